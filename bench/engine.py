"""Runs token workloads through the offline ``LLM``, with dummy weights of the shape of ``--model``.

Prints a table row for each workload, and appends a JSON line for each to ``--output-file``. The workloads are
functions in ``--workloads-file``: ``token_workloads.py``, or another Python file with ``ALL``, which maps names to
functions that return phases, each a list of (token ids, number of new tokens). A warm-up of 8 requests of 300
tokens comes first. The prefix cache is flushed before each workload. Answers are greedy and ignore the end of
sequence. The time is that of all phases.

The same run times the model's matrix products alone (``roof.py``), so that runs on different machines can be
compared: `adjusted` is the time on a machine whose products are as fast as where the peers ran. From the engine's
counters, `cache %` is the share of tree and pool work in step time, and `mgmt %` is the scheduler's time, including
that work, as a share of the device's time in attention. The products are not timed for a mixture of experts, whose
products depend on the tokens, for gated delta nets, and for several GPUs.

    python bench/engine.py --output-file bench/results/engine.jsonl
    python bench/engine.py --workloads decode,agents --cache off
    python bench/engine.py --workloads none --profile fewshot
    python bench/engine.py --model qwen3-30b-a3b
    python bench/engine.py --workloads pressure --setting kv_cache_memory_bytes=17179869184
    python bench/engine.py --workloads unshared --setting 'attention_backend="triton"'
    python bench/engine.py --workloads fewshot --adapters 8
    python bench/engine.py --small --device cpu      # tries the code
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peers import GEMM_MS, GEMM_OF, PEERS
from result_lines import add_gpu_flags, add_setting_flag, append, script_parser
from roof import measure
from shapes import LABELS, LLAMA_8B, MODELS, SMALL, Config, write_adapter, write_model, write_weights
from token_workloads import Phases, Workloads, load_workloads, long_context, pressure
from traces import record_trace, table

from gpu import gpu_provenance, watched_power
from radixkv import LLM, LoRARequest, SamplingParams
from radixkv.runtime.device.start_times import process_age_s
from radixkv.wire.stats import Stats

ADAPTER_RANK = 16
"""Rank of the adapters of ``--adapters``."""

SMALL_SIZES: Mapping[str, Mapping[str, int]] = {
    "single": {"prompt": 8, "output": 8},
    "decode": {"requests": 4, "prompt": 8, "output": 8},
    "unshared": {"requests": 4, "prompt": 32, "output": 4},
    "fewshot": {"requests": 8, "shared": 48, "question": 8, "output": 4},
    "multiturn": {"sessions": 3, "turns": 2, "system": 32, "user": 8, "output": 4},
    "agents": {"tasks": 2, "width": 2, "depth": 2, "system": 48, "step": 16, "output": 4},
    "long_context": {"document": 200, "question": 8, "output": 4},
    "pressure": {"sessions": 8, "turns": 2, "first": 80, "user": 8, "output": 4, "in_flight": 2},
}
"""Sizes of the workloads with ``--small``."""


def main() -> None:
    arguments = parse_arguments()
    known = load_workloads(arguments.workloads_file)
    names = select_workloads(arguments.workloads, known)
    config = SMALL if arguments.small else config_of(arguments)
    if arguments.device == "cuda":
        torch.cuda.synchronize()  # counts the CUDA context as the engine's start, unlike the products
    begun = time.perf_counter()
    n_ranks = arguments.settings.get("tensor_parallel_size", 1)
    gemm_ms = measure_products(config, arguments.device) if n_ranks == 1 else {}
    roof_s = time.perf_counter() - begun
    print(f"GEMM alone: {json.dumps(gemm_ms)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_run_model(arguments, config, Path(folder) / "model", arguments.device)
        adapters = write_run_adapters(arguments, config, Path(folder))
        slots = {"max_loras": len(adapters), "max_lora_rank": ADAPTER_RANK} if adapters else {}
        llm = open_llm(arguments, model, lora_modules=adapters, **slots)
        llm.generate([[17] * 8], greedy(1), use_tqdm=False)
        stages = {stage: round(seconds, 2) for stage, seconds in llm.get_metrics().start_seconds.items()}
        start = {"first_token_s": round(process_age_s() - roof_s, 2), "start_seconds": stages}
        print(f"first token {start['first_token_s']} s after the process began: {stages}", flush=True)
    warm_up(llm, list(adapters))
    common = {
        "mode": "offline",
        "cache": arguments.cache,
        "adapters": arguments.adapters,
        "model": "small" if arguments.small else label_of(arguments),
        "settings": arguments.settings,
        **start,
        **gemm_ms,
        **gpu_provenance(arguments.device, arguments.commit),
    }
    if names:
        print(HEADER)
    for name in names:
        for _ in range(arguments.repeat):
            phases = generate_workload(known[name], name, is_small=arguments.small)
            with watched_power(arguments.watch_power) as power:
                metrics = run(llm, phases, list(adapters))
            line = {"workload": name, **metrics, **power, **common}
            if config == LLAMA_8B:
                line |= compare_with_peers(name, line["duration"], gemm_ms)
            print(row(line), flush=True)
            append(arguments.output_file, line)
    for name in select_workloads(arguments.profile, known):
        phases = generate_workload(known[name], name, is_small=arguments.small)
        report = profile(llm, phases, arguments.profile_output, list(adapters))
        print(
            f"profile of {name}, answers of at most {arguments.profile_output} tokens:\n{table(report)}", flush=True
        )
        append(arguments.output_file, {"workload": name, "profile": report, **common})


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--profile", default="none", metavar="NAMES", help="workloads to run under the profiler")
    parser.add_argument("--profile-output", type=int, default=24, metavar="TOKENS", help="longest answer there")
    parser.add_argument("--small", action="store_true", help="a small model and small workloads")
    parser.add_argument("--repeat", type=int, default=1, metavar="TIMES")
    add_gpu_flags(parser)
    add_run_flags(parser)
    arguments = parser.parse_args()
    if arguments.profile != "none" and arguments.device != "cuda":
        parser.error("--profile records what a GPU does; leave it out with --device cpu")
    arguments.settings = dict(arguments.settings)
    return arguments


def config_of(arguments: argparse.Namespace) -> Config:
    """Returns the configuration that ``--model`` and ``--layers`` name."""
    return MODELS[arguments.model] | ({"num_hidden_layers": arguments.layers} if arguments.layers else {})


def label_of(arguments: argparse.Namespace) -> str:
    """Returns the model as result lines name it."""
    layers = f", {arguments.layers} layers" if arguments.layers else ""
    return f"{LABELS[arguments.model]}{layers}, {arguments.weights} weights"


def write_run_model(arguments: argparse.Namespace, config: Config, folder: Path, device: str) -> Path:
    """Writes the model that ``--weights`` asks for, and sets how it is loaded; returns the folder."""
    write_model(config, folder)
    if arguments.weights == "random":
        write_weights(config, folder, device)
        arguments.settings.setdefault("load_format", "auto")
    return folder


def write_run_adapters(arguments: argparse.Namespace, config: Config, folder: Path) -> dict[str, Path]:
    """Writes the adapters that ``--adapters`` asks for; returns the folder of each name."""
    return {
        f"adapter-{index}": write_adapter(config, folder / f"adapter-{index}", ADAPTER_RANK, index)
        for index in range(arguments.adapters)
    }


def names_in_turn(adapters: Sequence[str], n_prompts: int) -> list[str] | None:
    """Returns the adapter of each prompt, all in turn; None without adapters."""
    return [adapters[index % len(adapters)] for index in range(n_prompts)] if adapters else None


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of runs and results that are common to all engines."""
    parser.add_argument("--model", choices=MODELS, default="llama-8b", help="the shape of the weights")
    parser.add_argument("--layers", type=int, metavar="N", help="give the model this many layers")
    parser.add_argument(
        "--weights",
        choices=("dummy", "random"),
        default="dummy",
        help="the engine's own dummy weights, or a checkpoint with the same random weights for all engines",
    )
    parser.add_argument(
        "--workloads-file", type=Path, metavar="FILE", help="Python file with ALL (default: token_workloads.py)"
    )
    parser.add_argument(
        "--workloads",
        default="all",
        metavar="NAMES",
        help="comma-separated, all (without pressure and long_context) or none",
    )
    parser.add_argument("--cache", choices=("on", "off"), default="on")
    parser.add_argument(
        "--adapters", type=int, default=0, metavar="N", help=f"LoRA adapters of rank {ADAPTER_RANK}, used in turn"
    )
    parser.add_argument("--watch-power", action="store_true", help="record the GPU's clock and power too")
    add_setting_flag(parser)


def measure_products(config: Config, device: str) -> dict[str, float]:
    """Returns ``roof.measure`` of a dense model with attention in all layers, and nothing of others."""
    return {} if {"num_experts", "linear_num_key_heads"} & config.keys() else measure(config, device)


def select_workloads(text: str, known: Workloads) -> list[str]:
    """Returns the names in ``text``.

    ``all`` has neither ``pressure``, which needs a pool that is too small for it, nor ``long_context``, which needs
    a model with a context of 128k tokens.
    """
    if text == "all":
        return [name for name, workload in known.items() if workload not in (pressure, long_context)]
    if text == "none":
        return []
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no workload {', '.join(unknown)}; there are {', '.join(known)}, all and none")
    return names


def generate_workload(workload: Callable[..., Phases], name: str, *, is_small: bool) -> Phases:
    """Generates a workload, with the sizes of ``--small`` if ``is_small``."""
    return workload(**SMALL_SIZES[name]) if is_small else workload()


def open_llm(arguments: argparse.Namespace, folder: Path, **more: Any) -> LLM:
    settings: dict[str, Any] = {
        "device": arguments.device,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "enable_prefix_caching": arguments.cache == "on",
    }
    return LLM(folder, **(settings | arguments.settings | more))


def greedy(n_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)


def lora_requests(adapters: Sequence[str], n_prompts: int) -> list[LoRARequest] | None:
    names = names_in_turn(adapters, n_prompts)
    return None if names is None else [LoRARequest(name) for name in names]


def warm_up(llm: LLM, adapters: Sequence[str] = (), n_requests: int = 8, n_tokens: int = 300) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 32_000) for _ in range(n_tokens)] for _ in range(n_requests)]
    llm.generate(prompts, greedy(16), use_tqdm=False, lora_request=lora_requests(adapters, n_requests))


def run(llm: LLM, phases: Phases, adapters: Sequence[str] = ()) -> dict[str, Any]:
    """Runs all phases from an empty cache. Returns the seconds, and the growth of the engine's counters."""
    llm.flush_cache()
    gc.collect()
    before = llm.get_metrics()
    begun = time.perf_counter()
    n_answers = 0
    ends = [begun]
    for phase in phases:
        prompts = [prompt for prompt, _ in phase]
        answers = llm.generate(
            prompts,
            [greedy(n_new) for _, n_new in phase],
            use_tqdm=False,
            lora_request=lora_requests(adapters, len(prompts)),
        )
        for answer, (_, n_new) in zip(answers, phase, strict=True):
            assert len(answer.outputs[0].token_ids) == n_new, "an answer has the wrong length"
        n_answers += len(answers)
        ends.append(time.perf_counter())
    duration = time.perf_counter() - begun
    return {
        "duration": round(duration, 4),
        "phase_seconds": [round(end - start, 4) for start, end in pairwise(ends)],
        "requests": n_answers,
        "distinct_last_tokens": len({answer.outputs[0].token_ids[-1] for answer in answers}),
        **counter_growth(before, llm.get_metrics(), duration),
    }


def counter_growth(before: Stats, after: Stats, duration: float) -> dict[str, Any]:
    def growth(name: str) -> float:
        return float(getattr(after, name) - getattr(before, name))

    prompt, output = int(growth("prompt_tokens_total")), int(growth("generation_tokens_total"))
    queries, step_s = growth("prefix_queries_total"), growth("step_seconds")
    return {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": round(output / duration, 1),
        "total_tokens_per_s": round((prompt + output) / duration, 1),
        "hit_rate_pct": round(100 * growth("prefix_hits_total") / queries, 2) if queries else 0.0,
        "steps": int(growth("steps_total")),
        "preemptions": int(growth("preemptions_total")),
        "recomputed_tokens": int(growth("recomputed_tokens_total")),
        "pages": after.n_pages,
        "pages_used": after.n_pages - after.n_pages_free,
        "schedule_seconds": round(growth("schedule_seconds"), 4),
        "step_seconds": round(step_s, 4),
        "device_busy_seconds": round(growth("device_busy_seconds"), 4),
        "schedule_pct_of_step": round(100 * growth("schedule_seconds") / step_s, 3) if step_s else 0.0,
    }


def compare_with_peers(name: str, duration: float, gemm_ms: Mapping[str, float]) -> dict[str, Any]:
    """Returns the time in units of the matrix products, and compared with the peers' times."""
    result: dict[str, Any] = {
        f"duration_per_{gemm.removesuffix('_ms')}": round(1e3 * duration / time_ms, 2)
        for gemm, time_ms in gemm_ms.items()
    }
    peers, gemm = PEERS.get(name), GEMM_OF.get(name)
    if peers is None or gemm is None:
        return result
    adjusted = duration * GEMM_MS[gemm] / gemm_ms[gemm]
    return result | {
        "adjusted_duration": round(adjusted, 4),
        "must": peers.must,
        "goal": peers.goal,
        "best_peer": peers.best,
        "times_faster_than_best_peer": round(peers.best / adjusted, 3),
    }


HEADER = (
    f"{'workload':<10} {'seconds':>8} {'adjusted':>8} {'must':>6} {'goal':>6} {'peer':>6} {'peer/us':>7} "
    f"{'hits %':>6} {'steps':>6} {'out tok/s':>10} {'sched s':>8} {'sched %':>7}"
)


def row(line: Mapping[str, Any]) -> str:
    reached = "-"
    power = f" {line['clock_mhz']:.0f} MHz {line['power_w']:.0f} W" if "power_w" in line else ""
    if "must" in line:
        adjusted = line["adjusted_duration"]
        reached = "goal" if adjusted <= line["goal"] else "must" if adjusted <= line["must"] else "behind"
    return (
        f"{line['workload']:<10} {line['duration']:>8.3f} {line.get('adjusted_duration', 0):>8.3f} "
        f"{line.get('must', 0):>6} {line.get('goal', 0):>6} {line.get('best_peer', 0):>6} "
        f"{line.get('times_faster_than_best_peer', 0):>7} {line['hit_rate_pct']:>6.1f} {line['steps']:>6} "
        f"{line['output_tokens_per_s']:>10.0f} {line['schedule_seconds']:>8.3f} "
        f"{line['schedule_pct_of_step']:>7.3f} {reached}{power}"
    )


def profile(llm: LLM, phases: Phases, n_output: int, adapters: Sequence[str]) -> dict[str, Any]:
    """Profiles the workload with answers of at most ``n_output`` tokens. Returns GPU times per engine step."""
    llm.flush_cache()
    before = llm.get_metrics().steps_total

    def work() -> None:
        for phase in phases:
            settings = [greedy(min(n_new, n_output)) for _, n_new in phase]
            requests = lora_requests(adapters, len(phase))
            llm.generate([prompt for prompt, _ in phase], settings, use_tqdm=False, lora_request=requests)

    trace = record_trace(work)
    return trace.report(llm.get_metrics().steps_total - before)


if __name__ == "__main__":
    main()
