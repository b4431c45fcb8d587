"""The kernels for block tables and token inputs, against loops in Python."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_support import DEVICE, integers, on_kernels, poisoned
from torch import Tensor

from radixkv.runtime.device.ops.base import TokenInputs
from radixkv.runtime.device.ops.cuda.token_inputs import WindowPlaces, prepare_token_inputs, update_tables
from radixkv.runtime.device.pack import RowArrays

pytestmark = on_kernels


@pytest.mark.parametrize(("n_rows", "width"), [(1, 8), (5, 700), (40, 300)])
def test_update_tables(n_rows: int, width: int) -> None:
    rng = random.Random(n_rows)
    tables = torch.randint(1000, (n_rows + 3, width), dtype=torch.int32, device=DEVICE)
    expected = tables.clone()
    batch_slots = rng.sample(range(n_rows + 3), n_rows)
    starts, firsts, counts, updates = [], [], [], [7]
    for batch_slot in batch_slots:
        start = rng.randrange(width)
        count = rng.choice([0, 1, width - start, rng.randint(0, width - start)])
        starts.append(start)
        firsts.append(len(updates))
        counts.append(count)
        updates += [rng.randrange(2000, 3000) for _ in range(count)]
        expected[batch_slot, start : start + count] = integers(updates[firsts[-1] :])
    unused = [0] * n_rows
    rows = RowArrays(*map(integers, (batch_slots, *[unused] * 4, starts, firsts, counts, unused, unused)))
    update_tables(tables, rows, integers(updates))
    assert torch.equal(tables, expected)


@pytest.mark.parametrize("n_tokens", [[1], [1] * 77, [1, 1, 300, 7, 513], [2] * 9])
def test_prepare_token_inputs(n_tokens: list[int]) -> None:
    rng, page_size, width = random.Random(3), 16, 64
    n_rows, total = len(n_tokens), sum(n_tokens)
    tables = torch.randint(5000, (n_rows + 2, width), dtype=torch.int32, device=DEVICE)
    last_tokens = torch.randint(9000, (n_rows + 2,), dtype=torch.int32, device=DEVICE)
    batch_slots = rng.sample(range(n_rows + 2), n_rows)
    starts = [rng.randint(0, width * page_size - n) for n in n_tokens]
    write_starts = [start + rng.choice([0, 0, 5, 10_000]) for start in starts]
    n_skipped = [rng.choice([0, 0, page_size, 7 * page_size]) for _ in starts]
    firsts = [sum(n_tokens[:row]) for row in range(n_rows)]
    ids_in = [rng.choice([-1, rng.randrange(9000)]) for _ in range(total)]
    outs = [poisoned(total, dtype=torch.int32) for _ in range(3)]
    prepare_token_inputs(
        tables,
        last_tokens,
        _rows(batch_slots, starts, n_tokens, firsts, write_starts, n_skipped=n_skipped),
        integers(ids_in),
        TokenInputs(*outs),
        page_size=page_size,
        max_n_tokens=max(n_tokens),
    )
    pages, last = tables.tolist(), last_tokens.tolist()
    ids, positions, slot_mapping = [], [], []
    for row, batch_slot in enumerate(batch_slots):
        for i in range(n_tokens[row]):
            place, id_in = starts[row] + i, ids_in[firsts[row] + i]
            ids.append(last[batch_slot] if id_in == -1 else id_in)
            positions.append(place + n_skipped[row])
            slot = pages[batch_slot][place // page_size] * page_size + place % page_size
            slot_mapping.append(-1 if place < write_starts[row] else slot)
    assert [out.tolist() for out in outs] == [ids, positions, slot_mapping]


def test_layers_with_windows_store_at_places_of_their_own() -> None:
    """All positions but those of padding, also those that are in the tree; pages of layers are apart."""
    tables, window_tables = (integers([[p, p + 1, p + 2] for p in firsts]) for firsts in ((3, 30, 60), (5, 50, 90)))
    starts, n_tokens, batch_slots = [14, 32, 0], [20, 3, 1], [1, 0, 2]
    total = sum(n_tokens)
    ids, positions, slots, window_slots = (poisoned(total, dtype=torch.int32) for _ in range(4))
    prepare_token_inputs(
        tables,
        integers([0] * 3),
        _rows(batch_slots, starts, n_tokens, [0, 20, 23], [17, 35, 1]),
        integers(range(total)),
        TokenInputs(ids, positions, slots, in_windows=TokenInputs(ids, positions, window_slots)),
        page_size=16,
        max_n_tokens=20,
        page_pitch=48,
        windows=WindowPlaces(window_tables, 160),
    )
    expected: list[int] = []
    expected_windows: list[int] = []
    for slot, start, n, written in ((1, 14, 20, 17), (0, 32, 3, 35), (2, 0, 1, 1)):
        for position in range(start, start + n):
            page, offset = position // 16, position % 16
            is_stored = position >= written
            expected.append(tables.tolist()[slot][page] * 48 + offset if is_stored else -1)
            expected_windows.append(window_tables.tolist()[slot][page] * 160 + offset if slot != 2 else -1)
    assert (slots.tolist(), window_slots.tolist()) == (expected, expected_windows)
    assert -1 not in expected_windows[:-1]


def test_prepare_token_inputs_in_place() -> None:
    tables, last_tokens, ids = integers([[4, 9]]), integers([42]), integers([-1])
    out = TokenInputs(ids, poisoned(1, dtype=torch.int32), poisoned(1, dtype=torch.int32))
    rows = _rows([0], [17], [1], [0], [0])
    prepare_token_inputs(tables, last_tokens, rows, ids, out, page_size=16, max_n_tokens=1)
    assert [values.tolist() for values in (out.ids, out.positions, out.slot_mapping)] == [[42], [17], [9 * 16 + 1]]


def _rows(*arrays: list[int], n_skipped: list[int] | None = None) -> RowArrays[Tensor]:
    """Returns rows whose tables do not change."""
    unused = integers([0] * len(arrays[0]))
    return RowArrays(*map(integers, arrays), *[unused] * 4, unused if n_skipped is None else integers(n_skipped))
