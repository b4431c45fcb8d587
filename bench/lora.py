"""Measures what LoRA adapters cost in steps without and with them, in shared prompts, and in loads beside steps.

Two engines of dummy weights of the shape of Llama 3.1 8B are open at the same time, one without and one with
``enable_lora``, and random adapters of all projections. Repetitions of the cases take turns. One JSON line each:

    decode            milliseconds of a step of answers alone, with 32 and 256 rows: of the engine without LoRA
                      ("off", and "off again" as a measure of the noise), of the other without adapters in the step
                      ("base"), with one adapter in all rows ("1 adapter"), with one in half of them ("half"), and
                      with eight ("8 adapters"). It is the time of long answers less that of short ones, by the
                      steps between; the median
    fewshot           seconds of the workload of that name, "off", "base", and with eight adapters in turn, each of
                      which computes the examples of its own
    load              the longest time between two turns of 32 running answers, before, while and after an adapter
                      is loaded
    activated         milliseconds to the first token behind a conversation of 3,072 and 8,192 tokens that the model
                      has computed, of a LoRA ("lora") and an activated LoRA ("alora") of the same matrices

    python bench/lora.py --output-file bench/results/lora.jsonl
    python bench/lora.py --setting 'quantization="fp8"' --cases decode
    python bench/lora.py --cases decode --kinds "off,off again,base" --rows 32 --repeat 12
    python bench/lora.py --small --device cpu      # tries the code
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from result_lines import add_gpu_flags, add_setting_flag, report, script_parser
from shapes import LLAMA_8B, SMALL, write_adapter, write_model
from token_workloads import Phases, fewshot

from gpu import gpu_provenance
from radixkv import LLM, LoRARequest, SamplingParams
from radixkv.runtime.loop import Loop
from radixkv.wire.adapter_messages import AdapterLoaded, LoadAdapter
from radixkv.wire.messages import Submit, pack_tokens
from radixkv.wire.sampling import SamplingParams as LoopSamplingParams

N_ADAPTERS = 8
CASES = ("decode", "fewshot", "load", "activated")
KINDS = ("off", "off again", "base", "1 adapter", "half", f"{N_ADAPTERS} adapters")
"""Kinds of steps of answers; ratios are to the first one."""
INVOCATION = [11, 12, 13, 14]
"""Tokens from which on the activated adapter acts."""
SMALL_FEWSHOT: Mapping[str, int] = {"requests": 16, "shared": 48, "question": 8, "output": 4}
Requests = list[LoRARequest | None]


def main() -> None:
    arguments = parse_arguments()
    about = {
        "model": "small" if arguments.small else "Llama-3.1-8B shape, dummy weights",
        "rank": arguments.rank,
        "settings": arguments.settings,
        **gpu_provenance(arguments.device, arguments.commit),
    }
    config = SMALL if arguments.small else LLAMA_8B
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(config, Path(folder) / "model")
        adapters = {
            f"adapter-{index}": write_adapter(config, Path(folder) / str(index), arguments.rank, index)
            for index in range(N_ADAPTERS + 1)
        }
        spare = adapters.popitem()
        activated = Path(folder) / "activated"
        write_adapter(config, activated, arguments.rank, 0, alora_invocation_tokens=INVOCATION)
        off = open_llm(arguments, model)
        on = open_llm(
            arguments,
            model,
            lora_modules=adapters | {"activated": activated},
            max_lora_rank=arguments.rank,
            max_loras=N_ADAPTERS + 2,
        )
        requests = [LoRARequest(name) for name in adapters]
        if "decode" in arguments.cases:
            for n_rows in arguments.rows:
                for line in decode(arguments, off, on, requests, n_rows):
                    report(arguments.output_file, line, about)
        if "fewshot" in arguments.cases:
            for line in share_prefixes(arguments, off, on, requests):
                report(arguments.output_file, line, about)
        if "load" in arguments.cases:
            report(arguments.output_file, load_beside_steps(arguments, on._open_loop, *spare), about)
        if "activated" in arguments.cases:
            for n_tokens in arguments.contexts:
                for line in first_tokens(arguments, on, n_tokens):
                    report(arguments.output_file, line, about)


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--small", action="store_true", help="a small model and few short answers")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--repeat", type=int, default=5, metavar="TIMES")
    parser.add_argument("--pool-tokens", type=int, default=200_000, help="size of each engine's pool")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of the answers of decode and load")
    parser.add_argument("--cases", default=",".join(CASES), metavar="NAMES", help="comma-separated")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="NAMES", help="of steps of decode")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256], metavar="N", help="of steps of decode")
    add_gpu_flags(parser)
    add_setting_flag(parser)
    arguments = parser.parse_args()
    arguments.settings = dict(arguments.settings)
    arguments.cases = arguments.cases.split(",")
    arguments.kinds = arguments.kinds.split(",")
    arguments.steps, arguments.contexts = (8, 136), (3072, 8192)
    if arguments.small:
        arguments.rows, arguments.steps, arguments.prompt_tokens = (4, 16), (4, 12), 16
        arguments.pool_tokens, arguments.repeat, arguments.contexts = 4096, 2, (512,)
    return arguments


def open_llm(arguments: argparse.Namespace, model: Path, **more: Any) -> LLM:
    """Opens an engine whose steps differ in nothing but adapters."""
    settings: dict[str, Any] = {
        "device": arguments.device,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_total_tokens": arguments.pool_tokens,
        "max_model_len": 1024 if arguments.small else 16_384,
        "speculative_config": "off",
    }
    return LLM(model, **(settings | arguments.settings | more))


def decode(
    arguments: argparse.Namespace, off: LLM, on: LLM, adapters: Sequence[LoRARequest], n_rows: int
) -> list[dict[str, Any]]:
    """Returns a line for each kind of step."""
    of_adapters: dict[str, Requests] = {
        "1 adapter": [adapters[0]] * n_rows,
        "half": [adapters[0], None] * (n_rows // 2),
        f"{N_ADAPTERS} adapters": [adapters[index % N_ADAPTERS] for index in range(n_rows)],
    }
    kinds: dict[str, tuple[LLM, Requests]] = {
        name: (off if name.startswith("off") else on, of_adapters.get(name, [None] * n_rows))
        for name in arguments.kinds
    }
    rng = random.Random(n_rows)
    prompts = [[rng.randrange(10, 32_000) for _ in range(arguments.prompt_tokens)] for _ in range(n_rows)]
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for repetition in range(arguments.repeat + 1):
        for name, (llm, requests) in kinds.items():
            short, long = (answer_s(llm, prompts, requests, n) for n in arguments.steps)
            if repetition:  # the first one warms up
                times[name].append(1e3 * (long - short) / (arguments.steps[1] - arguments.steps[0]))
    ratios = {
        name: quantiles([one / other for one, other in zip(found, times["off"], strict=True)], method="inclusive")
        for name, found in times.items()
    }
    return [
        {
            "workload": "lora decode",
            "kind": name,
            "rows": n_rows,
            "ms_per_step": round(median(found), 4),
            "all_ms": [round(one, 4) for one in found],
            "times_off": round(ratios[name][1], 4),
            "quartiles_of_times_off": [round(ratios[name][0], 4), round(ratios[name][2], 4)],
        }
        for name, found in times.items()
    ]


def answer_s(llm: LLM, prompts: Sequence[list[int]], requests: Requests, n_tokens: int) -> float:
    """Returns the seconds of answers of so many tokens, from an empty cache."""
    llm.flush_cache()
    gc.collect()
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    begun = time.perf_counter()
    llm.generate(list(prompts), params, use_tqdm=False, lora_request=requests)
    return time.perf_counter() - begun


def share_prefixes(
    arguments: argparse.Namespace, off: LLM, on: LLM, adapters: Sequence[LoRARequest]
) -> list[dict[str, Any]]:
    """Returns a line of the workload ``fewshot`` for the model alone and for all adapters."""
    phases: Phases = fewshot(**SMALL_FEWSHOT) if arguments.small else fewshot()
    ((*prompts,),) = phases
    n_new = prompts[0][1]
    kinds: dict[str, tuple[LLM, Callable[[int], LoRARequest | None]]] = {
        "off": (off, lambda _: None),
        "base": (on, lambda _: None),
        f"{N_ADAPTERS} adapters": (on, lambda index: adapters[index % N_ADAPTERS]),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for repetition in range(min(arguments.repeat, 3) + 1):
        for name, (llm, adapter_of) in kinds.items():
            requests = [adapter_of(index) for index in range(len(prompts))]
            seconds = answer_s(llm, [prompt for prompt, _ in prompts], requests, n_new)
            if repetition:
                times[name].append(seconds)
    return [
        {
            "workload": "lora fewshot",
            "kind": name,
            "duration": round(median(found), 4),
            "all_s": [round(one, 4) for one in found],
            "times_off": round(median(found) / median(times["off"]), 4),
        }
        for name, found in times.items()
    ]


def load_beside_steps(arguments: argparse.Namespace, loop: Loop, name: str, folder: Path) -> dict[str, Any]:
    """Returns the longest times between turns of running answers, before, while and after a load."""
    n_rows, n_tokens = arguments.rows[0], 100 if arguments.small else 600
    params = LoopSamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    for index in range(n_rows):
        prompt = [10 + index] * arguments.prompt_tokens
        assert not loop.receive(Submit(f"load {index}", pack_tokens(prompt), params))
    gaps: dict[str, list[float]] = {"before": [], "while": [], "after": []}
    state, n_turns, loaded_s = "before", 0, 0.0
    last = begun = time.perf_counter()
    while loop.has_work:
        messages = loop.turn()
        now = time.perf_counter()
        n_turns += 1
        if n_turns > 10 and (state != "after" or n_turns < n_tokens - 10):
            gaps[state].append(1e3 * (now - last))
        last = now
        if any(isinstance(message, AdapterLoaded) for message in messages):
            state, loaded_s = "after", now - begun
        if n_turns == n_tokens // 6:
            begun = time.perf_counter()
            loop.receive(LoadAdapter(name, name, str(folder)))
            state = "while"
    return {
        "workload": "lora load",
        "rows": n_rows,
        "load_s": round(loaded_s, 3),
        **{f"{when}_max_ms": round(max(found, default=0.0), 3) for when, found in gaps.items()},
        **{f"{when}_median_ms": round(median(found), 3) for when, found in gaps.items() if found},
    }


def first_tokens(arguments: argparse.Namespace, llm: LLM, n_tokens: int) -> list[dict[str, Any]]:
    """Returns a line each of a LoRA and an activated LoRA, behind a conversation of so many tokens."""
    kinds = {"lora": LoRARequest("adapter-0"), "alora": LoRARequest("activated")}
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rng = random.Random(n_tokens)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for repetition in range(arguments.repeat + 1):
        for name, adapter in kinds.items():
            llm.flush_cache()
            conversation = [rng.randrange(20, 32_000) for _ in range(n_tokens)]
            llm.generate([conversation], params, use_tqdm=False)
            begun = time.perf_counter()
            llm.generate([conversation + INVOCATION], params, use_tqdm=False, lora_request=adapter)
            if repetition:
                times[name].append(1e3 * (time.perf_counter() - begun))
    return [
        {
            "workload": "lora activated",
            "kind": name,
            "context_tokens": n_tokens,
            "first_token_ms": round(median(found), 3),
            "all_ms": [round(one, 3) for one in found],
            "times_lora": round(median(found) / median(times["lora"]), 4),
        }
        for name, found in times.items()
    ]


if __name__ == "__main__":
    main()
