"""Agents and users who pause between turns, with and without what the server learns of their pauses.

Time is virtual. Agents call tools whose results take their time; a tenth of the calls is never answered, and
then another agent begins. Scheduler, caches and host tier are the server's. The times of steps are those of
``StepTime``, an 8B model in bfloat16 on an H200, and a token takes 2.4 µs to load from the host.
Prints a JSON line for each case and policy: prompt tokens found of all and of returning turns, the time to
first token of these, turns and output tokens a second, and how many returns found all of their conversation
on the device.

    agents         four tools: log-normal around 0.5, 3 and 30 s, and one with a heavy tail from 10 s on
    mixed          half of the sessions are users, log-normal around 10 s
    slow_tool      a tool of 30 s beside as many users and half again
    lost           half of the calls are of a tool whose results hardly ever come
    shift          two tools, one of which becomes 33 times as fast, and the other 40 times as slow
    one_tool       one tool with a wide spread: there is hardly anything to learn

``lru`` learns nothing, ``learnt`` is the server, and ``oracle`` knows when each conversation goes on. With
``--states`` the model has recurrent layers, and the cache so many of their states.

    python bench/pauses.py --output-file bench/results/pauses.jsonl
    python bench/pauses.py --case agents --host --load-us 12 --seed 11
    python bench/pauses.py --case agents --states 64
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Any, NamedTuple

from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.lab.simulator.step_time import StepTime
from radixkv.lab.simulator.virtual_time import Clock, TimedCopier
from radixkv.runtime.assemble import open_scheduler
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.pauses.pauses import Pauses
from radixkv.runtime.protocols.returns import NeededPrompt, Returns
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.states.recurrent_states import RecurrentStates
from radixkv.runtime.step.result import StepResult
from radixkv.runtime.tiers.host_tier import HostTier
from radixkv.runtime.tiers.load_choice import LoadChoice
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.tree.node import Namespace
from radixkv.wire.cache_messages import BeginPause
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams

PAGE_SIZE = 16
VOCAB = 32_000
MESSAGE_END = VOCAB
"""A token that ends a message."""
SYSTEM_TOKENS = 2000
MAX_TOKENS = 24_000
"""A conversation that has become longer ends."""
Draw = Callable[[Random], float]


def lognormal(median_s: float, sigma: float) -> Draw:
    return lambda rng: median_s * rng.lognormvariate(0.0, sigma)


class Tool(NamedTuple):
    """A kind of pause."""

    share: float
    """Of the calls."""
    seconds: Draw
    lost: float = 0.1
    """Share of the calls whose results never come."""


TOOLS = {
    "edit": Tool(0.4, lognormal(0.5, 0.5)),
    "search": Tool(0.3, lognormal(3.0, 0.6)),
    "test": Tool(0.2, lognormal(30.0, 0.5)),
    "ask": Tool(0.1, lambda rng: 10 * rng.paretovariate(1.2)),
}
USER = Tool(1.0, lognormal(10.0, 0.8))


class Case(NamedTuple):
    """Who sends requests."""

    tools: Mapping[str, Tool] = TOOLS
    users: float = 0.0
    """Share of the sessions that are those of users."""
    shift: Mapping[str, float] = {}
    """Factor of the tools' times from the middle of the run on."""


CASES = {
    "agents": Case(),
    "mixed": Case(users=0.5),
    "slow_tool": Case({"slow": Tool(1.0, lognormal(30.0, 0.4))}, 0.6),
    "lost": Case({"edit": Tool(0.5, lognormal(0.5, 0.5)), "lost": Tool(0.5, lognormal(3.0, 0.6), 0.95)}, 0.5),
    "shift": Case(
        {"slow": Tool(0.5, lognormal(30.0, 0.4)), "fast": Tool(0.5, lognormal(1.0, 0.4))},
        0.3,
        {"slow": 0.03, "fast": 40.0},
    ),
    "one_tool": Case({"tool": Tool(1.0, lognormal(7.4, 1.2))}),
}


@dataclass(eq=False)
class Session:
    """A conversation, and who goes on with it."""

    rng: Random
    tokens: array[int]
    is_user: bool
    turn: str = ""
    """Id of its last request."""
    due: float = inf
    """When it goes on."""
    namespace: Namespace = field(default_factory=Namespace)
    key: bytes = b""
    """As ``NeededPrompt``: what it goes on from, while it pauses."""


class Oracle(Returns):
    """Knows when each conversation goes on."""

    def __init__(self) -> None:
        self.paused: set[Session] = set()

    def expected(self) -> Iterator[NeededPrompt]:
        yield from sorted(self.paused, key=lambda one: one.due)


class Run:
    """A server with sessions.

    Args:
        case: the sessions.
        policy: ``lru``, ``learnt`` or ``oracle``.
        arguments: of the command line.
        open_pauses: makes what learns, of the device's cache and a clock.
    """

    def __init__(
        self,
        case: Case,
        policy: str,
        arguments: argparse.Namespace,
        open_pauses: Callable[[PageCache, Callable[[], float]], Pauses] = Pauses,
    ) -> None:
        self.case = case
        self.rng = Random(arguments.seed)
        self.clock = Clock()
        self.times = StepTime()
        self.seconds = arguments.seconds
        self.cache = PageCache(
            arguments.pool_tokens // PAGE_SIZE,
            PAGE_SIZE,
            n_states=arguments.states or None,
            clock=lambda: self.clock.now,
        )
        self.oracle = Oracle() if policy == "oracle" else None
        self.pauses = open_pauses(self.cache, self.clock) if policy == "learnt" else None
        self.caches = [self.cache]
        host_tier = None
        if arguments.host:
            load_s, n_measured, cost = arguments.load_us / 1e6, 1 << 14, LoadCost()
            cost.add_load(n_measured, n_measured * load_s)
            cost.add_step(n_measured, n_measured, n_measured * self.times.prompt_token_s)
            copier = TimedCopier(self.clock, 2 << 20, PAGE_SIZE * load_s)
            host = PageCache(4 * self.cache.n_pages, PAGE_SIZE, n_states=4 * arguments.states or None)
            host_tier = HostTier(self.cache, host, copier, choice=LoadChoice(cost=cost))
            self.caches.append(host)
        limits = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_queued_requests=1 << 20)
        states = None
        if arguments.states:
            states = RecurrentStates.at_likely_places(self.cache, frozenset({MESSAGE_END}))
        self.scheduler = open_scheduler(
            self.cache,
            limits,
            host_tier=host_tier,
            states=states,
            returns=self.pauses or self.oracle,
            clock=lambda: self.clock.now,
        )
        self.system = self._tokens(self.rng, SYSTEM_TOKENS)
        self.serials = count()
        self.arrivals: list[tuple[float, int, Session]] = []
        self.running: dict[Request, tuple[Session, float, bool]] = {}
        """Session and time of arrival of each request, and whether it is a returning turn."""
        self.n_prompt = self.n_found = self.n_prompt_returning = self.n_found_returning = 0
        self.n_output = self.n_turns = 0
        self.ttft: list[float] = []

    def measure(self, n_sessions: int) -> dict[str, Any]:
        for _ in range(n_sessions):
            self._begin(self.rng.uniform(0, 40))
        warm_s = self.seconds / 4
        while self.clock.now < self.seconds:
            while self.arrivals and self.arrivals[0][0] <= self.clock.now:
                at, _, session = heappop(self.arrivals)
                self._submit(session, at)
            plan = self.scheduler.schedule()
            if plan is None:
                next_end = self.clock.next_end()
                ends = [self.arrivals[0][0] if self.arrivals else inf, inf if next_end is None else next_end]
                self.clock.now = max(self.clock.now + 1e-4, min(ends))
                continue
            self.clock.now += self.times.seconds(plan.n_prompt_tokens, len(plan.rows))
            rows = zip(plan.rows, self.scheduler.launched_plans[0].requests, strict=True)
            tokens = tuple(-1 if row.sampling is None else self._next_token(request) for row, request in rows)
            for update in self.scheduler.complete(plan, StepResult(tokens, (True,) * len(tokens))):
                request = update.request
                if request.n_outputs == len(update.tokens) and self.clock.now > warm_s:
                    self._count_first(request)
                if update.finish_reason is not None:
                    self.n_turns += self.clock.now > warm_s
                    self.n_output += request.n_outputs if self.clock.now > warm_s else 0
                    self._end(request)
        self.scheduler.check()
        return self._line(self.seconds - warm_s)

    def _begin(self, at: float) -> None:
        rng = Random(self.rng.random())
        tokens = self.system + self._tokens(rng, rng.randint(2000, 6000))
        session = Session(rng, tokens, rng.random() < self.case.users)
        heappush(self.arrivals, (at, next(self.serials), session))

    def _submit(self, session: Session, at: float) -> None:
        if is_returning := bool(session.turn):
            session.tokens += self._tokens(session.rng, session.rng.randint(100, 1500))
        name, session.key = str(next(self.serials)), b""
        request = Request(
            id=name,
            namespace=session.namespace,
            known_key=bytearray(session.tokens.tobytes()),
            n_prompt=len(session.tokens),
            max_tokens=session.rng.randint(40, 250),
            received_at=at,
        )
        if self.pauses is not None:
            submit = Submit(name, b"", SamplingParams(), may_pause=True, resumes=session.turn)
            request.observers = (self.pauses.follow(submit, [request]),)
        if self.oracle is not None:
            self.oracle.paused.discard(session)
        session.turn = name
        self.running[request] = session, at, is_returning
        self.scheduler.add(request)

    def _count_first(self, request: Request) -> None:
        _, at, is_returning = self.running[request]
        use = request.cache_use.counted
        assert use is not None, "the prompt is computed"
        self.n_prompt += request.n_prompt
        self.n_found += use.n_cached
        if is_returning:
            self.n_prompt_returning += request.n_prompt
            self.n_found_returning += use.n_cached
            self.ttft.append(self.clock.now - at)

    def _end(self, request: Request) -> None:
        session, _, _ = self.running.pop(request)
        self.scheduler.tiers.ended((request,))
        session.tokens = array("i", bytes(request.known_key))
        if len(session.tokens) > MAX_TOKENS:
            self._begin(self.clock.now + session.rng.uniform(0, 2))
            return
        name, tool = "", USER
        if not session.is_user:
            tools = self.case.tools
            (name,) = session.rng.choices(list(tools), [tool.share for tool in tools.values()])
            tool = tools[name]
        pause_s = tool.seconds(session.rng)
        if self.clock.now > self.seconds / 2:
            pause_s *= self.case.shift.get(name, 1.0)
        is_lost = session.rng.random() < tool.lost
        session.due, session.key = inf if is_lost else self.clock.now + pause_s, bytes(request.known_key)
        if self.pauses is not None:
            for observer in request.observers:
                observer.ended([request], is_prompt_computed=True)
            self.pauses.begin(BeginPause("", request.id, (name,) if name else ()))
        if is_lost:
            self._begin(self.clock.now + session.rng.expovariate(1 / 20))
        else:
            heappush(self.arrivals, (session.due, next(self.serials), session))
            if self.oracle is not None:
                self.oracle.paused.add(session)

    def _line(self, seconds: float) -> dict[str, Any]:
        ttft = sorted(self.ttft)
        percentiles = {f"ttft_{name}_s": ttft[int(part * len(ttft))] for name, part in QUANTILES.items()}
        line: dict[str, Any] = {
            "found_pct": round(100 * self.n_found / self.n_prompt, 2),
            "found_returning_pct": round(100 * self.n_found_returning / self.n_prompt_returning, 2),
            **{name: round(value, 4) for name, value in percentiles.items()},
            "returning_turns": len(ttft),
            "turns_per_s": round(self.n_turns / seconds, 3),
            "output_tokens_per_s": round(self.n_output / seconds, 1),
        }
        if self.pauses is not None:
            stats = self.pauses.stats()
            line |= {
                "returns": stats.returns_total,
                "returns_on_device": stats.returns_on_device_total,
                "given_up": stats.given_up_total,
            }
        return line

    def _next_token(self, request: Request) -> int:
        return hash((request.id, len(request.known_key))) % VOCAB

    @staticmethod
    def _tokens(rng: Random, n_tokens: int) -> array[int]:
        """Returns the tokens of a message."""
        tokens = array("i", [rng.randrange(VOCAB) for _ in range(n_tokens)])
        tokens[-1] = MESSAGE_END
        return tokens


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="may occur several times; default: all"
    )
    parser.add_argument("--policy", action="append", choices=("lru", "learnt", "oracle"), help="default: all")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument(
        "--pool-tokens", type=int, default=400_000, help="about two thirds of what the sessions have"
    )
    parser.add_argument("--states", type=int, default=0, help="of recurrent layers; 0: there are none")
    parser.add_argument("--host", action="store_true", help="with a host tier of four times the pool")
    parser.add_argument("--load-us", type=float, default=2.4, help="time to load a token from the host")
    parser.add_argument("--seconds", type=float, default=400.0, help="of virtual time; a quarter is warm-up")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    names = ("sessions", "pool_tokens", "states", "host", "load_us", "seconds", "seed")
    settings = {name: vars(arguments)[name] for name in names}
    for name in arguments.case or CASES:
        for policy in arguments.policy or ("lru", "learnt", "oracle"):
            line = Run(CASES[name], policy, arguments).measure(arguments.sessions)
            report(arguments.output_file, {"case": name, "policy": policy, **line}, {**settings, **provenance()})


if __name__ == "__main__":
    main()
