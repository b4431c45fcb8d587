"""Shared support for tests of the engine on a CUDA device: checkpoints, oracles, and comparison of answers.

In bf16 two correct computations of one value differ, so nothing here needs equal bits. Differences are compared
with the distance of Transformers from float32 in the same dtype; tokens only where the likeliest is clearly ahead.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from radixkv import LLM, SamplingParams
from radixkv.llm.outputs import Logprob, RequestOutput
from support.checkpoints import save_checkpoint

DEVICE = "cuda"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
needs_flashinfer = pytest.mark.skipif(find_spec("flashinfer") is None, reason="its prompts are FlashInfer's")
VOCAB = 2003
SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "initializer_range": 0.06,
}
"""Heads of the sizes of common models; everything else is small."""

SENSITIVE: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""Sizes of the checkpoint of ``save_sensitive``."""
NEAR_TIE = 0.3
"""Difference of two of its log-probabilities that counts as a tie: nine times the noise of bf16, a quarter of the
effect of a wrong page."""

Scores = dict[tuple[int, int], float]
"""Log-probability by position of the token, and its id."""


def save_sensitive(folder: Path) -> Path:
    """Saves a checkpoint whose every token depends on the whole context; returns its folder.

    Its weights are bf16, and scaled as those of the embedded model: attention selects few positions, and its output
    has as much weight as the token itself. One wrong page of 40 changes log-probabilities twenty times as much as
    bf16 does, and half of the tokens.
    """
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **SENSITIVE}))
    scales = {"embed_tokens": 16.0, "q_proj": 2**0.5, "k_proj": 2**0.5, "o_proj": 3.0, "lm_head": 3.0}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                scale = next((scale for part, scale in scales.items() if part in name), 1.0)
                parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def save(folder: Path, **changes: Any) -> Path:
    """A random checkpoint of ``SHAPE``; gives its folder back."""
    save_checkpoint(folder, **{**SHAPE, **changes})
    return folder


@contextmanager
def opened(model: Path | str, **settings: Any) -> Iterator[LLM]:
    """An engine without drafts, with a small pool of its own; its memory is free again afterwards."""
    defaults: dict[str, Any] = {
        "device": DEVICE,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_total_tokens": 32_768,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "speculative_config": "off",
    }
    llm = LLM(model, **(defaults | settings))
    try:
        yield llm
    finally:
        llm.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def random_ids(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(n)]


def greedy(n_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True, **more)


def oracle_scores(
    folder: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[dict[int, torch.Tensor]]:
    """Returns Transformers' teacher-forced log-probabilities [vocab] of each position but the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(DEVICE)
    scores = []
    with torch.inference_mode():
        for ids in sequences:
            logits = model(torch.tensor([list(ids)], device=DEVICE)).logits[0].float()
            scores.append(dict(enumerate(logits.log_softmax(-1).cpu(), 1)))
    return scores


def engine_scores(output: RequestOutput, choice: int = 0) -> tuple[Scores, Scores]:
    """Returns the engine's reported log-probabilities of the prompt's tokens and of the answer's."""
    prompt = flat(enumerate(output.prompt_logprobs or ()))
    n_prompt = len(output.prompt_token_ids)
    answer = flat(enumerate(output.outputs[choice].logprobs or (), n_prompt))
    return prompt, answer


def flat(positions: Iterable[tuple[int, dict[int, Logprob] | None]]) -> Scores:
    return {
        (position, token): each.logprob for position, found in positions for token, each in (found or {}).items()
    }


def sequence_of(output: RequestOutput, choice: int = 0) -> list[int]:
    """Returns the tokens of prompt and answer."""
    return list(output.prompt_token_ids) + output.outputs[choice].token_ids


def deviation(differences: Sequence[float]) -> float:
    """Returns the root mean square."""
    assert differences, "nothing to compare"
    return float(torch.tensor(differences, dtype=torch.float64).square().mean().sqrt())


def common_difference(one: Scores, other: Scores) -> float:
    """Returns the root mean square difference of two runs, over the tokens that both report."""
    return deviation([one[key] - other[key] for key in one.keys() & other.keys()])


def family(n: int, seed: int, *, longest: int = 500) -> list[list[int]]:
    """Returns ragged prompts that share nested prefixes."""
    rng = random.Random(seed)
    systems = [random_ids(rng.randint(longest // 3, longest), seed + 1 + i) for i in range(3)]
    tools = [rng.choice(systems) + random_ids(rng.randint(20, longest // 2), seed + 10 + i) for i in range(6)]
    stems = [*systems, *tools, []]
    return [rng.choice(stems) + random_ids(rng.randint(1, 120), seed + 100 + i) for i in range(n)]


def agreement(alone: RequestOutput, other: Sequence[int], tolerance: float) -> float:
    """Returns the share of the answer before ``other`` differs from it; checks that they differ at a near-tie.

    Args:
        alone: computed alone, with ``logprobs``.
        other: token ids of the same prompt's answer, computed with other requests.
        tolerance: largest log-probability difference of two tokens that noise may swap.
    """
    answer = alone.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.token_ids) == len(other), "answers have different lengths"
    for index, (mine, theirs) in enumerate(zip(answer.token_ids, other, strict=True)):
        if mine != theirs:
            found = answer.logprobs[index]
            assert theirs in found, f"token {index} is {theirs}, which is none of the likeliest {list(found)}"
            gap = found[mine].logprob - found[theirs].logprob
            assert gap <= tolerance, f"token {index} is {theirs}, not {mine}, which is likelier by {gap:.3f}"
            return index / len(other)
    return 1.0


def check_same_answers(
    alone: Sequence[RequestOutput], others: Sequence[Sequence[int]], *, tolerance: float, min_share: float = 0.6
) -> None:
    """Checks that answers first differ at near-ties, and late enough that most of each is compared."""
    shares = [agreement(one, other, tolerance) for one, other in zip(alone, others, strict=True)]
    assert sum(shares) / len(shares) >= min_share, f"answers differ too early: {sorted(shares)[:10]}"
