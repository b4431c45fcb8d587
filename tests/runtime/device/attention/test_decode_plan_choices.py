"""Structure of decode plans; ``bench/attention_choices.py`` compares the choices with measured times."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixkv.runtime.device.attention.cuda.base import DecodeRows
from radixkv.runtime.device.attention.cuda.decode_plan import DecodePlanner, DecodeStep
from radixkv.runtime.device.attention.cuda.run_selection import SharedKernel, SharedRunSelector, SharingCosts
from radixkv.runtime.device.attention.cuda.work_items import N_COLUMNS
from radixkv.runtime.device.memory.cuda.staging import StagingBuffer, StagingLayout
from radixkv.runtime.step.plan import SharedRun
from support.cuda_geometry import H200, PAGE

MAX_ROWS = 512


def used_sizes(n_rows: int, n_tokens: int, n_groups: int, kernel: SharedKernel) -> list[bool]:
    """Returns for each group whose shared pages are read once per tile whether its tiles are large."""
    selector = SharedRunSelector(SharingCosts.for_kernel(kernel), H200)
    size = n_rows // n_groups
    runs = [SharedRun(tuple(range(first, first + size)), 0, n_tokens // PAGE) for first in range(0, n_rows, size)]
    sharing = selector.select(runs, None, n_rows, max(n_rows // 4, 1), max(2 * n_rows * 4 // 128, 1))
    return [] if sharing is None else [run.is_large for run in sharing.runs]


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("n_groups", [1, 4, 16])
@pytest.mark.parametrize("n_rows", [64, 256, 512])
def test_more_shared_tokens_never_lead_back_to_less_sharing(
    n_rows: int, n_groups: int, kernel: SharedKernel
) -> None:
    """From unshared through small tiles to large ones, and all groups alike, as they share equally many tokens."""
    degrees = []
    for n_tokens in (PAGE, 256, 1024, 4096, 16384):
        sizes = used_sizes(n_rows, n_tokens, n_groups, kernel)
        assert len(sizes) in (0, n_groups)
        assert len(set(sizes)) <= 1
        degrees.append(0 if not sizes else 1 + sizes[0])
    assert degrees == sorted(degrees)
    assert (degrees[0], degrees[-1] > 0) == (0, True)


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("n_rows", [2, 3, 4])
def test_a_shared_run_that_fits_one_small_tile_is_never_read_in_large_ones(
    n_rows: int, kernel: SharedKernel
) -> None:
    for n_tokens in (1024, 8192, 65536, 1 << 20):
        assert not any(used_sizes(n_rows, n_tokens, 1, kernel))


def test_groups_that_do_not_fit_into_large_tiles_use_small_ones() -> None:
    sizes = used_sizes(512, 8064, 64, "fa3")
    assert (sizes.count(True), sizes.count(False)) == (32, 32)


@pytest.mark.parametrize(("count", "n_tiles"), [(1, 1), (4, 4), (5, 5), (20, 10)])
def test_a_run_of_rows_with_drafts_is_used_if_its_tiles_are_fewer_than_the_items_that_read_it(
    count: int, n_tiles: int
) -> None:
    """Small tiles have 16 rows then, and a row with 20 tokens is two items."""
    selector, n_rows = SharedRunSelector(SharingCosts(), H200.for_extend()), 8 if count == 20 else 16
    runs, counts = [SharedRun(tuple(range(n_rows)), 0, 1000)], np.full(n_rows, count, np.int32)
    sharing = selector.select(runs, None, n_rows, n_tiles, 0, counts)
    assert sharing is not None
    assert [(run.first_row, run.n_rows) for run in sharing.runs] == [(0, n_rows)]
    assert selector.select(runs, None, n_rows, n_tiles - 1, 0, counts) is None


@pytest.mark.parametrize("count", [16, 32])
def test_a_run_of_rows_that_each_fill_tiles_with_their_drafts_is_not_used(count: int) -> None:
    selector, counts = SharedRunSelector(SharingCosts(), H200.for_extend()), np.full(8, count, np.int32)
    assert selector.select([SharedRun(tuple(range(8)), 0, 10_000)], None, 8, 1000, 0, counts) is None


def test_nested_runs_of_rows_with_drafts_are_used_by_their_numbers_of_tokens() -> None:
    """The run of the rows whose drafts fill tiles is not used, and the run around it is."""
    selector, counts = SharedRunSelector(SharingCosts(), H200.for_extend()), np.repeat(np.int32([16, 2]), [4, 16])
    runs = [SharedRun(tuple(range(20)), 0, 1000), SharedRun((0, 1, 2, 3), 1000, 1000)]
    inner = SharedRun(tuple(range(4, 20)), 1000, 1000)
    for shared, n_pages in ((runs, [1000]), ([*runs, inner], [1000, 1000])):
        sharing = selector.select(shared, None, 20, 1000, 0, counts)
        assert sharing is not None
        assert [run.n_pages for run in sharing.runs] == n_pages
        assert sharing.runs[0].n_rows == 20
    assert sharing.runs[1].n_rows == 16


@pytest.mark.parametrize(("n_rows", "count"), [(64, 1), (16, 4)])
def test_pages_that_rows_with_drafts_share_are_read_once_for_16_tokens(n_rows: int, count: int) -> None:
    layout = StagingLayout()
    planner = DecodePlanner(
        H200,
        [None],
        max_rows=MAX_ROWS,
        layout=layout,
        costs=SharingCosts(),
        shared_kernel="fa3",
    )
    staged = StagingBuffer(torch.zeros(layout.size, dtype=torch.int32))
    batch_slots = np.arange(n_rows, dtype=np.int32).repeat(count)
    lengths = 4000 + np.tile(np.arange(count, dtype=np.int32), n_rows)
    shared, counts = [SharedRun(tuple(range(n_rows)), 0, 3200 // PAGE)], np.full(n_rows, count, np.int32)
    step = planner.plan(staged, DecodeRows(batch_slots, lengths, shared, counts=counts), 4096)
    fields = planner.fields[None].items
    columns = staged[fields.field].reshape(N_COLUMNS, fields.capacity)[:, : step.n_items]
    assert int((columns[4] - columns[3]).sum()) == 64 // 16 * 3200 + n_rows * (800 + count - 1)


def plan_step(lengths: list[int]) -> tuple[DecodeStep, list[list[int]]]:
    """Returns the step, and the tokens of each row's work items."""
    layout = StagingLayout()
    planner = DecodePlanner(
        H200, [None], max_rows=MAX_ROWS, layout=layout, costs=SharingCosts(), shared_kernel="fa3"
    )
    staged = StagingBuffer(torch.zeros(layout.size, dtype=torch.int32))
    batch_slots = np.arange(len(lengths), dtype=np.int32)
    step = planner.plan(staged, DecodeRows(batch_slots, np.array(lengths, np.int32)), 4096, len(lengths))
    fields = planner.fields[None].items
    columns = staged[fields.field].reshape(N_COLUMNS, fields.capacity)[:, : step.n_items]
    parts: list[list[int]] = [[] for _ in lengths]
    for first_query, n_queries, _, begin, end, _, _ in columns.T:
        if n_queries:
            parts[first_query].append(int(end - begin))
    return step, parts


@pytest.mark.parametrize("lengths", [[1024], [2048], [32768], [2048] * 4, [8192] * 40])
def test_few_long_rows_are_split_into_equal_parts(lengths: list[int]) -> None:
    step, parts = plan_step(lengths)
    assert step.variant == "split"
    assert [sum(sizes) for sizes in parts] == lengths
    assert len({len(sizes) for sizes in parts}) == 1
    assert 1 < len(parts[0]) <= 16
    sizes = [size for row in parts for size in row]
    full = [size for size in sizes if size > max(sizes) // 2]
    assert max(full) - min(full) < 0.07 * max(full)


@pytest.mark.parametrize("lengths", [[64], [192], [320] * 2, [4096] * 256])
def test_short_rows_and_many_rows_of_one_length_are_left_whole(lengths: list[int]) -> None:
    step, parts = plan_step(lengths)
    assert step.variant == "whole"
    assert parts == [[length] for length in lengths]


@pytest.mark.parametrize("index", [0, 100, 255])
def test_only_a_row_far_longer_than_the_others_is_split(index: int) -> None:
    lengths = [320] * 256
    lengths[index] = 32768
    step, parts = plan_step(lengths)
    assert step.variant == "split"
    assert {row for row, sizes in enumerate(parts) if len(sizes) > 1} == {index}
    assert len(parts[index]) <= 16
    lengths[index] = 340
    assert plan_step(lengths)[0].variant == "whole"


@pytest.mark.parametrize(
    ("window", "starts", "n_tokens", "fits"),
    [
        (None, [16_000], [256], True),
        (None, [16_000], [272], False),
        (None, [16_000, 16_000], [256, 1], False),
        (None, [100_000], [16], True),
        (1024, [16_000], [256], True),
        (1024, [16_000], [257], False),
        (1024, [0], [256], True),
    ],
)
def test_short_prompts_fit_decode_rows_by_what_tiles_read(
    window: int | None, starts: list[int], n_tokens: list[int], fits: bool
) -> None:
    """Tiles of 16 tokens read a row's whole context, and each token its own window."""
    planner = DecodePlanner(
        H200, [window], max_rows=MAX_ROWS, layout=StagingLayout(), costs=SharingCosts(), shared_kernel="fa3"
    )
    assert planner.fits_prompts(np.array(starts, np.int32), np.array(n_tokens, np.int32)) is fits
