"""Window pages in host memory, on disk and back: no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_llm_window_pages import (
    END,
    answers,
    bits,
    cold_bits,
    folder,
    has_window_pages,
    of_each_kind,
    of_gemma,
    opened,
    text,
)

from radixkv import LLM
from radixkv.errors import ConfigError

__all__ = ["folder"]

SYSTEM = [*text(141, 1), END]
CHATS = [[*SYSTEM, *text(60 + 30 * n, 10 + n), END, *text(3, 3)] for n in range(5)]
TURNS = [[*chat[:-3], *text(20, 20 + n), END, *text(30, 30 + n), END, *text(3, 3)] for n, chat in enumerate(CHATS)]
"""They go on behind the last message of their chats, which is the deepest tail."""
N_SYSTEM = 128
N_CHATS = [(len(chat) - 3) // 16 * 16 for chat in CHATS]
TIERS: dict[str, Any] = {"host_memory_bytes": 1 << 24, "load_policy": "always"}
SMALL = {"max_total_tokens": 512, "max_num_batched_tokens": 256}
"""A pool that holds two chats."""


def until_stored(llm: LLM) -> None:
    """Waits until nothing is copied any more."""
    tiers = llm._open_loop.scheduler.tiers
    tier = tiers._host_tier  # type: ignore[attr-defined]
    while tiers.is_busy or tier.n_offers or (tier.disk is not None and tier.disk.n_offers):
        tiers.advance()


def served(llm: LLM, prompts: list[list[int]]) -> tuple[list[Any], list[int]]:
    """Returns the bits of answers and how many tokens were cached, of one prompt after the other."""
    warm = []
    for one in prompts:
        warm += answers(llm, [one])
        until_stored(llm)
        llm._open_loop.check()
    return [bits(one) for one in warm], [one.num_cached_tokens for one in warm]


@pytest.mark.nightly
@of_each_kind
def test_chats_that_were_evicted_are_loaded_with_the_bits_of_cold_ones(folder: Path) -> None:
    """A window page that tails share is in host memory once, and is loaded only where the device lacks it."""
    with opened(folder, **SMALL, **TIERS) as llm:
        assert has_window_pages(llm)
        warm, n_cached = served(llm, [*CHATS, *TURNS, CHATS[0]])
        host = llm.get_metrics().host
    assert host is not None
    assert n_cached == [0, *[N_SYSTEM] * 4, *N_CHATS, N_CHATS[0]]
    assert host.pages_loaded_total > 0 == host.pages_evicted_total
    assert warm == cold_bits(folder, [*CHATS, *TURNS, CHATS[0]])


@pytest.mark.nightly
@of_gemma
def test_host_memory_that_is_too_small_for_all_chats_loses_the_oldest(folder: Path) -> None:
    turns = TURNS[::-1]
    n_bytes = int(125 * 4096 * (1.6 if "gemma4" in folder.name else 1))  # windows of Gemma 4 take more
    with opened(folder, **SMALL, **TIERS | {"host_memory_bytes": n_bytes}) as llm:
        warm, _ = served(llm, [*CHATS, *turns])
        host = llm.get_metrics().host
    assert host is not None
    assert host.pages_evicted_total > 0 < host.pages_loaded_total
    assert warm == cold_bits(folder, [*CHATS, *turns])


@of_each_kind
def test_a_restart_reads_pages_and_windows_from_disk(folder: Path, tmp_path: Path) -> None:
    tiers = {**TIERS, "cache_dir": str(tmp_path / "cache"), "cache_dir_size": "64MiB"}
    with opened(folder, **SMALL, **tiers) as llm:
        served(llm, CHATS)
    with opened(folder, **SMALL, **tiers) as llm:
        assert has_window_pages(llm)
        warm, n_cached = served(llm, TURNS)
        disk = llm.get_metrics().disk
        assert llm.invalidate_cache(TURNS[0][:144]).n_on_disk
        again, n_again = served(llm, [TURNS[0]])
    assert disk is not None
    assert disk.pages_fetched_total > 0 == disk.pages_lost_total
    assert n_cached == N_CHATS
    assert n_again == [0]
    assert (warm, again) == (cold_bits(folder, TURNS), warm[:1])


@of_gemma
@pytest.mark.parametrize("n_bytes", [30000, 5000], ids=["less than a window", "less than a window page"])
def test_host_memory_without_room_for_a_window_is_refused(folder: Path, n_bytes: int) -> None:
    """Pages of Gemma 4 with shared KV are of more than 5,000 bytes."""
    with pytest.raises(ConfigError, match="less than (a window of 48 tokens takes, |one page, which takes 8192)"):
        opened(folder, **SMALL, host_memory_bytes=n_bytes)
