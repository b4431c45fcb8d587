"""Runs token workloads through another engine's offline API, as ``engine.py`` does through radixkv's.

Model, prompts, phases, warm-up and clock are the same: bf16 weights of the shape of ``--model``, token ids as
prompts, greedy answers of fixed length, and one call of ``generate`` for each phase. The prefix cache is flushed
before each workload. With one GPU the model's matrix products are timed alone in the same run. Settings not given
by ``--setting`` have the engine's defaults; the values in effect are recorded as `settings`. Appends a JSON line
per workload to ``--output-file``, with the keys of ``engine.py`` and `engine`.

Dummy weights are each engine's own. How many experts compute depends on them, so mixtures of experts are compared
with ``--weights random``: a checkpoint that all engines read, of as many ``--layers`` as the disk holds. Where
answers end alike, `distinct_last_tokens` is small, and so is the number of experts.

Lines of engines that ran on one machine can be shown as a table:

    python bench/peer_engine.py --engine vllm --output-file vllm.jsonl
    python bench/peer_engine.py --engine sglang --output-file sglang.jsonl
    python bench/engine.py --output-file radixkv.jsonl
    python bench/peer_engine.py --table radixkv.jsonl vllm.jsonl sglang.jsonl
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from engine import (
    ADAPTER_RANK,
    add_run_flags,
    compare_with_peers,
    config_of,
    generate_workload,
    label_of,
    measure_products,
    names_in_turn,
    select_workloads,
    write_run_adapters,
    write_run_model,
)
from peers import comparison_table
from result_lines import add_gpu_flags, append, script_parser
from shapes import LLAMA_8B, Config
from token_workloads import Phases, load_workloads

from gpu import gpu_provenance, watched_power
from radixkv.runtime.device.start_times import process_age_s

VLLM_SETTINGS: Mapping[str, Sequence[str]] = {
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "async_scheduling"),
    "cache_config": ("block_size", "gpu_memory_utilization", "enable_prefix_caching", "cache_dtype"),
    "model_config": ("max_model_len", "quantization"),
}
"""Recorded settings of vLLM by part of its configuration, as far as the version has them."""
SGLANG_SETTINGS = (
    "attention_backend",
    "quantization",
    "kv_cache_dtype",
    "chunked_prefill_size",
    "max_running_requests",
    "mem_fraction_static",
    "page_size",
    "disable_overlap_schedule",
)
"""Recorded settings of SGLang, as far as the version has them."""


class AnswerTokens(NamedTuple):
    """The tokens of one answer."""

    ids: Sequence[int]
    n_cached: int
    """Prompt tokens found in the cache, as reported by the engine."""


class Peer(Protocol):
    """Another engine, with the model loaded."""

    version: str
    """Version of the engine's package."""
    settings: dict[str, Any]
    """Settings in effect."""

    def generate(self, prompts: list[list[int]], n_new: list[int]) -> list[AnswerTokens]:
        """Generates greedy answers of exactly ``n_new`` tokens, with all adapters in turn."""

    def flush_cache(self) -> bool:
        """Drops all cached prefixes; returns false if the engine is still cleaning up a request."""

    def close(self) -> None:
        """Ends the engine's processes."""


class Vllm:
    """vLLM's ``LLM``."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        has_cache: bool,
        adapters: Mapping[str, Path],
        settings: Mapping[str, Any],
    ) -> None:
        self._vllm = import_engine("vllm")
        self.version: str = self._vllm.__version__
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": has_cache,
        }
        self._adapters: dict[str, Any] = {}
        if adapters:
            defaults |= {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": ADAPTER_RANK}
            lora = importlib.import_module("vllm.lora.request").LoRARequest
            self._adapters = {
                name: lora(name, index, str(path)) for index, (name, path) in enumerate(adapters.items(), 1)
            }
        self._llm = self._vllm.LLM(str(folder), **(defaults | dict(settings)))
        config = self._llm.llm_engine.vllm_config
        self.settings = dict(settings)
        for part, names in VLLM_SETTINGS.items():
            self.settings |= read_attributes(getattr(config, part), names)

    def generate(self, prompts: list[list[int]], n_new: list[int]) -> list[AnswerTokens]:
        sampling = [
            self._vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in n_new
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        names = names_in_turn(list(self._adapters), len(prompts))
        loras = None if names is None else [self._adapters[name] for name in names]
        answers = self._llm.generate(requests, sampling, use_tqdm=False, lora_request=loras)
        return [AnswerTokens(answer.outputs[0].token_ids, answer.num_cached_tokens or 0) for answer in answers]

    def flush_cache(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class Sglang:
    """SGLang's ``Engine``."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        has_cache: bool,
        adapters: Mapping[str, Path],
        settings: Mapping[str, Any],
    ) -> None:
        sglang = import_engine("sglang")
        self.version: str = sglang.__version__
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "disable_radix_cache": not has_cache,
            "log_level": "warning",
        }
        self._adapters = list(adapters)
        if adapters:
            paths = {name: str(path) for name, path in adapters.items()}
            defaults |= {"enable_lora": True, "lora_paths": paths, "max_loras_per_batch": len(adapters)}
        self._engine = sglang.Engine(model_path=str(folder), **(defaults | dict(settings)))
        self.settings = dict(settings) | read_attributes(self._engine.server_args, SGLANG_SETTINGS)

    def generate(self, prompts: list[list[int]], n_new: list[int]) -> list[AnswerTokens]:
        sampling = [{"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True} for n in n_new]
        names = names_in_turn(self._adapters, len(prompts))
        answers = self._engine.generate(input_ids=prompts, sampling_params=sampling, lora_path=names)
        return [AnswerTokens(answer["output_ids"], answer["meta_info"]["cached_tokens"]) for answer in answers]

    def flush_cache(self) -> bool:
        return bool(self._engine.flush_cache().success)

    def close(self) -> None:
        self._engine.shutdown()


ENGINES: Mapping[str, type[Vllm] | type[Sglang]] = {"vllm": Vllm, "sglang": Sglang}


def main() -> None:
    arguments = parse_arguments()
    if arguments.table is not None:
        print(comparison_table([json.loads(line) for path in arguments.table for line in path.open()]))
        return
    known = load_workloads(arguments.workloads_file)
    names = select_workloads(arguments.workloads, known)
    # This folder has modules with names of packages that engines import, such as `kernels`.
    sys.path.append(sys.path.pop(0))
    import_engine(arguments.engine)
    config = config_of(arguments)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    n_ranks = arguments.settings.get("tensor_parallel_size", arguments.settings.get("tp_size", 1))
    gemm_ms = measure_products(config, "cuda") if n_ranks == 1 else {}
    roof_s = time.perf_counter() - begun
    print(f"GEMM alone: {json.dumps(gemm_ms)}", flush=True)
    with open_peer(arguments, config) as peer:
        peer.generate([[17] * 8], [1])
        first_token_s = round(process_age_s() - roof_s, 2)
        engine = f"{arguments.engine} {peer.version}"
        print(f"{engine}: first token {first_token_s} s after the process began", flush=True)
        warm_up(peer)
        common = {
            "engine": engine,
            "mode": "offline",
            "cache": arguments.cache,
            "adapters": arguments.adapters,
            "model": label_of(arguments),
            "settings": peer.settings,
            "first_token_s": first_token_s,
            **gemm_ms,
            **gpu_provenance("cuda", arguments.commit),
        }
        for name in names:
            phases = generate_workload(known[name], name, is_small=False)
            with watched_power(arguments.watch_power) as power:
                metrics = run(peer, phases)
            line = {"workload": name, **metrics, **power, **common}
            if config == LLAMA_8B:
                line |= adjusted_times(name, line["duration"], gemm_ms)
            print(row(line), flush=True)
            append(arguments.output_file, line)


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--engine", choices=ENGINES)
    add_gpu_flags(parser, has_device=False)
    add_run_flags(parser)
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="FILE", help="compare these files' lines, run nothing"
    )
    arguments = parser.parse_args()
    if arguments.table is None and arguments.engine is None:
        parser.error("give --engine, or --table")
    arguments.settings = dict(arguments.settings)
    return arguments


@contextmanager
def open_peer(arguments: argparse.Namespace, config: Config) -> Iterator[Peer]:
    with tempfile.TemporaryDirectory() as folder:
        peer: Peer = ENGINES[arguments.engine](
            write_run_model(arguments, config, Path(folder) / "model", "cuda"),
            config["torch_dtype"],
            has_cache=arguments.cache == "on",
            adapters=write_run_adapters(arguments, config, Path(folder)),
            settings=arguments.settings,
        )
        try:
            yield peer
        finally:
            peer.close()


def import_engine(package: str) -> Any:
    """Imports the package, or exits with a line that names the missing module."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise SystemExit(f"{package} cannot be imported: no module {error.name}; install it first") from None


def read_attributes(holder: object, names: Sequence[str]) -> dict[str, Any]:
    """Returns the attributes that exist."""
    values: dict[str, Any] = {}
    for name in names:
        with suppress(AttributeError):
            values[name] = getattr(holder, name)
    return values


def warm_up(peer: Peer, n_requests: int = 8, n_tokens: int = 300) -> None:
    """Runs the warm-up of ``engine.py``."""
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 32_000) for _ in range(n_tokens)] for _ in range(n_requests)]
    peer.generate(prompts, [16] * n_requests)


def run(peer: Peer, phases: Phases) -> dict[str, Any]:
    """Runs all phases from an empty cache. Returns the seconds, and the reported token counts."""
    while not peer.flush_cache():
        time.sleep(0.05)
    gc.collect()
    n_answers = n_prompt = n_output = n_cached = 0
    begun = time.perf_counter()
    for phase in phases:
        lengths = [n_new for _, n_new in phase]
        answers = peer.generate([prompt for prompt, _ in phase], lengths)
        assert [len(answer.ids) for answer in answers] == lengths, "an answer has the wrong length"
        n_answers += len(answers)
        n_prompt += sum(len(prompt) for prompt, _ in phase)
        n_output += sum(lengths)
        n_cached += sum(answer.n_cached for answer in answers)
    duration = time.perf_counter() - begun
    return {
        "duration": round(duration, 4),
        "requests": n_answers,
        "distinct_last_tokens": len({answer.ids[-1] for answer in answers}),
        "prompt_tokens": n_prompt,
        "output_tokens": n_output,
        "output_tokens_per_s": round(n_output / duration, 1),
        "total_tokens_per_s": round((n_prompt + n_output) / duration, 1),
        "hit_rate_pct": round(100 * n_cached / n_prompt, 2),
    }


def adjusted_times(name: str, duration: float, gemm_ms: Mapping[str, float]) -> dict[str, Any]:
    """Returns the time in units of the matrix products, and as it would be on the machine of ``peers.py``."""
    metrics = compare_with_peers(name, duration, gemm_ms)
    return {key: value for key, value in metrics.items() if key.startswith(("duration_per_", "adjusted_"))}


def row(line: Mapping[str, Any]) -> str:
    power = f" {line['clock_mhz']:.0f} MHz {line['power_w']:.0f} W" if "power_w" in line else ""
    return (
        f"{line['workload']:<10} {line['duration']:>8.3f} s, adjusted {line.get('adjusted_duration', 0):>8.3f} s, "
        f"hits {line['hit_rate_pct']:>5.1f}%, {line['output_tokens_per_s']:>7.0f} tokens/s{power}"
    )


if __name__ == "__main__":
    main()
