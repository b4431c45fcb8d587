"""Measures the host time to schedule a step of 256 rows while 10,000 requests wait.

Appends one JSON line per case. Scheduler, cache and tree are the real ones. No device runs: step results are
generated at once. Times are processor time, except in `generate`. As in the runtime's loop, the cyclic garbage
collector is disabled.

    decode_only         all batch slots are taken: 256 decode rows, and no request can be admitted
    admit_by_prefix     a request finishes in each step, and `lpm` chooses its successor from the 256 oldest waiting
                        requests, whose prompts share one of 8 prefixes of 2,048 tokens
    churn               admit_by_prefix with the search for pages that rows share, as for a GPU: the rows change in
                        each step; also reports the milliseconds of the search, and its share of all
    blocked_by_memory   batch slots are free, but the pool is full: the queue is ranked and no request fits
    floors              admit_by_prefix with tenants that have half of the pages as floors, and half of the rows
    generate            all of `LLM.generate` around such a device: 128 tokens for each row, from prompts of 512
                        token ids; also reports the total time per token

With ``--tenants`` the requests are those of so many tenants, each with prefixes of its own.

With ``--workloads-file`` (in the format of ``bench/engine.py``) runs its workloads instead, from an empty cache,
with the pool and the limits of an H200. Reports milliseconds of the cache, and of the scheduler including the
cache, best of five runs.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from random import Random
from statistics import median
from unittest.mock import patch

from result_lines import report, script_parser
from token_workloads import Phases, load_workloads

from radixkv.lab.bench.environment import provenance
from radixkv.lab.studies.paging.timed import TimedPageCache
from radixkv.llm import LLM
from radixkv.runtime.assemble import assemble_loop, open_scheduler, page_quotas
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.loop import Loop
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import Scheduler, SchedulerLimits
from radixkv.runtime.scheduler.shared_prefixes import SharedPrefixes
from radixkv.runtime.step.executor import PageOrigin
from radixkv.runtime.step.plan import SharedRun, StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.settings.tenants import OPERATOR, TenantConfig
from radixkv.tree.node import Namespace
from radixkv.wire.messages import FromRuntime
from radixkv.wire.sampling import SamplingParams

PAGE_SIZE = 16
PREFIX_TOKENS = 2048
QUESTION_TOKENS = 96
N_PROMPT = 512
N_OUTPUT = 128
H200_PAGES = 55_357
"""Pages of an H200's pool beside the weights of an 8B model."""


def main() -> None:
    parser = script_parser(__doc__, requires_output_file=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tenants", type=int, default=0, help="tenants of the server (default: 0, none)")
    parser.add_argument("--case", action="append", choices=[*CASES, "generate"], help="a case to run; default: all")
    parser.add_argument(
        "--workloads-file", type=Path, help="Python file with ALL: name -> function that returns phases"
    )
    arguments = parser.parse_args()
    metrics: dict[str, object]
    if arguments.workloads_file is not None:
        for name, make_phases in load_workloads(arguments.workloads_file).items():
            phases = make_phases()
            cache_s, schedule_s, n_steps = min(run_workload(phases) for _ in range(5))
            metrics = {
                "case": name,
                "cache_ms": round(cache_s * 1e3, 2),
                "schedule_ms": round(schedule_s * 1e3, 2),
            }
            metrics |= {"steps": n_steps}
            report(arguments.output_file, metrics, provenance())
        return
    for name in arguments.case or [*CASES, "generate"]:
        metrics = {"case": name, "rows": arguments.rows}
        if name == "generate":
            times_ms, wall_s = generate(arguments.rows)
            metrics["us_per_token"] = round(wall_s * 1e6 / (arguments.rows * N_OUTPUT), 2)
        else:
            gc.collect()
            gc.disable()
            scheduler = CASES[name](arguments.rows, arguments.waiting, arguments.tenants)
            with timed_search() as search_ms:
                times_ms = measure(scheduler, arguments.steps)
            gc.enable()
            if search_ms:
                metrics["shared_runs_ms"] = round(median(search_ms), 4)
                metrics["shared_runs_pct"] = round(100 * sum(search_ms) / sum(times_ms), 1)
            metrics |= {"waiting": arguments.waiting, "tenants": arguments.tenants}
        metrics |= {
            "ms_per_step": round(median(times_ms), 4),
            "us_per_row": round(median(times_ms) * 1e3 / arguments.rows, 3),
            "p99_ms": round(sorted(times_ms)[int(len(times_ms) * 0.99)], 4),
            "max_ms": round(max(times_ms), 4),
            "steps": len(times_ms),
        }
        report(arguments.output_file, metrics, provenance())


def decode_only(n_rows: int, n_waiting: int, n_tenants: int) -> Scheduler:
    return _scheduler_with_requests(n_rows, n_waiting, n_tenants, max_tokens=1_000)


def admit_by_prefix(n_rows: int, n_waiting: int, n_tenants: int) -> Scheduler:
    return _scheduler_with_requests(n_rows, n_waiting, n_tenants, max_tokens=256, staggered=True)


def churn(n_rows: int, n_waiting: int, n_tenants: int) -> Scheduler:
    return _scheduler_with_requests(
        n_rows, n_waiting, n_tenants, max_tokens=256, staggered=True, finds_shared_runs=True
    )


def blocked_by_memory(n_rows: int, n_waiting: int, n_tenants: int) -> Scheduler:
    n_shared = lcm(8, max(1, n_tenants)) * PREFIX_TOKENS // PAGE_SIZE
    n_own = QUESTION_TOKENS // PAGE_SIZE + 64
    return _scheduler_with_requests(
        n_rows,
        n_waiting,
        n_tenants,
        n_pages=n_shared + n_rows * n_own,
        max_tokens=1_000,
        n_batch_slots=n_rows + 64,
    )


def floors(n_rows: int, n_waiting: int, n_tenants: int) -> Scheduler:
    share = 0.5 / max(1, n_tenants)
    return _scheduler_with_requests(
        n_rows, n_waiting, n_tenants, max_tokens=256, staggered=True, min_page_share=share, min_row_share=share
    )


CASES: dict[str, Callable[[int, int, int], Scheduler]] = {
    "decode_only": decode_only,
    "admit_by_prefix": admit_by_prefix,
    "churn": churn,
    "blocked_by_memory": blocked_by_memory,
    "floors": floors,
}


def generate(n_rows: int) -> tuple[list[float], float]:
    """Returns the milliseconds of each turn in which every row gained a token, and the total seconds."""
    sizes = {"max_num_seqs": n_rows, "max_num_batched_tokens": 8192, "max_total_tokens": 1024}
    llm = LLM("tiny", device="cpu", speculative_config="off", **sizes)
    vocab_size = llm._open_loop.ready.vocab_size
    device = NullDevice(n_rows * (N_PROMPT + N_OUTPUT) // PAGE_SIZE + 1, vocab_size)
    cache = PageCache(device.n_pages, PAGE_SIZE)
    scheduler = open_scheduler(
        cache, SchedulerLimits(max_num_seqs=n_rows, max_num_batched_tokens=8192), finds_shared_runs=True
    )
    llm._loop = loop = assemble_loop(scheduler, device, max_model_len=N_PROMPT + N_OUTPUT)
    turns = timed_turns(loop, device)
    rng = Random(1)
    prompts = [[rng.randrange(10, vocab_size) for _ in range(N_PROMPT)] for _ in range(n_rows)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=N_OUTPUT), use_tqdm=False)
    wall_s = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == N_OUTPUT for output in outputs)
    return [ms for ms, rows in turns if rows == n_rows], wall_s


def timed_turns(loop: Loop, device: NullDevice) -> list[tuple[float, int]]:
    """Returns a list that gets the milliseconds between turns, which include the caller's work, and the rows of the
    plan before."""
    turn, turns, last_turn_at = loop.turn, [], 0.0

    def timed() -> list[FromRuntime]:
        nonlocal last_turn_at
        elapsed_s, last_turn_at = time.perf_counter() - last_turn_at, time.perf_counter()
        turns.append((elapsed_s * 1e3, device.n_rows))
        return turn()

    loop.turn = timed
    return turns


class NullDevice:
    """A device that computes nothing and returns random tokens at once."""

    device = dtype = kv_dtype = "none"
    n_ranks = 1
    n_states = window_pool = adapters = None
    has_windows = False
    uses_shared_runs = True
    is_asynchronous = True
    splits_drafts = False
    window = None
    page_origin = PageOrigin("none", "none", "none", "none", "")

    def __init__(self, n_pages: int, vocab_size: int) -> None:
        self.n_pages = n_pages
        self.vocab_size = vocab_size
        self.n_rows = 0
        """Rows of the last plan that sample a token."""
        self._rng = Random(2)
        self._tokens = [self._rng.randrange(10, vocab_size) for _ in range(1 << 16)]

    def check(self) -> None:
        """Does nothing: there is no device to lose."""

    def close(self) -> None:
        """Does nothing: there is no memory to free."""

    def launch(self, plan: StepPlan) -> NullStep:
        self.n_rows = sum(row.sampling is not None for row in plan.rows)
        n_sampled = len(plan.rows) + plan.n_drafts
        start = self._rng.randrange(len(self._tokens) - n_sampled)
        return NullStep(StepResult(tuple(self._tokens[start : start + n_sampled]), (True,) * len(plan.rows)))


@dataclass
class NullStep:
    """A step that is done."""

    outcome: StepResult
    is_done: bool = True

    def sample(self, masks: None) -> NullStep:
        return self

    def result(self) -> StepResult:
        return self.outcome


@contextmanager
def timed_search() -> Iterator[list[float]]:
    """Yields a list that gets the milliseconds of every search for shared runs."""
    times_ms: list[float] = []
    find = SharedPrefixes.find

    def timed(self: SharedPrefixes, requests: Sequence[Request]) -> tuple[tuple[SharedRun, ...], int]:
        started = time.thread_time()
        runs = find(self, requests)
        times_ms.append((time.thread_time() - started) * 1e3)
        return runs

    with patch.object(SharedPrefixes, "find", timed):
        yield times_ms


def measure(scheduler: Scheduler, n_steps: int) -> list[float]:
    """Returns the milliseconds of processor time of ``schedule`` in each step."""
    times_ms = []
    for _ in range(n_steps):
        started = time.thread_time()
        plan = scheduler.schedule()
        times_ms.append((time.thread_time() - started) * 1e3)
        assert plan is not None
        scheduler.complete(plan, _result(plan))
    return times_ms


def run_workload(phases: Phases) -> tuple[float, float, int]:
    """Runs the phases; returns the cache's seconds, the scheduler's seconds including the cache, and the steps.

    All requests of a phase wait at its start. As in the runtime's loop, a step is launched before the previous
    step's result is taken.
    """
    cache = TimedPageCache(H200_PAGES, PAGE_SIZE)
    scheduler = open_scheduler(
        cache, SchedulerLimits(max_num_seqs=512, max_num_batched_tokens=8192), finds_shared_runs=True
    )
    seconds, n_steps = 0.0, 0
    launched: deque[StepPlan] = deque()
    gc.collect()
    gc.disable()
    for phase in phases:
        for number, (prompt, n_new) in enumerate(phase):
            tokens = bytearray(array("i", prompt).tobytes())
            scheduler.add(Request(str(number), Namespace(), tokens, n_prompt=len(prompt), max_tokens=n_new))
        while not scheduler.is_idle:
            started = time.perf_counter()
            plan = scheduler.schedule()
            seconds += time.perf_counter() - started
            if plan is not None:
                launched.append(plan)
                n_steps += 1
            if len(launched) > 1 or (plan is None and launched):
                oldest = launched.popleft()
                result = _result(oldest)
                started = time.perf_counter()
                scheduler.complete(oldest, result)
                seconds += time.perf_counter() - started
    gc.enable()
    return cache.seconds, seconds, n_steps


def _scheduler_with_requests(
    n_rows: int,
    n_waiting: int,
    n_tenants: int,
    *,
    n_pages: int = 60_000,
    max_tokens: int,
    staggered: bool = False,
    n_batch_slots: int | None = None,
    finds_shared_runs: bool = False,
    **shares: float,
) -> Scheduler:
    rng = Random(1)
    prefixes = [[rng.randrange(10, 30_000) for _ in range(PREFIX_TOKENS)] for _ in range(8)]
    tenants = [TenantConfig(f"t{number}", **shares) for number in range(n_tenants)]
    limits = SchedulerLimits(
        max_num_seqs=n_batch_slots or n_rows,
        max_num_batched_tokens=2048,
        max_queued_requests=n_rows + n_waiting,
    )
    scheduler = open_scheduler(
        PageCache(n_pages, PAGE_SIZE, page_quotas=page_quotas(tenants)),
        limits,
        finds_shared_runs=finds_shared_runs,
        tenants=tenants,
    )
    for number in range(n_rows + n_waiting):
        prompt = prefixes[number % 8] + [rng.randrange(10, 30_000) for _ in range(QUESTION_TOKENS)]
        n_output = 1 + number % max_tokens if staggered else max_tokens
        tenant = tenants[number % n_tenants].name if tenants else OPERATOR
        scheduler.add(
            Request(
                id=str(number),
                namespace=Namespace(tenant),
                known_key=bytearray(array("i", prompt).tobytes()),
                n_prompt=len(prompt),
                max_tokens=n_output,
                sender=tenant,
            )
        )
        if number == n_rows - 1:
            while scheduler.waiting:
                plan = scheduler.schedule()
                assert plan is not None
                scheduler.complete(plan, _result(plan))
    return scheduler


def _result(plan: StepPlan) -> StepResult:
    n_rows = len(plan.rows)
    return StepResult(tuple(-1 if row.sampling is None else 7 for row in plan.rows), (True,) * n_rows)


if __name__ == "__main__":
    main()
