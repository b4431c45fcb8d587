"""Profiles single steps: kernels, gaps and host time, with dummy weights of the shape of Llama 3.1 8B.

Only the device runs: plans are generated here as the scheduler would make them, over pages without computed KV.
Steps overlap as in the engine: one is launched before the previous one's result is taken. Each case is timed
without the profiler, then profiled, and gives one JSON line: milliseconds per step, the host's share of them, and
microseconds by kind and name of kernel.

    decode 256x1650          a step of 256 rows, each the 1650th token of its sequence
    decode 256x1650 shared   the same; each quarter of the rows shares its first 1536 tokens
    drafts 8x4096+4          8 rows, each with 4 drafts after 4096 tokens
    prompts 1x64             one small prompt
    prompts 8x1024           8 whole prompts
    extend 64x128+1536       64 prompts with 1536 tokens in the prefix cache
    mixed 256x1024 8x960     decode rows beside prompts

    python bench/profile_step.py --output-file profile.jsonl
    python bench/profile_step.py --only "mixed 7x,mixed 28x" --prompt-kernels --output-file profile.jsonl
    python bench/profile_step.py --small --device cpu --no-profile        # tries the code
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from result_lines import add_gpu_flags, append, script_parser
from shapes import LLAMA_8B, SMALL, write_model
from step_plans import CASES, MAX_MODEL_LEN, MAX_STEPS, PAGE_SIZE, SMALL_CASES, Plans
from traces import record_trace, table

from gpu import gpu_provenance
from radixkv.checkpoints import resolve
from radixkv.runtime.device.factory import look_at_machine, resolve_config
from radixkv.runtime.device.ranks.open import open_ranks
from radixkv.runtime.step.executor import Executor
from radixkv.runtime.step.result import SampledStep
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.settings.speculative import SpeculativeConfig


def main() -> None:
    arguments = parse_arguments()
    config = SMALL if arguments.small else LLAMA_8B
    with tempfile.TemporaryDirectory() as folder:
        executor = open_device(arguments, write_model(config, Path(folder)))
    if arguments.prompt_kernels:
        leave_prompts_whole()
    common = {
        "prompt_kernels": arguments.prompt_kernels,
        "max_num_seqs": arguments.max_num_seqs,
        "enforce_eager": arguments.enforce_eager,
        **gpu_provenance(arguments.device, arguments.commit),
    }
    first_step = 0
    for case in SMALL_CASES if arguments.small else CASES:
        if any(text in case.name for text in arguments.only.split(",")):
            plans = Plans(case, executor.n_pages, first_step)
            first_step += MAX_STEPS
            line = {"case": case.name, "tokens": case.n_tokens, **time_steps(executor, plans, arguments.steps)}
            print(f"{case.name}: {line['ms_per_step']} ms, host {line['launch_ms']} ms", flush=True)
            if not arguments.no_profile:
                line["profile"] = profile_steps(executor, plans, min(arguments.steps, 10))
                print(table(line["profile"], arguments.kernels), flush=True)
            append(arguments.output_file, line | common)


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    add_gpu_flags(parser)
    parser.add_argument("--small", action="store_true", help="a small model and small steps")
    parser.add_argument("--only", default="", metavar="TEXTS", help="run cases whose names contain one of these")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--kernels", type=int, default=12, metavar="COUNT", help="to print; the file has more")
    parser.add_argument("--enforce-eager", action="store_true", help="without CUDA graphs")
    parser.add_argument(
        "--prompt-kernels", action="store_true", help="no tokens of prompts as rows of decode graphs"
    )
    parser.add_argument("--max-num-seqs", type=int, help="most rows a step (default: the device's)")
    arguments = parser.parse_args()
    if arguments.device != "cuda" and not arguments.no_profile:
        parser.error("the profiler records a GPU's work; with --device cpu use --no-profile")
    if arguments.device != "cuda" and arguments.prompt_kernels:
        parser.error("only a GPU has --prompt-kernels")
    return arguments


def leave_prompts_whole() -> None:
    """Lets kernels of prompts compute also those that are short enough for a decode graph."""
    from radixkv.runtime.device.cuda.model_runner import ModelRunner

    patch.object(ModelRunner, "count_split", lambda _, step: step.n_decode).start()


def open_device(arguments: argparse.Namespace, folder: Path) -> Executor:
    """Opens the device as ``LLM`` with drafts would, with all its memory for the pool."""
    config = EngineConfig(
        ModelConfig(
            str(folder),
            dtype="bfloat16",
            load_format="dummy",
            device=arguments.device,
            enforce_eager=arguments.enforce_eager,
            max_model_len=MAX_MODEL_LEN,
        ),
        CacheConfig(page_size=PAGE_SIZE),
        SchedulerConfig(max_num_seqs=arguments.max_num_seqs, speculative_config=SpeculativeConfig(method="tree")),
    )
    checkpoint = resolve(config.model.model, load_format="dummy")
    resolved = resolve_config(config, checkpoint, look_at_machine(arguments.device))
    return open_ranks(resolved, checkpoint)


def time_steps(executor: Executor, plans: Plans, n_steps: int) -> dict[str, Any]:
    """Returns the milliseconds of overlapping steps, after a warm-up."""
    run_overlapping(executor, plans, 5)
    begun = time.perf_counter()
    launch_s = run_overlapping(executor, plans, n_steps)
    duration_s = time.perf_counter() - begun
    return {
        "ms_per_step": round(1e3 * duration_s / n_steps, 3),
        "launch_ms": round(1e3 * sum(launch_s) / n_steps, 3),
        "longest_launch_ms": round(1e3 * max(launch_s), 3),
    }


def profile_steps(executor: Executor, plans: Plans, n_steps: int) -> dict[str, Any]:
    """Profiles overlapping steps. Returns the GPU's times per step."""
    return record_trace(lambda: run_overlapping(executor, plans, n_steps)).report(n_steps)


def run_overlapping(executor: Executor, plans: Plans, n_steps: int) -> list[float]:
    """Runs steps, each launched before the previous result is taken. Returns the seconds of each launch."""
    launched: deque[SampledStep] = deque()
    times_s = []
    for plan in islice(plans, n_steps):
        begun = time.perf_counter()
        launched.append(executor.launch(plan).sample(None))
        times_s.append(time.perf_counter() - begun)
        if len(launched) > 1:
            launched.popleft().result()
    launched.popleft().result()
    return times_s


if __name__ == "__main__":
    main()
