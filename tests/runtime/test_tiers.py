"""Opening of the memory tiers with settings that are not the usual ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv import LLM, SamplingParams


@pytest.mark.parametrize(("page_size", "max_model_len"), [(1024, 4096), (48, 200), (64, 40)])
def test_a_disk_tier_with_pages_of_any_size(tmp_path: Path, page_size: int, max_model_len: int) -> None:
    llm = LLM(
        page_size=page_size,
        max_model_len=max_model_len,
        max_total_tokens=8 * 1024,
        host_memory_bytes=256 << 20,
        cache_dir=str(tmp_path / "cache"),
    )
    (output,) = llm.generate(["hello"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    llm.shutdown()
