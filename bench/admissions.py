"""Compares admission by expected answers with admission by reserved tokens, in virtual time, without a device.

The production scheduler runs requests whose answers have given lengths. The time of a step is that of an 8B model
in bfloat16 on an H200 (``bench/results/preemption.jsonl``). The pool has 65,536 tokens, unless a case says
otherwise, so that answers fill it. Prints one JSON line for each case and admission: preemptions, the tokens
computed again for them, answer tokens a second until everything has ended, time to first token, the longest pause
within an answer, and the processor time of a call of ``Scheduler.schedule``.

    decode, burst         256 answers of 512 tokens at once, whose lengths are known; prompts of 64 and 100 tokens
    bursts                three bursts as before, of answers that a token ends
    storm, storm_ends     answers of 500 to 1,500 tokens, more than the pool can serve; known lengths or not
    at_once               768 answers of 512 tokens that a token ends: all of a wave end at once
    bimodal               one answer of seven has 1,500 tokens, the others 20
    longer, shorter       lengths change suddenly, from 40 to 1,200 or back
    alternate             they change every 200 requests, between 1,000 and 40
    short                 ``max_tokens`` is 16,000, and answers have 50 to 150
    huge                  one request of 60 has 6,000 tokens, which is known
    spread                lengths are log-normal, with a median of 200
    prompts               long prompts, answers of 50 to 600
    chats                 the first requests of the trace --chats, in a pool of 524,288 tokens
    agents                the runs of --agents, each turn after the one before it, in a pool of 131,072 tokens

    python bench/admissions.py --output-file bench/results/admissions.jsonl
    python bench/admissions.py --case decode --case burst
"""

from __future__ import annotations

import gc
import json
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, get_args

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.lab.simulator.step_time import H200_8B
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.headroom.session_answers import SessionAnswer
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.step.plan import StepPlan
from radixkv.runtime.step.result import StepResult
from radixkv.settings.config import AdmissionPolicy
from radixkv.tree.node import TOKEN_BYTES, Namespace

PAGE_SIZE = 16
POOL_TOKENS = 65_536
LIMITS = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_queued_requests=1 << 20)
END = 1
"""The token that ends an answer."""
FIRST_TOKEN = 10
VOCAB = 30_000


class Turn(NamedTuple):
    """A request."""

    prompt: bytes
    n_answer: int
    max_tokens: int
    can_end: bool = True
    """Whether a token ends the answer; else ``max_tokens`` does."""


class Session(NamedTuple):
    """Requests, each of which arrives when the one before it has ended."""

    start_s: float
    turns: Sequence[Turn]


class Case(NamedTuple):
    """What arrives, and the size of the pool."""

    sessions: list[Session]
    pool_tokens: int = POOL_TOKENS


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="a case to run; default: all")
    parser.add_argument("--chats", type=Path, metavar="FILE", help="a Mooncake trace")
    parser.add_argument("--agents", type=Path, metavar="FILE", help="JSON lines with the messages of a run each")
    arguments = parser.parse_args()
    for name in arguments.case or CASES:
        file = {"chats": arguments.chats, "agents": arguments.agents}.get(name)
        if name in ("chats", "agents") and file is None:
            if arguments.case:
                parser.error(f"--case {name} needs --{name} FILE")
            continue
        for admission in get_args(AdmissionPolicy):
            case = CASES[name](Random(1), file)
            gc.collect()
            gc.disable()
            line = simulate(case, admission)
            gc.enable()
            metrics = {"bench": "admissions", "case": name, "admission": admission, **line}
            report(arguments.output_file, metrics, {"pool_tokens": case.pool_tokens, **provenance()})


def simulate(case: Case, admission: AdmissionPolicy) -> dict[str, Any]:
    """Runs a case to its end."""
    now = 0.0
    cache = PageCache(case.pool_tokens // PAGE_SIZE, PAGE_SIZE)
    scheduler = open_scheduler(cache, LIMITS, admission=admission, clock=lambda: now)
    numbers = count()
    todo: list[tuple[float, int, Session, int]] = []
    for session in case.sessions:
        heappush(todo, (session.start_s, next(numbers), session, 0))
    turn_of: dict[Request, tuple[Session, int]] = {}
    first: dict[Request, float] = {}
    last: dict[Request, float] = {}
    pause: dict[Request, float] = {}
    pending: deque[StepPlan] = deque()
    n_steps = n_rows = n_output = 0
    schedule_s: list[float] = []
    while todo or pending or not scheduler.is_idle:
        while todo and todo[0][0] <= now:
            start_s, number, session, index = heappop(todo)
            turn = session.turns[index]
            request = Request(
                id=str(number),
                namespace=Namespace(),
                known_key=bytearray(turn.prompt),
                n_prompt=len(turn.prompt) // TOKEN_BYTES,
                max_tokens=turn.max_tokens,
                received_at=start_s,
                stop_token_ids=frozenset([END] if turn.can_end else []),
            )
            if len(session.turns) > 1:
                request.observers = (SessionAnswer((request.namespace, str(id(session)))),)
            turn_of[request] = session, index
            scheduler.add(request)
        begun = time.process_time()
        plan = scheduler.schedule()
        schedule_s.append(time.process_time() - begun)
        if plan is not None:
            pending.append(plan)
            n_steps += 1
            n_rows += len(plan.rows)
            now += H200_8B.of_plan(plan)
        elif not pending:
            now = todo[0][0]
            continue
        if len(pending) > 1 or plan is None:
            done = pending.popleft()
            requests = scheduler.launched_plans[0].requests
            tokens = tuple(next_token(request, *turn_of[request]) for request in requests)
            for update in scheduler.complete(done, StepResult(tokens, (True,) * len(tokens))):
                request = update.request
                n_output += len(update.tokens)
                pause[request] = max(pause.get(request, 0.0), now - last.get(request, now))
                first.setdefault(request, now - request.received_at)
                last[request] = now
                session, index = turn_of[request]
                if update.finish_reason is not None and index + 1 < len(session.turns):
                    heappush(todo, (now, next(numbers), session, index + 1))
    scheduler.check()
    return {
        "preemptions": scheduler.n_preemptions,
        "recomputed_tokens": scheduler.n_recomputed_tokens,
        "duration": round(now, 2),
        "output_tokens_per_s": round(n_output / now, 1),
        **_percentiles("ttft_s", list(first.values())),
        **_percentiles("pause_s", list(pause.values())),
        "steps": n_steps,
        "rows_per_step": round(n_rows / n_steps, 1),
        "schedule_us": round(sum(schedule_s) / len(schedule_s) * 1e6, 1),
    }


def next_token(request: Request, session: Session, index: int) -> int:
    """Returns what the model samples: the last token of an answer ends it, all others are arbitrary."""
    place = len(request.known_key) // TOKEN_BYTES - request.n_prompt
    turn = session.turns[index]
    if turn.can_end and place + 1 >= turn.n_answer:
        return END
    return FIRST_TOKEN + (request.serial * 7919 + place * 31) % (VOCAB - FIRST_TOKEN)


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    values.sort()
    picks = {"p50": len(values) // 2, "p90": len(values) * 9 // 10, "p99": len(values) * 99 // 100}
    return {f"{name}_{pick}": round(values[index], 3) for pick, index in picks.items()}


def _prompt(random: Random, n_tokens: int) -> bytes:
    return array("i", [random.randrange(FIRST_TOKEN, VOCAB) for _ in range(n_tokens)]).tobytes()


def _one(start_s: float, prompt: bytes, n_answer: int, max_tokens: int | None = None) -> Session:
    """Returns a session of one request; without ``max_tokens`` the length of its answer is known."""
    return Session(start_s, [Turn(prompt, n_answer, max_tokens or n_answer, can_end=max_tokens is not None)])


def _decode(random: Random, _: Path | None) -> Case:
    return Case([_one(0, _prompt(random, 64), 512) for _ in range(256)])


def _burst(random: Random, _: Path | None) -> Case:
    return Case([_one(0, _prompt(random, 100), 512) for _ in range(256)])


def _bursts(random: Random, _: Path | None) -> Case:
    return Case([_one(12 * burst, _prompt(random, 100), 512, 2048) for burst in range(3) for _ in range(256)])


def _storm(random: Random, _: Path | None, max_tokens: int | None = None) -> Case:
    times = (random.uniform(0, 300 / 14) for _ in range(300))
    return Case(
        [_one(t, _prompt(random, random.randint(250, 750)), random.randint(500, 1500), max_tokens) for t in times]
    )


def _storm_ends(random: Random, _: Path | None) -> Case:
    return _storm(random, None, 4096)


def _at_once(random: Random, _: Path | None) -> Case:
    return Case([_one(0, _prompt(random, 100), 512, 4096) for _ in range(768)])


def _changing(rate: float, n_requests: int, length: Callable[[int], int]) -> Callable[[Random, Path | None], Case]:
    """Makes a case in which request number i arrives after i / rate seconds."""

    def make(random: Random, _: Path | None) -> Case:
        return Case([_one(i / rate, _prompt(random, 100), length(i), 4096) for i in range(n_requests)])

    return make


def _short(random: Random, _: Path | None) -> Case:
    return Case([_one(0, _prompt(random, 200), random.randint(50, 150), 16_000) for _ in range(2000)])


def _huge(random: Random, _: Path | None) -> Case:
    return Case([_one(i / 60, _prompt(random, 100), 6000 if i % 60 == 30 else 150) for i in range(1200)])


def _spread(random: Random, _: Path | None) -> Case:
    lengths = [max(1, min(4000, int(random.lognormvariate(5.3, 1.1)))) for _ in range(1000)]
    return Case([_one(0, _prompt(random, random.randint(50, 800)), length, 4096) for length in lengths])


def _prompts(random: Random, _: Path | None) -> Case:
    return Case(
        [
            _one(i / 8, _prompt(random, random.randint(1000, 5000)), random.randint(50, 600), 2048)
            for i in range(300)
        ]
    )


def _chats(_: Random, file: Path | None) -> Case:
    assert file is not None
    sessions = []
    with file.open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(400), strict=False):
            one = json.loads(line)
            tokens = array("i")
            for block in one["hash_ids"]:
                tokens.extend(FIRST_TOKEN + (block * 7919 + place) % VOCAB for place in range(512))
            prompt = tokens[: one["input_length"]].tobytes()
            sessions.append(_one(one["timestamp"] / 8000, prompt, one["output_length"], 4096))
    return Case(sessions, 524_288)


def _agents(_: Random, file: Path | None) -> Case:
    assert file is not None
    with file.open(encoding="utf-8") as lines:
        runs = [json.loads(line)["messages"] for line in lines]
    return Case([Session(0, list(_turns(messages))) for messages in runs], 131_072)


def _turns(messages: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """Yields a run's turns, in which four characters are a token."""
    history = array("i")
    for message in messages:
        text = str(message.get("content") or "") + str(message.get("tool_calls") or "")
        quarters = [text[start : start + 4].encode() for start in range(0, len(text), 4)]
        tokens = [FIRST_TOKEN + int.from_bytes(quarter[:4], "little") % VOCAB for quarter in quarters]
        if message["role"] == "assistant" and tokens:
            yield Turn(history.tobytes(), len(tokens), 4096)
        history.extend(tokens)


CASES: dict[str, Callable[[Random, Path | None], Case]] = {
    "decode": _decode,
    "burst": _burst,
    "bursts": _bursts,
    "storm": _storm,
    "storm_ends": _storm_ends,
    "at_once": _at_once,
    "bimodal": _changing(60, 1200, lambda i: 1500 if i * 7919 % 7 == 0 else 20),
    "longer": _changing(50, 700, lambda i: 40 if i < 400 else 1200),
    "shorter": _changing(40, 1500, lambda i: 1200 if i < 300 else 40),
    "alternate": _changing(30, 1000, lambda i: 40 if i // 200 % 2 else 1000),
    "short": _short,
    "huge": _huge,
    "spread": _spread,
    "prompts": _prompts,
    "chats": _chats,
    "agents": _agents,
}


if __name__ == "__main__":
    main()
