"""Layers with windows have pages of their own on several ranks, too, and these in host memory and on disk.

No bit changes beside one process that keeps all pages and multiplies in slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_llm_window_pages import (
    END,
    KINDS_OF_RANKS,
    answers,
    bits,
    folder,
    has_window_pages,
    opened,
    pages_of_all_layers,
    text,
)
from test_llm_window_pages_in_tiers import CHATS, N_CHATS, N_SYSTEM, SMALL, TIERS, TURNS, served

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.runtime.device.cpu import executor
from support.sliced_operations import SlicedOperations

__all__ = ["folder"]

SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, logprobs=1, ignore_eos=True, n=2)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)


def prompts() -> list[list[int]]:
    """Returns a chat of two turns behind a system prompt, another chat, and prompts that fork."""
    system, plain = [*text(141, 1), END], text(300, 7)
    first = [*system, *text(40, 2), END, *text(3, 3)]
    second = [*system, *text(75, 4), END, *text(3, 3)]
    turn = [*first[:-3], *text(30, 5), END, *text(60, 6), END, *text(3, 3)]
    return [first, second, turn, plain, *([*plain[:210], *text(90, seed)] for seed in (8, 9)), plain]


def beams(llm: LLM) -> list[tuple[list[int], float]]:
    (found,) = llm.beam_search([{"prompt_token_ids": text(200, 1)}], BEAMS)
    return [(list(beam.tokens), beam.cum_logprob) for beam in found.sequences]


@contextmanager
def one_process(folder: Path, n_slices: int) -> Iterator[LLM]:
    """Opens a process that computes all that it is asked, keeps the pages of all layers, and sums as ranks do."""
    with pytest.MonkeyPatch.context() as patch, pages_of_all_layers():
        patch.setattr(executor, "CpuOperations", partial(SlicedOperations, n_slices=n_slices))
        with opened(folder, enable_prefix_caching=False, max_total_tokens=8192) as llm:
            assert not has_window_pages(llm)
            yield llm


CASES = [(kind, n) for n in (2, 4) for kind in KINDS_OF_RANKS]


of_ranks = pytest.mark.parametrize(("folder", "n_ranks"), CASES, indirect=["folder"], ids=str)


@pytest.mark.nightly
@of_ranks
def test_ranks_have_the_bits_of_one_process_that_keeps_all_pages(folder: Path, n_ranks: int) -> None:
    """Hits, forks, choices and beams, one request after the other and all at once in a pool that is too small for
    them: tails are evicted and requests preempted."""
    inputs = prompts()
    with one_process(folder, n_ranks) as llm:
        expected = [bits(answers(llm, [one], SAMPLED)[0]) for one in inputs]
        expected_beams = beams(llm)
    few = {"max_total_tokens": 640, "max_num_batched_tokens": 79, "num_reserved_decode_tokens": 0}
    with opened(folder, **few, tensor_parallel_size=n_ranks) as llm:
        assert has_window_pages(llm)
        found = [answers(llm, [one], SAMPLED)[0] for one in inputs]
        together = answers(llm, inputs, SAMPLED)
        found_beams = beams(llm)
        llm._open_loop.check()
        metrics = llm.get_metrics()
    for outputs in (found, together):
        assert [bits(one) for one in outputs] == expected
    assert found_beams == expected_beams
    assert [one.num_cached_tokens for one in found] == [0, 128, 176, 0, 0, 208, 288]
    assert metrics.windows is not None
    assert metrics.windows.evicted_total > 0
    assert metrics.preemptions_total > 0


@pytest.mark.nightly
@of_ranks
def test_window_pages_of_ranks_come_back_from_host_memory_and_after_a_restart_from_disk(
    folder: Path, n_ranks: int, tmp_path: Path
) -> None:
    """Each rank has its heads' part of a window page; those that have the same KV heads share it. Gemma 4 has ranks
    that share those of the layers without windows alone."""
    tiers: dict[str, Any] = {**TIERS, "cache_dir": str(tmp_path / "cache"), "cache_dir_size": "64MiB"}
    settings = {**SMALL, **tiers, "tensor_parallel_size": n_ranks}
    with one_process(folder, n_ranks) as llm:
        chats, turns = ([bits(answers(llm, [one])[0]) for one in prompts] for prompts in (CHATS, TURNS[:2]))
    with opened(folder, **settings) as llm:
        assert has_window_pages(llm)
        warm, n_cached = served(llm, [*CHATS, *TURNS[:2], CHATS[0]])
        host = llm.get_metrics().host
    assert warm == [*chats, *turns, chats[0]]
    assert n_cached == [0, *[N_SYSTEM] * 4, *N_CHATS[:2], N_CHATS[0]]
    assert host is not None
    assert (host.pages_loaded_total > 0, host.copies_failed_total) == (True, 0)
    with opened(folder, **settings) as llm:
        again, n_again = served(llm, CHATS[3:])
        disk = llm.get_metrics().disk
    assert again == chats[3:]
    assert n_again == N_CHATS[3:]
    assert disk is not None
    assert disk.pages_fetched_total > 0 == disk.pages_lost_total
