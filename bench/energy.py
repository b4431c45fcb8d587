"""Energy of a decode step and of its parts, in joules by the GPU's own counter, for the shape of Llama 3.1 8B.

Each part runs for ``--seconds`` alone: the idle GPU, all matrix products, attention of all layers, norms and
activations of all layers, and the whole step in the engine. A part that draws the power of the whole step, at the
card's limit, limits the step by its energy. A part that draws less is limited by something else. Appends a JSON
line for each: milliseconds, joules and watts, per step.

    python bench/energy.py --output-file bench/results/energy.jsonl
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from attention import Case as AttentionCase
from attention import LayerBench
from profile_step import open_device, run_overlapping
from result_lines import add_gpu_flags, report, script_parser
from roof import GemmBench
from shapes import LLAMA_8B, write_model
from step_plans import MAX_STEPS, PAGE_SIZE, Case, Plans

from gpu import EnergyCounter, gpu_provenance
from radixkv.runtime.device.attention.cuda.base import AttentionShape
from radixkv.runtime.device.ops.base import RmsFields
from radixkv.runtime.device.ops.cuda.activation import silu_and_multiply
from radixkv.runtime.device.ops.cuda.norm import rms_norm

N_ROWS, LENGTH = 256, 320
PROMPT_TOKENS = 8192
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 4096, 14_336, 32, 8, 128
DTYPE = torch.bfloat16


def main() -> None:
    arguments = parse_arguments()
    counter = EnergyCounter.open()
    if counter is None:
        raise SystemExit("this machine has no GPU that counts its energy")
    about = gpu_provenance("cuda", arguments.commit)
    with torch.inference_mode():
        for part, n_steps, run in parts(arguments):
            line = {"part": part, **measured(counter, run, n_steps, arguments.seconds)}
            report(arguments.output_file, line, about)


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    add_gpu_flags(parser, has_device=False)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each part")
    parser.set_defaults(device="cuda", enforce_eager=False, max_num_seqs=None)
    return parser.parse_args()


def measured(counter: EnergyCounter, run: Callable[[], None], n_steps: int, seconds: float) -> dict[str, float]:
    """Repeats ``run``, which is ``n_steps`` steps and waits for the GPU. Returns times and energy per step."""
    end = time.perf_counter() + seconds / 4  # clocks settle
    while time.perf_counter() < end:
        run()
    n_runs, begun_j, begun = 0, counter.read_j(), time.perf_counter()
    while time.perf_counter() < begun + seconds:
        run()
        n_runs += 1
    duration_s, used_j = time.perf_counter() - begun, counter.read_j() - begun_j
    n_steps *= n_runs
    return {
        "steps": n_steps,
        "ms": round(1e3 * duration_s / n_steps, 3),
        "joules": round(used_j / n_steps, 3),
        "watts": round(used_j / duration_s, 1),
    }


def parts(arguments: argparse.Namespace) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Yields name, steps and body of each part; what it allocated is freed before the next."""
    yield "idle", 1, lambda: time.sleep(0.1)
    products = GemmBench(LLAMA_8B, "cuda")
    yield f"products, {N_ROWS} rows", 1, replayed(products.step(N_ROWS, has_head=True))
    yield f"products, {PROMPT_TOKENS} tokens", 1, replayed(products.step(PROMPT_TOKENS, has_head=False))
    del products
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, DTYPE, HEAD_DIM**-0.5, DTYPE)
    attention = LayerBench(shape, 2 * N_ROWS * LENGTH // PAGE_SIZE)
    case = AttentionCase(f"decode {N_ROWS}x{LENGTH}", [LENGTH] * N_ROWS)
    yield f"attention, {case.name}", 1, replayed(attention.decode_layer(case), LAYERS)
    del attention
    yield f"norms and activation, {N_ROWS} rows", 1, replayed(small_kernels(), LAYERS)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        executor = open_device(arguments, write_model(LLAMA_8B, Path(folder)))
    n_before = 0
    for step, n_steps in (
        (Case(f"decode {N_ROWS}x{LENGTH}", N_ROWS, LENGTH), MAX_STEPS),
        (Case("prompts 8x1024", n_prompts=8, n_new=PROMPT_TOKENS // 8), 8),
    ):

        def run(step: Case = step, n_steps: int = n_steps) -> None:
            nonlocal n_before
            run_overlapping(executor, Plans(step, executor.n_pages, n_before), n_steps)
            n_before += MAX_STEPS

        yield f"step, {step.name}", n_steps, run


def small_kernels() -> Callable[[], None]:
    """Returns what enqueues both norms of a layer and the activation of its MLP."""
    x, residual, out = (torch.randn(N_ROWS, HIDDEN, device="cuda", dtype=DTYPE) for _ in range(3))
    norm = RmsFields(torch.ones(HIDDEN, device="cuda", dtype=DTYPE), 1e-5)
    gate_up = torch.randn(N_ROWS, 2 * INNER, device="cuda", dtype=DTYPE)
    gated = torch.empty(N_ROWS, INNER, device="cuda", dtype=DTYPE)

    def layer() -> None:
        for _ in range(2):
            rms_norm(x, norm, out, residual)
        silu_and_multiply(gate_up, gated)

    return layer


def replayed(body: Callable[[], None], n_times: int = 1) -> Callable[[], None]:
    """Returns what runs ``body`` so many times in a CUDA graph, and waits for it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(n_times):
                body()

    def run() -> None:
        with torch.cuda.stream(stream):
            graph.replay()
        stream.synchronize()

    return run


if __name__ == "__main__":
    main()
