"""Packing of plans, and refusal of plans that would write out of bounds."""

from __future__ import annotations

import pytest

from radixkv.errors import DeviceError
from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.pack import Packer
from radixkv.runtime.step.plan import Row, Scoring, StepPlan
from radixkv.wire.messages import pack_tokens


def make_packer() -> Packer:
    settings = DeviceSettings(page_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
    return Packer(settings, 20, settings.max_num_batched_tokens)


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
        "ids": [-1, 7, 8, 9, 10, 11],
        "updates": [9, 8],
    }
    assert step.lengths.tolist() == [6, 5]


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
        ({"table_pages": (1, 20)}, r"^step 0: pages \[20\] of a pool of 20"),
        ({"table_pages": (1, -1)}, r"^step 0: pages \[-1\] of a pool of 20"),
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
    with pytest.raises(DeviceError, match="copies pages 1 to 20"):
        packer.pack(StepPlan(0, (row(),), copies=((1, 20),)))
    with pytest.raises(DeviceError, match="row 0: a decode row computes one token"):
        packer.pack(StepPlan(0, (row(),), n_decode=1))
    with pytest.raises(DeviceError, match="2 decode rows of 1 rows"):
        packer.pack(StepPlan(0, (row(n_tokens=1, tokens=pack_tokens([5])),), n_decode=2))
    with pytest.raises(DeviceError, match="same destination"):
        packer.pack(StepPlan(0, (row(),), copies=((1, 2), (3, 2))))
