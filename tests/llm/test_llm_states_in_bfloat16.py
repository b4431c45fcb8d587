"""In bfloat16, answers after evictions, preemptions and restarts are as near to exact scores as Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from radixkv import LLM, RequestOutput, SamplingParams
from radixkv.checkpoints import resolve
from support.cases import rest_nightly
from support.checkpoints import save_checkpoint
from support.device_support import HYBRIDS, OTHERS, load_oracle, random_ids

RECURRENT = {name: HYBRIDS[name] for name in ("qwen3.5", "qwen3.5-moe", "qwen3-next", "nemotron-h")}
KINDS: dict[str, dict[str, Any]] = RECURRENT | {
    name: OTHERS[name] for name in ("gemma4", "gemma4-shared", "gemma4-moe")
}
SCARCE = {
    "few pages": {"max_total_tokens": 720},
    "preemptions": {"max_total_tokens": 592, "max_num_seqs": 5, "num_reserved_decode_tokens": 0},
    "host memory": {"max_total_tokens": 720, "host_memory_bytes": "16MiB", "load_policy": "always"},
}


class Oracles:
    """Transformers' model in float32, with weights that bfloat16 can hold, and in bfloat16."""

    def __init__(self, folder: Path) -> None:
        checkpoint = resolve(str(folder))
        self._exact = load_oracle(checkpoint)
        with torch.no_grad():
            for parameter in self._exact.parameters():
                parameter.copy_(parameter.bfloat16().float())
        self._rounded = load_oracle(checkpoint, torch.bfloat16)
        self._has_experts = any("expert" in name for name, _ in self._exact.named_parameters())

    def check(self, outputs: Sequence[RequestOutput]) -> float:
        """Checks the scores of the likeliest first tokens of each answer; returns Transformers' typical error.

        Wrong states cause 16 times the error of bfloat16, and more. So does rounding that gives a token to another
        expert, in one answer.
        """
        errors, oracle_errors = [], []
        for output in outputs:
            first = (output.outputs[0].logprobs or [{}])[0]
            ids = list(first)
            exact = first_scores(self._exact, output.prompt_token_ids)[ids]
            found = torch.tensor([one.logprob for one in first.values()])
            errors.append(deviation(found, exact))
            oracle_errors.append(deviation(first_scores(self._rounded, output.prompt_token_ids)[ids], exact))
        typical_error = median(oracle_errors)
        assert median(errors) < 2 * typical_error
        assert sum(error > 10 * typical_error for error in errors) <= self._has_experts
        return typical_error


def first_scores(model: PreTrainedModel, prompt: Sequence[int]) -> Tensor:
    """Returns the log probabilities of an answer's first token."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(prompt)])).logits[0, -1]
    return logits.float().log_softmax(-1)


def deviation(one: Tensor, other: Tensor) -> float:
    return (one - other).square().mean().sqrt().item()


@pytest.fixture(scope="module", params=rest_nightly(KINDS, kept=(0, 5)))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bfloat16")
    save_checkpoint(folder, **KINDS[request.param])
    return folder


@pytest.fixture(scope="module")
def oracles(folder: Path) -> Oracles:
    return Oracles(folder)


def check_all_places(found: RequestOutput, expected: RequestOutput, typical_error: float) -> None:
    """Checks the scores of all tokens of an answer beside those of one that was not interrupted.

    Only these show a wrong state wherever the answer began again: at some places Transformers in bfloat16 is as far
    from the exact scores as a wrong state is.
    """
    (one,), (other,) = found.outputs, expected.outputs
    assert one.token_ids == other.token_ids
    for place, (scores, others) in enumerate(zip(one.logprobs or [], other.logprobs or [], strict=True)):
        ids = list(scores.keys() & others.keys())
        assert len(ids) > 10, f"other tokens are likely at place {place}"
        values = [torch.tensor([each[token].logprob for token in ids]) for each in (scores, others)]
        assert deviation(*values) < 2 * typical_error, f"other scores at place {place}"


def opened(folder: Path, **settings: Any) -> LLM:
    settings = {"dtype": "bfloat16", "max_model_len": 448, "max_total_tokens": 4096, **settings}
    return LLM(folder, device="cpu", **settings)


def answers(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=50, logprobs=20, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": list(one)} for one in prompts], params, use_tqdm=False)


STEMS = [random_ids(n, seed=n) for n in (128, 192, 256, 320, 384)]
PROMPTS = [[*stem, *random_ids(3, seed)] for seed in (1, 2) for stem in STEMS]
"""Models of random weights forget soon: a wrong state is seen in tokens that follow it closely."""


@pytest.mark.parametrize("name", rest_nightly(SCARCE, kept=(1,)))
def test_scores_with_little_memory_and_many_requests_at_once(folder: Path, oracles: Oracles, name: str) -> None:
    with opened(folder, **SCARCE[name]) as llm:
        for _ in range(2):
            outputs = answers(llm, PROMPTS)
        metrics = llm.get_metrics()
        llm._open_loop.check()
    typical_error = oracles.check(outputs)
    assert any(one.num_cached_tokens for one in outputs)
    if name == "preemptions":
        assert metrics.preemptions_total > 0
        with opened(folder) as llm:
            for one, other in zip(outputs, answers(llm, PROMPTS), strict=True):
                check_all_places(one, other, typical_error)
    assert name != "host memory" or any(one.num_loaded_tokens for one in outputs)


@pytest.mark.nightly
@pytest.mark.parametrize("folder", RECURRENT, indirect=True)
def test_scores_with_few_states(folder: Path) -> None:
    with opened(folder, state_memory_bytes=12_000) as llm:
        for _ in range(2):
            outputs = answers(llm, PROMPTS)
        states = llm.get_metrics().states
    assert states is not None
    assert states.hits_total > 0
    assert states.evicted_total > 0
    Oracles(folder).check(outputs)


@pytest.mark.parametrize("is_chunked", rest_nightly([False, True], kept=(1,)), ids=["whole", "in chunks"])
def test_scores_after_a_restart(folder: Path, oracles: Oracles, tmp_path: Path, is_chunked: bool) -> None:
    settings = {"host_memory_bytes": "16MiB", "cache_dir": str(tmp_path / "kv"), "load_policy": "always"}
    if is_chunked:
        settings |= {"max_num_batched_tokens": 79, "page_size": 8}
    with opened(folder, **settings) as llm:
        answers(llm, STEMS)
    with opened(folder, **settings) as llm:
        outputs = [answers(llm, [[*stem, *random_ids(3, 9)]])[0] for stem in STEMS]
    assert all(one.num_fetched_tokens for one in outputs)
    oracles.check(outputs)
