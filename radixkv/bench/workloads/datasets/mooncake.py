"""Reading of traces in Mooncake's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from radixkv.bench.workloads.datasets.formats import TRACE
from radixkv.bench.workloads.datasets.lines import Items, read_lines

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
