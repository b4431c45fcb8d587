"""Packing of plans, and refusal of plans that would write out of bounds."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from radixkv.errors import DeviceError
from radixkv.runtime.device.cuda.results import step_result
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.pack import Packer
from radixkv.runtime.request import GREEDY
from radixkv.runtime.step.plan import Row, Scoring, StepPlan
from radixkv.wire.messages import pack_tokens


def make_packer(*, max_num_seqs: int = 4, max_model_len: int = 32, n_split: int | None = None) -> Packer:
    """Returns a packer that splits the decode rows, or the first ``n_split`` rows if these are more."""
    settings = DeviceSettings(
        page_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=16, max_model_len=max_model_len
    )
    count_split = None if n_split is None else lambda step: max(step.n_decode, n_split)
    return Packer(settings, 200, settings.max_num_batched_tokens, count_split=count_split)


def row(batch_slot: int = 0, **changes: object) -> Row:
    fields: dict[str, object] = {
        "batch_slot": batch_slot,
        "start": 0,
        "n_tokens": 5,
        "tokens": pack_tokens([7, 8, 9, 10, 11]),
        "write_start": 0,
        "table_start": 0,
        "table_pages": (3, 4),
        "sampling": None,
    }
    return Row(**(fields | changes))


def test_an_adapter_that_the_device_has_not_is_refused() -> None:
    settings = DeviceSettings(
        page_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
    )
    packer = Packer(settings, 200, None, adapters={"12ab"})
    packer.pack(StepPlan(0, (row(adapter="12ab"), row(1))))
    with pytest.raises(DeviceError, match="step 3, batch slot 1: the device has no adapter 34cd"):
        packer.pack(StepPlan(3, (row(adapter="12ab"), row(1, adapter="34cd"))))


def test_rows_become_arrays() -> None:
    packer = make_packer()
    packer.pack(StepPlan(0, (row(2),)))
    decode = row(2, start=5, n_tokens=1, tokens=None, write_start=5, table_start=2, table_pages=())
    step = packer.pack(StepPlan(1, (decode, row(1, table_pages=(9, 8))), n_decode=1))
    assert step.n_decode == 1
    found = step.rows._asdict() | {"ids": step.ids, "updates": step.updates}
    assert {name: values.tolist() for name, values in found.items()} == {
        "batch_slots": [2, 1],
        "starts": [5, 0],
        "n_tokens": [1, 5],
        "firsts": [0, 1],
        "write_starts": [5, 0],
        "table_starts": [2, 0],
        "update_firsts": [0, 0],
        "update_counts": [0, 2],
        "sampled_slots": [2, 1],
        "n_skipped": [0, 0],
        "ids": [-1, 7, 8, 9, 10, 11],
        "updates": [9, 8],
    }
    assert step.lengths.tolist() == [6, 5]


def test_a_row_that_skips_pages_has_places_before_its_positions() -> None:
    packer = make_packer(max_model_len=24)
    prompt = row(start=0, n_tokens=8, tokens=pack_tokens(range(8)), table_pages=(3, 4, 5))
    packer.pack(StepPlan(0, (prompt,)))
    decode = row(start=22, n_tokens=1, tokens=None, write_start=22, table_start=1, table_pages=(9,), n_skipped=4)
    step = packer.pack(StepPlan(1, (decode,), n_decode=1))
    rows = step.rows
    assert [values.tolist() for values in (rows.starts, rows.write_starts, rows.n_skipped)] == [[6], [6], [16]]
    assert step.lengths.tolist() == [7]
    with pytest.raises(DeviceError, match="a position beyond max_model_len 24"):
        packer.pack(StepPlan(2, (replace(decode, start=24, write_start=24),), n_decode=1))
    with pytest.raises(DeviceError, match="a row has no tokens, or a start below 0"):
        packer.pack(StepPlan(2, (replace(decode, n_skipped=6),), n_decode=1))
    with pytest.raises(DeviceError, match="row 0: a row skips fewer than 0 pages"):
        packer.pack(StepPlan(2, (replace(decode, n_skipped=-1),), n_decode=1))


def test_pages_to_score_are_pages_of_the_pool() -> None:
    packer = make_packer()
    assert packer.pack(StepPlan(0, (row(scored_pages=(3,)),))).plan.scored_pages() == [3]
    with pytest.raises(DeviceError, match="step 1 scores pages 3 to 200 of a pool of 200"):
        packer.pack(StepPlan(1, (row(scored_pages=(3, 200)),)))


def test_drafts_become_rows() -> None:
    packer = make_packer(max_num_seqs=8, max_model_len=400, n_split=0)
    pages = tuple(range(100))
    drafting = row(2, start=73, n_tokens=3, tokens=pack_tokens([5, 6, 7]), write_start=73, n_drafts=2)
    drafting = replace(drafting, table_pages=pages[:20])
    plain = row(1, start=390, n_tokens=1, tokens=None, write_start=390, table_pages=pages)
    late = row(
        0, start=82, n_tokens=2, tokens=pack_tokens([8, 9]), write_start=82, table_pages=pages[:22], n_drafts=1
    )
    plan = StepPlan(0, (drafting, plain, late, row(3)), n_decode=3, n_drafts=3)
    step = packer.pack(plan)
    assert step.n_decode == 6
    found = step.rows._asdict() | {"ids": step.ids}
    assert {name: values.tolist() for name, values in found.items()} == {
        "batch_slots": [2, 2, 2, 1, 0, 0, 3],
        "starts": [73, 74, 75, 390, 82, 83, 0],
        "n_tokens": [1, 1, 1, 1, 1, 1, 5],
        "firsts": [0, 1, 2, 3, 4, 5, 6],
        "write_starts": [73, 73, 73, 390, 82, 82, 0],
        "table_starts": [0] * 7,
        "update_firsts": [0, 0, 0, 20, 120, 120, 142],
        "update_counts": [20, 0, 0, 100, 22, 0, 2],
        "sampled_slots": [2, 2, 2, 1, 0, 0, 3],
        "n_skipped": [0] * 7,
        "ids": [5, 6, 7, -1, 8, 9, 7, 8, 9, 10, 11],
    }
    assert step.sampled.tolist() == [0, 1, 2, 3, 4, 5, 10]
    assert step.counts is not None
    assert step.counts.tolist() == [3, 1, 2]
    assert step.results is None


def test_a_short_prompt_becomes_rows_of_which_the_last_one_samples() -> None:
    packer = make_packer(max_num_seqs=16, n_split=3)
    packer.pack(StepPlan(0, (row(2, table_pages=(5, 6)),)))
    drafting = row(2, start=5, n_tokens=2, tokens=pack_tokens([5, 6]), write_start=5, table_pages=(), n_drafts=1)
    cached = row(1, start=4, n_tokens=1, tokens=pack_tokens([12]), write_start=5)
    prompt = row(3, start=2, n_tokens=3, tokens=pack_tokens([7, 8, 9]), write_start=4)
    step = packer.pack(StepPlan(1, (drafting, cached, prompt), n_decode=1, n_drafts=1))
    assert step.n_decode == step.n_rows == 6
    found = step.rows._asdict() | {"ids": step.ids, "counts": step.counts, "results": step.results}
    assert {name: None if values is None else values.tolist() for name, values in found.items()} == {
        "batch_slots": [2, 2, 1, 3, 3, 3],
        "starts": [5, 6, 4, 2, 3, 4],
        "n_tokens": [1] * 6,
        "firsts": [0, 1, 2, 3, 4, 5],
        "write_starts": [5, 5, 5, 4, 4, 4],
        "table_starts": [0] * 6,
        "update_firsts": [0, 0, 0, 2, 2, 2],
        "update_counts": [0, 0, 2, 2, 0, 0],
        "sampled_slots": [2, 2, 1, 16, 16, 3],
        "n_skipped": [0] * 6,
        "ids": [5, 6, 12, 7, 8, 9],
        "counts": [2, 1, 3],
        "results": [0, 1, 2, 5],
    }


def test_a_chunk_that_samples_nothing_has_its_position_between_drafts_and_others() -> None:
    pages = (5, 6, 7)
    drafting = row(2, start=7, n_tokens=3, tokens=pack_tokens([5, 6, 7]), table_pages=pages, sampling=GREEDY)
    drafting = replace(drafting, n_drafts=2)
    chunk = row(1, start=4, n_tokens=3, tokens=pack_tokens([7, 8, 9]), table_pages=pages, sampling=None)
    last = row(3, start=2, n_tokens=2, tokens=pack_tokens([3, 4]), sampling=GREEDY)
    step = make_packer(max_num_seqs=16, n_split=3).pack(
        StepPlan(1, (drafting, chunk, last), n_decode=1, n_drafts=2)
    )
    assert step.n_decode == step.n_rows == 8
    assert step.rows.sampled_slots.tolist() == [2, 2, 2, 16, 16, 1, 16, 3]
    assert step.results is not None
    assert step.results.tolist() == [0, 1, 2, 5, 7]
    sampled = np.array([range(10, 18), [1] * 8], np.int32)[:, step.results]
    result = step_result(step.plan, sampled, {}, [], 0.0)
    assert (result.tokens, result.finite) == ((10, 11, 12, -1, 17), (True,) * 3)


def test_prompts_of_one_token_become_decode_rows() -> None:
    cached = row(1, start=4, n_tokens=1, tokens=pack_tokens([12]), write_start=5)
    step = make_packer(n_split=1).pack(StepPlan(1, (cached,)))
    assert (step.n_decode, step.counts, step.results) == (1, None, None)


def test_drafts_that_need_more_rows_than_there_are_are_refused() -> None:
    drafting = row(start=0, n_tokens=5, n_drafts=4)
    with pytest.raises(DeviceError, match="1 rows and 4 drafts, each a row to the device, which takes 4"):
        make_packer(n_split=0).pack(StepPlan(0, (drafting,), n_decode=1, n_drafts=4))
    assert make_packer().pack(StepPlan(0, (drafting,), n_decode=1, n_drafts=4)).sampled.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DeviceError, match="a row of a prompt has drafts"):
        make_packer().pack(StepPlan(0, (drafting,), n_drafts=4))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"batch_slot": 4}, "4 batch slots"),
        ({"batch_slot": -1}, "4 batch slots"),
        ({"n_tokens": 0, "tokens": b""}, "no tokens"),
        ({"start": -1}, "below 0"),
        ({"tokens": None}, "as many ids"),
        ({"tokens": b"abc"}, "as many ids"),
        ({"start": 28}, "max_model_len"),
        ({"table_start": -1}, "table entries"),
        ({"table_pages": (1,) * 9}, "table entries"),
        ({"table_pages": (1, 200)}, r"^step 0: pages \[200\] of a pool of 200"),
        ({"table_pages": (1, -1)}, r"^step 0: pages \[-1\] of a pool of 200"),
        ({"table_pages": (1,)}, "row 1: no page is known"),
        ({"table_start": 1}, "a hole"),
        ({"table_pages": ()}, "no page is known"),
        ({"scoring": Scoring(pack_tokens([1] * 3), 1)}, "batch slot 0: prompt logprobs of 3 tokens .* 5"),
        ({"scoring": Scoring(pack_tokens([1] * 6), 1)}, "batch slot 0: prompt logprobs of 6 tokens .* 5"),
        ({"scoring": Scoring(pack_tokens([1] * 5), -1)}, "n_logprobs -1"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(changes: dict[str, object], problem: str) -> None:
    packer = make_packer()
    with pytest.raises(DeviceError, match=problem):
        packer.pack(StepPlan(0, (row(3), row(**{"batch_slot": 0} | changes))))  # type: ignore[arg-type]
    packer.pack(StepPlan(0, (row(3),)))
    with pytest.raises(DeviceError, match="no page is known"):  # the refused plan has left nothing
        packer.pack(StepPlan(1, (row(0, table_pages=()),)))


def test_a_plan_that_does_not_fit_is_refused() -> None:
    packer = make_packer()
    with pytest.raises(DeviceError, match="0 rows"):
        packer.pack(StepPlan(0, ()))
    with pytest.raises(DeviceError, match="two rows have batch slot 1"):
        packer.pack(StepPlan(0, (row(1), row(1))))
    with pytest.raises(DeviceError, match="20 tokens; the device takes 16"):
        packer.pack(StepPlan(0, tuple(row(batch_slot) for batch_slot in range(4))))
    with pytest.raises(DeviceError, match="copies pages 1 to 200"):
        packer.pack(StepPlan(0, (row(),), copies=((1, 200),)))
    with pytest.raises(DeviceError, match="row 0: a decode row computes one token"):
        packer.pack(StepPlan(0, (row(),), n_decode=1))
    with pytest.raises(DeviceError, match="2 decode rows of 1 rows"):
        packer.pack(StepPlan(0, (row(n_tokens=1, tokens=pack_tokens([5])),), n_decode=2))
    with pytest.raises(DeviceError, match="same destination"):
        packer.pack(StepPlan(0, (row(),), copies=((1, 2), (3, 2))))
