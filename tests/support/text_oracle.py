"""What an answer's text must be: ``tokenizer.decode`` of all ids, with the one case where it is not."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterator, Sequence

from radixkv.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def each_byte(error: UnicodeError) -> tuple[str, int]:
    """Python itself gives one U+FFFD for the whole beginning of a character."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("each byte", each_byte)


def answer_text(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Where a run of single-byte tokens has characters and bad bytes, the characters stay characters."""
    cut = runs(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    shown = [token for run in cut for token in mended(tokenizer, run)]
    return tokenizer.decode(shown, skip_special_tokens=skip_special_tokens)


def runs(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> Iterator[list[int]]:
    """The ids, cut where runs of single-byte tokens begin and end; what ``decode`` skips ends no run."""
    names = byte_names(tokenizer)
    shown = [token for token in ids if tokenizer.token(token, skip_special_tokens=skip_special_tokens) is not None]
    for _, run in itertools.groupby(shown, lambda token: token in names):
        yield list(run)


def mended(tokenizer: Tokenizer, run: list[int]) -> list[int]:
    """The run with U+FFFD for its bad bytes, if it has both these and characters."""
    names = byte_names(tokenizer)
    if run[0] not in names:
        return run
    text = bytes(names[token] for token in run).decode(errors="each byte")
    if REPLACEMENT not in text or not text.strip(REPLACEMENT):
        return run
    by_byte = {byte: token for token, byte in names.items()}
    return [by_byte[byte] for byte in text.encode()]


def byte_names(tokenizer: Tokenizer) -> dict[int, int]:
    """The byte of each single-byte token, where the tokenizer's decoder takes them as bytes."""
    found = {}
    for token in range(tokenizer.vocab_size):
        name = re.fullmatch(r"<0x(..)>", tokenizer.token(token) or "")
        if name:
            found[token] = int(name[1], 16)
    is_bytes = any(tokenizer.decode([token]) == "A" for token, byte in found.items() if byte == ord("A"))
    return found if is_bytes else {}
