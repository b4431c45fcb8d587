"""What the beams of a search share, and what a search costs beside as many sampled answers, by the embedded model.

The prompts are problems of arithmetic, alone and after three worked examples, and the answers have ``--output-len``
tokens. One kind of line has the pages that searches of ``--widths`` hold, summed over all steps: with shared pages,
and in an engine whose beams have pages of their own. Both engines find the same beams. The second kind has
the entries of block tables that each step of decode rows sends to the device, where all searches run at once, and
how many of these steps have more entries than a decode graph on CUDA takes. The third kind has the times of
searches and of as many sampled answers (``n``), of the same prompts and lengths, which alternate.

    python bench/beams.py --output-file bench/results/beams.jsonl
    python bench/beams.py --prompts 2 --output-len 8 --pairs 1
    python bench/beams.py --case table_entries
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from result_lines import report, script_parser

from gpu import gpu_provenance
from radixkv import LLM, SamplingParams
from radixkv.checkpoints import resolve
from radixkv.lab.bench.workloads.arithmetic import generate_problems
from radixkv.lab.bench.workloads.problems import question_prompt, worked_examples
from radixkv.runtime.device.cuda.persistent_batch import RowFields
from radixkv.runtime.device.memory.cuda.staging import StagingLayout
from radixkv.runtime.device.pack import PackedStep, Packer
from radixkv.runtime.loop import Loop
from radixkv.runtime.open_loop import build_loop
from radixkv.runtime.step.plan import StepPlan
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_messages import Flush
from radixkv.wire.messages import Done, GetStats, Submit, Tokens
from radixkv.wire.stats import Stats

N_EXAMPLES = 3
POOL_TOKENS = 1 << 17
CASES = ("pages", "table_entries", "time")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="a kind of line; default: all")
    parser.add_argument("--commit", help="the commit that is checked out, if there is no .git folder")
    parser.add_argument("--prompts", type=int, default=16, metavar="COUNT")
    parser.add_argument("--output-len", type=int, default=96, metavar="TOKENS")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--page-size", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--pairs", type=int, default=9, help="runs of a search and of sampling")
    arguments = parser.parse_args()
    about = {"model": "tiny", "page_size": arguments.page_size, **gpu_provenance("cpu", arguments.commit)}
    for line in lines(arguments):
        report(arguments.output_file, line, about)


def lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the result lines."""
    cases, kinds = arguments.case or CASES, prompts_of(arguments.prompts)
    of_each_search = {"pages": pages, "table_entries": table_entries}
    for case in [case for case in of_each_search if case in cases]:
        for kind, prompts in kinds.items():
            for width in arguments.widths:
                yield {"case": case, "prompts": kind, **of_each_search[case](prompts, width, arguments)}
    if "time" in cases:
        llm = LLM(device="cpu", max_total_tokens=POOL_TOKENS, page_size=arguments.page_size)
        for kind, prompts in kinds.items():
            for width in arguments.widths:
                yield {"case": "time", "prompts": kind, **times(llm, prompts, width, arguments)}


def prompts_of(count: int) -> dict[str, list[str]]:
    """Returns the prompts by kind."""
    problems = list(islice(generate_problems(0), N_EXAMPLES + count))
    examples, asked = worked_examples(problems[:N_EXAMPLES]), problems[N_EXAMPLES:]
    return {
        "problems": [question_prompt(problem) for problem in asked],
        "examples and problems": [examples + question_prompt(problem) for problem in asked],
    }


def search(width: int, n_tokens: int) -> SamplingParams:
    return SamplingParams(n=width, max_tokens=n_tokens, use_beam_search=True, ignore_eos=True)


def pages(prompts: Sequence[str], width: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the pages that one search after another holds, with shared pages and with each beam's own."""
    tokenizer = Tokenizer.load(resolve("tiny").folder)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    held: dict[bool, int] = {}
    answers: dict[bool, list[bytes]] = {}
    for shares in (True, False):
        cache = CacheConfig(
            page_size=arguments.page_size, max_total_tokens=POOL_TOKENS, enable_prefix_caching=shares
        )
        loop = build_loop(
            EngineConfig(ModelConfig("tiny", device="cpu"), cache, SchedulerConfig()), resolve("tiny")
        )
        held[shares], answers[shares] = 0, []
        for index, prompt in enumerate(encoded):
            loop.receive(Submit(str(index), prompt, search(width, arguments.output_len)))
            held[shares] += pages_held(loop, answers[shares])
            loop.receive(Flush("flush"))
        loop.close()
    assert answers[True] == answers[False], "the engines find different beams"
    return {
        "width": width,
        "mean_prompt_tokens": sum(map(len, encoded)) // 4 // len(encoded),
        "output_len": arguments.output_len,
        "page_steps_shared": held[True],
        "page_steps_own": held[False],
        "saved_pct": round(100 * (1 - held[True] / held[False]), 1),
    }


def pages_held(loop: Loop, answers: list[bytes]) -> int:
    """Runs a request to its end; returns the sum over all steps of the pages that requests hold."""
    n_held = 0
    while loop.has_work:
        n_steps = stats_of(loop).steps_total
        for message in loop.turn():
            if isinstance(message, Tokens):
                answers += [item.tokens for item in message.items]
            assert isinstance(message, Tokens | Done), f"the search failed: {message}"
        stats = stats_of(loop)
        if stats.steps_total > n_steps:
            n_held += stats.n_pages - stats.n_pages_free - stats.n_pages_evictable
    return n_held


def stats_of(loop: Loop) -> Stats:
    (stats,) = loop.receive(GetStats("stats"))
    assert isinstance(stats, Stats)
    return stats


def table_entries(prompts: Sequence[str], width: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the changed block table entries of steps of decode rows, with a row for each beam of all searches."""
    n_rows = width * len(prompts)
    llm = LLM(device="cpu", max_num_seqs=n_rows, max_total_tokens=POOL_TOKENS, page_size=arguments.page_size)
    fields = RowFields(n_rows, StagingLayout())
    counts: list[int] = []
    over_limit: list[bool] = []
    pack = Packer.pack

    def counting(self: Packer, plan: StepPlan) -> PackedStep:
        step = pack(self, plan)
        if step.n_decode == step.n_rows:
            counts.append(len(step.updates))
            over_limit.append(not fields.fits_updates(step))
        return step

    with patch.object(Packer, "pack", counting):
        llm.generate(prompts, search(width, arguments.output_len), use_tqdm=False)
    return {
        "width": width,
        "n_prompts": len(prompts),
        "output_len": arguments.output_len,
        "steps": len(counts),
        "mean_entries": round(mean(counts), 1),
        "median_entries": median(counts),
        "max_entries": max(counts),
        "graph_limit": fields.updates.size,
        "steps_over_limit": sum(over_limit),
    }


def times(llm: LLM, prompts: Sequence[str], width: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the times of searches and of sampled answers in turn, all prompts at once, the cache empty before."""
    sampled = SamplingParams(n=width, max_tokens=arguments.output_len, ignore_eos=True, seed=0)
    kinds = {"beams": search(width, arguments.output_len), "sampled": sampled}
    durations: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(arguments.pairs + 1):
        for kind in list(kinds) if number % 2 else reversed(kinds):
            llm.flush_cache()
            begun = time.perf_counter()
            llm.generate(prompts, kinds[kind], use_tqdm=False)
            if number:  # the first pair warms up
                durations[kind].append(round(time.perf_counter() - begun, 4))
    ratios = [beams / others for beams, others in zip(durations["beams"], durations["sampled"], strict=True)]
    return {
        "width": width,
        "n_prompts": len(prompts),
        "output_len": arguments.output_len,
        "durations": durations,
        "median_ratio": round(median(ratios), 3),
    }


if __name__ == "__main__":
    main()
