"""``LLM(kv_cache_dtype=...)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv import LLM, SamplingParams
from radixkv.errors import ConfigError
from support.cases import rest_nightly

PROMPTS = ["The capital of France is", "Once upon a time there was a girl who lived in a house " * 6]
POOL_BYTES = 16 << 20


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def opened(**settings: Any) -> LLM:
    return LLM(device="cpu", kv_cache_memory_bytes=POOL_BYTES, **settings)


def n_tokens(llm: LLM) -> int:
    return llm.get_metrics().n_pages * 16


def test_the_cache_changes_no_token() -> None:
    cached, uncached = (opened(kv_cache_dtype="fp8", enable_prefix_caching=on) for on in (True, False))
    expected = answers(uncached)
    assert [answers(cached), answers(cached)] == [expected, expected]


@pytest.mark.parametrize(("dtype", "factor"), rest_nightly([("bfloat16", 2), ("float32", 4)], kept=(1,)))
def test_a_pool_of_the_same_size_holds_more_tokens(dtype: str, factor: int) -> None:
    plain, quantized = opened(dtype=dtype), opened(dtype=dtype, kv_cache_dtype="fp8_e4m3")
    assert n_tokens(quantized) // n_tokens(plain) == factor


@pytest.mark.parametrize("name", ["fp8_e5m2", "int8", "", None, 8])
def test_other_types_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="^kv_cache_dtype .* is not supported; use auto, fp8 or fp8_e4m3$"):
        opened(kv_cache_dtype=name)


@pytest.mark.nightly
def test_files_of_another_type_are_not_read(tmp_path: Path) -> None:
    fetched = []
    for name in ("fp8", "auto", "fp8_e4m3"):
        llm = opened(
            kv_cache_dtype=name, host_memory_bytes=64 << 20, cache_dir=tmp_path / "cache", load_policy="always"
        )
        (output,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        fetched.append(output.num_fetched_tokens > 0)
        llm.shutdown()
    assert fetched == [False, False, True]
