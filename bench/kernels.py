"""Times of the GPU kernels, compared with plain torch operations and with memory bandwidth.

Appends one JSON line per kernel and size. Each time is the median replay of a CUDA graph of many calls, divided by
their number. Calls alternate among enough buffers that none stays in the 60 MB cache of an H200. Bytes count each
byte that must move once.

    gemm     all matrix products of the model's layers and the head by cuBLAS; `linear`: the same by our `linear`
    experts  a whole mixture of experts; `route`, `gated` and `down`: its parts; `torch`: the products by
             torch._grouped_mm over rows in the order of experts, and a separate activation
    others   one kernel each; `torch`: the same by plain torch operations
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from result_lines import add_gpu_flags, report, script_parser
from torch import Tensor

from gpu import gpu_provenance
from radixkv.runtime.device.ops.base import RmsFields, TokenInputs
from radixkv.runtime.device.ops.cuda.activation import silu_and_multiply
from radixkv.runtime.device.ops.cuda.argmax import argmax, argmax_scratch
from radixkv.runtime.device.ops.cuda.expert_routing import Routing, route
from radixkv.runtime.device.ops.cuda.grouped_linear import grouped_linear, grouped_tiles
from radixkv.runtime.device.ops.cuda.layers import Linear, RMSNorm
from radixkv.runtime.device.ops.cuda.linear import add_linear_and_norm, gated_linear, linear
from radixkv.runtime.device.ops.cuda.norm import rms_norm
from radixkv.runtime.device.ops.cuda.operations import Experts
from radixkv.runtime.device.ops.cuda.programmatic_launch import has_much_shared_memory
from radixkv.runtime.device.ops.cuda.rotary import RotateAndStore
from radixkv.runtime.device.weights.layer_weights import LinearWeights

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, VOCAB = 4096, 32, 8, 128, 14336, 32, 128_256
"""An 8B model's shape."""
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SHAPES = {
    "qkv": torch.Size((WIDTH, HIDDEN)),
    "o": torch.Size((HIDDEN, HEADS * HEAD_DIM)),
    "gate_up": torch.Size((2 * INNER, HIDDEN)),
    "down": torch.Size((HIDDEN, INNER)),
    "head": torch.Size((VOCAB, HIDDEN)),
}
MIXTURES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "mixtral-8x7b": (4096, 14_336, 8, 2)}
"""Hidden size, inner size, experts and active experts of mixtures."""
N_ROUTINGS = 8
"""Inputs to alternate among, so that few rows do not find their experts' weights in the cache."""
CACHE_BYTES = 200 * 10**6
"""Alternating buffers take at least this much memory together."""
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
Call = Callable[[], object]
Product = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Case:
    """One kernel at one size."""

    kernel: str
    rows: int
    n_bytes: int
    """Bytes that a call must move."""
    calls: Sequence[Call]
    """The same call on different buffers."""
    n_flops: int = 0


def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    add_gpu_flags(parser, has_device=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 8192])
    parser.add_argument("--gemm-rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 512, 8192])
    parser.add_argument("--expert-rows", type=int, nargs="*", default=[1, 16, 64, 256, 2048, 8192])
    parser.add_argument("--only-experts", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    about = gpu_provenance("cuda", arguments.commit)
    with torch.inference_mode():
        if not arguments.only_experts:
            for line in measure(arguments.rows, arguments.gemm_rows, arguments.rounds):
                report(arguments.output_file, line, about)
        for model in MIXTURES:
            mixture = make_mixture(model)
            for n_rows in arguments.expert_rows:
                for case in experts(mixture, n_rows):
                    line = {"model": model, **line_of(case, time_us(case.calls, arguments.rounds))}
                    report(arguments.output_file, line, about)


def measure(rows: Sequence[int], gemm_rows: Sequence[int], n_rounds: int) -> Iterator[dict[str, object]]:
    """Yields the result lines."""
    for n_rows in rows:
        for cases in (norms, rotations, activations, argmaxes):
            for case in cases(n_rows):
                yield line_of(case, time_us(case.calls, n_rounds))
    weights = {name: [normal(*shape) for _ in range(copies(2 * shape.numel()))] for name, shape in SHAPES.items()}
    for n_rows in gemm_rows:
        for name, multiply in (("gemm", cublas), ("linear", linear)):
            if name == "linear" and n_rows > 16:
                continue  # ``linear`` calls cuBLAS
            yield from products(name, n_rows, weights, multiply, n_rounds)
        for case in fused_products(n_rows, weights):
            yield line_of(case, time_us(case.calls, n_rounds))


def products(
    name: str, n_rows: int, weights: dict[str, list[Tensor]], multiply: Product, n_rounds: int
) -> Iterator[dict[str, object]]:
    """Times each matrix, then sums over the model."""
    total_us = 0.0
    for part, matrices in weights.items():
        n_out, n_in = SHAPES[part]
        n_in_use = min(n_rows, 1024) if part == "head" else n_rows
        x, out = normal(n_in_use, n_in), torch.empty(n_in_use, n_out, dtype=DTYPE, device=DEVICE)
        calls = [partial(multiply, x, matrix, out) for matrix in matrices]
        case = Case(
            f"{name}_{part}",
            n_in_use,
            2 * (n_out * n_in + n_in_use * (n_out + n_in)),
            calls,
            2 * n_in_use * n_out * n_in,
        )
        us = time_us(calls, n_rounds)
        yield line_of(case, us)
        total_us += us if part == "head" else LAYERS * us
    yield {"kernel": f"{name}_all", "rows": n_rows, "ms": round(total_us / 1e3, 3)}


def fused_products(n_rows: int, weights: dict[str, list[Tensor]]) -> list[Case]:
    """Returns products with what follows them, as one call and as two or three kernels."""
    x, inner, norm = normal(n_rows, HIDDEN), normal(n_rows, INNER), RmsFields(normal(HIDDEN), 1e-5)
    product, residual, gate_up = normal(n_rows, HIDDEN), normal(n_rows, HIDDEN), normal(n_rows, 2 * INNER)

    def separate_add(weight: Tensor) -> None:
        cublas(inner, weight, product)
        rms_norm(product, norm, x, residual)

    def separate_gate(weight: Tensor) -> None:
        cublas(x, weight, gate_up)
        silu_and_multiply(gate_up, inner)

    def case(name: str, part: str, call: Callable[[Tensor], None]) -> Case:
        size = SHAPES[part].numel()
        return Case(name, n_rows, 2 * size, [partial(call, weight) for weight in weights[part]], 2 * n_rows * size)

    return [
        case("gated_linear", "gate_up", lambda weight: gated_linear(x, weight, inner)),
        case("gated_linear_cublas", "gate_up", separate_gate),
        case(
            "add_linear_and_norm",
            "down",
            lambda weight: add_linear_and_norm(inner, weight, residual, norm, x),
        ),
        case("add_linear_and_norm_cublas", "down", separate_add),
    ]


def make_mixture(model: str) -> Experts:
    """Returns a mixture of experts with random weights."""
    hidden, inner, n_experts, n_active = MIXTURES[model]
    gate_up = normal(n_experts, 2 * inner, hidden).mul_(hidden**-0.5)
    down = normal(n_experts, hidden, inner).mul_(inner**-0.5)
    router = Linear(normal(n_experts, hidden).mul_(hidden**-0.5), None)
    return Experts(router, LinearWeights(gate_up), LinearWeights(down), "silu", n_active, True)


def experts(mixture: Experts, n_rows: int) -> Iterator[Case]:
    """Yields a mixture of experts and its parts. Bytes are those of the weights of the chosen experts."""
    gate_up, down, router, n_active = mixture.gate_up.weight, mixture.down.weight, mixture.router, mixture.n_active
    n_experts, hidden, inner = down.shape
    norm = RMSNorm(normal(hidden), 1e-6, False)
    xs = [normal(n_rows, hidden) for _ in range(N_ROUTINGS)]
    n_pairs = n_rows * n_active
    tiles = grouped_tiles(n_pairs, n_experts, 2, has_room=has_much_shared_memory(gate_up))
    logits = [router(x) for x in xs]
    routings = [route(each, n_active, tiles.first.rows, normalizes=True) for each in logits]
    counts = [each.float().topk(n_active).indices.flatten().bincount(minlength=n_experts) for each in logits]
    ends = [count.cumsum(0).int() for count in counts]
    share = sum(int((count > 0).sum()) for count in counts) / (N_ROUTINGS * n_experts)
    residual = normal(n_rows, hidden)
    activated, gathered = normal(n_pairs, inner), normal(n_pairs, hidden)
    gated, products = torch.empty_like(activated), torch.empty_like(gathered)

    def multiply_gated(x: Tensor, routing: Routing) -> None:
        grouped_linear(x, mixture.gate_up, routing, tiles.first, gated, "silu")

    def multiply_gated_torch(ends: Tensor) -> None:
        silu_and_multiply(torch._grouped_mm(gathered, gate_up.transpose(1, 2), offs=ends), gated)

    def case(name: str, matrices: Sequence[Tensor], calls: Sequence[Call]) -> Case:
        n_bytes = sum(2 * int(share * each.numel()) for each in matrices)
        n_flops = sum(2 * n_pairs * each[0].numel() for each in matrices)
        return Case(name, n_rows, n_bytes, calls, n_flops)

    yield case("experts", (gate_up, down), [partial(mixture.add_and_norm, x, residual, norm) for x in xs])
    yield case(
        "experts_route", (), [partial(route, each, n_active, tiles.first.rows, normalizes=True) for each in logits]
    )
    pairs = zip(xs, routings, strict=True)
    yield case("experts_gated", (gate_up,), [partial(multiply_gated, *each) for each in pairs])
    yield case("experts_gated_torch", (gate_up,), [partial(multiply_gated_torch, each) for each in ends])
    yield case(
        "experts_down",
        (down,),
        [partial(grouped_linear, activated, mixture.down, each, tiles.second, products) for each in routings],
    )
    yield case(
        "experts_down_torch",
        (down,),
        [partial(torch._grouped_mm, activated, down.transpose(1, 2), offs=each) for each in ends],
    )


def line_of(case: Case, us: float) -> dict[str, object]:
    line: dict[str, object] = {"kernel": case.kernel, "rows": case.rows, "us": round(us, 2)}
    line["tb_per_s"] = round(case.n_bytes / us / 1e6, 2)
    if case.n_flops:
        line["tflop_per_s"] = round(case.n_flops / us / 1e6, 1)
    return line


def time_us(calls: Sequence[Call], n_rounds: int) -> float:
    """Returns the median time of a call in a graph of at least 20 calls, with each buffer equally often."""
    n_calls = len(calls) * -(-20 // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(n_calls):
                calls[index % len(calls)]()
        graph.replay()
        times = []
        for _ in range(n_rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / n_calls)
    return median(times)


def copies(n_bytes: int) -> int:
    """Returns how many buffers of ``n_bytes`` to alternate among."""
    return max(2, min(-(-CACHE_BYTES // n_bytes), 64))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def cublas(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x, weight.t(), out=out)


def norms(n_rows: int) -> list[Case]:
    n_bytes = 2 * n_rows * HIDDEN
    weight = normal(HIDDEN)
    norm = RmsFields(weight, 1e-5)
    sets = [[normal(n_rows, HIDDEN) for _ in range(3)] for _ in range(copies(3 * n_bytes))]

    def plain(x: Tensor, residual: Tensor, out: Tensor) -> None:
        residual += x
        out.copy_(torch.nn.functional.rms_norm(residual, (HIDDEN,), weight, 1e-5))

    return [
        Case("rms_norm", n_rows, 2 * n_bytes, [lambda s=s: rms_norm(s[0], norm, s[2]) for s in sets]),
        Case(
            "add_rms_norm",
            n_rows,
            4 * n_bytes,
            [lambda s=s: rms_norm(s[0], norm, s[2], s[1]) for s in sets],
        ),
        Case("add_rms_norm_torch", n_rows, 4 * n_bytes, [lambda s=s: plain(*s) for s in sets]),
    ]


def rotations(n_rows: int) -> list[Case]:
    n_bytes = 4 * n_rows * WIDTH
    weight = normal(HEAD_DIM)
    table = torch.randn(8192, HEAD_DIM, device=DEVICE)
    sets = []
    for _ in range(copies(n_bytes)):
        caches = [normal(n_rows // 16 + 1, 16, KV_HEADS, HEAD_DIM) for _ in range(2)]
        positions = torch.randint(8192, (n_rows,), dtype=torch.int32, device=DEVICE)
        slot_mapping = torch.randperm(16 * (n_rows // 16 + 1), device=DEVICE)[:n_rows].int()
        inputs = TokenInputs(positions, positions, slot_mapping)
        sets.append((normal(n_rows, WIDTH), inputs, *caches, normal(n_rows, HEADS, HEAD_DIM)))

    def case(name: str, norm: Tensor | None) -> Case:
        calls = [partial(RotateAndStore(table, norm, norm, 1e-5), *each) for each in sets]
        return Case(name, n_rows, n_bytes, calls)

    return [case("rotate_and_store", None), case("rotate_and_store_norms", weight)]


def activations(n_rows: int) -> list[Case]:
    n_bytes = 6 * n_rows * INNER
    sets = [(normal(n_rows, 2 * INNER), normal(n_rows, INNER)) for _ in range(copies(n_bytes))]

    def plain(gate_up: Tensor, out: Tensor) -> None:
        torch.mul(torch.nn.functional.silu(gate_up[:, :INNER]), gate_up[:, INNER:], out=out)

    return [
        Case("silu_and_multiply", n_rows, n_bytes, [lambda s=s: silu_and_multiply(*s) for s in sets]),
        Case("silu_and_multiply_torch", n_rows, n_bytes, [lambda s=s: plain(*s) for s in sets]),
    ]


def argmaxes(n_rows: int) -> list[Case]:
    if n_rows > 1024:
        return []
    n_bytes = 2 * n_rows * VOCAB
    sets = [normal(n_rows, VOCAB) for _ in range(copies(n_bytes))]
    ids, finite = (torch.empty(n_rows, dtype=torch.int32, device=DEVICE) for _ in range(2))
    scratch = argmax_scratch(n_rows, VOCAB, DEVICE)
    return [
        Case("argmax", n_rows, n_bytes, [lambda s=s: argmax(s, ids, finite, scratch) for s in sets]),
        Case("argmax_torch", n_rows, n_bytes, [lambda s=s: (s.argmax(-1), s.isfinite().all(-1)) for s in sets]),
    ]


if __name__ == "__main__":
    main()
