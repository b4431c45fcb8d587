"""Attention over the same rows with K and V in contiguous memory and in pages, in the shape of Llama 3.1 8B.

Fewer KV heads than its 8 are those of other models with 32 heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from attention import Ints, attention_over, planned
from torch import Tensor

from radixkv.lab.studies.paging.schemes import HEAD_DIM, N_KV_HEADS, VALUE_BYTES
from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.step.plan import SharedRun

N_HEADS = 32
DTYPE = torch.bfloat16
KV_BYTES = 2 * N_KV_HEADS * HEAD_DIM * VALUE_BYTES
"""Bytes of K and V of a token in one layer."""
WORKSPACE_BYTES = 256 << 20
"""For FlashInfer's partial results, which take up to 70 MB with 32 heads of 128."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], object]
"""Enqueues attention of q [queries, heads, dim] over k and v [tokens, kv_heads, dim], into a tensor like q."""
Name = TypeVar("Name")


@dataclass(frozen=True)
class Rows:
    """Rows of equal length, whose last tokens are the queries."""

    n_rows: int
    n_tokens: int
    n_queries: int = 1
    """For each row; 1 for decode."""

    @property
    def name(self) -> str:
        if self.n_queries == 1:
            return f"decode {self.n_rows} x {self.n_tokens}"
        before = self.n_tokens - self.n_queries
        return f"prompt {self.n_rows} x {self.n_queries}" + (f" after {before}" if before else "")

    @property
    def n_stored(self) -> int:
        """Tokens of all rows."""
        return self.n_rows * self.n_tokens


class Layout(NamedTuple):
    """A kernel, and where it finds a row's tokens."""

    kernel: Literal["triton", "fa2", "fa3"]
    order: Literal["contiguous", "in order", "scattered"]
    """``contiguous``: one page for each row with ``triton``, and no pages with FlashInfer's kernels."""
    page_size: int | None
    """None for contiguous memory."""
    n_layers: int = 1
    """Layers whose K, or V, is one tensor: those of a token follow each other, and the next token's come behind."""

    def tables(self, rows: Rows) -> Ints:
        """Returns [rows, pages of a row]: block tables of all pages that the rows fill."""
        size = self.page_size or rows.n_tokens
        n_pages = rows.n_stored // size
        order = np.random.default_rng(0).permutation(n_pages) if self.order == "scattered" else np.arange(n_pages)
        return order.astype(np.int32).reshape(rows.n_rows, -1)

    def attend(self, rows: Rows, n_kv_heads: int, workspace: Tensor) -> Attend:
        """Plans the rows. ``workspace`` is for FlashInfer's kernels, one at a time."""
        tables = self.tables(rows)
        if self.kernel == "triton":
            page_size = self.page_size or rows.n_tokens
            if rows.n_queries > 1:
                return triton_prompts(rows, tables, page_size, n_kv_heads)
            return decode(tables, page_size, [rows.n_tokens] * rows.n_rows, n_kv_heads=n_kv_heads)[0]
        if self.page_size is None:
            return flashinfer_contiguous(self.kernel, rows, n_kv_heads, workspace)
        return flashinfer_pages(self.kernel, rows, tables, self.page_size, n_kv_heads, workspace)

    def sets(self, tokens: Tensor, rows: Rows) -> Sequence[Tensor]:
        """Views memory as several sets of the rows' tokens, [tokens, kv_heads, dim] each.

        Args:
            tokens: [tokens of all sets, kv_heads, dim]: ``n_layers`` sets, or any number if that is 1.
            rows: whose tokens a set has.
        """
        if self.n_layers > 1:
            return tokens.view(rows.n_stored, self.n_layers, *tokens.shape[1:]).unbind(1)
        return tokens.split(rows.n_stored)


def decode(
    tables: Ints,
    page_size: int,
    lengths: Sequence[int],
    runs: Sequence[SharedRun] = (),
    n_kv_heads: int = N_KV_HEADS,
) -> tuple[Attend, str]:
    """Plans decode rows for the engine's kernels. Returns the call, and the variant that the planner chose.

    Without FlashInfer, and without ``runs``, Triton's kernel computes all.

    Args:
        tables: [rows, width] block tables.
        page_size: tokens per page.
        lengths: [rows], tokens that each row attends to.
        runs: of shared pages, which may be read once for all their rows.
        n_kv_heads: KV heads of the ``N_HEADS`` heads.
    """
    padded = np.vstack([tables, np.zeros_like(tables[:1])])
    attention, staging = attention_over(
        shape_of(page_size, n_kv_heads),
        torch.from_numpy(padded).cuda(),
        kernel=None if runs and find_spec("flashinfer") else "triton",
    )
    step = planned(attention, staging, lengths, runs)
    layer = attention.step(step, None)

    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        layer.run(0, q, as_pages(k, page_size), as_pages(v, page_size), out)

    return attend, step.variant


def triton_prompts(rows: Rows, tables: Ints, page_size: int, n_kv_heads: int) -> Attend:
    """Plans prompt rows for the engine's Triton kernel, which always reads block tables."""
    padded = np.vstack([tables, np.zeros_like(tables[:1])])
    attention, _ = attention_over(shape_of(page_size, n_kv_heads), torch.from_numpy(padded).cuda(), kernel="triton")
    slots, n_queries = np.arange(rows.n_rows, dtype=np.int32), np.full(rows.n_rows, rows.n_queries, np.int32)
    layer = attention.step(None, attention.plan_prompts(slots, rows.n_tokens - n_queries, n_queries))
    torch.cuda.synchronize()  # the plan is there

    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        layer.run(0, q, as_pages(k, page_size), as_pages(v, page_size), out)

    return attend


def shape_of(page_size: int, n_kv_heads: int) -> AttentionShape:
    """Returns the shape of the engine's attention."""
    return AttentionShape(N_HEADS, n_kv_heads, HEAD_DIM, page_size, DTYPE, HEAD_DIM**-0.5, DTYPE)


def flashinfer_contiguous(kernel: str, rows: Rows, n_kv_heads: int, workspace: Tensor) -> Attend:
    """Plans rows that follow each other in memory, for FlashInfer's kernel without block tables."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernel)
    wrapper.plan(
        offsets(rows.n_rows, rows.n_queries),
        offsets(rows.n_rows, rows.n_tokens),
        N_HEADS,
        n_kv_heads,
        HEAD_DIM,
        causal=rows.n_queries > 1,
        q_data_type=DTYPE,
    )
    return lambda q, k, v, out: wrapper.run(q, k, v, out=out, enable_pdl=False)


def flashinfer_pages(
    kernel: str, rows: Rows, tables: Ints, page_size: int, n_kv_heads: int, workspace: Tensor
) -> Attend:
    """Plans rows over full pages, for FlashInfer's kernel with block tables."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
    wrapper.plan(
        offsets(rows.n_rows, rows.n_queries),
        offsets(rows.n_rows, tables.shape[1]),
        torch.from_numpy(tables.flatten()),
        torch.full((rows.n_rows,), page_size, dtype=torch.int32),
        N_HEADS,
        n_kv_heads,
        HEAD_DIM,
        page_size,
        causal=rows.n_queries > 1,
        q_data_type=DTYPE,
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        wrapper.run(q, (as_pages(k, page_size), as_pages(v, page_size)), out=out, enable_pdl=False)

    return attend


def relative_error(attend: Attend, q: Tensor, k: Tensor, v: Tensor, row_k: Tensor, row_v: Tensor) -> float:
    """Returns the error of the last query's first KV head: ‖out − expected‖ / ‖expected‖, NaN if not written.

    Args:
        attend: what is checked.
        q, k, v: its arguments.
        row_k, row_v: [tokens, kv_heads, dim]: the last row's.
    """
    out = torch.full_like(q, float("nan"))
    attend(q, k, v, out)
    group = N_HEADS // row_k.shape[1]
    scores = q[-1, :group].float() @ row_k[:, 0].float().T * HEAD_DIM**-0.5
    expected = scores.softmax(-1) @ row_v[:, 0].float()
    return float((out[-1, :group].float() - expected).norm() / expected.norm())


def slots_of(tables: Ints, page_size: int, n_tokens: int) -> Tensor:
    """Returns [rows, tokens] int64 on the GPU: where block tables of pages have the rows' first tokens."""
    token = np.arange(n_tokens)
    return torch.from_numpy(tables[:, token // page_size].astype(np.int64) * page_size + token % page_size).cuda()


def time_rounds(
    variants: Mapping[Name, Sequence[Callable[[], object]]], n_calls: int, n_rounds: int = 7
) -> dict[Name, list[float]]:
    """Returns the microseconds of a call in a CUDA graph of ``n_calls``, for each variant and round.

    A variant's calls do the same to different inputs, and take turns. All variants run in each round.
    """
    stream = torch.cuda.Stream()
    graphs: dict[Name, torch.cuda.CUDAGraph] = {}
    times: dict[Name, list[float]] = {name: [] for name in variants}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for name, calls in variants.items():
            calls[0]()
            stream.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for index in range(n_calls):
                    calls[index % len(calls)]()
            graphs[name].replay()
        for _ in range(n_rounds):
            next(iter(graphs.values())).replay()  # the GPU is busy while the others are launched
            events = []
            for name, graph in graphs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                events.append((name, begin, end))
            stream.synchronize()
            for name, begin, end in events:
                times[name].append(begin.elapsed_time(end) * 1e3 / n_calls)
    return times


def spread(name: str, values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Returns median, minimum and maximum as ``name``, ``name_min`` and ``name_max``."""
    found = {name: median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return {key: round(value, digits) for key, value in found.items()}


def compare(layouts: Sequence[Layout], rows: Rows, k: Tensor, v: Tensor, n_calls: int) -> list[dict[str, Any]]:
    """Times layouts of the same rows. A kernel's first layout is the one that its others are compared with.

    Layouts of kernels that are not installed are left out.

    Args:
        layouts: kernels and where they find the tokens.
        rows: what is computed.
        k, v: [tokens, kv_heads, dim], as many sets of the rows' tokens as calls alternate among.
        n_calls: calls in a graph.
    """
    layouts = [layout for layout in layouts if layout.kernel == "triton" or find_spec("flashinfer")]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    q = torch.randn(rows.n_rows * rows.n_queries, N_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)
    n_kv_heads = k.shape[1]
    errors: dict[Layout, float] = {}
    calls: dict[Layout, list[Callable[[], object]]] = {}
    for layout in layouts:
        attend = layout.attend(rows, n_kv_heads, workspace)
        sets = list(zip(layout.sets(k, rows), layout.sets(v, rows), strict=True))
        slots = slots_of(layout.tables(rows)[-1:], layout.page_size or rows.n_tokens, rows.n_tokens)[0]
        errors[layout] = relative_error(attend, q, *sets[-1], *(tokens[slots] for tokens in sets[-1]))
        calls[layout] = [partial(attend, q, *kv, out) for kv in sets]
    times = time_rounds(calls, n_calls)
    lines = []
    for layout in layouts:
        first = next(other for other in layouts if other.kernel == layout.kernel)
        ratios = [us / base for us, base in zip(times[layout], times[first], strict=True)]
        lines.append(
            {
                "case": rows.name,
                "kernel": layout.kernel,
                "layout": layout.order,
                "page_size": layout.page_size,
                "kv_heads": n_kv_heads,
                "layers_in_a_tensor": layout.n_layers,
                **spread("us", times[layout]),
                **spread("ratio", ratios, 4),
                "sets": len(calls[layout]),
                "relative_error": round(errors[layout], 5),
            }
        )
    return lines


def as_pages(tokens: Tensor, page_size: int) -> Tensor:
    """Views [tokens, kv_heads, dim] as [pages, page_size, kv_heads, dim]."""
    return tokens.view(-1, page_size, *tokens.shape[1:])


def random_tokens(*shape: int) -> Tensor:
    """Returns [*shape, kv_heads, dim], random, on the GPU."""
    return torch.randn(*shape, N_KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)


def offsets(n_rows: int, n_each: int) -> Tensor:
    """Returns [rows + 1] int32: where each row of ``n_each`` begins, and the end."""
    return torch.arange(n_rows + 1, dtype=torch.int32) * n_each
