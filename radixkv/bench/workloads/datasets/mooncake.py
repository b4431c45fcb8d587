"""Traces of requests in Mooncake's format: when, how long, and which blocks of the prompt were seen before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from radixkv.bench.workloads.datasets.formats import TRACE
from radixkv.bench.workloads.datasets.lines import Items, read_lines

BLOCK_LEN = 512
"""Tokens that a hash id stands for; the last of a prompt may have fewer."""

MAX_LENGTH = 10_000_000
"""Tokens; no model reads or writes more."""
MAX_TIME_MS = 1e14
MAX_HASH_ID = (1 << 63) - 1


Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
HashId = Annotated[int, msgspec.Meta(ge=0, le=MAX_HASH_ID)]


class TraceRequest(msgspec.Struct, frozen=True):
    """A request of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_MS)]
    """Milliseconds since some begin."""
    input_length: Length
    """Tokens of the prompt."""
    output_length: Length
    """Tokens of the answer."""
    hash_ids: list[HashId]
    """One for each block of the prompt, in order; equal ids are equal blocks."""

    def __post_init__(self) -> None:
        n_blocks = -(-self.input_length // BLOCK_LEN)
        if len(self.hash_ids) != n_blocks:
            raise ValueError(
                f"input_length {self.input_length} makes {n_blocks} blocks of {BLOCK_LEN} tokens, but there are "
                f"{len(self.hash_ids)} hash_ids"
            )


def read_trace(path: Path, *, skip_bad_lines: bool = False) -> Items[TraceRequest]:
    """The requests of a trace, one a line, in the order of their times. Cost: some 3 µs a request.

    Raises:
        ConfigError: as ``read_lines``; lengths that cannot be, a number of hash ids that does not fit the input
            length, and a time before that of the line above count as faults.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    latest = 0.0

    def convert(line: bytes) -> TraceRequest:
        nonlocal latest
        request = decoder.decode(line)
        if request.timestamp < latest:
            raise ValueError(f"timestamp {request.timestamp:g} is before {latest:g}, that of the request above")
        latest = request.timestamp
        return request

    return read_lines(path, convert, wanted=TRACE, skip_bad_lines=skip_bad_lines)
