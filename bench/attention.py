"""Times of one layer's attention on the GPU: decode rows in CUDA graphs, prompts, and planning.

Usage: python bench/attention.py [--only NAME ...] [--heads 32] [--kv-heads 8] [--page-size 16]
       python bench/attention.py --only prefill extend --prompt-kernels triton fa2 fa3    # the prompt kernels

Prints one JSON line per case: milliseconds of each variant or kernel, and the variant that the planner chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from result_lines import add_gpu_flags, report, script_parser
from torch import Tensor

from gpu import gpu_provenance
from radixkv.runtime.device.attention.cuda.base import AttentionShape, DecodeRows
from radixkv.runtime.device.attention.cuda.decode_plan import DecodeStep
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.paged import PagedAttention, PrefillKernel
from radixkv.runtime.device.attention.cuda.run_selection import SharedKernel, SharingCosts
from radixkv.runtime.device.kv_dtype import choose_kv_dtype
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingLayout
from radixkv.runtime.step.plan import SharedRun

Ints = NDArray[np.int32]
PREFILL_KERNELS: Sequence[PrefillKernel] = get_args(PrefillKernel)
_REPEATS = 8
"""Layers in one graph."""


@dataclass
class Case:
    """Rows to compute attention for."""

    name: str
    lengths: Sequence[int]
    """Positions that each row attends to."""
    shared: Sequence[tuple[Sequence[int], int, int]] = ()
    """Shared runs: (rows, first token, number of tokens)."""
    n_tokens: int = 1
    """Tokens per row; 1 for decode."""
    variants: Sequence[Variant] = ("whole", "split", "shared")
    """Variants of decode to time."""


def groups(n_rows: int, n_groups: int) -> list[range]:
    """Returns ``n_groups`` groups of consecutive rows."""
    size = n_rows // n_groups
    return [range(i * size, (i + 1) * size) for i in range(n_groups)]


def agents() -> Case:
    """Returns tree search: a common prompt, then tokens that groups of four share, then each row's own."""
    random = np.random.default_rng(0)
    shared: list[tuple[Sequence[int], int, int]] = [(range(256), 0, 3072)]
    lengths: list[int] = []
    for group in groups(256, 64):
        more = int(random.integers(16, 53)) * 16
        shared.append((group, 3072, more))
        lengths += (3072 + more + random.integers(200, 301, 4)).tolist()
    return Case("agents", lengths, shared)


def decode_cases() -> list[Case]:
    """Returns decode rows of the performance goals, and batches with one long row."""
    unshared: Sequence[Variant] = ("whole", "split")
    return [
        Case("decode 1x192", [192], variants=unshared),
        Case("decode 1x2048", [2048], variants=unshared),
        Case("decode 16x512", [512] * 16, variants=unshared),
        Case("decode 32x512, 256 shared", [512] * 32, [(range(32), 0, 256)]),
        Case("decode 40x8192", [8192] * 40, variants=unshared),
        Case("decode 64x1024", [1024] * 64, variants=unshared),
        Case("decode 256x320", [320] * 256, variants=unshared),
        Case("decode 128x700", [700] * 128, variants=unshared),
        Case("decode 512x320", [320] * 512, variants=unshared),
        Case("decode 256x1024", [1024] * 256, variants=unshared),
        Case("decode 512x1024", [1024] * 512, variants=unshared),
        Case("decode 256x1664, 1536 in 4", [1664] * 256, [(g, 0, 1536) for g in groups(256, 4)]),
        Case("decode 512x1664, 1536 in 4", [1664] * 512, [(g, 0, 1536) for g in groups(512, 4)]),
        Case("decode 256x4096, 3072 shared", [4096] * 256, [(range(256), 0, 3072)]),
        Case("decode 64x8192, 8064 in 4", [8192] * 64, [(g, 0, 8064) for g in groups(64, 4)]),
        Case("decode 256x1024, 512 in 64", [1024] * 256, [(g, 0, 512) for g in groups(256, 64)]),
        Case("decode 256x1024, 512 in 16", [1024] * 256, [(g, 0, 512) for g in groups(256, 16)]),
        Case("decode 128x1100, 512 shared", [1100] * 128, [(range(128), 0, 512)]),
        Case("decode 1x32768 among 255x512", [512] * 100 + [32768] + [512] * 155, variants=unshared),
        Case(
            "decode ragged 256, 64..4000",
            np.random.default_rng(1).integers(64, 4000, 256).tolist(),
            variants=unshared,
        ),
        agents(),
    ]


def prompt_cases() -> list[Case]:
    """Returns whole prompts, and prompts after a cached prefix."""
    return [
        Case("prefill 8x2048", [2048] * 8, n_tokens=2048),
        Case("prefill 16x512", [512] * 16, n_tokens=512),
        Case("extend 64x96 over 1536", [1632] * 64, n_tokens=96),
        Case("extend 8x64 over 2048", [2112] * 8, n_tokens=64),
        Case("extend 1x32 over 16384", [16416], n_tokens=32),
        Case("extend 1x512 over 32768", [33280], n_tokens=512),
    ]


def attention_over(
    shape: AttentionShape,
    tables: Tensor,
    *,
    kernel: PrefillKernel | None = None,
    costs: SharingCosts | None = None,
    shared_kernel: SharedKernel | None = None,
) -> tuple[PagedAttention, Staging]:
    """Builds attention of one layer over block tables, [rows + 1, width] int32; the last row is for padding."""
    layout, device = StagingLayout(), torch.device("cuda")
    attention = PagedAttention(
        shape,
        [None],
        max_rows=len(tables) - 1,
        layout=layout,
        device=device,
        costs=costs,
        prefill_kernel=kernel,
        shared_kernel=shared_kernel,
    )
    staging = Staging(layout, device)
    attention.connect(staging, tables)
    torch.cuda.synchronize()
    return attention, staging


def planned(
    attention: PagedAttention, staging: Staging, lengths: Sequence[int], runs: Sequence[SharedRun] = ()
) -> DecodeStep:
    """Plans decode rows of these lengths in the variant that the planner chooses, and sends the plan."""
    staged, n_rows = staging.stage(), len(lengths)
    slots = np.arange(n_rows, dtype=np.int32)
    step = attention.plan_decode(staged, DecodeRows(slots, np.array(lengths, dtype=np.int32), runs), n_rows)
    staging.send(staged)
    return step


class LayerBench:
    """One layer with random K and V."""

    def __init__(self, shape: AttentionShape, n_pages: int) -> None:
        self.shape = shape
        pool = (n_pages + 1, shape.page_size, shape.n_kv_heads, shape.head_dim)
        self.k = torch.randn(pool, device="cuda", dtype=shape.dtype).to(shape.kv_dtype)
        self.v = torch.randn(pool, device="cuda", dtype=shape.dtype).to(shape.kv_dtype)
        self.n_pages = n_pages
        self.stream = torch.cuda.Stream()

    def attention(
        self,
        case: Case,
        kernel: PrefillKernel | None = None,
        costs: SharingCosts | None = None,
        shared_kernel: SharedKernel | None = None,
    ) -> tuple[PagedAttention, Staging, list[SharedRun]]:
        """Builds attention with block tables for the case, over scattered pages."""
        size, n_rows = self.shape.page_size, len(case.lengths)
        free = np.random.default_rng(0).permutation(self.n_pages).astype(np.int32)
        width = -(-max(case.lengths) // size)
        tables = np.full((n_rows + 1, width), self.n_pages, np.int32)
        used = 0
        for row, length in enumerate(case.lengths):
            count = -(-length // size)
            tables[row, :count] = free[used : used + count]
            used += count
        runs = []
        for rows, first, n_tokens in case.shared:
            begin, end = first // size, (first + n_tokens) // size
            tables[list(rows), begin:end] = tables[rows[0], begin:end]
            runs.append(SharedRun(tuple(rows), begin, end - begin))
        attention, staging = attention_over(
            self.shape, torch.from_numpy(tables).cuda(), kernel=kernel, costs=costs, shared_kernel=shared_kernel
        )
        return attention, staging, runs

    def time(self, body: Callable[[], None]) -> float:
        """Returns the milliseconds of one ``body`` in a graph of several, the median of five replays."""
        body()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(_REPEATS):
                body()
        return median_ms(graph.replay) / _REPEATS

    def decode_layer(self, case: Case) -> Callable[[], None]:
        """Returns what enqueues a decode case in the variant that the planner chooses."""
        attention, staging, runs = self.attention(case)
        step = planned(attention, staging, case.lengths, runs)
        q = torch.randn(step.n_rows, self.shape.n_heads, self.shape.head_dim, device="cuda").to(self.shape.dtype)
        return partial(attention.step(step, None).run, 0, q, self.k, self.v, torch.empty_like(q))

    def decode(self, case: Case) -> dict[str, object]:
        """Times each variant of a decode case, and planning."""
        attention, staging, runs = self.attention(case)
        n_rows = len(case.lengths)
        batch_slots, lengths = np.arange(n_rows, dtype=np.int32), np.array(case.lengths, dtype=np.int32)
        q = torch.randn(n_rows, self.shape.n_heads, self.shape.head_dim, device="cuda").to(self.shape.dtype)
        out = torch.empty_like(q)
        staged = staging.stage()
        chosen = attention.plan_decode(staged, DecodeRows(batch_slots, lengths, runs), n_rows).variant
        begun = time.perf_counter()
        for _ in range(20):
            attention.plan_decode(staged, DecodeRows(batch_slots, lengths, runs), n_rows)
        plan_ms = (time.perf_counter() - begun) * 1000 / 20
        times: dict[str, float] = {}
        for variant in case.variants:
            if variant == "shared":
                attention, staging, runs = self.attention(case, costs=SharingCosts(launches_ns=0))
            staged = staging.stage()
            forced = None if variant == "shared" else variant
            step = attention.plan_decode(staged, DecodeRows(batch_slots, lengths, runs), n_rows, forced)
            staging.send(staged)
            times[step.variant] = self.time(partial(attention.step(step, None).run, 0, q, self.k, self.v, out))
        return {
            "chosen": chosen,
            "plan_ms": round(plan_ms, 3),
            **{variant: round(ms, 4) for variant, ms in times.items()},
        }

    def prompts(self, case: Case, kernels: Sequence[PrefillKernel]) -> dict[str, object]:
        """Times kernels on a prompt case, and planning."""
        times: dict[str, object] = {}
        n_rows = len(case.lengths)
        batch_slots, n_tokens = np.arange(n_rows, dtype=np.int32), np.full(n_rows, case.n_tokens, np.int32)
        starts = np.array(case.lengths, dtype=np.int32) - n_tokens
        q = torch.randn(int(n_tokens.sum()), self.shape.n_heads, self.shape.head_dim, device="cuda")
        q = q.to(self.shape.dtype)
        out = torch.empty_like(q)
        for kernel in kernels:
            attention, _, _ = self.attention(case, kernel)
            begun = time.perf_counter()
            step = attention.plan_prompts(batch_slots, starts, n_tokens)
            times[f"plan_{kernel}_ms"] = round((time.perf_counter() - begun) * 1000, 3)
            ms = self.time(partial(attention.step(None, step).run, 0, q, self.k, self.v, out))
            times[kernel] = round(ms, 4)
        return times


def median_ms(run: Callable[[], None]) -> float:
    """Returns the milliseconds of ``run``, the median of five."""
    times: list[float] = []
    run()
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def main() -> None:
    """Prints one JSON line per case."""
    parser = script_parser(__doc__)
    add_gpu_flags(parser, has_device=False)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--prompt-kernels", nargs="*", choices=PREFILL_KERNELS, default=PREFILL_KERNELS)
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8", "fp8_e4m3"], default="auto")
    arguments = parser.parse_args()
    about = gpu_provenance("cuda", arguments.commit)
    kv_dtype = choose_kv_dtype(arguments.kv_cache_dtype, torch.bfloat16)
    sizes = (arguments.heads, arguments.kv_heads, 128, arguments.page_size)
    shape = AttentionShape(*sizes, torch.bfloat16, 128**-0.5, kv_dtype)
    bench = LayerBench(shape, 1_100_000 // arguments.page_size)
    with torch.cuda.stream(bench.stream):
        for case in decode_cases() + prompt_cases():
            if arguments.only and not any(name in case.name for name in arguments.only):
                continue
            times = bench.decode(case) if case.n_tokens == 1 else bench.prompts(case, arguments.prompt_kernels)
            report(
                arguments.output_file,
                {"case": case.name, "kv_cache_dtype": arguments.kv_cache_dtype, **times, **about},
                {},
            )


if __name__ == "__main__":
    main()
