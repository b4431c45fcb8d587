"""What other engines took for the token workloads.

Measured 2026-11-20 on one H200 (torch 2.11.0+cu130): dummy bf16 weights of the shape of Llama 3.1 8B, offline API,
token ids as prompts, greedy, fixed output lengths; SGLang 0.5.14 and mini-sglang with FlashInfer, vLLM 0.24.0. On
that machine the matrix products alone took what ``GEMM_MS`` says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

OWN = "radixkv"
"""The engine of lines that name none."""

GEMM_MS = {"gemm_1_ms": 4.14, "gemm_256_ms": 6.02, "gemm_8192_ms": 171.0}


class Times(NamedTuple):
    """Seconds of one workload."""

    sglang: float
    vllm: float
    mini_sglang: float
    must: float
    """Ahead of all of them beyond doubt."""
    goal: float
    """Near what the kernels allow."""

    @property
    def best(self) -> float:
        """Of the three."""
        return min(self.sglang, self.vllm, self.mini_sglang)


PEERS = {
    "single": Times(1.249, 1.256, 1.254, 1.17, 1.09),
    "decode": Times(6.38, 6.23, 6.09, 5.4, 5.0),
    "unshared": Times(17.0, 16.4, 16.5, 15.6, 14.5),
    "fewshot": Times(5.35, 5.27, 5.60, 3.9, 3.5),
    "multiturn": Times(13.1, 12.7, 12.7, 11.9, 11.0),
    "agents": Times(14.3, 13.8, 15.1, 10.2, 9.5),
}

GEMM_OF = {
    "single": "gemm_1_ms",
    "decode": "gemm_256_ms",
    "unshared": "gemm_8192_ms",
    "fewshot": "gemm_8192_ms",
    "multiturn": "gemm_8192_ms",
    "agents": "gemm_8192_ms",
}
"""Which matrix products a workload's time is mostly made of; machines are compared by them."""


def compared_engines(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of lines that ``engine.py`` and ``peer_engine.py`` wrote on one machine.

    Seconds of each engine with the cache on, the median where there are several; the best of the others over
    radixkv; and the shares of prompt tokens that each found in the cache, in the engines' order.
    """
    durations: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    hits: dict[str, dict[str, float]] = defaultdict(dict)
    for line in lines:
        if "duration" in line and line["cache"] == "on":
            engine = line.get("engine", OWN)
            durations[line["workload"]][engine].append(line["duration"])
            hits[line["workload"]][engine] = line["hit_rate_pct"]
    engines = sorted({engine for found in durations.values() for engine in found} - {OWN})
    titles = ["workload", *engines, OWN, f"best of the others / {OWN}", "prompt tokens from the cache, %"]
    table = [titles, ["---"] * len(titles)]
    for workload, found in durations.items():
        seconds = {engine: median(times) for engine, times in found.items()}
        others = [seconds[engine] for engine in engines if engine in seconds]
        ratio = f"{min(others) / seconds[OWN]:.2f}" if others and OWN in seconds else "-"
        times = [f"{seconds[engine]:.3f}" if engine in seconds else "-" for engine in (*engines, OWN)]
        shares = [f"{hits[workload][engine]:.1f}" if engine in seconds else "-" for engine in (*engines, OWN)]
        table.append([workload, *times, ratio, " / ".join(shares)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)
