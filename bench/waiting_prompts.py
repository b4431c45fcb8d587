"""Measures what waiting prompts cost a turn whose step computes prompts, with recurrent states and without.

Times are processor time of the server's scheduler; steps take none. Prints a JSON line for a case and a model:
microseconds of one arrival, and milliseconds of all turns that have a row of a prompt, their median and largest.
Each turn and each arrival has its shortest time of several equal runs. As in the runtime's loop, the cyclic garbage
collector is disabled.

    fan_out     all prompts begin with one new prefix, and end with 100 tokens of their own
    groups      8 groups of prompts that begin with a prefix each
    full        one long prompt is computed, rows of answers have all other batch slots, and prompts with the same
                prefix wait
    apart       prompts have nothing in common

    python bench/waiting_prompts.py --output-file bench/results/waiting_prompts.jsonl
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from itertools import product
from random import Random
from statistics import median
from time import thread_time
from typing import Any, NamedTuple

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import Scheduler, SchedulerLimits
from radixkv.runtime.states.recurrent_states import RecurrentStates
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.tree.node import Namespace

PAGE_SIZE = 16
STEP_TOKENS = 8192
N_ROWS = 64
N_STATES = 256
TAIL_TOKENS = 100
LONG_TOKENS = 200_000
"""Of the prompt of ``full``: more than all its turns compute."""
CASES = ("fan_out", "groups", "full", "apart")


def ids(rng: Random, n_tokens: int) -> list[int]:
    return rng.choices(range(10, 32_000), k=n_tokens)


def opened(*, has_states: bool, n_rows: int) -> Scheduler:
    """Returns a scheduler over a pool that holds all prompts."""
    cache = PageCache(400_000, PAGE_SIZE, n_states=N_STATES if has_states else None)
    states = RecurrentStates.at_likely_places(cache, frozenset({2})) if has_states else None
    limits = SchedulerLimits(max_num_seqs=n_rows, max_num_batched_tokens=STEP_TOKENS, max_queued_requests=1 << 16)
    return open_scheduler(cache, limits, schedule_policy="lpm", states=states)


class Run(NamedTuple):
    """What one run of a case takes."""

    arrivals_s: list[float]
    turns_s: list[float]
    """Of the turns that have a row of a prompt."""
    n_tokens: int
    """Tokens of prompts that are computed."""
    n_waiting: int
    """Requests that still wait at the end."""


def run(case: str, *, has_states: bool, n_waiting: int, common_tokens: int, n_turns: int) -> Run:
    """Runs the first turns of a case."""
    rng = Random(1)
    prefixes = [ids(rng, common_tokens) for _ in range(8 if case == "groups" else 1)]
    scheduler = opened(has_states=has_states, n_rows=4 if case == "full" else N_ROWS)
    launched: deque[StepPlan] = deque()
    if case == "full":
        for number in range(3):
            scheduler.add(_request(ids(rng, 50), -1 - number, max_tokens=10_000))
        scheduler.add(_request(prefixes[0] + ids(rng, LONG_TOKENS), -9))
        _turn(scheduler, launched)
    arrivals_s: list[float] = []
    for number in range(n_waiting):
        prefix = ids(rng, common_tokens) if case == "apart" else prefixes[number % len(prefixes)]
        request = _request(prefix + ids(rng, TAIL_TOKENS), number)
        started = thread_time()
        scheduler.add(request)
        arrivals_s.append(thread_time() - started)
    turns = [_turn(scheduler, launched) for _ in range(n_turns)]
    turns_s = [seconds for seconds, n_tokens in turns if n_tokens]
    return Run(arrivals_s, turns_s, sum(n_tokens for _, n_tokens in turns), len(list(scheduler.waiting)))


def measure(case: str, n_runs: int, **settings: Any) -> dict[str, Any]:
    """Returns the times of one case, the shortest of so many runs."""
    runs: list[Run] = []
    for _ in range(n_runs):
        gc.collect()
        runs.append(run(case, **settings))
    arrivals_s = [min(times) for times in zip(*(one.arrivals_s for one in runs), strict=True)]
    turns_s = [min(times) for times in zip(*(one.turns_s for one in runs), strict=True)]
    return {
        "arrival_us": round(median(arrivals_s) * 1e6, 1) if arrivals_s else None,
        "turns": len(turns_s),
        "all_ms": round(sum(turns_s) * 1e3, 2),
        "median_ms": round(median(turns_s) * 1e3, 3),
        "max_ms": round(max(turns_s) * 1e3, 3),
        "prompt_tokens": runs[0].n_tokens,
        "left_waiting": runs[0].n_waiting,
    }


def _turn(scheduler: Scheduler, launched: deque[StepPlan]) -> tuple[float, int]:
    """Plans a step and takes the result of the one before; returns the seconds of planning, and the tokens of
    prompts."""
    started = thread_time()
    plan = scheduler.schedule()
    seconds = thread_time() - started
    n_tokens = 0
    if plan is not None:
        launched.append(plan)
        n_tokens = plan.n_prompt_tokens
    if launched and (plan is None or len(launched) == 2):
        oldest = launched.popleft()
        tokens = tuple(-1 if row.sampling is None else 7 for row in oldest.rows)
        scheduler.complete(oldest, StepResult(tokens, (True,) * len(oldest.rows)))
    return seconds, n_tokens


def _request(prompt: list[int], number: int, max_tokens: int = 8) -> Request:
    tokens = bytearray(array("i", prompt).tobytes())
    return Request(str(number), Namespace(), tokens, n_prompt=len(prompt), max_tokens=max_tokens)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="may occur several times; default: all")
    parser.add_argument("--model", action="append", choices=("attention", "recurrent"), help="default: both")
    parser.add_argument("--waiting", type=int, action="append", help="prompts that arrive; default: 1000")
    parser.add_argument("--common-tokens", type=int, default=16_000)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--note", help="is kept with the lines")
    arguments = parser.parse_args()
    gc.disable()
    runs = product(
        arguments.case or CASES, arguments.model or ("attention", "recurrent"), arguments.waiting or (1000,)
    )
    for case, model, n_waiting in runs:
        line = measure(
            case,
            arguments.runs,
            has_states=model == "recurrent",
            n_waiting=n_waiting,
            common_tokens=arguments.common_tokens,
            n_turns=arguments.turns,
        )
        settings = {"case": case, "model": model, "waiting": n_waiting, "common_tokens": arguments.common_tokens}
        noted = {} if arguments.note is None else {"note": arguments.note}
        report(arguments.output_file, settings | line, provenance() | noted)


if __name__ == "__main__":
    main()
