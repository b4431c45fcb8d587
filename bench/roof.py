"""Times of a model's matrix products alone on this GPU: the lower bound that whole steps are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from shapes import Config, layer_matrices
from torch import Tensor

MAX_DISTINCT_LAYERS = 4
"""Layers whose weights are allocated, which exceed any cache; other layers repeat them."""


PAUSE_S = 0.03
"""Pause between runs with few rows: in a step, other kernels that draw less power run between the products."""


class GemmBench:
    """The weight matrices of a model, with random values.

    Args:
        config: contents of ``config.json``.
        device: ``cuda``, or ``cpu`` to try the code.
    """

    def __init__(self, config: Config, device: str) -> None:
        self._device = torch.device(device)
        self._n_layers: int = config["num_hidden_layers"]
        shapes = layer_matrices(config)
        n_distinct = min(MAX_DISTINCT_LAYERS, self._n_layers)
        self._layers = [[self._random(shape, shape[1]) for shape in shapes] for _ in range(n_distinct)]
        self._head = self._random((config["vocab_size"], config["hidden_size"]), config["hidden_size"])

    def gemm_ms(self, n_rows: int, *, has_head: bool, n_runs: int, pause_s: float = 0.0) -> float:
        """Returns the milliseconds of all layers' products for ``n_rows`` rows, the median of CUDA graph replays.

        Args:
            n_rows: rows of the input.
            has_head: whether the LM head is included.
            n_runs: replays.
            pause_s: pause before each replay. Without pauses the GPU soon reaches its power limit and slows down.
        """
        step = self.step(n_rows, has_head=has_head)
        step()
        if self._device.type == "cpu":
            return median(_cpu_ms(step) for _ in range(n_runs))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
        return median(_replay_ms(graph, pause_s) for _ in range(n_runs))

    def step(self, n_rows: int, *, has_head: bool) -> Callable[[], None]:
        """Returns what enqueues all layers' products for ``n_rows`` rows, with those of the LM head if asked."""
        matrices = [self._layers[i % len(self._layers)] for i in range(self._n_layers)]
        products = [matrix for layer in matrices for matrix in layer] + ([self._head] if has_head else [])
        # One input and output for each size: real activations do not stay in the cache either.
        inputs = {matrix.shape[1]: self._random((n_rows, matrix.shape[1]), 1) for matrix in products}
        outputs = {shape: self._random((n_rows, shape), 1) for shape in {matrix.shape[0] for matrix in products}}

        def step() -> None:
            for matrix in products:
                torch.mm(inputs[matrix.shape[1]], matrix.t(), out=outputs[matrix.shape[0]])

        return step

    def _random(self, shape: tuple[int, ...] | torch.Size, n_inputs: int) -> Tensor:
        tensor = torch.empty(*shape, dtype=torch.bfloat16, device=self._device)
        return tensor.normal_(0.0, n_inputs**-0.5)


def _replay_ms(graph: torch.cuda.CUDAGraph, pause_s: float) -> float:
    time.sleep(pause_s)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _cpu_ms(step: Callable[[], None]) -> float:
    begun = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begun)


def measure(config: Config, device: str) -> dict[str, float]:
    """Returns the milliseconds of a model's products, and frees all memory.

    ``gemm_1_ms`` and ``gemm_256_ms`` are for 1 and 256 rows, with the head and with pauses.
    ``gemm_256_sustained_ms`` is without pauses, and ``gemm_8192_ms`` without pauses and head.
    """
    gemm_bench = GemmBench(config, device)
    few, many, n_runs = (256, 8192, 21) if device == "cuda" else (4, 16, 3)
    with torch.inference_mode():
        times = {
            # The longest first: an idle GPU takes a while to raise its clocks and to warm up.
            "gemm_8192_ms": gemm_bench.gemm_ms(many, has_head=False, n_runs=min(n_runs, 9)),
            "gemm_256_sustained_ms": gemm_bench.gemm_ms(few, has_head=True, n_runs=3 * n_runs),
            "gemm_256_ms": gemm_bench.gemm_ms(few, has_head=True, n_runs=n_runs, pause_s=PAUSE_S),
            "gemm_1_ms": gemm_bench.gemm_ms(1, has_head=True, n_runs=n_runs, pause_s=PAUSE_S),
        }
    del gemm_bench
    if device == "cuda":
        torch.cuda.empty_cache()
    return {name: round(time_ms, 4) for name, time_ms in reversed(times.items())}
