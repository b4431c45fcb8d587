"""Compares variants of one operation in one engine over whole workloads. Needs a GPU.

``kernels.py`` compares kernels in short bursts. In a run of seconds a GPU at its power limit lowers its clock, so
the kernel that is faster in a burst may be slower there. Each case runs a workload repeatedly, alternating forwards
and backwards through its variants, and appends a JSON line with all times to ``--output-file``. The model has the
shape of Llama 3.1 8B and dummy weights.

    python bench/choices.py --output-file bench/results/choices.jsonl
    python bench/choices.py --only prompts --pairs 10
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from engine import open_llm, run, warm_up
from result_lines import add_gpu_flags, append, script_parser
from shapes import LLAMA_8B, write_model
from token_workloads import VOCAB, Phases, decode

from gpu import gpu_provenance
from radixkv import LLM
from radixkv.runtime.device.attention.cuda import decode_plan as attention
from radixkv.runtime.device.cuda.executor import CudaExecutor
from radixkv.runtime.device.ops.cuda import linear


@dataclass(frozen=True)
class Case:
    """A workload, and the function or constant of the engine that is replaced while it runs."""

    phases: Phases
    module: ModuleType
    name: str
    variants: Mapping[str, Any]
    """The values for ``name`` in ``module``, by description; the first is the engine's own."""
    bucket: int | None = None
    """Rows of the decode graph that uses ``name``: that graph is captured again for each value."""


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        llm = open_llm(arguments, write_model(LLAMA_8B, Path(folder)))
    warm_up(llm)
    common = {
        "model": "llama-3.1-8b, dummy weights",
        **gpu_provenance("cuda", arguments.commit),
    }
    for name, case in cases().items():
        if not any(text in name for text in arguments.only.split(",")):
            continue
        times = run_alternating(llm, case, arguments.pairs)
        for variant, durations in times.items():
            print(
                f"{name}, {variant}: median {median(durations):.4f} s, {min(durations)} to {max(durations)}",
                flush=True,
            )
        append(arguments.output_file, {"case": name, "durations": times, **common})


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    add_gpu_flags(parser, has_device=False)
    parser.add_argument("--only", default="", metavar="TEXTS", help="run cases whose names contain one of these")
    parser.add_argument("--pairs", type=int, default=4, metavar="COUNT", help="runs of each variant")
    parser.set_defaults(device="cuda", cache="on", settings={})
    return parser.parse_args()


def cases() -> Mapping[str, Case]:
    is_thin = linear._is_thin_faster
    return {
        "gate, up and activation of 256 rows": Case(
            decode(),
            linear,
            "_is_fused_faster",
            {"cuBLAS and a kernel": linear._is_fused_faster, "one kernel": lambda x, _: 16 < len(x) <= 256},
            bucket=256,
        ),
        "residual sum of 256 rows": Case(
            decode(),
            linear,
            "_MANY_ROWS",
            {"by the product": linear._MANY_ROWS, "by the norm": 1 << 20},
            bucket=256,
        ),
        "residual sum of prompts": Case(
            requests(64, prompt=1024, output=1),
            linear,
            "_MANY_ROWS",
            {"by the product": linear._MANY_ROWS, "by the norm": 1 << 20},
        ),
        "products of 16 rows": Case(
            requests(16, prompt=64, output=192),
            linear,
            "_is_thin_faster",
            {
                "down by cuBLAS": is_thin,
                "own kernel": lambda x, _: len(x) <= 16,
                "all by cuBLAS": lambda x, weight: False,
            },
            bucket=16,
        ),
        "cutting rows of 256": Case(
            decode(), attention, "_SPLIT_MANY_ROWS_NS", {"if it pays": attention._SPLIT_MANY_ROWS_NS, "never": 1e9}
        ),
    }


def requests(n: int, *, prompt: int, output: int) -> Phases:
    """Returns one phase of ``n`` random prompts without shared prefixes."""
    rng = random.Random(n)
    return [[([rng.randrange(10, VOCAB) for _ in range(prompt)], output) for _ in range(n)]]


def run_alternating(llm: LLM, case: Case, n_pairs: int) -> dict[str, list[float]]:
    """Returns the seconds of each variant's runs, after one warm-up run that does not count."""
    times: dict[str, list[float]] = {variant: [] for variant in case.variants}
    run_variant = partial(duration, llm, case)
    run_variant(next(iter(case.variants)))
    for turn in range(n_pairs):
        for variant in times if turn % 2 == 0 else reversed(times):
            times[variant].append(run_variant(variant))
    return times


def duration(llm: LLM, case: Case, variant: str) -> float:
    """Returns the seconds of one run of the workload."""
    executor = llm._open_loop._executor
    assert isinstance(executor, CudaExecutor)
    with patch.object(case.module, case.name, case.variants[variant]):
        if case.bucket is not None:
            with torch.inference_mode(), torch.cuda.stream(executor._stream):
                executor._runner.capture([case.bucket])
        return float(run(llm, case.phases)["duration"])


if __name__ == "__main__":
    main()
