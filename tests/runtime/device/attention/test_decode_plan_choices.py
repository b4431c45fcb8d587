"""How decode rows are computed, held against what each way took on an H200, in microseconds a layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixkv.runtime.device.attention.cuda.decode_plan import DecodePlanner, DecodeStep
from radixkv.runtime.device.attention.cuda.shared_runs import SharedKernel, SharingChoice, SharingCosts
from radixkv.runtime.device.attention.cuda.work_items import N_COLUMNS
from radixkv.runtime.device.staging_cuda import Layout, Staged
from radixkv.runtime.step.plan import SharedRun
from support.cuda_geometry import H200, PAGE

MAX_ROWS = 512
SHARED = [
    # rows, tokens, groups, then flat, small tiles, large tiles of FA2 and of FA3; rows have 128 tokens of their own
    (512, 1536, 4, 462.6, 207.5, 148.8, 123.2),
    (512, 1536, 1, 465.7, 208.0, 150.1, 123.2),
    (512, 1536, 16, 462.2, 209.3, 149.9, 129.8),
    (512, 3072, 4, 859.0, 320.6, 183.4, 143.0),
    (512, 3072, 1, 855.1, 318.9, 183.8, 143.8),
    (512, 3072, 16, 850.3, 320.0, 184.5, 153.9),
    (512, 8064, 4, 2132.0, 683.4, 300.7, 213.0),
    (512, 8064, 1, 2134.5, 687.6, 299.9, 211.2),
    (512, 8064, 16, 2135.4, 687.5, 306.0, 234.4),
    (256, 1536, 4, 232.5, 112.4, 90.5, 73.4),
    (256, 1536, 1, 233.7, 113.0, 89.6, 72.4),
    (256, 1536, 16, 233.8, 113.8, 105.6, 87.3),
    (256, 1536, 64, 245.3, 142.9, 272.2, 248.6),
    (256, 3072, 4, 426.5, 167.0, 108.7, 84.3),
    (256, 3072, 1, 427.8, 167.3, 109.2, 82.6),
    (256, 3072, 16, 431.8, 170.6, 140.5, 111.6),
    (256, 3072, 64, 452.5, 228.9, 489.7, 450.4),
    (256, 8064, 4, 1065.1, 349.7, 167.5, 119.3),
    (256, 8064, 1, 1068.9, 351.5, 167.4, 116.7),
    (256, 8064, 16, 1083.5, 356.9, 260.3, 190.9),
    (256, 8064, 64, 1147.2, 508.2, 1218.0, 1113.8),
    (64, 1536, 4, 72.3, 38.0, 46.6, 35.6),
    (64, 1536, 1, 71.3, 37.1, 35.4, 32.6),
    (64, 1536, 16, 74.7, 46.3, 87.8, 76.6),
    (64, 3072, 4, 133.4, 53.3, 56.8, 42.8),
    (64, 3072, 1, 132.5, 53.3, 49.1, 35.7),
    (64, 3072, 16, 138.3, 68.0, 152.0, 135.5),
    (64, 8064, 4, 332.1, 99.4, 84.9, 62.9),
    (64, 8064, 1, 326.1, 98.1, 64.1, 45.5),
    (64, 8064, 16, 347.2, 137.2, 340.5, 310.0),
    # the same with 256 and 588 tokens of their own
    (32, 256, 1, 19.9, 23.1, 29.2, 27.1),
    (128, 512, 1, 108.1, 106.9, 104.8, 100.6),
]


def used_sizes(n_rows: int, n_tokens: int, n_groups: int, kernel: SharedKernel) -> list[bool]:
    """Of each run that is read once a tile, whether its tiles are large."""
    choice = SharingChoice(
        SharingCosts.of(kernel), page_size=PAGE, token_bytes=4096, group=4, small_tile=16, large_tile=128
    )
    size = n_rows // n_groups
    runs = [SharedRun(tuple(range(first, first + size)), 0, n_tokens // PAGE) for first in range(0, n_rows, size)]
    sharing = choice.choose(runs, n_rows, max(n_rows // 4, 1), max(2 * n_rows * 4 // 128, 1))
    return [] if sharing is None else [run.is_large for run in sharing.runs]


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("case", SHARED, ids=lambda case: f"{case[0]}x{case[1]} in {case[2]}")
def test_shared_pages_are_read_in_the_way_that_was_fastest(
    case: tuple[int, int, int, float, float, float, float], kernel: SharedKernel
) -> None:
    n_rows, n_tokens, n_groups, flat, small, fa2, fa3 = case
    large = fa3 if kernel == "fa3" else fa2
    sizes = used_sizes(n_rows, n_tokens, n_groups, kernel)
    assert len(sizes) in (0, n_groups), "groups that are alike are not"
    assert len(set(sizes)) <= 1
    us = flat if not sizes else large if sizes[0] else small
    assert us <= 1.05 * min(flat, small, large)


def test_groups_that_do_not_fit_into_large_tiles_are_read_in_small_ones() -> None:
    """64 groups of 8 rows: all in small tiles took 732 us, half in large ones and half flat 1,556."""
    sizes = used_sizes(512, 8064, 64, "fa3")
    assert (sizes.count(True), sizes.count(False)) == (32, 32)


def planned(lengths: list[int], bucket: int | None = None) -> tuple[DecodeStep, list[int]]:
    """The step, and how many tokens each item has."""
    layout = Layout()
    planner = DecodePlanner(
        H200, [None], max_rows=MAX_ROWS, layout=layout, costs=SharingCosts(), shared_kernel="fa3"
    )
    staged = Staged(torch.zeros(layout.size, dtype=torch.int32))
    batch_slots = np.arange(len(lengths), dtype=np.int32)
    step = planner.plan(staged, batch_slots, np.array(lengths, np.int32), 4096, (), bucket or len(lengths))
    fields = planner.work[None].items
    columns = staged[fields.field].reshape(N_COLUMNS, fields.capacity)[:, : step.n_items]
    return step, [int(end - begin) for _, n, _, begin, end, _ in columns.T if n]


@pytest.mark.parametrize(
    ("lengths", "n_items"),
    [
        ([1024], 16),  # 5.9; as one item 15.5
        ([2048], 16),  # 7.6; 10.2 where parts were half as long
        ([32768], 16),  # 42.6; 51.7 in 128
        ([2048] * 4, 16),  # 14.5; as one item a row 37.6
        ([8192] * 40, 240),  # 307; 327 in 120, 337 as one item a row
        ([512] * 100 + [32768] + [512] * 155, 271),  # 171; 208 if the long row has 64 items
    ],
)
def test_rows_are_cut_into_as_many_parts_as_was_fastest(lengths: list[int], n_items: int) -> None:
    step, sizes = planned(lengths)
    assert step.variant == "split"
    assert len(sizes) == n_items
    longest = [size for size in sizes if size > max(sizes) // 2]
    assert max(longest) - min(longest) < 0.07 * max(longest), "parts of a long row are equally long"


@pytest.mark.parametrize(
    "lengths", [[64], [192], [320], [512] * 16, [512] * 32, [1024] * 64, [700] * 128, [320] * 256, [4096] * 256]
)
def test_rows_are_left_whole_where_that_was_fastest(lengths: list[int]) -> None:
    step, sizes = planned(lengths)
    assert step.variant == "whole"
    assert sizes == lengths


def test_ragged_rows_are_left_whole() -> None:
    lengths = np.random.default_rng(1).integers(64, 4000, 256).tolist()  # 479; 485 in 512 items
    assert planned(lengths)[0].variant == "whole"


def test_one_row_among_many_is_cut_once_it_would_hold_them_up() -> None:
    """256 rows of 320 take 82 us; a block that runs alone goes through 1,500 tokens in that time."""
    assert planned([320] * 255 + [1200])[0].variant == "whole"
    assert planned([320] * 255 + [3000])[0].variant == "split"
