"""The six token workloads through another engine's offline API, as ``engine.py`` sends them through radixkv's.

Model, prompts, phases, warm-up and clock are the same: dummy bf16 weights of the shape of Llama 3.1 8B, token ids
as prompts, greedy answers of fixed length, one call of ``generate`` for each phase, the prefix cache flushed before
each workload, and the model's matrix products timed alone in the same call. What is not given by ``--setting`` is
the engine's own default; what it then chose is recorded as `settings`. Appends a JSON line a workload to
``--output-file``, with the keys of ``engine.py`` and `engine`. Lines of one machine, one engine after the other,
make a table:

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
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from engine import add_run_flags, chosen, compared, made, seconds_since_start, write
from gpu_environment import gpu_environment
from peers import compared_engines
from phases import TOKEN_WORKLOADS, Phases, load_workloads
from power import watched_power
from roof import measure
from shapes import LLAMA_8B, Config, write_model

VLLM_CHOICES: Mapping[str, Sequence[str]] = {
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "async_scheduling"),
    "cache_config": ("block_size", "gpu_memory_utilization", "enable_prefix_caching"),
    "model_config": ("max_model_len",),
}
SGLANG_CHOICES = (
    "attention_backend",
    "chunked_prefill_size",
    "max_running_requests",
    "mem_fraction_static",
    "page_size",
    "disable_overlap_schedule",
)
"""What of an engine's settings is recorded, as far as that version has it."""


class Answer(NamedTuple):
    """Of one request, in tokens."""

    n_output: int
    n_cached: int
    """Of the prompt, as the engine tells."""


class Peer(Protocol):
    """Another engine, with the model loaded: its package's version, and what it runs with."""

    version: str
    settings: dict[str, Any]

    def generate(self, prompts: list[list[int]], n_new: list[int]) -> list[Answer]:
        """Greedy answers of exactly so many tokens, in the prompts' order, once all are done."""

    def flush_cache(self) -> bool:
        """Forgets all prefixes; false where a request's last traces are still being cleared away."""

    def close(self) -> None:
        """Ends the engine's processes."""


class Vllm:
    """vLLM's ``LLM``."""

    def __init__(self, folder: Path, dtype: str, *, has_cache: bool, settings: Mapping[str, Any]) -> None:
        self._vllm = imported("vllm")
        self.version: str = self._vllm.__version__
        wanted: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": has_cache,
        }
        self._llm = self._vllm.LLM(str(folder), **(wanted | dict(settings)))
        config = self._llm.llm_engine.vllm_config
        self.settings = dict(settings)
        for part, names in VLLM_CHOICES.items():
            self.settings |= told(getattr(config, part), names)

    def generate(self, prompts: list[list[int]], n_new: list[int]) -> list[Answer]:
        sampling = [
            self._vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in n_new
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._llm.generate(requests, sampling, use_tqdm=False)
        return [Answer(len(answer.outputs[0].token_ids), answer.num_cached_tokens or 0) for answer in answers]

    def flush_cache(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class Sglang:
    """SGLang's ``Engine``."""

    def __init__(self, folder: Path, dtype: str, *, has_cache: bool, settings: Mapping[str, Any]) -> None:
        sglang = imported("sglang")
        self.version: str = sglang.__version__
        wanted: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "disable_radix_cache": not has_cache,
            "log_level": "warning",
        }
        self._engine = sglang.Engine(model_path=str(folder), **(wanted | dict(settings)))
        self.settings = dict(settings) | told(self._engine.server_args, SGLANG_CHOICES)

    def generate(self, prompts: list[list[int]], n_new: list[int]) -> list[Answer]:
        sampling = [{"temperature": 0.0, "max_new_tokens": n, "ignore_eos": True} for n in n_new]
        answers = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        return [Answer(len(answer["output_ids"]), answer["meta_info"]["cached_tokens"]) for answer in answers]

    def flush_cache(self) -> bool:
        return bool(self._engine.flush_cache().success)

    def close(self) -> None:
        self._engine.shutdown()


ENGINES: Mapping[str, type[Vllm] | type[Sglang]] = {"vllm": Vllm, "sglang": Sglang}


def main() -> None:
    arguments = parsed()
    if arguments.table is not None:
        print(compared_engines([json.loads(line) for path in arguments.table for line in path.open()]))
        return
    known = load_workloads(arguments.workloads_file)
    names = chosen(arguments.workloads, known)
    # This folder has modules named as packages that engines look for, such as `kernels`.
    sys.path.append(sys.path.pop(0))
    imported(arguments.engine)
    config = LLAMA_8B | ({"num_hidden_layers": arguments.layers} if arguments.layers else {})
    torch.cuda.synchronize()
    begun = time.perf_counter()
    gemm_ms = measure(config, "cuda")
    roof_s = time.perf_counter() - begun
    print(f"GEMM alone: {json.dumps(gemm_ms)}", flush=True)
    with opened(arguments, config) as peer:
        peer.generate([[17] * 8], [1])
        first_token_s = round(seconds_since_start() - roof_s, 2)
        engine = f"{arguments.engine} {peer.version}"
        print(f"{engine}: first token {first_token_s} s after the process began", flush=True)
        warm_up(peer)
        common = {
            "engine": engine,
            "mode": "offline",
            "cache": arguments.cache,
            "model": "llama-3.1-8b, dummy weights" + (f", {arguments.layers} layers" if arguments.layers else ""),
            "settings": peer.settings,
            "first_token_s": first_token_s,
            **gemm_ms,
            "date": date.today().isoformat(),
            "environment": gpu_environment("cuda", arguments.commit),
        }
        for name in names:
            phases = made(known[name], name, is_small=False)
            with watched_power(arguments.watch_power) as power:
                figures = run(peer, phases)
            line = {"workload": name, **figures, **power, **common}
            if not arguments.layers:
                line |= adjusted(name, line["duration"], gemm_ms)
            print(row(line), flush=True)
            write(arguments.output_file, line)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--workloads-file", type=Path, default=TOKEN_WORKLOADS)
    parser.add_argument("--layers", type=int, metavar="N", help="a model of so few layers, to try the engine")
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
def opened(arguments: argparse.Namespace, config: Config) -> Iterator[Peer]:
    with tempfile.TemporaryDirectory() as folder:
        peer: Peer = ENGINES[arguments.engine](
            write_model(config, Path(folder)),
            config["torch_dtype"],
            has_cache=arguments.cache == "on",
            settings=arguments.settings,
        )
        try:
            yield peer
        finally:
            peer.close()


def imported(package: str) -> Any:
    """The package, or one line about what is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise SystemExit(f"{package} cannot be imported: no module {error.name}; install it first") from None


def told(holder: object, names: Sequence[str]) -> dict[str, Any]:
    """Those of the attributes that are there."""
    found: dict[str, Any] = {}
    for name in names:
        with suppress(AttributeError):
            found[name] = getattr(holder, name)
    return found


def warm_up(peer: Peer, n_requests: int = 8, n_tokens: int = 300) -> None:
    """As ``engine.py`` does."""
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 32_000) for _ in range(n_tokens)] for _ in range(n_requests)]
    peer.generate(prompts, [16] * n_requests)


def run(peer: Peer, phases: Phases) -> dict[str, Any]:
    """Seconds of all phases from an empty cache, and what the engine told of them."""
    while not peer.flush_cache():
        time.sleep(0.05)
    gc.collect()
    n_answers = n_prompt = n_output = n_cached = 0
    begun = time.perf_counter()
    for phase in phases:
        lengths = [n_new for _, n_new in phase]
        answers = peer.generate([prompt for prompt, _ in phase], lengths)
        assert [answer.n_output for answer in answers] == lengths, "an answer has not the length that was asked for"
        n_answers += len(answers)
        n_prompt += sum(len(prompt) for prompt, _ in phase)
        n_output += sum(lengths)
        n_cached += sum(answer.n_cached for answer in answers)
    duration = time.perf_counter() - begun
    return {
        "duration": round(duration, 4),
        "requests": n_answers,
        "prompt_tokens": n_prompt,
        "output_tokens": n_output,
        "output_tokens_per_s": round(n_output / duration, 1),
        "total_tokens_per_s": round((n_prompt + n_output) / duration, 1),
        "hit_rate_pct": round(100 * n_cached / n_prompt, 2),
    }


def adjusted(name: str, duration: float, gemm_ms: Mapping[str, float]) -> dict[str, Any]:
    """The time in units of the matrix products, and on the machine of ``peers.py``."""
    figures = compared(name, duration, gemm_ms)
    return {key: value for key, value in figures.items() if key.startswith(("duration_per_", "adjusted_"))}


def row(line: Mapping[str, Any]) -> str:
    power = f" {line['clock_mhz']:.0f} MHz {line['power_w']:.0f} W" if "power_w" in line else ""
    return (
        f"{line['workload']:<10} {line['duration']:>8.3f} s, adjusted {line.get('adjusted_duration', 0):>8.3f} s, "
        f"hits {line['hit_rate_pct']:>5.1f}%, {line['output_tokens_per_s']:>7.0f} tokens/s{power}"
    )


if __name__ == "__main__":
    main()
