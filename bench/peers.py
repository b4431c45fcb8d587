"""Times of other engines for the token workloads.

Measured 2026-11-20 on one H200 (torch 2.11.0+cu130): dummy bf16 weights of the shape of Llama 3.1 8B, offline API,
token ids as prompts, greedy, fixed output lengths; SGLang 0.5.14 and mini-sglang with FlashInfer, vLLM 0.24.0.
``GEMM_MS`` has the times of the matrix products alone on that machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

OWN = "radixkv"
"""The engine of result lines without an `engine`."""

GEMM_MS = {"gemm_1_ms": 4.14, "gemm_256_ms": 6.02, "gemm_8192_ms": 171.0}
"""Milliseconds of the matrix products by number of rows, see ``roof.measure``."""


class PeerTimes(NamedTuple):
    """Seconds of one workload."""

    sglang: float
    vllm: float
    mini_sglang: float
    must: float
    """Required time: clearly faster than all three."""
    goal: float
    """Goal: near the limit of the kernels."""

    @property
    def best(self) -> float:
        """The fastest of the three."""
        return min(self.sglang, self.vllm, self.mini_sglang)


PEERS = {
    "single": PeerTimes(1.249, 1.256, 1.254, 1.17, 1.09),
    "decode": PeerTimes(6.38, 6.23, 6.09, 5.4, 5.0),
    "unshared": PeerTimes(17.0, 16.4, 16.5, 15.6, 14.5),
    "fewshot": PeerTimes(5.35, 5.27, 5.60, 3.9, 3.5),
    "multiturn": PeerTimes(13.1, 12.7, 12.7, 11.9, 11.0),
    "agents": PeerTimes(14.3, 13.8, 15.1, 10.2, 9.5),
}

GEMM_OF = {
    "single": "gemm_1_ms",
    "decode": "gemm_256_ms",
    "unshared": "gemm_8192_ms",
    "fewshot": "gemm_8192_ms",
    "multiturn": "gemm_8192_ms",
    "agents": "gemm_8192_ms",
}
"""The matrix products that dominate each workload's time; times of different machines are scaled by them."""


def comparison_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table of lines that ``engine.py`` and ``peer_engine.py`` wrote on one machine.

    Its columns are the seconds of each engine with the cache on, the median of several runs; the best of the others
    over radixkv; and the share of prompt tokens that each engine found in the cache.
    """
    durations: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    hits: dict[str, dict[str, float]] = defaultdict(dict)
    for line in lines:
        if "duration" in line and line["cache"] == "on":
            engine = line.get("engine", OWN)
            durations[line["workload"]][engine].append(line["duration"])
            hits[line["workload"]][engine] = line["hit_rate_pct"]
    engines = sorted({engine for by_engine in durations.values() for engine in by_engine} - {OWN})
    titles = ["workload", *engines, OWN, f"best of the others / {OWN}", "prompt tokens from the cache, %"]
    table = [titles, ["---"] * len(titles)]
    for workload, by_engine in durations.items():
        seconds = {engine: median(times) for engine, times in by_engine.items()}
        others = [seconds[engine] for engine in engines if engine in seconds]
        ratio = f"{min(others) / seconds[OWN]:.2f}" if others and OWN in seconds else "-"
        times = [f"{seconds[engine]:.3f}" if engine in seconds else "-" for engine in (*engines, OWN)]
        shares = [f"{hits[workload][engine]:.1f}" if engine in seconds else "-" for engine in (*engines, OWN)]
        table.append([workload, *times, ratio, " / ".join(shares)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)
