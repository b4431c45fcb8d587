"""Compares the choices of the decode planner's cost model with what was fastest on an H200. Needs no GPU.

The times below are microseconds per layer, measured in CUDA graphs with 32 heads and 8 KV heads of 128 in bf16,
with K and V read from memory. For each case the script prints what the planner chooses and which measured way was
fastest, and at the end the share of cases whose choice is within ``--tolerance`` of the fastest.

    python bench/attention_choices.py
    python bench/attention_choices.py --tolerance 0
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from radixkv.runtime.device.attention.cuda.base import AttentionShape, DecodeRows, Geometry
from radixkv.runtime.device.attention.cuda.decode_plan import DecodePlanner
from radixkv.runtime.device.attention.cuda.run_selection import SharedKernel, SharedRunSelector, SharingCosts
from radixkv.runtime.device.attention.cuda.work_items import N_COLUMNS
from radixkv.runtime.device.memory.cuda.staging import StagingBuffer, StagingLayout
from radixkv.runtime.step.plan import SharedRun

PAGE = 16
MAX_ROWS = 512
SHAPE = AttentionShape(
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    page_size=PAGE,
    dtype=torch.bfloat16,
    scale=128**-0.5,
    kv_dtype=torch.bfloat16,
)
H200 = Geometry(SHAPE, large_tile=128, n_processors=132, shared_bytes=228 << 10)
KERNELS: tuple[SharedKernel, ...] = ("fa2", "fa3")


class SharedCase(NamedTuple):
    """Rows in groups of equal size; the rows of a group share their first tokens."""

    n_rows: int
    n_shared_tokens: int
    n_groups: int
    flat_us: float
    """Every row reads all its pages."""
    small_us: float
    """The decode kernel's small tiles read the shared pages."""
    fa2_us: float
    """Large tiles read the shared pages, by FlashInfer's FA2 kernel."""
    fa3_us: float
    """The same by its FA3 kernel."""


SHARED = [
    # each row has 128 tokens of its own
    SharedCase(512, 1536, 4, 462.6, 207.5, 148.8, 123.2),
    SharedCase(512, 1536, 1, 465.7, 208.0, 150.1, 123.2),
    SharedCase(512, 1536, 16, 462.2, 209.3, 149.9, 129.8),
    SharedCase(512, 3072, 4, 859.0, 320.6, 183.4, 143.0),
    SharedCase(512, 3072, 1, 855.1, 318.9, 183.8, 143.8),
    SharedCase(512, 3072, 16, 850.3, 320.0, 184.5, 153.9),
    SharedCase(512, 8064, 4, 2132.0, 683.4, 300.7, 213.0),
    SharedCase(512, 8064, 1, 2134.5, 687.6, 299.9, 211.2),
    SharedCase(512, 8064, 16, 2135.4, 687.5, 306.0, 234.4),
    SharedCase(256, 1536, 4, 232.5, 112.4, 90.5, 73.4),
    SharedCase(256, 1536, 1, 233.7, 113.0, 89.6, 72.4),
    SharedCase(256, 1536, 16, 233.8, 113.8, 105.6, 87.3),
    SharedCase(256, 1536, 64, 245.3, 142.9, 272.2, 248.6),
    SharedCase(256, 3072, 4, 426.5, 167.0, 108.7, 84.3),
    SharedCase(256, 3072, 1, 427.8, 167.3, 109.2, 82.6),
    SharedCase(256, 3072, 16, 431.8, 170.6, 140.5, 111.6),
    SharedCase(256, 3072, 64, 452.5, 228.9, 489.7, 450.4),
    SharedCase(256, 8064, 4, 1065.1, 349.7, 167.5, 119.3),
    SharedCase(256, 8064, 1, 1068.9, 351.5, 167.4, 116.7),
    SharedCase(256, 8064, 16, 1083.5, 356.9, 260.3, 190.9),
    SharedCase(256, 8064, 64, 1147.2, 508.2, 1218.0, 1113.8),
    SharedCase(64, 1536, 4, 72.3, 38.0, 46.6, 35.6),
    SharedCase(64, 1536, 1, 71.3, 37.1, 35.4, 32.6),
    SharedCase(64, 1536, 16, 74.7, 46.3, 87.8, 76.6),
    SharedCase(64, 3072, 4, 133.4, 53.3, 56.8, 42.8),
    SharedCase(64, 3072, 1, 132.5, 53.3, 49.1, 35.7),
    SharedCase(64, 3072, 16, 138.3, 68.0, 152.0, 135.5),
    SharedCase(64, 8064, 4, 332.1, 99.4, 84.9, 62.9),
    SharedCase(64, 8064, 1, 326.1, 98.1, 64.1, 45.5),
    SharedCase(64, 8064, 16, 347.2, 137.2, 340.5, 310.0),
    # each row has 256 tokens of its own
    SharedCase(32, 256, 1, 19.9, 23.1, 29.2, 27.1),
    # each row has 588 tokens of its own
    SharedCase(128, 512, 1, 108.1, 106.9, 104.8, 100.6),
]

RAGGED = [int(n) for n in np.random.default_rng(1).integers(64, 4000, 256)]

SPLIT: list[tuple[str, list[int], int, dict[int, float]]] = [
    # rows without shared pages: description, lengths, the fastest number of work items, measured times by items
    ("1 x 64", [64], 1, {}),
    ("1 x 192", [192], 1, {}),
    ("1 x 320", [320], 1, {}),
    ("1 x 1,024", [1024], 16, {1: 15.5, 16: 5.9}),
    ("1 x 2,048", [2048], 16, {16: 7.6, 32: 10.2}),
    ("1 x 32,768", [32768], 16, {16: 42.6, 128: 51.7}),
    ("4 x 2,048", [2048] * 4, 16, {4: 37.6, 16: 14.5}),
    ("16 x 512", [512] * 16, 16, {}),
    ("32 x 512", [512] * 32, 32, {}),
    ("40 x 8,192", [8192] * 40, 240, {40: 337, 120: 327, 240: 307}),
    ("64 x 1,024", [1024] * 64, 64, {}),
    ("128 x 700", [700] * 128, 128, {}),
    ("256 x 320", [320] * 256, 256, {}),
    ("256 x 4,096", [4096] * 256, 256, {}),
    ("1 x 32,768 among 255 x 512", [512] * 100 + [32768] + [512] * 155, 271, {271: 171, 319: 208}),
    ("256 rows of 64 to 4,000", RAGGED, 256, {256: 479, 512: 485}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tolerance", type=float, default=0.05, metavar="SHARE", help="slower than the fastest by at most this"
    )
    tolerance = parser.parse_args().tolerance
    outcomes = [*compare_sharing(tolerance), *compare_splitting()]
    print(f"{sum(outcomes)} of {len(outcomes)} choices are right ({100 * sum(outcomes) / len(outcomes):.0f}%)")


def compare_sharing(tolerance: float) -> Iterator[bool]:
    """Prints how shared pages are read. Yields for each case whether that is as fast as the fastest way."""
    for kernel in KERNELS:
        for case in SHARED:
            large_us = case.fa3_us if kernel == "fa3" else case.fa2_us
            times_us = {"flat": case.flat_us, "small": case.small_us, "large": large_us}
            fastest = min(times_us, key=lambda way: times_us[way])
            choice = choose_reading(case, kernel)
            is_right = choice in times_us and times_us[choice] <= (1 + tolerance) * times_us[fastest]
            where = f"{kernel}: {case.n_rows} rows x {case.n_shared_tokens} shared tokens in {case.n_groups} groups"
            report(where, show(choice, times_us), show(fastest, times_us), is_right)
            yield is_right


def compare_splitting() -> Iterator[bool]:
    """Prints into how many work items rows are split. Yields for each case whether that was the fastest number."""
    for description, lengths, fastest, times_us in SPLIT:
        choice = n_work_items(lengths)
        times = {f"{n} items": time_us for n, time_us in times_us.items()}
        report(
            description, show(f"{choice} items", times), show(f"{fastest} items", times), is_right=choice == fastest
        )
        yield choice == fastest


def report(case: str, choice: str, fastest: str, is_right: bool) -> None:
    print(f"{'ok   ' if is_right else 'WRONG'}  {case:<50} chosen {choice:<20} fastest {fastest}")


def show(name: str, times_us: dict[str, float]) -> str:
    return f"{name} ({times_us[name]:g} us)" if name in times_us else name


def choose_reading(case: SharedCase, kernel: SharedKernel) -> str:
    """Returns how the cost model reads the groups' shared pages: ``flat``, ``small``, ``large`` or ``mixed``."""
    selector = SharedRunSelector(SharingCosts.for_kernel(kernel), H200)
    size = case.n_rows // case.n_groups
    groups = [tuple(range(first, first + size)) for first in range(0, case.n_rows, size)]
    runs = [SharedRun(rows, 0, case.n_shared_tokens // PAGE) for rows in groups]
    # the planner's own limits on tiles
    sharing = selector.select(runs, None, case.n_rows, max(case.n_rows // 4, 1), max(2 * case.n_rows * 4 // 128, 1))
    if sharing is None:
        return "flat"
    sizes = {run.is_large for run in sharing.runs}
    if len(sharing.runs) < case.n_groups or len(sizes) > 1:
        return "mixed"
    return "large" if sizes == {True} else "small"


def n_work_items(lengths: list[int]) -> int:
    """Returns how many work items the planner makes of rows without shared pages."""
    layout = StagingLayout()
    planner = DecodePlanner(
        H200, [None], max_rows=MAX_ROWS, layout=layout, costs=SharingCosts(), shared_kernel="fa3"
    )
    staged = StagingBuffer(torch.zeros(layout.size, dtype=torch.int32))
    batch_slots = np.arange(len(lengths), dtype=np.int32)
    step = planner.plan(staged, DecodeRows(batch_slots, np.array(lengths, np.int32)), 4096, len(lengths))
    fields = planner.fields[None].items
    n_queries = staged[fields.field].reshape(N_COLUMNS, fields.capacity)[1, : step.n_items]
    return int((n_queries > 0).sum())


if __name__ == "__main__":
    main()
