"""Traces in Mooncake's format, read from a file or generated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from radixkv.lab.bench.workloads.datasets import TRACE, Items, read_lines

BLOCK_LEN = 512
"""Tokens in the block of a hash id; the last block of a prompt may have fewer."""

MAX_LENGTH = 10_000_000
"""Maximum tokens of a prompt or an answer, above those of any model."""
MAX_TIME_MS = 1e14
MAX_HASH_ID = (1 << 63) - 1


Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
HashId = Annotated[int, msgspec.Meta(ge=0, le=MAX_HASH_ID)]


class TraceRequest(msgspec.Struct, frozen=True):
    """A request of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_MS)]
    """Arrival in milliseconds, since an unspecified start."""
    input_length: Length
    """Tokens of the prompt."""
    output_length: Length
    """Tokens of the answer."""
    hash_ids: list[HashId]
    """The id of each block of the prompt, in order; equal ids stand for equal blocks."""

    def __post_init__(self) -> None:
        n_blocks = -(-self.input_length // BLOCK_LEN)
        if len(self.hash_ids) != n_blocks:
            raise ValueError(
                f"input_length {self.input_length} makes {n_blocks} blocks of {BLOCK_LEN} tokens, but there are "
                f"{len(self.hash_ids)} hash_ids"
            )


def read_trace(path: Path, *, skip_bad_lines: bool = False) -> Items[TraceRequest]:
    """Reads the requests of a trace, one in a line, in the order of their times. Cost: about 3 µs a request.

    Raises:
        ConfigError: as ``read_lines``; a line is also bad if a length is out of range, the number of hash ids does
            not fit the input length, or its time is before that of the previous line.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    latest = 0.0

    def convert(line: bytes) -> TraceRequest:
        nonlocal latest
        request = decoder.decode(line)
        if request.timestamp < latest:
            raise ValueError(f"timestamp {request.timestamp:g} is before {latest:g}, that of the previous request")
        latest = request.timestamp
        return request

    return read_lines(path, convert, expected=TRACE, skip_bad_lines=skip_bad_lines)


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
