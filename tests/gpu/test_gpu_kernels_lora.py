"""Kernels that add products of adapters, against torch in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, check_close, normal, on_device_only, on_kernels, poisoned
from torch import Tensor

from radixkv.runtime.device.adapters.cuda.blocks import DeviceBlocks, in_blocks, most_blocks, token_slots
from radixkv.runtime.device.ops.cuda.lora import LoraMatrices, add_adapters, split_count, tile_columns
from radixkv.runtime.step.plan import Row, StepPlan

pytestmark = on_kernels
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's products have no bfloat16


class World:
    """Random adapters in slots, whose memory is NaN where none has a value."""

    def __init__(self, sizes: Sequence[int], n_in: int, ranks: Sequence[Sequence[int]], max_rank: int) -> None:
        """``ranks`` are of each slot's parts; ``sizes`` the outputs of the parts."""
        self.sizes, self.n_in, self.n_slots = sizes, n_in, len(ranks)
        n_parts, n_out, columns = len(sizes), sum(sizes), tile_columns(sum(sizes))
        first_b = -(-n_parts * max_rank * n_in // 64) * 64
        values = poisoned(self.n_slots, first_b + -(-max_rank * n_out // 64) * 64, dtype=DTYPE)
        tables = torch.zeros(self.n_slots, 4, dtype=torch.int32, device=DEVICE)
        scales = torch.zeros(self.n_slots, 4, device=DEVICE)
        self.dense = torch.zeros(self.n_slots, n_out, n_in, dtype=torch.float64, device=DEVICE)
        """What each adapter adds to the weight."""
        tiles, first = list[tuple[int, int, int, int]](), 0
        for part, size in enumerate(sizes):
            tiles += [(part, first, size, column) for column in range(0, size, columns)]
            for slot, of_parts in enumerate(ranks):
                rank = of_parts[part]
                a, b = normal(rank, n_in, dtype=DTYPE, scale=n_in**-0.5), normal(size, rank, dtype=DTYPE)
                begin = part * max_rank * n_in
                values[slot, begin : begin + a.numel()] = a.flatten()
                begin = first_b + first * max_rank
                values[slot, begin : begin + b.numel()] = b.t().flatten()
                scale = 0.5 + slot
                tables[slot, part], scales[slot, part] = rank, scale
                self.dense[slot, first : first + size] = scale * (b.double() @ a.double())
            first += size
        self.matrices = LoraMatrices(
            a=values[0],
            b=values[0, first_b:],
            ranks=tables[0],
            scales=scales[0],
            tiles=torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
            n_parts=n_parts,
            n_in=n_in,
            max_rank=max_rank,
            columns=columns,
            is_aligned=all(size % 16 == 0 for size in sizes),
            slot_stride=values.shape[1],
            table_stride=4,
        )

    def check(self, slots: Sequence[int], n_padded: int | None = None) -> None:
        """Computes rows of the adapters in these slots, and compares each with its own weights; twice."""
        n = len(slots)
        blocks = DeviceBlocks(n_padded or n, self.n_slots, torch.device(DEVICE))
        planned = blocks.put(np.array(slots, np.int32), n_padded or n)
        x, base = normal(n_padded or n, self.n_in, dtype=DTYPE), normal(n_padded or n, sum(self.sizes), dtype=DTYPE)
        found, again = base.clone(), base.clone()
        for out in (found, again):
            add_adapters(x, self.matrices, planned, out)
        assert torch.equal(found, again)
        expected = base.double()
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[row] += self.dense[slot] @ x[row].double()
        check_close(found, expected, n_roundings=2, slack=2.0)
        unchanged = [row for row in range(n_padded or n) if row >= n or slots[row] < 0]
        assert torch.equal(found[unchanged], base[unchanged])


def mixed(n: int, n_slots: int, seed: int = 0) -> list[int]:
    """Returns slots of rows, some of which have no adapter."""
    return np.random.default_rng(seed).integers(-1, n_slots, n).tolist()


@pytest.mark.parametrize("n_rows", [1, 2, 15, 16, 17, 33, 70])
@pytest.mark.parametrize(
    ("sizes", "n_in"), [((64,), 128), ((128, 32, 32), 256), ((200, 200), 72), ((7, 130), 51), ((96, 96), 900)]
)
def test_rows_of_many_adapters(sizes: tuple[int, ...], n_in: int, n_rows: int) -> None:
    ranks = [[4] * len(sizes), [16, *[0] * (len(sizes) - 1)], [0] * len(sizes), [9] * len(sizes)]
    World(sizes, n_in, ranks, 16).check(mixed(n_rows, 4))


@pytest.mark.parametrize("rank", [1, 8, 16, 17, 32, 64, 128])
def test_ranks_up_to_the_limit(rank: int) -> None:
    World((64, 48), 200, [[rank, max(rank - 1, 1)]] * 2, rank).check([0, 1, -1, 1, 0])


@pytest.mark.parametrize("slots", [[-1] * 5, [0] * 40, [2] * 3 + [0] * 3, [1], list(range(12)) * 2])
def test_rows_of_one_adapter_or_of_none(slots: list[int]) -> None:
    World((48,), 64, [[8]] * 12, 8).check(slots)


def test_programs_go_on_to_further_blocks() -> None:
    """More adapters than programs."""
    world = World((32,), 64, [[4]] * 40, 4)
    world.check(list(range(40)))
    world.check(mixed(60, 40), n_padded=64)


def test_padding_is_left_alone() -> None:
    World((64, 32), 128, [[8, 8]] * 3, 16).check([0, 2, -1], n_padded=8)


@pytest.mark.parametrize("seed", range(20))
def test_each_token_has_the_slot_of_its_rows_adapter(seed: int) -> None:
    """From where the adapter begins in the row's sequence, which is anywhere."""
    draws = np.random.default_rng(seed)
    slots, rows, expected = {"12ab": 2, "34cd": 0}, list[Row](), list[int]()
    for index in range(draws.integers(1, 20)):
        adapter = str(draws.choice(["", *slots]))
        start, n_tokens, adapter_start = draws.integers(0, 9), draws.choice([1, 1, 5]), draws.integers(0, 16)
        rows.append(
            Row(
                batch_slot=index,
                start=int(start),
                n_tokens=int(n_tokens),
                tokens=None,
                write_start=int(start),
                table_start=0,
                table_pages=(),
                sampling=None,
                adapter=adapter,
                adapter_start=int(adapter_start),
            )
        )
        for position in range(start, start + n_tokens):
            expected.append(slots[adapter] if adapter and position >= adapter_start else -1)
    found = token_slots(StepPlan(0, tuple(rows)), slots)
    if found is None:
        assert not any(row.adapter for row in rows)
    else:
        assert found.dtype == np.int32
        assert found.tolist() == expected


@pytest.mark.parametrize("n_rows", [257, 300])
def test_blocks_of_many_rows(n_rows: int) -> None:
    World((40, 24), 96, [[8, 5]] * 3, 8).check(mixed(n_rows, 3))


def test_nothing_is_planned_outside_the_memory_of_blocks() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        n, n_slots = int(rng.integers(1, 400)), int(rng.integers(1, 40))
        slots = rng.integers(-1, n_slots, n).astype(np.int32)
        for n_rows in (16, 32):
            of_blocks, rows = in_blocks(slots, n_rows)
            assert sorted(rows[rows >= 0].tolist()) == np.flatnonzero(slots >= 0).tolist()
            for slot, places in zip(of_blocks, rows.reshape(-1, n_rows), strict=True):
                own = places[places >= 0]
                assert len(own)
                assert (np.diff(own) > 0).all()
                assert (slots[own] == slot).all()
        assert len(in_blocks(slots, 16 if n <= 256 else 32)[0]) <= most_blocks(n, n_slots)


def test_inputs_are_split_into_parts_that_are_worth_it() -> None:
    sizes = (4096, 10, 16), (4096, 33, 16), (100, 1, 16), (14_336, 20, 16), (4096, 500, 16), (4096, 20, 32)
    assert [split_count(*each) for each in sizes] == [16, 8, 1, 16, 1, 4]


@on_device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_rows", [1, 32, 256, 2048])
@pytest.mark.parametrize(
    ("sizes", "n_in"), [((4096, 1024, 1024), 4096), ((4096,), 4096), ((14_336, 14_336), 4096), ((4096,), 14_336)]
)
def test_products_of_model_size(
    sizes: tuple[int, ...], n_in: int, n_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "DTYPE", dtype)
    World(sizes, n_in, [[16] * len(sizes)] * 8, 16).check(mixed(n_rows, 8))


def test_a_graph_reads_the_blocks_of_a_later_plan() -> None:
    """Its kernels depend on the number of rows with padding alone."""
    world = World((64,), 128, [[8]] * 4, 16)
    blocks = DeviceBlocks(32, 4, torch.device(DEVICE))
    first = blocks.put(np.empty(0, np.int32), 32)
    x, base = normal(32, 128, dtype=DTYPE), normal(32, 64, dtype=DTYPE)
    out: Tensor = base.clone()
    add_adapters(x, world.matrices, first, out)
    assert torch.equal(out, base)
    later = blocks.put(np.array(mixed(20, 4), np.int32), 32)
    same, expected = base.clone(), base.clone()
    add_adapters(x, world.matrices, first, same)
    add_adapters(x, world.matrices, later, expected)
    assert torch.equal(same, expected)
    assert not torch.equal(same, base)
