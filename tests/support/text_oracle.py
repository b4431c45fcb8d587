"""Oracle of an answer's text: ``tokenizer.decode`` of all ids, except for runs with invalid single-byte tokens."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterator, Sequence

from radixkv.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def each_byte(error: UnicodeError) -> tuple[str, int]:
    """Decodes every invalid byte to U+FFFD; Python's "replace" gives one U+FFFD for a whole truncated character."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("each byte", each_byte)


def expected_text(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Returns the text of the ids; valid characters of a run of single-byte tokens survive its invalid bytes."""
    runs = split_runs(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    tokens = [token for run in runs for token in repair_run(tokenizer, run)]
    return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


def split_runs(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> Iterator[list[int]]:
    """Yields the ids in runs of only single-byte or only other tokens; tokens that ``decode`` skips are dropped."""
    byte_of = bytes_by_token(tokenizer)
    tokens = [token for token in ids if tokenizer.token(token, skip_special_tokens=skip_special_tokens) is not None]
    for _, run in itertools.groupby(tokens, lambda token: token in byte_of):
        yield list(run)


def repair_run(tokenizer: Tokenizer, run: list[int]) -> list[int]:
    """Returns the run with U+FFFD for its invalid bytes, if it has both invalid bytes and characters."""
    byte_of = bytes_by_token(tokenizer)
    if run[0] not in byte_of:
        return run
    text = bytes(byte_of[token] for token in run).decode(errors="each byte")
    if REPLACEMENT not in text or not text.strip(REPLACEMENT):
        return run
    by_byte = {byte: token for token, byte in byte_of.items()}
    return [by_byte[byte] for byte in text.encode()]


def bytes_by_token(tokenizer: Tokenizer) -> dict[int, int]:
    """Returns the byte of each single-byte token; empty if the tokenizer's decoder does not treat them as bytes."""
    bytes_of = {}
    for token in range(tokenizer.vocab_size):
        name = re.fullmatch(r"<0x(..)>", tokenizer.token(token) or "")
        if name:
            bytes_of[token] = int(name[1], 16)
    is_bytes = any(tokenizer.decode([token]) == "A" for token, byte in bytes_of.items() if byte == ord("A"))
    return bytes_of if is_bytes else {}
