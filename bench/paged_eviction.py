"""Accuracy of the embedded model and speed of decoding with a ``kv_budget``, beside all KV.

``accuracy`` appends a JSON line for each family, method and budget: percent of held-out problems that are right,
greedy. A budget is a share of the tokens of each prompt. Methods:

    all       all KV is read
    paged     the engine's: pages of the lowest |V| / |K| are dropped
    window    the newest pages stay
    sink      the newest pages stay, and the first one
    random    random pages stay, the same ones in each answer

``decode`` appends a line for each budget: milliseconds of a step of answers behind distinct prompts, with all KV
and with the budget in turns, on dummy weights of the shape of Llama 3.1 8B. It is the time of long answers less
that of short ones, by the steps between.

``memory`` appends a line with the preemptions and seconds of long answers of the embedded model in a pool that
holds one of them, with all KV and with a budget.

    python -m bench.paged_eviction --parts accuracy memory --device cpu --output-file FILE
    python -m bench.paged_eviction --parts decode --device cuda --rows 64 --context 4096 --budgets 2048
    python -m bench.paged_eviction --parts decode --small          # tries the code on a CPU
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch
from zlib import crc32

from tokenizers import Tokenizer

from bench.gpu import gpu_provenance
from bench.result_lines import add_gpu_flags, add_setting_flag, report, script_parser
from bench.shapes import LLAMA_8B, SMALL, write_model
from bench.tiny_scores import prompt_of, text_of
from radixkv import LLM, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.runtime.paged_eviction import branch
from radixkv.runtime.paged_eviction.eviction import PagedEviction, Rank, by_score
from training.cases import OUTPUT_TOKENS, count_right, families, fitting_cases
from training.chat_format import Conversation

METHODS: Mapping[str, Rank] = {
    "paged": by_score,
    "window": lambda entry, score: entry,
    "sink": lambda entry, score: entry or float("inf"),
    "random": lambda entry, score: crc32(entry.to_bytes(4, "little")),
}
PARTS = ("accuracy", "decode", "memory")


def main() -> None:
    arguments = parse_arguments()
    environment = gpu_provenance(arguments.device, arguments.commit)
    parts = {"accuracy": accuracy, "decode": decode, "memory": memory}
    for part in arguments.parts:
        for line in parts[part](arguments):
            report(arguments.output_file, {"part": part, **line}, environment)


def parse_arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--families", nargs="*", choices=families(), default=families())
    parser.add_argument("--cases", type=int, default=50, help="of each family")
    parser.add_argument("--length", type=int, default=1000, help="tokens of the prompts of problems, about")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[0.9, 0.75, 0.5, 0.25], help="budgets of problems"
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt of decode")
    parser.add_argument("--budgets", type=int, nargs="*", default=[1024, 2048, 3072], help="of decode, in tokens")
    parser.add_argument("--repeat", type=int, default=10, metavar="TIMES")
    parser.add_argument("--small", action="store_true", help="a small model, and few short answers")
    add_gpu_flags(parser)
    add_setting_flag(parser)
    arguments = parser.parse_args()
    arguments.settings = dict(arguments.settings)
    arguments.steps = (8, 136)
    if arguments.small:
        arguments.device, arguments.rows, arguments.context, arguments.budgets = "cpu", 4, 128, [64]
        arguments.repeat, arguments.steps = 2, (4, 12)
    return arguments


def accuracy(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a line for each family, method and budget."""
    for family in arguments.families:
        for method, rank in {"all": by_score, **METHODS}.items():
            with (
                patch.object(branch, "PagedEviction", partial(PagedEviction, rank=rank)),
                LLM("tiny", device=arguments.device, **arguments.settings) as llm,
            ):
                for share in [1.0] if method == "all" else arguments.shares:
                    yield {"family": family, "method": method, "share": share} | score(
                        llm, arguments, family, share
                    )


def score(llm: LLM, arguments: argparse.Namespace, family: str, share: float) -> dict[str, Any]:
    """Returns how many problems of a family are right that read a share of the pages of their prompts."""
    tokenizer = Tokenizer.from_file(str(resolve("tiny").folder / "tokenizer.json"))

    def token_ids(prompt: str | Conversation) -> list[int]:
        ready = prompt_of(llm, prompt)
        return tokenizer.encode(ready).ids if isinstance(ready, str) else ready

    taken = fitting_cases(family, arguments.length, arguments.cases, token_ids)
    prompts = [token_ids(step.prompt) for step in chain.from_iterable(case.steps for case in taken)]
    budgets = [0 if share == 1 else max(32, int(share * len(prompt))) for prompt in prompts]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, kv_budget=kv_budget) for kv_budget in budgets
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    uses = [output.kv_eviction for output in outputs if output.kv_eviction is not None]
    return {
        "cases": len(taken),
        "right_pct": round(100 * count_right(taken, map(text_of, outputs)) / len(taken), 1),
        "mean_prompt_tokens": sum(map(len, prompts)) // len(prompts),
        "mean_kv_budget": sum(budgets) // len(budgets),
        "mean_skipped_tokens": sum(use.n_skipped for use in uses) // max(1, len(uses)),
        "mean_freed_tokens": sum(use.n_freed for use in uses) // max(1, len(uses)),
    }


def decode(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a line for each budget: the steps with it beside those without, in turns."""
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 32_000) for _ in range(arguments.context)] for _ in range(arguments.rows)]
    if arguments.small:
        prompts = [[token % 90 for token in prompt] for prompt in prompts]
    n_tokens = arguments.rows * (arguments.context + arguments.steps[1] + 64)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(SMALL if arguments.small else LLAMA_8B, Path(folder) / "model")
        settings = {
            "device": arguments.device,
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_total_tokens": n_tokens,
            "max_model_len": arguments.context + arguments.steps[1] + 64,
            "speculative_config": "off",
        }
        with LLM(model, **(settings | arguments.settings)) as llm:
            for kv_budget in arguments.budgets:
                pairs: list[tuple[float, float]] = []
                for repetition in range(arguments.repeat + 1):
                    pair = step_ms(llm, arguments, prompts, 0), step_ms(llm, arguments, prompts, kv_budget)
                    if repetition:  # the first one warms up, and fills the cache with the prompts
                        pairs.append(pair)
                ratios = [whole / dropped for whole, dropped in pairs]
                yield {
                    "rows": arguments.rows,
                    "context": arguments.context,
                    "kv_budget": kv_budget,
                    "settings": arguments.settings,
                    "all_ms": round(median(whole for whole, _ in pairs), 4),
                    "paged_ms": round(median(dropped for _, dropped in pairs), 4),
                    "times_as_fast": round(median(ratios), 4),
                    "quartiles": [round(one, 4) for one in quantiles(ratios, n=4)],
                    "pairs": len(pairs),
                }


def memory(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a line: long answers in a pool that holds one of them."""
    n_rows, n_tokens, kv_budget = (8, 200, 64) if arguments.small else (8, 900, 64)
    line: dict[str, Any] = {"rows": n_rows, "answer_tokens": n_tokens, "kv_budget": kv_budget}
    line["pool_tokens"] = n_tokens + 124
    for name, budget in {"all": 0, "paged": kv_budget}.items():
        settings = {
            "device": arguments.device,
            "max_total_tokens": line["pool_tokens"],
            "speculative_config": "off",
            **arguments.settings,
        }
        with LLM("tiny", **settings) as llm:
            prompts = [f"Question {row}: what is {row} plus {row}?" for row in range(n_rows)]
            sampling = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True, kv_budget=budget)
            begun = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            line[f"{name}_s"] = round(time.perf_counter() - begun, 2)
            stats = llm.get_metrics()
            line[f"{name}_preemptions"] = stats.preemptions_total
            line[f"{name}_recomputed_tokens"] = stats.recomputed_tokens_total
    yield line


def step_ms(llm: LLM, arguments: argparse.Namespace, prompts: list[list[int]], kv_budget: int) -> float:
    """Returns the milliseconds of a step of answers to all prompts."""
    seconds = []
    for n_tokens in arguments.steps:
        sampling = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True, kv_budget=kv_budget)
        begun = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
    return 1e3 * (seconds[1] - seconds[0]) / (arguments.steps[1] - arguments.steps[0])


if __name__ == "__main__":
    main()
