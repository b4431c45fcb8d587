"""Decode plans, simulated as the kernels execute them: each row reads each of its positions exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from radixkv.runtime.device.attention.cuda.base import DecodeRows, Geometry
from radixkv.runtime.device.attention.cuda.decode_plan import DecodePlanner, DecodeStep
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.fa3_prefill import Fa3Schedule, balance_tiles
from radixkv.runtime.device.attention.cuda.fa3_shared import Fa3Fields, choose_part_tokens
from radixkv.runtime.device.attention.cuda.prefill import PrefillBatch, causal_tiles
from radixkv.runtime.device.attention.cuda.run_selection import SharedKernel, SharedRunSelector, SharingCosts
from radixkv.runtime.device.attention.cuda.work_items import N_COLUMNS, UNLIMITED, WorkItems
from radixkv.runtime.device.memory.cuda.staging import StagingBuffer, StagingLayout
from radixkv.runtime.step.plan import SharedRun
from support.cases import covering, rest_nightly
from support.cuda_geometry import H200, PAGE, SHAPE

Ints = NDArray[np.int32]
WIDTH = 300
MAX_ROWS = 300
ZERO_PAGE = 10**6


class SimulatedPlanner:
    """A planner with block tables, and a simulation of the kernels: ``reads``."""

    @dataclass
    class Item:
        """A simulated work item."""

        rows: list[int]
        """Rows of the step."""
        kv_slots: list[list[tuple[int, int]]]
        """(page, offset) of each position that a row attends to, by row."""
        result: int
        """Index of the first row's result; below 0, the rows' outputs are written directly."""

    def __init__(
        self,
        geometry: Geometry = H200,
        windows: Sequence[int | None] = (None,),
        shared_kernel: SharedKernel | None = "fa3",
    ) -> None:
        self.geometry = geometry = geometry if shared_kernel else replace(geometry, large_tile=0)
        self.layout = StagingLayout()
        self.planner = DecodePlanner(
            geometry,
            windows,
            max_rows=MAX_ROWS,
            layout=self.layout,
            costs=SharingCosts.for_kernel(shared_kernel),
            shared_kernel=shared_kernel,
        )
        self.tables = np.full((MAX_ROWS + 1, WIDTH), ZERO_PAGE, np.int32)

    def plan(
        self,
        batch_slots: Ints,
        lengths: Ints,
        shared: Sequence[SharedRun] = (),
        bucket: int | None = None,
        variant: Variant | None = None,
        counts: Ints | None = None,
    ) -> DecodeStep:
        self.staged = StagingBuffer(torch.full((self.layout.size,), -77, dtype=torch.int32))
        rows = DecodeRows(batch_slots, lengths, shared, counts=counts)
        return self.planner.plan(self.staged, rows, WIDTH, bucket, variant)

    def items(self, step: DecodeStep, window: int | None = None) -> list[SimulatedPlanner.Item]:
        """Simulates ``attend_decode`` for each small item."""
        fields = self.planner.fields[window].items
        columns = self.staged[fields.field].reshape(N_COLUMNS, fields.capacity)[:, : step.n_items].T.tolist()
        order = self.staged[self.planner.order][: step.n_rows].tolist()
        entries, found = self.tables.ravel(), []
        for first, n_queries, first_entry, begin, end, limit, result in columns:
            assert n_queries * self.geometry.shape.group <= step.tile
            kv_slots = [
                [
                    (int(entries[first_entry + at // PAGE]), at % PAGE)
                    for at in range(begin, min(end, limit + query) if step.variant == "extend" else end)
                ]
                for query in range(n_queries)
            ]
            if n_queries:
                found.append(SimulatedPlanner.Item(order[first : first + n_queries], kv_slots, result))
        return found

    def large_items(self, step: DecodeStep) -> list[SimulatedPlanner.Item]:
        """Simulates FlashInfer for each large item."""
        fields = self.planner.large_fields
        if fields is None:
            assert not step.n_large_items
            return []
        if isinstance(fields, Fa3Fields):
            return self.tiles(step, fields)
        staged_values, entries = self.staged[fields.field], self.tables.ravel()
        order = self.staged[self.planner.order][: step.n_rows].tolist()
        assert not step.n_large_items or staged_values[fields.page_indptr + 2 * fields.capacity] == entries.size
        is_item = staged_values[fields.is_item :].view(np.uint8)
        found = []
        for index in range(step.n_large_items):
            if not is_item[index]:
                continue
            request = int(staged_values[fields.requests + index])
            assert staged_values[fields.zeros + index] == 0
            first, last = staged_values[fields.query_indptr + request : fields.query_indptr + request + 2].tolist()
            assert 0 < (last - first) * self.geometry.shape.group <= self.geometry.large_tile
            begin, end = staged_values[fields.page_indptr + request : fields.page_indptr + request + 2].tolist()
            length = (end - begin - 1) * PAGE + int(staged_values[fields.last_page_lens + request])
            kv_slots = [(int(entries[begin + at // PAGE]), at % PAGE) for at in range(length)]
            found.append(
                SimulatedPlanner.Item(
                    order[first:last], [kv_slots] * (last - first), int(staged_values[fields.results + request])
                )
            )
        return found

    def tiles(self, step: DecodeStep, fields: Fa3Fields) -> list[SimulatedPlanner.Item]:
        """Simulates FA3: every multiprocessor computes its tiles, with queries at the indices of their results."""
        staged_values, entries = self.staged[fields.field], self.tables.ravel()
        order = self.staged[self.planner.order][: step.n_rows].tolist()
        starts = [offset // 4 for offset in fields.plan[:-1]]
        n_heads, group = self.geometry.shape.n_kv_heads, self.geometry.shape.group
        found: dict[tuple[int, ...], set[int]] = {}
        for begin, end in pairwise(staged_values[starts[6] : starts[6] + self.geometry.n_processors + 1].tolist()):
            for work in range(begin, end):
                tile, query, entry, n_queries, length, head = (
                    int(staged_values[start + work]) for start in starts[:6]
                )
                assert tile == 0
                assert 0 < n_queries <= self.geometry.large_tile
                heads = found.setdefault((query, n_queries, entry, length), set())
                assert head not in heads
                heads.add(head)
        assert all(heads == set(range(n_heads)) for heads in found.values())
        copied = {}
        copies = self.staged[fields.copies].reshape(3, fields.capacity)[:, : step.n_large_items].T.tolist()
        for first, n_rows, result in copies:
            assert n_rows <= self.geometry.large_tile // group
            for offset in range(n_rows):
                assert result + offset not in copied
                copied[result + offset] = order[first + offset]
        assert all(result < self.planner.n_large_results for result in copied)
        return [
            SimulatedPlanner.Item(
                [copied[result] for result in range(query // group, (query + n_queries) // group)],
                [[(int(entries[entry + at // PAGE]), at % PAGE) for at in range(length)]] * (n_queries // group),
                query // group,
            )
            for query, n_queries, entry, length in found
        ]

    def reads(self, step: DecodeStep, window: int | None = None) -> list[list[tuple[int, int]]]:
        """Returns the (page, offset) pairs that each row's output is computed from."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(step.n_rows)]
        results: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        large = self.large_items(step) if window is None and step.variant == "shared" else []
        for item in self.items(step, window) + large:
            for offset, row in enumerate(item.rows):
                if item.result < 0:
                    assert not rows[row], "two items write one output"
                    rows[row] += item.kv_slots[offset]
                else:
                    assert step.variant != "whole", "whole rows are not merged"
                    assert item.result + offset not in results
                    assert item.result + offset < self.planner.n_results
                    results[item.result + offset] = row, item.kv_slots[offset]
        if step.variant == "whole":
            return rows
        fields = self.planner.fields[window]
        order = self.staged[self.planner.order][: step.n_rows].tolist()
        assert sorted(order) == list(range(step.n_rows))
        indptr = self.staged[fields.merge_indptr].tolist()
        for query_index, row in enumerate(order):
            merged = self.staged[fields.merge_indices][indptr[query_index] : indptr[query_index + 1]].tolist()
            assert not (merged and rows[row]), "the merge overwrites an output"
            for result in merged:
                query, kv_slots = results.pop(result)
                assert query == row
                rows[row] += kv_slots
        assert not results, "a result is not merged"
        return rows

    def check(self, step: DecodeStep, batch_slots: Ints, lengths: Ints, window: int | None = None) -> None:
        reads = self.reads(step, window)
        for row, (batch_slot, length) in enumerate(zip(batch_slots.tolist(), lengths.tolist(), strict=True)):
            seen = range(0 if window is None else max(length - window, 0), length)
            expected = [(int(self.tables[batch_slot, at // PAGE]), at % PAGE) for at in seen]
            assert sorted(reads[row]) == sorted(expected), f"row {row}"
        for row in range(len(batch_slots), step.n_rows):
            assert reads[row] == [(ZERO_PAGE, 0)], "padding rows must read the zero page"


def ragged(planner_sim: SimulatedPlanner, seed: int, n_rows: int, longest: int) -> tuple[Ints, Ints]:
    random = np.random.default_rng(seed)
    planner_sim.tables[:MAX_ROWS] = random.permutation(MAX_ROWS * WIDTH).reshape(MAX_ROWS, WIDTH)
    batch_slots = random.permutation(MAX_ROWS)[:n_rows].astype(np.int32)
    return batch_slots, random.integers(1, longest + 1, n_rows).astype(np.int32)


def share(
    planner_sim: SimulatedPlanner,
    batch_slots: Ints,
    lengths: Ints,
    seed: int,
    first_page: int,
    rows: list[int],
    depth: int = 0,
) -> list[SharedRun]:
    """Returns random nested runs, parents first, and adapts tables and lengths to them."""
    random = np.random.default_rng(seed)
    n_pages = int(random.integers(1, 60))
    end = first_page + n_pages
    if len(rows) < 2 or end * PAGE >= WIDTH * PAGE - 400 or depth > 3:
        return []
    for row in rows:
        planner_sim.tables[batch_slots[row], first_page:end] = planner_sim.tables[
            batch_slots[rows[0]], first_page:end
        ]
        lengths[row] = max(lengths[row], end * PAGE + int(random.integers(1, 300)))
    runs = [SharedRun(tuple(sorted(rows)), first_page, n_pages)]
    shuffled = random.permutation(rows).tolist()
    while len(shuffled) > 3:
        size = int(random.integers(2, len(shuffled)))
        runs += share(
            planner_sim, batch_slots, lengths, int(random.integers(1 << 30)), end, shuffled[:size], depth + 1
        )
        shuffled = shuffled[size:]
    return runs


@pytest.mark.parametrize(
    ("size", "variant"), covering([(1, 4800), (3, 40), (33, 4800), (200, 700)], ["whole", "split", "shared", None])
)
def test_every_row_reads_each_of_its_positions_once(size: tuple[int, int], variant: Variant | None) -> None:
    n_rows, longest = size
    planner_sim = SimulatedPlanner()
    batch_slots, lengths = ragged(planner_sim, n_rows, n_rows, longest)
    planner_sim.check(planner_sim.plan(batch_slots, lengths, variant=variant), batch_slots, lengths)
    planner_sim.check(
        planner_sim.plan(batch_slots, lengths, bucket=n_rows + 7, variant=variant), batch_slots, lengths
    )


@pytest.mark.parametrize("seed", rest_nightly(range(40), kept=range(2)))
def test_nested_runs(seed: int) -> None:
    random = np.random.default_rng(seed)
    n_heads, n_kv_heads = [(32, 8), (28, 4), (64, 1)][seed % 3]
    geometry = replace(H200, shape=replace(SHAPE, n_heads=n_heads, n_kv_heads=n_kv_heads))
    kernels: list[SharedKernel | None] = ["fa3", "fa3", "fa2", "fa2", None]
    planner_sim = SimulatedPlanner(geometry, shared_kernel=kernels[seed % 5])
    n_rows = int(random.integers(2, 250))
    batch_slots, lengths = ragged(planner_sim, seed, n_rows, 300)
    rows = random.permutation(n_rows).tolist()
    half = int(random.integers(1, n_rows + 1))
    runs = share(planner_sim, batch_slots, lengths, seed, 0, rows[:half]) + share(
        planner_sim, batch_slots, lengths, seed + 1, 0, rows[half:]
    )
    bucket = None if seed % 2 else min(n_rows + 16, MAX_ROWS)
    planner_sim.check(planner_sim.plan(batch_slots, lengths, runs, bucket), batch_slots, lengths)


@pytest.mark.parametrize("seed", rest_nightly(range(40), kept=range(4)))
def test_a_token_and_its_drafts_each_see_one_position_more(seed: int) -> None:
    """With and without runs that other rows share, which the plan lists by its own rows."""
    random = np.random.default_rng(seed)
    n_heads, n_kv_heads = [(32, 8), (28, 4), (64, 1), (16, 16)][seed % 4]
    geometry = replace(H200, shape=replace(SHAPE, n_heads=n_heads, n_kv_heads=n_kv_heads))
    windows: list[int | None] = [[None], [None, 64], [700]][seed % 3]
    kernels: list[SharedKernel | None] = ["fa3", "fa2", None]
    planner_sim = SimulatedPlanner(geometry, windows, kernels[seed % 3])
    n_rows = int(random.integers(1, 40))
    batch_slots, lengths = ragged(planner_sim, seed, n_rows, [4000, 40][seed % 2])
    counts = random.integers(1, 1 + MAX_ROWS // n_rows, n_rows).clip(1, 33).astype(np.int32)
    rows = random.permutation(n_rows).tolist()
    half = int(random.integers(1, n_rows + 1))
    runs = share(planner_sim, batch_slots, lengths, seed, 0, rows[:half]) if seed % 5 else []
    of_row = np.repeat(np.arange(n_rows), counts)
    batch_slots, lengths = batch_slots[of_row], lengths[of_row]
    lengths += np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    bucket = None if seed % 2 else min(len(of_row) + 16, MAX_ROWS)
    step = planner_sim.plan(batch_slots, lengths, runs, bucket, counts=counts)
    assert step.variant == "extend"
    for window in windows:
        planner_sim.check(step, batch_slots, lengths, window)


def test_a_token_and_its_drafts_are_read_together() -> None:
    """Eight rows of 16 tokens are eight items before they are split, with all tokens of a prefix read once more."""
    planner_sim = SimulatedPlanner()
    slots = np.repeat(np.arange(8, dtype=np.int32), 16)
    lengths = 2000 + np.tile(np.arange(16, dtype=np.int32), 8)
    counts = np.full(8, 16, np.int32)
    for runs, n_read in (((), 8 * 2015), ((SharedRun(tuple(range(8)), 0, 125),), 8 * 2000 + 8 * 15)):
        step = planner_sim.plan(slots, lengths, runs, counts=counts)
        fields = planner_sim.planner.fields[None].items
        columns = planner_sim.staged[fields.field].reshape(N_COLUMNS, fields.capacity)[:, : step.n_items]
        assert int((columns[4] - columns[3]).sum()) == n_read
        assert step.n_items < 300


@pytest.mark.nightly
def test_partial_results_of_rows_with_drafts_fit_their_buffer() -> None:
    """They are more than in any other step, whose small tiles have fewer rows."""
    planner_sim = SimulatedPlanner(shared_kernel=None)
    slots, _ = ragged(planner_sim, 0, 16, 1)
    slots, lengths = slots.repeat(16), 4000 + np.tile(np.arange(16, dtype=np.int32), 16)
    step = planner_sim.plan(slots, lengths, counts=np.full(16, 16, np.int32))
    planner_sim.check(step, slots, lengths)
    n_results = max(item.result + len(item.rows) for item in planner_sim.items(step))
    assert n_results <= planner_sim.planner.n_results


@pytest.mark.parametrize(
    ("n_processors", "heads"), covering([2, 58, 132], [(32, 8, 16), (64, 2, 32), (16, 16, 16)])
)
def test_rows_of_any_lengths_fit_the_staging_fields(n_processors: int, heads: tuple[int, int, int]) -> None:
    """Staging more items than fit the fields raises; the staged items read as many tokens as the rows have."""
    n_heads, n_kv_heads, small_tile = heads
    shape = replace(SHAPE, n_heads=n_heads, n_kv_heads=n_kv_heads)
    geometry = replace(H200, shape=shape, n_processors=n_processors)
    assert geometry.small_tile == small_tile
    layout, costs, max_rows, width = StagingLayout(), SharingCosts(launches_ns=0, large_ns=0), 1024, 1 << 14
    planner = DecodePlanner(geometry, [None], max_rows=max_rows, layout=layout, costs=costs, shared_kernel="fa3")
    random = np.random.default_rng(n_processors + n_heads)
    for n_rows in (1, 2, 7, 65, 300, 777, 1024):
        batch_slots = random.permutation(max_rows)[:n_rows].astype(np.int32)
        for longest in (33, 5000, width * PAGE):
            lengths = random.integers(1, longest, n_rows).astype(np.int32)
            lengths[: n_rows // 50] = longest
            size = int(random.integers(2, 80))
            groups = [range(first, min(first + size, n_rows)) for first in range(0, n_rows, size)]
            runs = [SharedRun(tuple(group), 0, (int(lengths[group].min()) - 1) // PAGE) for group in groups]
            runs = [run for run in runs if run.n_pages]
            options: list[tuple[Variant | None, int | None]] = [(None, None), (None, min(n_rows + 9, max_rows))]
            for variant, bucket in [*options, ("split", None)]:
                staged = StagingBuffer(torch.zeros(layout.size, dtype=torch.int32))
                step = planner.plan(staged, DecodeRows(batch_slots, lengths, runs), width, bucket, variant)
                items = planner.fields[None].items
                columns = staged[items.field].reshape(N_COLUMNS, items.capacity)[:, : step.n_items]
                n_read = int((columns[1].astype(np.int64) * (columns[4] - columns[3])).sum())
                if step.n_large_items:
                    assert isinstance(planner.large_fields, Fa3Fields)
                    staged_values, starts = staged[planner.large_fields.field], planner.large_fields.plan
                    n_tiles = staged_values[starts[6] // 4 + n_processors]
                    pairs, reads = (staged_values[start // 4 :][:n_tiles].astype(np.int64) for start in starts[3:5])
                    n_read += int((pairs * reads).sum()) // n_heads
                assert n_read == int(lengths.sum()) + step.n_rows - n_rows


@pytest.mark.parametrize(
    ("n_processors", "shared_kernel", "heads"),
    covering([2, 58, 132], ["fa3", None], [(32, 8, 16), (32, 2, 4), (16, 16, 64)]),
)
def test_rows_with_drafts_of_any_lengths_fit_the_staging_fields(
    n_processors: int, shared_kernel: SharedKernel | None, heads: tuple[int, int, int]
) -> None:
    """Runs are nested; the staged items read as many tokens as the rows have."""
    n_heads, n_kv_heads, small_rows = heads
    shape = replace(SHAPE, n_heads=n_heads, n_kv_heads=n_kv_heads)
    geometry = replace(H200, shape=shape, n_processors=n_processors, large_tile=128 if shared_kernel else 0)
    assert geometry.for_extend().small_rows == small_rows
    layout, costs, max_rows, width = StagingLayout(), SharingCosts(launches_ns=0, large_ns=0), 1024, 1 << 14
    planner = DecodePlanner(
        geometry,
        [None],
        max_rows=max_rows,
        layout=layout,
        costs=costs,
        shared_kernel=shared_kernel,
    )
    random = np.random.default_rng(n_processors + n_heads)
    for n_rows, most in ((1, 16), (7, 16), (16, 16), (60, 17), (300, 3), (31, 33), (1024, 1)):
        slots = random.permutation(max_rows)[:n_rows].astype(np.int32)
        for longest in (33, 5000, (width - 3) * PAGE):
            counts = random.integers(1, most + 1, n_rows).astype(np.int32)
            starts = random.integers(1, longest, n_rows).astype(np.int32)
            starts[: n_rows // 50] = longest
            runs, outer, inner = [], int(random.integers(2, 80)), int(random.integers(2, 20))
            for first in range(0, n_rows, outer):
                rows = range(first, min(first + outer, n_rows))
                end = (int(starts[rows].min()) - 1) // PAGE
                runs.append(SharedRun(tuple(rows), 0, end))
                for nested in (rows[at : at + inner] for at in range(0, len(rows), inner)):
                    runs.append(SharedRun(tuple(nested), end, (int(starts[nested].min()) - 1) // PAGE - end))
            runs = [run for run in runs if run.n_pages]
            offsets = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
            batch_slots, lengths = slots.repeat(counts), starts.repeat(counts) + offsets
            for bucket in (None, min(len(lengths) + 9, max_rows)):
                staged = StagingBuffer(torch.zeros(layout.size, dtype=torch.int32))
                rows_of_step = DecodeRows(batch_slots, lengths, runs, counts=counts)
                step = planner.plan(staged, rows_of_step, width, bucket)
                items = planner.fields[None].items
                columns = staged[items.field].reshape(N_COLUMNS, items.capacity)[:, : step.n_items]
                item = np.arange(step.n_items).repeat(columns[1])
                query = np.arange(len(item)) - (columns[1].cumsum() - columns[1])[item]
                ends = np.minimum(columns[4][item], columns[5][item] + query)
                n_read = int(np.maximum(ends - columns[3][item], 0).astype(np.int64).sum())
                assert n_read == int(lengths.sum()) + step.n_rows - len(lengths)


@pytest.mark.parametrize(("shared_kernel", "tile"), [("fa2", 128), ("fa3", 128), (None, 16)])
def test_a_large_prefix_is_read_once_per_tile(shared_kernel: SharedKernel | None, tile: int) -> None:
    planner_sim = SimulatedPlanner(shared_kernel=shared_kernel)
    batch_slots, lengths = np.arange(256, dtype=np.int32), np.full(256, 3300, np.int32)
    planner_sim.tables[:256, :192] = planner_sim.tables[0, :192]
    step = planner_sim.plan(batch_slots, lengths, [SharedRun(tuple(range(256)), 0, 192)], 256)
    assert step.variant == "shared"
    n_read = sum(len(item.kv_slots[-1]) for item in planner_sim.items(step) + planner_sim.large_items(step))
    assert n_read == 256 * (3300 - 3072) + 3072 * 256 * 4 // tile


def test_short_runs_are_not_shared() -> None:
    planner_sim = SimulatedPlanner()
    batch_slots, lengths = np.arange(32, dtype=np.int32), np.full(32, 512, np.int32)
    assert planner_sim.plan(batch_slots, lengths, [SharedRun(tuple(range(32)), 0, 16)], 32).variant == "whole"


def test_one_long_row_among_short_ones_is_split() -> None:
    planner_sim = SimulatedPlanner()
    batch_slots, lengths = np.arange(256, dtype=np.int32), np.full(256, 300, np.int32)
    assert planner_sim.plan(batch_slots, lengths, bucket=256).variant == "whole"
    lengths[100] = 4800
    lengths[:100] = 100
    lengths[101:] = 100
    step = planner_sim.plan(batch_slots, lengths, bucket=256)
    assert step.variant == "split"
    assert max(len(item.kv_slots[-1]) for item in planner_sim.items(step)) < 1500


@pytest.mark.parametrize("variant", ["whole", "split", None])
@pytest.mark.parametrize("windows", [(None, 100), (100, 777)])
def test_layers_with_windows(windows: tuple[int | None, ...], variant: Variant | None) -> None:
    for n_rows in (2, 20, 90):
        planner_sim = SimulatedPlanner(windows=windows)
        batch_slots, lengths = ragged(planner_sim, n_rows, n_rows, 2000)
        step = planner_sim.plan(batch_slots, lengths, bucket=n_rows + 4, variant=variant)
        for window in windows:
            planner_sim.check(step, batch_slots, lengths, window)


def test_a_run_after_a_gap_is_left_out() -> None:
    selector = SharedRunSelector(SharingCosts(), H200)
    assert selector.select([SharedRun(tuple(range(64)), 5, 200)], None, 64, 16, 4) is None
    assert selector.select([SharedRun(tuple(range(64)), 0, 200)], None, 64, 16, 4) is not None


def test_a_step_without_runs_keeps_the_last_plan() -> None:
    selector = SharedRunSelector(SharingCosts(), H200)
    runs = [SharedRun(tuple(range(64)), 0, 200)]
    chosen = selector.select(runs, 3, 64, 16, 4)
    assert selector.select((), 0, 64, 16, 4) is None
    assert selector.select(list(runs), 3, 64, 16, 4) is chosen


def test_runs_with_another_number_are_selected_anew() -> None:
    selector = SharedRunSelector(SharingCosts(), H200)
    many, few = ([SharedRun(tuple(range(64)), 0, n_pages)] for n_pages in (200, 100))
    plans = [selector.select(runs, number, 64, 16, 4) for runs, number in ((many, 1), (few, 2), (many, None))]
    assert all(plan is not None for plan in plans)
    assert [plan.runs[0].n_pages for plan in plans if plan is not None] == [200, 100, 200]


def test_an_fa3_schedule_has_every_tile_once_and_is_balanced() -> None:
    random = np.random.default_rng(0)
    n_tokens = random.integers(1, 2000, 12).astype(np.int32)
    lengths = n_tokens + random.integers(0, 3000, 12).astype(np.int32)
    firsts = (np.cumsum(n_tokens) - n_tokens).astype(np.int32)
    entries = (np.arange(12) * WIDTH).astype(np.int32)
    rows = PrefillBatch(firsts, n_tokens, lengths, entries)
    schedule = Fa3Schedule.build(rows, n_heads=32, tile=128, n_processors=132)
    starts = [start // 4 for start in schedule.plan[:-1]]
    assert schedule.plan[-1] == 0
    ends = schedule.values[starts[6] : starts[6] + 133]
    tiles, queries, pages, n_queries, reads, heads = (
        schedule.values[start : start + ends[-1]].tolist() for start in starts[:6]
    )
    batch = schedule.values[starts[7] : starts[7] + ends[-1]].tolist()
    found = sorted(zip(batch, tiles, heads, strict=True))
    expected = [(row, tile, h) for row in range(12) for tile in range(-(-n_tokens[row] // 128)) for h in range(32)]
    assert found == expected
    assert queries == firsts[batch].tolist()
    assert pages == entries[batch].tolist()
    assert n_queries == n_tokens[batch].tolist()
    assert reads == lengths[batch].tolist()
    costs = [min(r - n + (t + 1) * 128, r) + 256 for r, n, t in zip(reads, n_queries, tiles, strict=True)]
    loads = [sum(costs[ends[i] : ends[i + 1]]) for i in range(132)]
    assert max(loads) < 1.05 * sum(loads) / 132 + max(costs) / 2


@pytest.mark.parametrize(("n_tiles", "length"), [(8, 1536), (4, 8064), (1, 3072), (20, 4000)])
def test_tiles_of_shared_pages_leave_few_processors_idle(n_tiles: int, length: int) -> None:
    items = WorkItems.of(*(np.full(n_tiles, value, np.int32) for value in (0, 32, 0, 0, length, UNLIMITED)))
    part = choose_part_tokens(items, H200, max_items=n_tiles + 66, minimum=192)
    lengths = items.split(part).ends - items.split(part).begins
    loads = np.zeros(132)
    costs = np.repeat(lengths, 8)
    np.add.at(loads, balance_tiles(costs, 132), costs)
    assert lengths.sum() == n_tiles * length
    assert loads.max() < 1.3 * loads.mean() + 192


def test_causal_tiles_end_at_their_last_query() -> None:
    n_tokens, lengths = np.array([70, 1, 32], np.int32), np.array([70, 9, 132], np.int32)
    firsts = np.array([0, 70, 71], np.int32)
    items = causal_tiles(PrefillBatch(firsts, n_tokens, lengths, np.array([0, 300, 600], np.int32)), 32)
    seen: list[int] = []
    for index in range(len(items)):
        first, n = int(items.first_queries[index]), int(items.n_queries[index])
        row = int(items.first_entries[index]) // 300
        assert items.begins[index] == 0
        assert items.ends[index] == lengths[row] - n_tokens[row] + first - firsts[row] + n
        assert n <= 32
        seen += range(first, first + n)
    assert sorted(seen) == list(range(103))
