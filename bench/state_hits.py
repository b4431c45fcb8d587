"""Hit rates of a hybrid model's cache beside those of an oracle with a state at each multiple of 64 tokens.

Replays ``fewshot``, ``multiturn`` and ``agents`` of token_workloads.py on the production scheduler and cache,
without a model. Memory is counted in tokens of KV: a share of it is for states, each of which takes as much as
some tokens. The oracle has the same pages, and room for all states. In ``multiturn`` and ``agents`` each segment
ends a message. Chats are replayed twice: each next turn repeats the answer before it, or has another text in its
place, as where a template leaves reasoning out. The other workloads repeat no answer.

Appends one JSON line for each workload, kind of answers and size of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, product
from random import Random
from typing import Any

import token_workloads
from result_lines import report, script_parser
from token_workloads import Phases

from radixkv.lab.bench.environment import provenance
from radixkv.lab.simulator.all_places import AllPlaces
from radixkv.lab.simulator.answers import RecordedAnswers
from radixkv.lab.simulator.caches import CacheSettings
from radixkv.lab.simulator.stepped_engine import SteppedEngine
from radixkv.lab.simulator.traffic import TokenTraffic
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.scheduler.scheduler import SchedulerLimits
from radixkv.runtime.states.recurrent_states import RecurrentStates
from radixkv.wire.messages import pack_tokens

PAGE_SIZE = 16
MESSAGE_END = 2
"""An id that the workloads do not use otherwise."""
LIMITS = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_queued_requests=4096)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--memory", default="200000,400000,800000", help="in tokens (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.2, help="of the memory for states (default: %(default)s)")
    parser.add_argument(
        "--state-tokens",
        type=int,
        default=1568,
        help="tokens whose KV takes as much as a state (default: %(default)s, of Qwen3.5-9B's shape)",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the workloads' sizes (default: %(default)s)")
    arguments = parser.parse_args()
    replays = (("fewshot", False), ("multiturn", False), ("multiturn", True), ("agents", False))
    for (name, repeats), memory in product(replays, map(int, arguments.memory.split(","))):
        phases = workload(name, arguments.scale)
        line = measure(name, phases, memory, arguments.share, arguments.state_tokens, repeats=repeats)
        report(arguments.output_file, line, provenance())


def workload(name: str, scale: float) -> Phases:
    """Returns a workload. Where it has messages, each segment ends with ``MESSAGE_END``."""
    count = {"fewshot": ("requests", 1024), "multiturn": ("sessions", 128), "agents": ("tasks", 64)}[name]
    make_ids = token_workloads._ids

    def segment(rng: Random, n: int) -> list[int]:
        return [*make_ids(rng, n)[:-1], MESSAGE_END]

    try:
        if name != "fewshot":
            token_workloads._ids = segment
        return token_workloads.ALL[name](**{count[0]: max(1, round(count[1] * scale))})
    finally:
        token_workloads._ids = make_ids


def measure(
    name: str, phases: Phases, memory: int, share: float, state_tokens: int, *, repeats: bool
) -> dict[str, Any]:
    """Returns the line of one workload and size of the memory."""
    n_states = int(memory * share) // state_tokens
    n_pages = (memory - n_states * state_tokens) // PAGE_SIZE
    kept = hit_rate_pct(phases, n_pages, n_states, likely_states, repeats=repeats)
    oracle = hit_rate_pct(phases, n_pages, n_pages, all_states, repeats=repeats)
    return {
        "case": "state_hits",
        "workload": name,
        "repeats_answers": repeats,
        "requests": sum(map(len, phases)),
        "memory_tokens": memory,
        "states": n_states,
        "pages": n_pages,
        "hit_rate_pct": round(kept, 2),
        "oracle_pct": round(oracle, 2),
        "of_oracle_pct": round(100 * kept / oracle, 2) if oracle else None,
    }


class OtherAnswers:
    """Answers that no prompt repeats.

    Args:
        lengths: tokens of each prompt's answer.
    """

    are_limited = True

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self._starts = list(accumulate(lengths, initial=token_workloads.VOCAB))

    def symbols(self, index: int) -> bytes:
        """See ``Answers.symbols``."""
        return pack_tokens(range(self._starts[index], self._starts[index + 1]))


def likely_states(cache: PageCache) -> RecurrentStates:
    """Returns what keeps states as an engine does."""
    return RecurrentStates.at_likely_places(cache, frozenset({MESSAGE_END}))


def all_states(cache: PageCache) -> RecurrentStates:
    """Returns the oracle."""
    assert cache.recurrent_states is not None
    return RecurrentStates(cache, AllPlaces(cache.recurrent_states.block_tokens))


def hit_rate_pct(
    phases: Phases,
    n_pages: int,
    n_states: int,
    make_states: Callable[[PageCache], RecurrentStates],
    *,
    repeats: bool,
) -> float:
    """Returns the cached tokens of a replay in percent of the prompts' tokens."""
    requests = [request for phase in phases for request in phase]
    traffic = TokenTraffic([pack_tokens(prompt) for prompt, _ in requests], PAGE_SIZE)
    lengths = [n_new for _, n_new in requests]
    answers = RecordedAnswers(traffic, lengths, are_limited=True) if repeats else OtherAnswers(lengths)
    engine = SteppedEngine(traffic, CacheSettings(n_pages, n_states=n_states), LIMITS, answers, make_states)
    index = n_cached = 0
    for phase in phases:
        for _ in phase:
            engine.send(index)
            index += 1
        while engine.n_in_flight:
            n_cached += sum(use.n_cached for _, use in engine.step().ended)
    return 100 * n_cached / sum(len(prompt) for prompt, _ in requests)


if __name__ == "__main__":
    main()
