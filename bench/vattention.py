"""Paged, contiguous and virtual KV on a GPU: what block tables, mapping, and sharing by mapping cost.

One JSON line for each measurement, in the shape of Llama 3.1 8B: 32 heads and 8 KV heads of 128, bf16, one layer.

    tables      the same kernel over contiguous memory and over block tables, for decode and prompts of 512 to
                131,072 tokens; `ratio` is to the kernel's time over contiguous memory in the same round
    layers      the same for Triton's kernels and for K, or V, of all 32 layers in one tensor, in which a layer's
                next token is 32 times as far away
    page-sizes  Triton's decode kernel over contiguous memory and over pages of 1 to 256, with 2, 4 and 8 KV heads
    mapping     microseconds a granule to create, map, allow, unmap and release, alone and beside decode steps
    sharing     decode rows with a common prefix: granules mapped into each row's addresses, with a tensor for each
                layer and one for all, beside pages of 16; `ratio` is to `radix` without a plan for shared pages

Without FlashInfer the lines of its kernels are left out, and `radix, shared runs` is computed by Triton's kernel.

    python bench/vattention.py --output-file vattention.jsonl
    python bench/vattention.py --only mapping
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from granule_mapping import measure_mapping
from kv_layouts import KV_BYTES, Layout, Rows, compare, random_tokens
from prefix_mapping import NEEDED_BYTES, SHARED, measure_sharing
from result_lines import add_gpu_flags, append, script_parser
from virtual_memory import VirtualMemory, load_driver

from gpu import gpu_provenance
from radixkv.errors import DeviceError
from radixkv.lab.studies.paging.schemes import HEAD_DIM, N_KV_HEADS, N_LAYERS

Line = dict[str, Any]
DECODES = (Rows(1, 131_072), Rows(8, 16_384), Rows(32, 8192), Rows(64, 2048), Rows(256, 512))
PROMPTS = (
    Rows(1, 512, 512),
    Rows(1, 2048, 2048),
    Rows(8, 2048, 2048),
    Rows(1, 8192, 8192),
    Rows(1, 32_768, 32_768),
    Rows(1, 131_072, 2048),
)
DECODE_LAYOUTS = (
    Layout("triton", "contiguous", None),
    Layout("triton", "in order", 16),
    Layout("triton", "scattered", 16),
    Layout("fa2", "contiguous", None),
    Layout("fa2", "in order", 16),
    Layout("fa2", "scattered", 16),
)
PROMPT_LAYOUTS = (
    Layout("fa3", "contiguous", None),
    Layout("fa3", "scattered", 1),
    Layout("fa3", "scattered", 16),
    Layout("fa3", "scattered", 64),
    Layout("fa2", "contiguous", None),
    Layout("fa2", "scattered", 1),
    Layout("fa2", "scattered", 16),
    Layout("fa2", "scattered", 64),
)
LAYERED = (
    Rows(8, 16_384),
    Rows(32, 8192),
    Rows(64, 2048),
    Rows(256, 512),
    Rows(8, 2048, 2048),
    Rows(1, 8192, 8192),
    Rows(1, 32_768, 32_768),
    Rows(1, 32_768, 2048),
)
"""A row of one page has fewer than 2**31 values of K of all layers, which the kernels take as offsets."""
LAYERED_LAYOUTS = (
    Layout("triton", "contiguous", None),
    Layout("triton", "contiguous", None, N_LAYERS),
    Layout("triton", "scattered", 1),
    Layout("triton", "scattered", 16),
    Layout("triton", "scattered", 64),
    Layout("triton", "scattered", 16, N_LAYERS),
)
N_PROMPT_CALLS = 4
SIZED = (Rows(32, 8192), Rows(256, 512))
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KV_HEADS = (8, 4, 2)
CACHE_BYTES = 200 * 10**6
"""Calls alternate among inputs of at least this size together, so that they do not find them in the GPU's cache."""
MAX_SETS = 64
MIN_DECODE_CALLS = 8
MAX_ERROR = 0.02
"""Largest relative error of results in bf16."""


def main() -> None:
    parts: dict[str, Callable[[], Iterator[Line]]] = {
        "tables": tables,
        "layers": layers,
        "page-sizes": page_sizes,
        "mapping": mapping,
        "sharing": sharing,
    }
    parser = script_parser(__doc__)
    add_gpu_flags(parser, has_device=False)
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=list(parts), metavar="PART", help=", ".join(parts)
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("vattention.py needs an NVIDIA GPU, and torch finds none")
    torch.zeros(1, device="cuda")  # makes the GPU's context, which virtual memory needs
    about = {"benchmark": "vattention", **gpu_provenance("cuda", arguments.commit)}
    wrong: list[Line] = []
    for part in arguments.only:
        columns: list[str] = []
        for line in parts[part]():
            append(arguments.output_file, {"part": part, **line, **about})
            columns = print_row(line, columns)
            if not line.get("relative_error", 0.0) <= MAX_ERROR:
                wrong.append(line)
        torch.cuda.empty_cache()
    if wrong:
        raise SystemExit(f"{len(wrong)} results are wrong by more than {MAX_ERROR}; the first: {wrong[0]}")


def tables() -> Iterator[Line]:
    """Yields the times of kernels over contiguous memory and over block tables."""
    cases = [(rows, n_sets(rows)) for rows in (*DECODES, *PROMPTS)]
    n_tokens = max(rows.n_stored * n for rows, n in cases)
    k, v = random_tokens(n_tokens), random_tokens(n_tokens)
    for rows, n in cases:
        is_decode = rows.n_queries == 1
        layouts, n_calls = (DECODE_LAYOUTS, max(n, MIN_DECODE_CALLS)) if is_decode else (PROMPT_LAYOUTS, n)
        yield from compare(layouts, rows, k[: n * rows.n_stored], v[: n * rows.n_stored], n_calls)


def layers() -> Iterator[Line]:
    """Yields the times of kernels over a tensor for each layer and over one for all."""
    n_tokens = N_LAYERS * max(rows.n_stored for rows in LAYERED)
    k, v = random_tokens(n_tokens), random_tokens(n_tokens)
    for rows in LAYERED:
        n = N_LAYERS * rows.n_stored
        n_calls = N_LAYERS if rows.n_queries == 1 else N_PROMPT_CALLS
        yield from compare(LAYERED_LAYOUTS, rows, k[:n], v[:n], n_calls)


def page_sizes() -> Iterator[Line]:
    """Yields the times of the decode kernel over pages of several sizes."""
    layouts = [
        Layout("triton", "contiguous", None),
        *(Layout("triton", "scattered", page_size) for page_size in PAGE_SIZES),
    ]
    cases = [(rows, n, n_sets(rows) * N_KV_HEADS // n) for rows, n in product(SIZED, KV_HEADS)]
    n_values = HEAD_DIM * max(rows.n_stored * n_heads * n for rows, n_heads, n in cases)
    k, v = (random_tokens(n_values // (N_KV_HEADS * HEAD_DIM)).flatten() for _ in range(2))
    for rows, n_heads, n in cases:
        used_k, used_v = (
            values[: rows.n_stored * n * n_heads * HEAD_DIM].view(-1, n_heads, HEAD_DIM) for values in (k, v)
        )
        yield from compare(layouts, rows, used_k, used_v, max(n, MIN_DECODE_CALLS))


def n_sets(rows: Rows) -> int:
    """Returns how many sets of the rows' K and V calls alternate among."""
    return max(2, min(-(-CACHE_BYTES // (rows.n_stored * KV_BYTES)), MAX_SETS))


def mapping() -> Iterator[Line]:
    """Yields the times of mapping."""
    with virtual_memory() as memory:
        yield from measure_mapping(memory)


def sharing() -> Iterator[Line]:
    """Yields memory and times of rows with a common prefix."""
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < NEEDED_BYTES:
        raise SystemExit(
            f"sharing needs {NEEDED_BYTES >> 30} GiB of free GPU memory, and there are {free_bytes >> 30}; leave "
            "it out: --only tables layers page-sizes mapping"
        )
    for rows in SHARED:
        with virtual_memory() as memory:
            yield from measure_sharing(rows, memory)


def virtual_memory() -> VirtualMemory:
    """Opens the GPU's virtual memory. Raises ``SystemExit`` if it has none."""
    try:
        return VirtualMemory(torch.cuda.current_device(), load_driver())
    except DeviceError as error:
        raise SystemExit(str(error)) from None


def print_row(line: Line, columns: list[str]) -> list[str]:
    """Prints a line as a row of a table, without minima and maxima, and the columns' names if they are others."""
    row = {key: str(value) for key, value in line.items() if not key.endswith(("_min", "_max"))}
    widths = [max(len(key), 28 if key in ("case", "scheme") else 10) for key in row]
    if list(row) != columns:
        print("\n" + "  ".join(key.ljust(width) for key, width in zip(row, widths, strict=True)))
    print("  ".join(value.ljust(width) for value, width in zip(row.values(), widths, strict=True)), flush=True)
    return list(row)


if __name__ == "__main__":
    main()
