"""Attention over KV in pinned host memory, beside copying it to the GPU first, in the shape of Llama 3.1 8B.

A prefix is in the engine's host slots. A request with some tokens behind it computes attention to it in all layers,
for these tokens at once, then for one token a step. Three ways:

    copied   the engine's copier brings the pages to the GPU, and all attention reads them there
    direct   the engine's kernels read the host slots, through their addresses on the GPU
    beside   the first attention reads the host slots while the copier copies them; the steps read the copies

One JSON line for each of

- `lengths`: a prefix and a number of tokens behind it: milliseconds of the copy, and of attention to either memory;
- `totals`: the same with a number of steps: milliseconds of each way, and from how many steps on copying is faster,
  beside what was predicted from rates. `whole` are measured from beginning to end, others are sums of `lengths`;
- `memories`: a step over memory that the engine has registered, and over memory that CUDA has allocated.

Attention to the request's own tokens, which are on the GPU in each way, is left out. So is the rest of the model,
which reads more than the GPU's cache holds: steps alternate among prefixes of 200 MB together.

    python bench/unified_addressing.py --output-file unified_addressing.jsonl
    python bench/unified_addressing.py --lengths 256 --tokens 1        # tries the code
"""

from __future__ import annotations

import ctypes
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from result_lines import add_gpu_flags, report, script_parser
from torch import Tensor

from gpu import gpu_provenance
from radixkv.runtime.device.memory.page_shape import PageLayout, PageShape

Line = dict[str, Any]
Layers = Sequence[tuple[Tensor, Tensor]]
"""K and V of each layer, [pages, page_size, kv_heads, head_dim] each."""

PAGE = PageShape(n_layers=32, n_kv_heads=8, page_size=16, head_dim=128, dtype=torch.bfloat16)
N_HEADS = 32
TOKEN_BYTES = 2 * PAGE.n_layers * PAGE.n_kv_heads * PAGE.head_dim * 2
"""Bytes of a token in all layers: 131,072."""
LENGTHS = (256, 1024, 4096, 16_384, 65_536)
N_TOKENS = (1, 64, 1024)
N_STEPS = (1, 2, 4, 16, 64)
MEASURED_STEPS = (1, 2, 4)
"""Numbers of steps that are also measured from beginning to end, after a first token alone."""
TILE_TOKENS = 32
"""Tokens whose attention a thread block of the prompt kernel computes: 128 pairs of a token and one of 4 heads."""
CACHE_BYTES = 200 * 10**6
"""Calls alternate among inputs of at least this size together, so that they do not find them in the GPU's cache."""
MEMORIES_LENGTH = 4096
N_ROUNDS = 7
MAX_SECONDS = 3.0
"""Rounds end after this time, but not before the second one."""
_CAN_USE_HOST_POINTER = 91
"""``CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM``."""

COPY_BYTES_PER_S = 50.8e9
"""Predicted rate of copies: what `page_copies.jsonl` has for jobs of 512 pages."""
COPY_START_MS = 0.15
"""Predicted time that a copy of any size takes: 2 MiB went at 9 GB/s."""
DIRECT_BYTES_PER_S = 45e9
"""Predicted rate of a kernel that reads host memory: nine tenths of a copy's. PCIe 5 x16 has 63, with headers."""
DEVICE_BYTES_PER_S = 3.7e12
"""Predicted rate of attention on the GPU: what `vattention.jsonl` has for a row of 131,072 tokens in pages."""
FLOPS = 3e14
"""Predicted rate of the prompt kernel's products."""
TILE_NS = 17.0
"""Predicted time of a tile of the prompt kernel for a token of the prefix: what the decode kernel's blocks take."""
LAUNCHES_MS = 0.32
"""Predicted time of attention in all layers if there is almost nothing to read: 10 µs a layer."""


@dataclass(frozen=True)
class Parts:
    """Milliseconds of what the three ways consist of, for one prefix and one number of tokens behind it."""

    copy: float
    """The copy alone."""
    device_first: float
    """Attention of the tokens behind the prefix, over the copy."""
    direct_first: float
    """The same over host memory."""
    beside_first: float
    """The same, and the copy that begins with it, until both have ended."""
    device_step: float
    """Attention of one token more, over the copy."""
    direct_step: float
    """The same over host memory."""

    def copied(self, n_steps: int) -> float:
        """Milliseconds with the copy first."""
        return self.copy + self.device_first + n_steps * self.device_step

    def direct(self, n_steps: int) -> float:
        """Milliseconds without a copy."""
        return self.direct_first + n_steps * self.direct_step

    def beside(self, n_steps: int) -> float:
        """Milliseconds with the copy beside the first attention."""
        return self.beside_first + n_steps * self.device_step

    @property
    def break_even_steps(self) -> float | None:
        """Number of steps up to which ``direct`` is not slower than ``copied``; negative if it is from the first
        token on, None if it never is."""
        lost = self.direct_step - self.device_step
        return (self.copied(0) - self.direct(0)) / lost if lost > 0 else None


def predicted(n_prefix: int, n_tokens: int) -> Parts:
    """Returns what known rates say. Each tile of tokens reads all of the prefix, and nothing is cached."""
    n_bytes, n_reads = n_prefix * TOKEN_BYTES, -(-n_tokens // TILE_TOKENS)
    copy = COPY_START_MS + 1e3 * n_bytes / COPY_BYTES_PER_S
    device_read, direct_read = (1e3 * n_bytes / rate for rate in (DEVICE_BYTES_PER_S, DIRECT_BYTES_PER_S))
    computing = LAUNCHES_MS
    if n_tokens > 1:
        n_products = 4 * n_tokens * n_prefix * N_HEADS * PAGE.head_dim * PAGE.n_layers
        computing = max(LAUNCHES_MS, 1e3 * n_products / FLOPS, 1e-6 * n_prefix * TILE_NS * PAGE.n_layers)
    direct_first = max(computing, n_reads * direct_read)
    return Parts(
        copy=copy,
        device_first=max(computing, n_reads * device_read),
        direct_first=direct_first,
        beside_first=max(computing, copy + n_reads * direct_read),  # both take turns at one link
        device_step=max(LAUNCHES_MS, device_read),
        direct_step=max(LAUNCHES_MS, direct_read),
    )


def main() -> None:
    parser = script_parser(__doc__)
    add_gpu_flags(parser, has_device=False)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of prefixes, multiples of 32"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", choices=N_TOKENS, default=N_TOKENS, help="numbers of tokens behind them"
    )
    arguments = parser.parse_args()
    if any(length <= 0 or length % TILE_TOKENS for length in arguments.lengths):
        parser.error(f"--lengths must be positive multiples of {TILE_TOKENS}")
    if not torch.cuda.is_available():
        raise SystemExit("unified_addressing.py needs an NVIDIA GPU, and torch finds none")
    require_host_pointers()
    about = {"benchmark": "unified_addressing", **gpu_provenance("cuda", arguments.commit)}
    most_bytes = max(length * n_sets(length) for length in arguments.lengths) * TOKEN_BYTES
    with closing(Memories(most_bytes)) as memories:
        report(arguments.output_file, {"part": "start", **memories.line}, about)
        for length in arguments.lengths:
            for line in measure(memories, length, arguments.tokens):
                report(arguments.output_file, line, about)
        if MEMORIES_LENGTH in arguments.lengths:
            report(arguments.output_file, compare_memories(memories), about)


def require_host_pointers() -> None:
    """Raises ``SystemExit`` if registered host memory has other addresses on the GPU."""
    torch.zeros(1, device="cuda")  # initialises the driver
    found = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(
        ctypes.byref(found), _CAN_USE_HOST_POINTER, torch.cuda.current_device()
    )
    if code or not found.value:
        raise SystemExit("this GPU does not read registered host memory through the host's addresses")


def n_sets(n_prefix: int) -> int:
    """Returns how many prefixes of a length calls alternate among."""
    return -(-CACHE_BYTES // (n_prefix * TOKEN_BYTES))


class Memories:
    """A pool on the GPU and the engine's host slots with as many pages, all with the same random content.

    Page and slot with the same content have other numbers: both are in random order.

    Args:
        n_bytes: of all pages.
    """

    def __init__(self, n_bytes: int) -> None:
        # Here, so that --help and wrong uses need no Triton.
        from radixkv.runtime.device.memory.copy_threads import CopyThreads
        from radixkv.runtime.device.memory.cuda.copy_pace import CopyPace
        from radixkv.runtime.device.memory.cuda.driver import CudaDriver
        from radixkv.runtime.device.memory.cuda.host_slots import CudaHostSlots
        from radixkv.runtime.device.memory.cuda.kv_pool import CudaPool

        layout = PageLayout.uniform(PAGE)
        n_pages = n_bytes // layout.n_bytes
        device = torch.device("cuda", torch.cuda.current_device())
        self.pool = CudaPool(layout, n_pages, device)
        begun = time.perf_counter()
        slots = CudaHostSlots(self.pool, n_pages * layout.n_bytes, CudaDriver(), CopyPace(lambda: False))
        self.copier = CopyThreads(slots, begin_thread=lambda: torch.cuda.set_device(device))
        while slots.n_usable < n_pages:
            if not slots.is_growing:
                raise SystemExit(
                    f"{n_bytes >> 20} MiB of host memory cannot be pinned; see ulimit -l and --lengths"
                )
            time.sleep(0.01)
        pinned_s = time.perf_counter() - begun
        random = np.random.default_rng(0)
        self.pages, self.slots = (random.permutation(n_pages).astype(np.int32) for _ in range(2))
        """[pages]: pages of the pool and slots, of which those at one index have the same content."""
        for layer in self.pool.layers:
            for values in layer:
                values[:n_pages].normal_()
        torch.cuda.synchronize()
        self.wait_for(self.copier.store(self.pages.tolist(), self.slots.tolist()))
        self.host_layers = layers_of_slots(host_tensor(slots.memory.address, n_pages * layout.n_bytes))
        self.line = {"pages": n_pages, "page_bytes": layout.n_bytes, "pinned_s": round(pinned_s, 2)}

    def load_ms(self, first: int, last: int) -> float:
        """Copies the slots of some indices to their pages; returns the milliseconds."""
        begun = time.perf_counter()
        self.wait_for(self.begin_load(first, last))
        return 1e3 * (time.perf_counter() - begun)

    def begin_load(self, first: int, last: int) -> int:
        """Starts to copy the slots of some indices to their pages; returns a ticket."""
        return self.copier.load(self.slots[first:last].tolist(), self.pages[first:last].tolist())

    def wait_for(self, ticket: int) -> None:
        """Waits for a copy. Raises ``SystemExit`` if it has failed."""
        select.select([self.copier], [], [])
        (finished,) = self.copier.take_finished()
        if finished.error is not None:
            raise SystemExit(f"a copy failed: {finished.error}")
        assert finished.ticket == ticket

    def close(self) -> None:
        """Frees the host memory."""
        torch.cuda.synchronize()
        self.copier.close()


def host_tensor(address: int, n_bytes: int) -> Tensor:
    """Returns memory as a tensor that does not keep it."""
    return torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype=PAGE.dtype)


def layers_of_slots(memory: Tensor) -> Layers:
    """Views host slots, each with K of all layers before V, as the pages of each layer."""
    slots = memory.view(-1, 2, PAGE.n_layers, PAGE.page_size, PAGE.n_kv_heads, PAGE.head_dim)
    return [(slots[:, 0, layer], slots[:, 1, layer]) for layer in range(PAGE.n_layers)]


class Reads:
    """Attention in all layers to each of several prefixes, in a CUDA graph.

    Tokens behind the prefix are planned in rows of a tile, each of which reads the prefix and nothing behind it.

    Args:
        layers: where K and V are.
        tables: [prefixes, width] the pages of each prefix, all full.
        n_tokens: tokens that read the prefix.
        q: [tokens, heads, dim].
    """

    def __init__(
        self, layers: Layers, tables: np.ndarray[Any, np.dtype[np.int32]], n_tokens: int, q: Tensor
    ) -> None:
        from attention import attention_over, planned
        from kv_layouts import shape_of

        self.n_prefixes, n_prefix = len(tables), tables.shape[1] * PAGE.page_size
        self.out = torch.empty(self.n_prefixes, *q.shape, device="cuda", dtype=q.dtype)
        self._plans = []  # keeps what the graph reads
        attends: list[Callable[[], None]] = []
        for table, out in zip(tables, self.out, strict=True):
            padded = torch.from_numpy(np.stack([table, table])).cuda()
            attention, staging = attention_over(shape_of(PAGE.page_size, PAGE.n_kv_heads), padded, kernel="triton")
            if n_tokens == 1:
                step = attention.step(planned(attention, staging, [n_prefix]), None)
            else:
                n_rows = n_tokens // TILE_TOKENS
                slots, tile = np.zeros(n_rows, np.int32), np.full(n_rows, TILE_TOKENS, np.int32)
                step = attention.step(None, attention.plan_prompts(slots, n_prefix - tile, tile))
            self._plans.append((attention, staging, step, padded))

            def attend(step: Any = step, out: Tensor = out) -> None:
                for k, v in layers:
                    step.run(0, q, k, v, out)

            attends.append(attend)
        torch.cuda.synchronize()  # the plans are there
        stream = torch.cuda.Stream()
        self.graphs = []
        with torch.cuda.stream(stream):
            attends[0]()  # compiles
            stream.synchronize()
            for attend in attends:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    attend()
                self.graphs.append(graph)
        torch.cuda.synchronize()

    def ms(self) -> float:
        """Returns the milliseconds of one prefix, the median of rounds over all of them."""
        self.run_all()
        torch.cuda.synchronize()
        return median(rounds(self._round_ms))

    def run_all(self) -> None:
        """Enqueues attention to all prefixes."""
        for graph in self.graphs:
            graph.replay()

    def _round_ms(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.run_all()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / self.n_prefixes


def rounds(measured: Callable[[], float]) -> list[float]:
    """Returns what up to ``N_ROUNDS`` calls return."""
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < N_ROUNDS and (len(found) < 2 or time.perf_counter() - begun < MAX_SECONDS):
        found.append(measured())
    return found


def measure(memories: Memories, n_prefix: int, tokens: Sequence[int]) -> Iterator[Line]:
    """Yields the lines of a length."""
    n_pages, n = n_prefix // PAGE.page_size, n_sets(n_prefix)
    places = {"device": (memories.pool.layers, memories.pages), "direct": (memories.host_layers, memories.slots)}
    steps: dict[str, Reads] = {}
    parts: dict[int, Parts] = {}
    index = Turns(n)
    copies = rounds(lambda: memories.load_ms(*index.span(n_pages)))
    for n_tokens in sorted({1, *tokens}):  # a step is what one token does
        q = torch.randn(n_tokens, N_HEADS, PAGE.head_dim, device="cuda", dtype=PAGE.dtype)
        reads = {
            name: Reads(layers, order[: n * n_pages].reshape(n, n_pages), n_tokens, q)
            for name, (layers, order) in places.items()
        }
        first = {name: one.ms() for name, one in reads.items()}
        require_equal(*reads.values())
        if n_tokens == 1:
            steps, step = reads, first
        beside = rounds(lambda one=reads["direct"]: beside_ms(memories, one, index, n_pages))
        parts[n_tokens] = Parts(
            copy=median(copies),
            device_first=first["device"],
            direct_first=first["direct"],
            beside_first=median(beside),
            device_step=step["device"],
            direct_step=step["direct"],
        )
    for n_tokens in tokens:
        one = parts[n_tokens]
        yield lengths_line(n_prefix, n_tokens, n, one)
        for n_steps in N_STEPS:
            line = totals_line(n_prefix, n_tokens, n_steps, one)
            if n_tokens == 1 and n_steps in MEASURED_STEPS:
                whole = {
                    way: median(
                        rounds(lambda way=way, k=n_steps: whole_ms(memories, steps, way, k, index, n_pages))
                    )
                    for way in ("copied", "direct", "beside")
                }
                line |= {f"whole_{way}_ms": round(ms, 3) for way, ms in whole.items()}
            yield line


class Turns:
    """Prefixes that take turns, so that none is in the GPU's cache.

    Args:
        n: number of prefixes.
    """

    def __init__(self, n: int) -> None:
        self._n, self._next = n, 0

    def take(self) -> int:
        """Returns the next one."""
        self._next = (self._next + 1) % self._n
        return self._next

    def span(self, n_pages: int) -> tuple[int, int]:
        """Returns the first and last page of the next one."""
        first = self.take() * n_pages
        return first, first + n_pages


def beside_ms(memories: Memories, direct: Reads, index: Turns, n_pages: int) -> float:
    """Returns the milliseconds until a copy has ended, and attention over host memory that begins with it."""
    turn = index.take()
    begun = time.perf_counter()
    ticket = memories.begin_load(turn * n_pages, (turn + 1) * n_pages)
    direct.graphs[turn].replay()
    memories.wait_for(ticket)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


def whole_ms(
    memories: Memories, reads: dict[str, Reads], way: str, n_steps: int, index: Turns, n_pages: int
) -> float:
    """Returns the milliseconds of a token and ``n_steps`` more, from the beginning to the end."""
    turn = index.take()
    device, direct = (reads[name].graphs[turn] for name in ("device", "direct"))
    begun = time.perf_counter()
    ticket = None if way == "direct" else memories.begin_load(turn * n_pages, (turn + 1) * n_pages)
    if way == "beside":
        direct.replay()
    if ticket is not None:
        memories.wait_for(ticket)
    for _ in range(n_steps if way == "beside" else n_steps + 1):
        (direct if way == "direct" else device).replay()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


def require_equal(one: Reads, other: Reads) -> None:
    """Raises ``SystemExit`` unless both memories have given the same values, and not zeros."""
    if not torch.equal(one.out, other.out) or not bool(one.out.abs().sum(-1).min() > 0):
        raise SystemExit("attention over host memory differs from that over the same values elsewhere")


def lengths_line(n_prefix: int, n_tokens: int, n: int, parts: Parts) -> Line:
    """Returns the line of what was measured for a length."""
    n_bytes = n_prefix * TOKEN_BYTES
    rates = {
        f"{name}_gb_per_s": round(n_bytes / ms / 1e6, 1)
        for name, ms in (
            ("copy", parts.copy),
            ("direct_first", parts.direct_first),
            ("direct_step", parts.direct_step),
            ("device_step", parts.device_step),
        )
    }
    times = {f"{name}_ms": round(ms, 3) for name, ms in asdict(parts).items()}
    return {"part": "lengths", "prefix": n_prefix, "tokens": n_tokens, **times, **rates, "sets": n}


def totals_line(n_prefix: int, n_tokens: int, n_steps: int, parts: Parts) -> Line:
    """Returns the line of a number of steps, with what was predicted."""
    line: Line = {"part": "totals", "prefix": n_prefix, "tokens": n_tokens, "steps": n_steps}
    for prefix, one in (("", parts), ("predicted_", predicted(n_prefix, n_tokens))):
        steps = one.break_even_steps
        line |= {
            f"{prefix}copied_ms": round(one.copied(n_steps), 3),
            f"{prefix}direct_ms": round(one.direct(n_steps), 3),
            f"{prefix}beside_ms": round(one.beside(n_steps), 3),
            f"{prefix}break_even_steps": None if steps is None else round(steps, 2),
        }
    return line


def compare_memories(memories: Memories) -> Line:
    """Returns the line of a step over registered memory, and over memory that CUDA has allocated."""
    n_pages, n = MEMORIES_LENGTH // PAGE.page_size, n_sets(MEMORIES_LENGTH)
    used = memories.slots[: n * n_pages]
    allocated = torch.empty(len(used) * PAGE.page_size * TOKEN_BYTES // 2, dtype=PAGE.dtype, pin_memory=True)
    layers = layers_of_slots(allocated)
    for copies, sources in zip(layers, memories.host_layers, strict=True):
        for copy, source in zip(copies, sources, strict=True):
            copy.copy_(source[used.tolist()])
    q = torch.randn(1, N_HEADS, PAGE.head_dim, device="cuda", dtype=PAGE.dtype)
    registered = Reads(memories.host_layers, used.reshape(n, n_pages), 1, q)
    other = Reads(layers, np.arange(len(used), dtype=np.int32).reshape(n, n_pages), 1, q)
    times = {"registered_ms": round(registered.ms(), 3), "allocated_ms": round(other.ms(), 3)}
    require_equal(registered, other)
    return {"part": "memories", "prefix": MEMORIES_LENGTH, "tokens": 1, **times, "sets": n}


if __name__ == "__main__":
    main()
