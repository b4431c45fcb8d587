"""How long the host takes to schedule a step of 256 rows while 10,000 requests wait.

Appends one JSON line a case. The scheduler, the cache and the tree are the real ones; no device runs, each step's
result is made up at once. As in the runtime's loop, the cyclic collector is off.

    decode_only         every slot is taken: 256 rows continue, nobody can be admitted
    admit_by_prefix     a row ends in each step, and `lpm` chooses its successor from the 256 oldest of the queue,
                        whose prompts share one of 8 prefixes of 2,048 tokens
    blocked_by_memory   slots are free, but the pool is full: the queue is ranked and nobody fits
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from array import array
from collections.abc import Callable
from datetime import date
from pathlib import Path
from random import Random
from statistics import median

from radixkv.bench.environment import environment
from radixkv.config import SchedulerConfig
from radixkv.runtime.cache import PageCache
from radixkv.runtime.plan import StepPlan, StepResult
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler import Scheduler
from radixkv.tree.node import Namespace

PAGE_SIZE = 16
PREFIX_TOKENS = 2048
QUESTION_TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-file", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    cases: dict[str, Callable[[int, int], Scheduler]] = {
        "decode_only": decode_only,
        "admit_by_prefix": admit_by_prefix,
        "blocked_by_memory": blocked_by_memory,
    }
    with arguments.output_file.open("a", encoding="utf-8") as output:
        for name, make in cases.items():
            gc.collect()
            gc.disable()
            times_ms = measure(make(arguments.rows, arguments.waiting), arguments.steps)
            gc.enable()
            line = {
                "case": name,
                "rows": arguments.rows,
                "waiting": arguments.waiting,
                "ms_per_step": round(median(times_ms), 4),
                "p99_ms": round(sorted(times_ms)[int(len(times_ms) * 0.99)], 4),
                "max_ms": round(max(times_ms), 4),
                "steps": arguments.steps,
                "date": date.today().isoformat(),
                "environment": environment(),
            }
            print(json.dumps({key: line[key] for key in ("case", "ms_per_step", "p99_ms", "max_ms")}))
            output.write(json.dumps(line) + "\n")


def decode_only(n_rows: int, n_waiting: int) -> Scheduler:
    return _filled(n_rows, n_waiting, n_pages=60_000, max_tokens=1_000)


def admit_by_prefix(n_rows: int, n_waiting: int) -> Scheduler:
    return _filled(n_rows, n_waiting, n_pages=60_000, max_tokens=256, staggered=True)


def blocked_by_memory(n_rows: int, n_waiting: int) -> Scheduler:
    n_shared, n_own = 8 * PREFIX_TOKENS // PAGE_SIZE, QUESTION_TOKENS // PAGE_SIZE + 64
    return _filled(n_rows, n_waiting, n_pages=n_shared + n_rows * n_own, max_tokens=1_000, n_slots=n_rows + 64)


def measure(scheduler: Scheduler, n_steps: int) -> list[float]:
    """Milliseconds of ``schedule`` in each step."""
    times_ms = []
    for _ in range(n_steps):
        begun = time.perf_counter()
        plan = scheduler.schedule()
        times_ms.append((time.perf_counter() - begun) * 1e3)
        assert plan is not None
        scheduler.complete(plan, _result(plan))
    return times_ms


def _filled(
    n_rows: int,
    n_waiting: int,
    *,
    n_pages: int,
    max_tokens: int,
    staggered: bool = False,
    n_slots: int | None = None,
) -> Scheduler:
    rng = Random(1)
    prefixes = [[rng.randrange(10, 30_000) for _ in range(PREFIX_TOKENS)] for _ in range(8)]
    config = SchedulerConfig(
        max_num_seqs=n_slots or n_rows, max_num_batched_tokens=2048, max_queued_requests=n_rows + n_waiting
    )
    scheduler = Scheduler(PageCache(n_pages, PAGE_SIZE), config)
    for number in range(n_rows + n_waiting):
        prompt = prefixes[number % 8] + [rng.randrange(10, 30_000) for _ in range(QUESTION_TOKENS)]
        n_output = 1 + number % max_tokens if staggered else max_tokens
        scheduler.add(
            Request(
                id=str(number),
                namespace=Namespace(),
                tokens=bytearray(array("i", prompt).tobytes()),
                n_prompt=len(prompt),
                max_tokens=n_output,
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
