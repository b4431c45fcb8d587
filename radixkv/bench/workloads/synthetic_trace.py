"""A made trace: sessions whose prompts grow turn by turn, at times of their own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from radixkv.bench.workloads.datasets.mooncake import BLOCK_LEN, TraceRequest

SESSIONS_PER_S = 1.0
MEAN_PAUSE_S = 4.0
"""Between a turn and the next of its session."""
CHANCE_OF_MORE = 0.7
"""That a turn is not the last."""

INPUT_MEDIAN, INPUT_SIGMA, INPUT_MAX = 3000, 1.0, 40_000
"""Tokens of a session's first prompt: log-normal."""
TURN_MEDIAN, TURN_SIGMA, TURN_MAX = 500, 1.0, 4000
"""Tokens that a later turn adds to the answer before it."""
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX = 250, 0.8, 2000
LONGEST = 100_000
"""Tokens of a prompt; a session ends before it has more."""

SHARED_ID = 0
"""Of the block that all prompts begin with: what the assistant is told first."""


def made_trace(seed: int, n_requests: int) -> list[TraceRequest]:
    """The first requests of such sessions, by time. Cost: some 50 µs a request."""
    rng = Random(seed)
    ids = count(SHARED_ID + 1)
    requests: list[TraceRequest] = []
    start_s = 0.0
    for _ in range(n_requests):  # each has one request at least, and later sessions begin later
        requests += _session(rng, ids, start_s)
        start_s += rng.expovariate(SESSIONS_PER_S)
    return sorted(requests, key=lambda request: request.timestamp)[:n_requests]


def _session(rng: Random, ids: Iterator[int], start_s: float) -> Iterator[TraceRequest]:
    """Whole blocks keep their ids from turn to turn; the last, of fewer tokens, is another each time."""
    whole = [SHARED_ID]
    n_input = BLOCK_LEN + _length(rng, INPUT_MEDIAN, INPUT_SIGMA, INPUT_MAX)
    time_s = start_s
    while n_input <= LONGEST:
        n_output = _length(rng, OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX)
        n_whole, rest = divmod(n_input, BLOCK_LEN)
        whole += [next(ids) for _ in range(n_whole - len(whole))]
        yield TraceRequest(
            timestamp=float(round(1000 * time_s)),
            input_length=n_input,
            output_length=n_output,
            hash_ids=[*whole, next(ids)] if rest else list(whole),
        )
        if rng.random() >= CHANCE_OF_MORE:
            return
        n_input += n_output + _length(rng, TURN_MEDIAN, TURN_SIGMA, TURN_MAX)
        time_s += rng.expovariate(1 / MEAN_PAUSE_S)


def _length(rng: Random, median: int, sigma: float, most: int) -> int:
    return min(most, max(1, round(median * rng.lognormvariate(0, sigma))))
