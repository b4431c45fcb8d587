"""Agents that compact their histories and abandon sub-agents, with and without what clients say of their branches.

Time is virtual, as in ``pauses.py``. An agent calls tools, and sub-agents, for which it waits. A sub-agent has a
prompt of its own and calls tools for some turns. A fourth of the sub-agents is abandoned: the last answer calls a
tool, and the agent goes on without its result. When an agent's history is long, the agent asks for a summary, and
goes on from that in a new history. All prompts of an agent and its sub-agents have one ``prompt_cache_key``.

Prints a JSON line for each case, policy and size of the pool: prompt tokens found, the time to first token of
returning turns, turns and output tokens a second, and what became of the pauses.

    lru            learns nothing
    learnt         the server: it learns pauses
    told           also, each conversation is a session, which is closed when it is over
    keys           no sessions: the prototype in ``keyed_pauses.py`` learns which branches of a key are over

With ``--case``, the conversations are those of ``pauses.py``, which have no branches, and keys say nothing:

    one_key        the prototype, where all prompts have the same key
    own_keys       the prototype, where each conversation has a key of its own

    python bench/branches.py --output-file bench/results/branches.jsonl
    python bench/branches.py --case agents --case lost --seed 11 --output-file bench/results/branches.jsonl
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heappush
from random import Random
from typing import Any

from keyed_pauses import KeyedPauses
from pauses import CASES, SYSTEM_TOKENS, TOOLS, Case, Run, Session
from result_lines import report, script_parser

from radixkv.lab.bench.environment import provenance
from radixkv.runtime.lifetimes.sessions import Sessions
from radixkv.runtime.pauses.pauses import Pauses
from radixkv.runtime.request import Request
from radixkv.wire.cache_messages import BeginPause
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams

COMPACT_TOKENS = 16_000
"""Length of a history from which on it is compacted."""
SUBAGENT_SHARE = 0.15
"""Of an agent's turns that call a sub-agent."""
ABANDONED_SHARE = 0.25
"""Of the sub-agents."""
MAX_COMPACTIONS = 3
"""After so many an agent ends, and another one begins."""
POLICIES = ("lru", "learnt", "told", "keys")
KEYS = ("one_key", "own_keys")


@dataclass(eq=False)
class Branch(Session):
    """A conversation of an agent or a sub-agent."""

    id: str = ""
    cache_key: str = ""
    parent: Branch | None = None
    """The agent that waits for this sub-agent."""
    n_left: int = 0
    """Turns that a sub-agent still has."""
    n_compactions: int = 0
    is_summing_up: bool = False
    """Whether the last prompt asked for a summary."""
    is_over: bool = False
    """Whether no other prompt follows, neither from the last answer nor in a new history."""


class BranchRun(Run):
    """A server with such agents.

    Args:
        policy: one of ``POLICIES``.
        arguments: of the command line.
    """

    def __init__(self, policy: str, arguments: argparse.Namespace) -> None:
        self.keys: dict[str, str] = {}
        """The ``prompt_cache_key`` of each request."""
        open_pauses = partial(KeyedPauses, key_of=lambda message: self.keys[message.id])
        learns = "lru" if policy == "lru" else "learnt"
        super().__init__(Case(), learns, arguments, open_pauses if policy == "keys" else Pauses)
        self.sessions = Sessions(self.caches) if policy == "told" else None
        self.subagent_system = self._tokens(self.rng, SYSTEM_TOKENS)

    def _begin(self, at: float) -> None:
        rng, name = Random(self.rng.random()), str(next(self.serials))
        tokens = self.system + self._tokens(rng, rng.randint(1000, 4000))
        heappush(self.arrivals, (at, next(self.serials), Branch(rng, tokens, False, id=name, cache_key=name)))

    def _submit(self, session: Session, at: float) -> None:
        assert isinstance(session, Branch)
        if is_returning := bool(session.turn):
            session.tokens += self._tokens(session.rng, session.rng.randint(100, 1500))
        name = str(next(self.serials))
        request = Request(
            id=name,
            namespace=session.namespace,
            known_key=bytearray(session.tokens.tobytes()),
            n_prompt=len(session.tokens),
            max_tokens=session.rng.randint(40, 250) + 600 * session.is_summing_up,
            received_at=at,
        )
        session_id = "" if self.sessions is None else session.id
        self.keys[name] = session.cache_key
        submit = Submit(name, b"", SamplingParams(), may_pause=True, resumes=session.turn, session_id=session_id)
        followers = [one.follow(submit, [request]) for one in (self.sessions, self.pauses) if one is not None]
        request.observers = tuple(one for one in followers if one is not None)
        session.turn = name
        self.running[request] = session, at, is_returning
        self.scheduler.add(request)

    def _end(self, request: Request) -> None:
        branch, _, _ = self.running.pop(request)
        assert isinstance(branch, Branch)
        self.scheduler.tiers.ended((request,))
        branch.tokens = array("i", bytes(request.known_key))
        tools = tuple(self._go_on(branch, request))
        if self.pauses is not None:
            for observer in request.observers:
                observer.ended([request], is_prompt_computed=True)
            self.pauses.begin(BeginPause("", request.id, tools))
        if self.sessions is not None and branch.is_over:
            assert self.pauses is not None
            self.pauses.close_session(branch.namespace, branch.id)
            self.sessions.close(branch.namespace, branch.id)

    def _go_on(self, branch: Branch, request: Request) -> Iterator[str]:
        """Decides how an agent goes on after an answer, and yields the tools that this has called."""
        rng, now = branch.rng, self.clock.now
        if branch.parent is not None:
            branch.n_left -= 1
            if not branch.n_left:
                branch.is_over = True
                heappush(self.arrivals, (now + rng.uniform(0.1, 0.5), next(self.serials), branch.parent))
                if rng.random() < ABANDONED_SHARE:
                    yield "search"
                return
        elif branch.is_summing_up:
            summary = branch.tokens[request.n_prompt :]
            branch.tokens = self.system + summary + self._tokens(rng, 500)
            branch.turn, branch.is_summing_up = "", False
            branch.n_compactions += 1
            if branch.n_compactions == MAX_COMPACTIONS:
                branch.is_over = True
                self._begin(now + rng.uniform(0, 2))
            else:
                heappush(self.arrivals, (now + 0.1, next(self.serials), branch))
            return
        elif len(branch.tokens) > COMPACT_TOKENS:
            branch.is_summing_up = True
        elif rng.random() < SUBAGENT_SHARE:
            yield "agent"
            heappush(self.arrivals, (now + 0.1, next(self.serials), self._subagent(branch)))
            return
        (name,) = rng.choices(list(TOOLS), [tool.share for tool in TOOLS.values()])
        yield name
        heappush(self.arrivals, (now + TOOLS[name].seconds(rng), next(self.serials), branch))

    def _subagent(self, parent: Branch) -> Branch:
        rng = parent.rng
        tokens = self.subagent_system + self._tokens(rng, rng.randint(500, 2000))
        name, n_turns = str(next(self.serials)), rng.randint(3, 8)
        return Branch(rng, tokens, False, id=name, cache_key=parent.cache_key, parent=parent, n_left=n_turns)


def own_keys() -> Callable[[Submit], str]:
    """Returns what gives each conversation a key of its own: the id of its first request."""
    keys: dict[str, str] = {}

    def key_of(message: Submit) -> str:
        keys[message.id] = keys.get(message.resumes, message.id)
        return keys[message.id]

    return key_of


def run_case(name: str, policy: str, arguments: argparse.Namespace) -> Run:
    """Returns a run of ``pauses.py``, whose conversations have no branches."""
    if policy not in KEYS:
        return Run(CASES[name], policy, arguments)
    key_of = own_keys() if policy == "own_keys" else (lambda message: "one")
    return Run(CASES[name], "learnt", arguments, partial(KeyedPauses, key_of=key_of))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: agents with branches")
    parser.add_argument("--policy", action="append", choices=(*POLICIES, *KEYS), help="default: all of the case")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument(
        "--pool-tokens", type=int, action="append", help="default: 200,000 and 300,000; with --case 400,000"
    )
    parser.add_argument("--host", action="store_true", help="with a host tier of four times the pool")
    parser.add_argument("--load-us", type=float, default=2.4, help="time to load a token from the host")
    parser.add_argument("--seconds", type=float, default=400.0, help="of virtual time; a quarter is warm-up")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.states = 0
    names = ("sessions", "pool_tokens", "host", "load_us", "seconds", "seed")
    is_case = bool(arguments.case)
    policies = arguments.policy or (("learnt", *KEYS) if is_case else POLICIES)
    pools = arguments.pool_tokens or ((400_000,) if is_case else (200_000, 300_000))
    for case in arguments.case or ("branches",):
        for arguments.pool_tokens in pools:
            settings = {name: vars(arguments)[name] for name in names}
            for policy in policies:
                run = run_case(case, policy, arguments) if is_case else BranchRun(policy, arguments)
                line: dict[str, Any] = {"case": case, "policy": policy, **run.measure(arguments.sessions)}
                report(arguments.output_file, line, {**settings, **provenance()})


if __name__ == "__main__":
    main()
