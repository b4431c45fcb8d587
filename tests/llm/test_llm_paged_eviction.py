"""``LLM`` with ``kv_budget``: answers as those of Transformers whose cache loses the keys of the same pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from radixkv import LLM, SamplingParams
from radixkv.errors import ConfigError, ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from radixkv.wire.messages import KVEvictionUse
from support.cases import nightly_but
from support.checkpoints import VOCAB, save_checkpoint

PAGE_SIZE, N_PROMPT, N_ANSWER = 4, 42, 40
PROMPT = [(7 * i * i + 3) % VOCAB for i in range(N_PROMPT)]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}


def sampled(kv_budget: int | None, **settings: Any) -> SamplingParams:
    defaults = {"temperature": 0.0, "max_tokens": N_ANSWER, "ignore_eos": True, "logprobs": 0}
    return SamplingParams(**(defaults | settings), kv_budget=kv_budget)


@pytest.fixture(scope="module", params=nightly_but(KINDS, "qwen3"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder, **KINDS[request.param])
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", page_size=PAGE_SIZE, max_total_tokens=1024, max_model_len=512) as llm:
        yield llm


def scores(cache: DynamicCache) -> Tensor:
    """Returns the mean of |V| / |K| of each token in a cache, over layers and heads: [tokens]."""
    ratios = [layer.values[0].norm(dim=-1) / layer.keys[0].norm(dim=-1) for layer in cache.layers]
    return torch.stack(ratios).mean((0, 1))


def expected(folder: Path, kv_budget: int) -> tuple[list[int], list[float], int]:
    """Returns tokens and logprobs of an answer whose cache keeps the pages of the highest scores; and how many
    tokens it has lost."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    cache = DynamicCache()
    logits = model(torch.tensor([PROMPT]), past_key_values=cache).logits[0, -1]
    positions = list(range(N_PROMPT))
    """Of the tokens in the cache."""
    tokens: list[int] = []
    logprobs: list[float] = []
    n_lost = 0
    while True:
        tokens.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
        position = N_PROMPT + len(tokens) - 1
        if len(tokens) == N_ANSWER:
            return tokens, logprobs, n_lost
        of_tokens = scores(cache)
        newest = position // PAGE_SIZE - 1
        while len({one // PAGE_SIZE for one in positions} | {position // PAGE_SIZE}) > kv_budget // PAGE_SIZE:
            of_pages = {
                page: float(of_tokens[[one // PAGE_SIZE == page for one in positions]].mean())
                for page in {one // PAGE_SIZE for one in positions}
                if page < newest
            }
            lowest = min(of_pages, key=of_pages.__getitem__)
            keep = torch.tensor([one // PAGE_SIZE != lowest for one in positions])
            n_lost += int((~keep).sum())
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
            of_tokens, positions = of_tokens[keep], [one for one in positions if one // PAGE_SIZE != lowest]
        logits = model(
            torch.tensor([tokens[-1:]]), past_key_values=cache, position_ids=torch.tensor([[position]])
        ).logits[0, -1]
        positions.append(position)


@pytest.mark.parametrize("kv_budget", [9, 24, 60])
def test_answers_are_those_without_the_keys_of_the_dropped_pages(llm: LLM, folder: Path, kv_budget: int) -> None:
    with torch.inference_mode():
        tokens, logprobs, n_lost = expected(folder, kv_budget)
    for _ in range(2):  # the second time the prompt is cached
        (output,) = llm.generate([PROMPT], sampled(kv_budget), use_tqdm=False)
        answer = output.outputs[0]
        assert list(answer.token_ids) == tokens
        assert answer.logprobs is not None
        found = [step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)]
        assert found == pytest.approx(logprobs, abs=2e-4)
        assert output.kv_eviction is not None
        assert output.kv_eviction.n_skipped + output.kv_eviction.n_freed == n_lost
    assert output.num_cached_tokens > 0


def test_answers_beside_it_and_after_it_are_exact(llm: LLM) -> None:
    alone = llm.generate([PROMPT], sampled(None), use_tqdm=False)[0]
    lossy, beside = llm.generate([PROMPT] * 2, [sampled(12), sampled(0)], use_tqdm=False)
    (after,) = llm.generate([PROMPT], sampled(None), use_tqdm=False)
    assert beside.outputs[0].logprobs == after.outputs[0].logprobs == alone.outputs[0].logprobs
    assert lossy.outputs[0].logprobs != alone.outputs[0].logprobs
    assert (beside.kv_eviction, after.kv_eviction) == (None, None)


def test_the_next_turn_finds_what_was_computed_exactly(llm: LLM) -> None:
    prompt = [token + 1 for token in PROMPT[:20]]
    (output,) = llm.generate([prompt], sampled(12), use_tqdm=False)
    turn = [*prompt, *output.outputs[0].token_ids]
    (cached,) = llm.generate([turn], sampled(None), use_tqdm=False)
    assert cached.num_cached_tokens == 20
    llm.flush_cache()
    (cold,) = llm.generate([turn], sampled(None), use_tqdm=False)
    assert cached.outputs[0].logprobs == cold.outputs[0].logprobs


def test_a_budget_that_is_never_reached_changes_nothing(llm: LLM) -> None:
    (exact,) = llm.generate([PROMPT], sampled(None), use_tqdm=False)
    (output,) = llm.generate([PROMPT], sampled(512), use_tqdm=False)
    assert output.outputs[0].logprobs == exact.outputs[0].logprobs
    assert output.kv_eviction == KVEvictionUse(512)


@pytest.mark.nightly
def test_an_answer_may_be_longer_than_the_pool(llm: LLM, folder: Path) -> None:
    (whole,) = llm.generate([PROMPT], sampled(24, max_tokens=120), use_tqdm=False)
    with LLM(folder, device="cpu", page_size=PAGE_SIZE, max_total_tokens=128, max_model_len=512) as small:
        with pytest.raises(ContextLengthExceeded, match="the pool holds 128 tokens"):
            small.generate([PROMPT], sampled(None, max_tokens=120), use_tqdm=False)
        with pytest.raises(ContextLengthExceeded, match="the pool holds 128 tokens"):
            # 11 pages of the prompt, 20 of the answer, and two in passing are one more than the pool has.
            small.generate([PROMPT], sampled(80, max_tokens=120), use_tqdm=False)
        with pytest.raises(ContextLengthExceeded, match="512"):
            small.generate([PROMPT], sampled(24, max_tokens=471), use_tqdm=False)
        (output,) = small.generate([PROMPT], sampled(24, max_tokens=120), use_tqdm=False)
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids
        both = small.generate([PROMPT, PROMPT[5:]], sampled(24, max_tokens=120), use_tqdm=False)
        assert both[0].outputs[0].token_ids == whole.outputs[0].token_ids, "whether or not it was preempted"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_budget": 7}, "kv_budget is 7; it must be 0, or at least 8, which is 2 pages"),
        ({"kv_budget": -1}, "kv_budget is -1; it must be between 0"),
        ({"kv_budget": 64, "n": 2}, "n does not work with kv_budget 64"),
        ({"kv_budget": 64, "prompt_logprobs": 1}, "prompt_logprobs does not work with kv_budget 64"),
        ({"kv_budget": 64, "n": 2, "use_beam_search": True}, "kv_budget is 64 with use_beam_search"),
    ],
)
def test_what_needs_all_pages_is_refused(llm: LLM, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        llm.generate([PROMPT], SamplingParams(max_tokens=4, **settings), use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_eviction": "paged"}, "kv_eviction is paged and kv_budget None; set both"),
        ({"kv_budget": 64}, "kv_eviction is none and kv_budget 64; set both"),
        ({"kv_eviction": "paged", "kv_budget": 31}, "kv_budget 31 is less than 2 pages of page_size 16"),
        ({"kv_eviction": "h2o", "kv_budget": 64}, "kv_eviction 'h2o' is unknown"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM("tiny", device="cpu", **settings)


def test_the_budget_of_the_server_is_that_of_requests_without_one() -> None:
    with LLM("tiny", device="cpu", page_size=4, kv_eviction="paged", kv_budget=16) as llm:
        prompts = ["One two three four five six seven."] * 3
        outputs = llm.generate(prompts, [sampled(None), sampled(32), sampled(0)], use_tqdm=False)
        budgets = [None if one.kv_eviction is None else one.kv_eviction.kv_budget for one in outputs]
        assert budgets == [16, 32, None]
        for kv_budget in (None, 0):
            answers = llm.generate(prompts[:1], sampled(kv_budget, n=2), use_tqdm=False)[0]
            assert (len(answers.outputs), answers.kv_eviction) == (2, None), "both need all KV, and have it"
            beams = SamplingParams(n=2, use_beam_search=True, kv_budget=kv_budget)
            assert len(llm.generate(prompts[:1], beams, use_tqdm=False)[0].outputs) == 2
        with pytest.raises(InvalidRequest, match="n does not work with kv_budget 32"):
            llm.generate(prompts[:1], sampled(32, n=2), use_tqdm=False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "mistral", "sliding_window": 24}, "sliding windows"),
        # Hardly shorter than the context: pages of all layers are kept.
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 120,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            "sliding windows",
        ),
        (
            {
                "model_type": "qwen3_5_text",
                "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            },
            "recurrent layers",
        ),
    ],
)
def test_models_that_forget_otherwise_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    save_checkpoint(tmp_path, **changes)
    with (
        LLM(tmp_path, device="cpu", max_total_tokens=256, max_model_len=128) as llm,
        pytest.raises(UnsupportedFeature, match=text),
    ):
        llm.generate([PROMPT], sampled(64, max_tokens=4), use_tqdm=False)
    with pytest.raises(ConfigError, match=text):
        LLM(tmp_path, device="cpu", max_total_tokens=256, max_model_len=128, kv_eviction="paged", kv_budget=64)
