"""Generator of traces of sessions whose prompts grow turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from radixkv.bench.workloads.datasets.mooncake import BLOCK_LEN, TraceRequest

SESSIONS_PER_S = 1.0
MEAN_PAUSE_S = 4.0
"""Mean time between two turns of a session."""
P_NEXT_TURN = 0.7
"""Probability that a turn is not the last."""

INPUT_MEDIAN, INPUT_SIGMA, INPUT_MAX = 3000, 1.0, 40_000
"""Tokens of a session's first prompt, log-normal."""
TURN_MEDIAN, TURN_SIGMA, TURN_MAX = 500, 1.0, 4000
"""Tokens that a later turn adds after the previous answer, log-normal."""
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX = 250, 0.8, 2000
"""Tokens of an answer, log-normal."""
MAX_PROMPT_LEN = 100_000
"""Maximum tokens of a prompt; a session ends before it has more."""

SHARED_ID = 0
"""Id of the block that all prompts begin with, which stands for a system prompt."""


def generate_trace(seed: int, n_requests: int) -> list[TraceRequest]:
    """Returns the first ``n_requests`` requests of the sessions, by time. Cost: about 50 µs a request."""
    rng = Random(seed)
    ids = count(SHARED_ID + 1)
    requests: list[TraceRequest] = []
    start_s = 0.0
    for _ in range(n_requests):  # enough sessions, since each has a request and later sessions start later
        requests += _session(rng, ids, start_s)
        start_s += rng.expovariate(SESSIONS_PER_S)
    return sorted(requests, key=lambda request: request.timestamp)[:n_requests]


def _session(rng: Random, ids: Iterator[int], start_s: float) -> Iterator[TraceRequest]:
    """Yields the requests of a session.

    Full blocks keep their ids from turn to turn; a last block that is not full gets a new id in each turn.
    """
    full_ids = [SHARED_ID]
    n_input = BLOCK_LEN + _length(rng, INPUT_MEDIAN, INPUT_SIGMA, INPUT_MAX)
    time_s = start_s
    while n_input <= MAX_PROMPT_LEN:
        n_output = _length(rng, OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MAX)
        n_full, remainder = divmod(n_input, BLOCK_LEN)
        full_ids += [next(ids) for _ in range(n_full - len(full_ids))]
        yield TraceRequest(
            timestamp=float(round(1000 * time_s)),
            input_length=n_input,
            output_length=n_output,
            hash_ids=[*full_ids, next(ids)] if remainder else list(full_ids),
        )
        if rng.random() >= P_NEXT_TURN:
            return
        n_input += n_output + _length(rng, TURN_MEDIAN, TURN_SIGMA, TURN_MAX)
        time_s += rng.expovariate(1 / MEAN_PAUSE_S)


def _length(rng: Random, median: int, sigma: float, maximum: int) -> int:
    return min(maximum, max(1, round(median * rng.lognormvariate(0, sigma))))
