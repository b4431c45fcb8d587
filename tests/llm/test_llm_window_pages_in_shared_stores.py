"""Engines of models with window pages that share a store: what one computes, the others start from."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_llm_states_in_shared_stores import SHARED, objects, stats
from test_llm_window_pages import (
    KINDS,
    KINDS_OF_RANKS,
    cold_bits,
    folder,
    has_window_pages,
    of_gemma,
    opened,
    pages_of_all_layers,
)
from test_llm_window_pages_in_tiers import CHATS, N_CHATS, N_SYSTEM, SMALL, SYSTEM, TURNS, served

from radixkv import LLM
from support.cases import covering, rest_nightly
from support.fake_objects import FakeObjects

__all__ = ["folder", "objects"]

CHAT = CHATS[0]


def sharing(folder: Path, **settings: Any) -> LLM:
    llm = opened(folder, **{**SMALL, **SHARED, **settings})
    assert has_window_pages(llm)
    return llm


@pytest.mark.nightly
@pytest.mark.parametrize("folder", rest_nightly(KINDS, kept=(2,)), indirect=True)
def test_engines_start_from_the_windows_of_each_other_with_the_bits_of_cold_prompts(
    folder: Path, objects: FakeObjects
) -> None:
    """The second was there before the first had written. It computes next turns, which a third finds: also from
    what it has itself, and windows that begin before that."""
    cold_chats, cold_turns = cold_bits(folder, CHATS), cold_bits(folder, TURNS)
    with sharing(folder) as second:
        with sharing(folder) as first:
            assert served(first, CHATS) == (cold_chats, [0, *[N_SYSTEM] * 4])
        assert served(second, TURNS) == (cold_turns, N_CHATS)
        disk, shared = stats(second)
    assert disk.pages_fetched_total > 0
    assert (disk.pages_lost_total, shared.failures_total) == (0, 0)
    with sharing(folder) as third:
        found, n_found = served(third, [CHAT, TURNS[0], TURNS[0]])
        disk, shared = stats(third)
    assert found == [cold_chats[0], cold_turns[0], cold_turns[0]]
    n_turn = (len(TURNS[0]) - 1) // 16 * 16  # where its answer has ended, there is a window, too
    assert n_found == [N_CHATS[0], n_turn, n_turn]
    assert disk.pages_fetched_total > n_turn // 16
    assert (disk.pages_lost_total, shared.failures_total) == (0, 0)


@pytest.mark.nightly
@of_gemma
@pytest.mark.parametrize(("what", "is_deleted"), covering(("window", "page"), (False, True)))
def test_a_prompt_goes_on_from_an_earlier_window_if_an_object_is_damaged_or_deleted(
    folder: Path, objects: FakeObjects, what: str, is_deleted: bool
) -> None:
    """The object is written again then. Of the window after the chat's last message, it is the first."""
    with sharing(folder) as llm:
        served(llm, [SYSTEM])
        before = len(objects.objects)
        cold, _ = served(llm, [CHAT])
    written = dict(objects.objects)
    n_pages = (N_CHATS[0] - N_SYSTEM) // 16
    name = list(written)[before + (n_pages if what == "window" else 0)]
    if is_deleted:
        del objects.objects[name]
    else:
        objects.objects[name] = written[name][:-100] + bytes(b ^ 1 for b in written[name][-100:])
    with sharing(folder) as llm:
        assert served(llm, [CHAT]) == (cold, [N_SYSTEM])
        disk, shared = stats(llm)
    assert shared.failures_total == 0
    assert disk.pages_lost_total == (not is_deleted)
    assert objects.objects == written


@of_gemma
def test_pages_of_another_shape_are_no_window_pages(folder: Path, objects: FakeObjects) -> None:
    """Pages of all layers, or of another size, are a miss, and nobody's objects are removed."""
    cold = cold_bits(folder, [CHAT])
    engines: list[tuple[Any, dict[str, Any]]] = [
        (pages_of_all_layers(), {"max_total_tokens": 2048}),
        (nullcontext(), {}),
        (nullcontext(), {"page_size": 8}),
    ]
    for is_written in (False, True):
        for shape, settings in engines:
            with shape, opened(folder, **{**SMALL, **SHARED, **settings}) as llm:
                found, (n_found,) = served(llm, [CHAT])
                assert found == cold
                assert (n_found > 0) == is_written
                assert stats(llm)[0].pages_lost_total == 0


@of_gemma
def test_an_invalidated_prefix_is_removed_from_the_store_with_its_windows(
    folder: Path, objects: FakeObjects
) -> None:
    with sharing(folder) as llm:
        served(llm, [SYSTEM, CHAT])
    with sharing(folder) as llm:
        served(llm, [SYSTEM, CHAT])
        assert objects.objects
        llm.invalidate_cache(SYSTEM[:N_SYSTEM])
        assert served(llm, [CHAT])[1] == [0]
        llm.invalidate_cache(SYSTEM[:N_SYSTEM])
    assert not objects.objects


@pytest.mark.nightly
@pytest.mark.parametrize("folder", KINDS_OF_RANKS, indirect=True)
def test_ranks_find_windows_of_as_many_ranks_only(folder: Path, objects: FakeObjects) -> None:
    found = []
    for n_ranks in (1, 2, 2, 1):
        with sharing(folder, tensor_parallel_size=n_ranks) as llm:
            found.append((n_ranks, *served(llm, [CHAT])))
            assert stats(llm)[0].pages_lost_total == 0
    assert [n_found for _, _, (n_found,) in found] == [0, 0, N_CHATS[0], N_CHATS[0]]
    assert found[0][1] == found[3][1]
    assert found[1][1] == found[2][1]
