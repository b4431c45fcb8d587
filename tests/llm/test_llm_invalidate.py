"""Tests of ``LLM.invalidate_cache`` on the embedded engine, with all tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.errors import InvalidRequest
from radixkv.llm import LLM
from radixkv.wire.sampling import SamplingParams

TOKEN = SamplingParams(max_tokens=1, temperature=0)
DOCUMENT = list(range(3, 67))
OTHER = [*DOCUMENT[:32], *range(100, 132)]


@pytest.fixture
def llm(sensitive: Path, tmp_path: Path) -> Iterator[LLM]:
    with LLM(
        sensitive,
        max_total_tokens=512,
        max_model_len=256,
        host_memory_bytes=8 << 20,
        cache_dir=str(tmp_path / "cache"),
        load_policy="always",
    ) as llm:
        yield llm


def test_a_document_goes_and_what_others_share_with_it_stays(llm: LLM) -> None:
    llm.generate([DOCUMENT, OTHER], TOKEN)
    before = llm.generate([[*DOCUMENT, 7], [*OTHER, 7]], TOKEN)
    dropped = llm.invalidate_cache(DOCUMENT[:48])
    assert dropped.n_on_device == 2
    after = llm.generate([[*DOCUMENT, 7]], TOKEN) + llm.generate([[*OTHER, 7]], TOKEN)
    assert [output.num_cached_tokens for output in before] == [64, 64]
    assert [output.num_cached_tokens for output in after] == [32, 64]
    assert [output.outputs for output in after] == [output.outputs for output in before]


def test_a_salt_goes_as_a_whole(llm: LLM) -> None:
    for salt in ("hers", "his", ""):
        llm.generate({"prompt_token_ids": DOCUMENT, "cache_salt": salt}, TOKEN)
    assert llm.invalidate_cache(cache_salt="hers").n_on_device == 4
    cached = {salt: llm.explain(DOCUMENT, cache_salt=salt).n_cached for salt in ("hers", "his", "")}
    assert cached == {"hers": 0, "his": 63, "": 63}
    llm.invalidate_cache(cache_salt="")
    assert llm.explain(DOCUMENT).n_cached == 0
    assert llm.explain(DOCUMENT, cache_salt="his").n_cached == 63


def test_what_is_too_short_or_missing_is_refused(llm: LLM) -> None:
    llm.generate([DOCUMENT], TOKEN)
    for prompt in (None, "", [], [3, 4, 5]):
        with pytest.raises(InvalidRequest):
            llm.invalidate_cache(prompt)
    assert llm.explain(DOCUMENT).n_cached == 63
