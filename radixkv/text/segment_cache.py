"""Texts in stretches that are encoded by themselves, so that those which come again need not be.

Prompts repeat: examples, instructions, all earlier turns of a chat. Where a text may be cut without changing its
ids depends on the pattern by which the tokenizer cuts it into words; here are those for which it is known.
"""

from __future__ import annotations

import json
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_letters, digits
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NEEDS_TEXT_BEFORE = {
    # Llama 3, Qwen 2 and 3: the word that holds the end of a line goes on to the last one in a row, and no further.
    _CL100K % r"\p{N}{1,3}": False,
    _CL100K % r"\p{N}": False,
    # GPT-2: the last of several in a row is a word by itself, but only if something else follows.
    "GPT-2": True,
}
"""By the words' pattern: no word spans the place after the end of a line and before a letter or digit of ASCII, and
none looks across. Whether that holds only if the line does not end with white space."""
_FOLLOWS = frozenset(ascii_letters + digits)

MIN_CHARACTERS = 256
"""Of a stretch that another follows. Places are counted from the text's beginning, so that prefixes agree."""
SHARED_CHARACTERS = 1 << 15
"""That all processors encode before they look who else waits. Tokens take hundreds of bytes each meanwhile."""
MAX_CHARACTERS = 1 << 13
"""Of a stretch that is kept."""
MAX_KEPT_CHARACTERS = 1 << 22
"""Of all of them, a short one counted as of the least; least recently used first. Ids take about as many bytes."""


class Stretches:
    """The ids of stretches that came before. Safe to use from several threads.

    Args:
        backend: what encodes.
        needs_text_before: whether a text is cut only after lines that do not end with white space.
        around: the ids that the tokenizer adds before and after a text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, needs_text_before: bool, around: tuple[bytes, bytes]
    ) -> None:
        self._backend = backend
        self._needs_text_before = needs_text_before
        self._around = around
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, bytes] = OrderedDict()
        self._n_characters = 0

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Stretches | None:
        """None for a tokenizer of which no such places are known."""
        needs_text_before = _NEEDS_TEXT_BEFORE.get(_pattern(backend) or "")
        looks_around = any(
            "\n" in token.content or token.lstrip or token.rstrip or token.single_word
            for token in backend.get_added_tokens_decoder().values()
        )
        is_local = (
            # NFC joins no letter or digit of ASCII to what is before it.
            (backend.normalizer is None or isinstance(backend.normalizer, normalizers.NFC))
            and isinstance(backend.model, models.BPE)
            and not backend.model.dropout
            and all(backend.model.token_to_id(letter) is not None for letter in pre_tokenizers.ByteLevel.alphabet())
            and not looks_around
        )
        if needs_text_before is None or not is_local or (around := _around(backend)) is None:
            return None
        return cls(backend, needs_text_before=needs_text_before, around=around)

    def encode_all(self, texts: Sequence[str], *, adds_special_tokens: bool) -> list[bytes]:
        """The little-endian int32 ids of texts. O(length). All processors take part, for each thread in turn."""
        return self._encode(texts, adds_special_tokens, SHARED_CHARACTERS)

    def encode_here(self, text: str, *, adds_special_tokens: bool) -> bytes:
        """Those of one, by the calling thread alone. It waits for nothing that others encode."""
        # The package gives a single stretch to the thread that asks, and several to threads of its own.
        return self._encode([text], adds_special_tokens, 1)[0]

    def _encode(self, texts: Sequence[str], adds_special_tokens: bool, n_at_once: int) -> list[bytes]:
        cut = [self._stretches(text) for text in texts]
        wanted = list(dict.fromkeys(stretch for stretches in cut for stretch in stretches))
        found = self._kept(wanted)
        for new in _parts([stretch for stretch in wanted if stretch not in found], n_at_once):
            # Of the package's ways to encode only those for batches let other threads run.
            encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
            encoded = {stretch: pack(encoding.ids) for stretch, encoding in zip(new, encodings, strict=True)}
            self._keep(encoded)
            found |= encoded
        before, after = self._around if adds_special_tokens else (b"", b"")
        return [b"".join([before, *(found[stretch] for stretch in stretches), after]) for stretches in cut]

    def _stretches(self, text: str) -> list[str]:
        stretches, start = [], 0
        place = text.find("\n", MIN_CHARACTERS - 1) + 1
        while place:
            if text[place : place + 1] in _FOLLOWS and (
                not self._needs_text_before or "!" <= text[place - 2] <= "~"
            ):
                stretches.append(text[start:place])
                start = place
            place = text.find("\n", max(place, start + MIN_CHARACTERS - 1)) + 1
        return [*stretches, text[start:]]

    def _kept(self, wanted: Sequence[str]) -> dict[str, bytes]:
        with self._lock:
            found = {stretch: self._ids[stretch] for stretch in wanted if stretch in self._ids}
            for stretch in found:
                self._ids.move_to_end(stretch)
        return found

    def _keep(self, encoded: Mapping[str, bytes]) -> None:
        with self._lock:
            for stretch, ids in encoded.items():
                if len(stretch) <= MAX_CHARACTERS and stretch not in self._ids:
                    self._ids[stretch] = ids
                    self._n_characters += _counted(stretch)
            while self._n_characters > MAX_KEPT_CHARACTERS:
                oldest, _ = self._ids.popitem(last=False)
                self._n_characters -= _counted(oldest)


def _counted(stretch: str) -> int:
    # A whole text may be of one character, and its entry takes some 200 bytes nevertheless.
    return max(len(stretch), MIN_CHARACTERS)


def _parts(stretches: Sequence[str], n_at_once: int) -> Iterator[list[str]]:
    """The stretches, as many at once as have so many characters; a longer one alone."""
    part: list[str] = []
    n_characters = 0
    for stretch in stretches:
        if part and n_characters + len(stretch) > n_at_once:
            yield part
            part, n_characters = [], 0
        part.append(stretch)
        n_characters += len(stretch)
    if part:
        yield part


def pack(ids: Sequence[int]) -> bytes:
    """Little-endian int32."""
    return struct.pack(f"<{len(ids)}i", *ids)


def _around(backend: tokenizers.Tokenizer) -> tuple[bytes, bytes] | None:
    """The ids that the tokenizer adds before and after a text; None if it does anything else."""
    plain, added = (backend.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    is_added = backend.encode("a").special_tokens_mask
    start = is_added.index(0) if 0 in is_added else 0
    end = start + len(plain)
    if not plain or added[start:end] != plain or not all(is_added[:start]) or not all(is_added[end:]):
        return None
    # A template may also repeat the text, with or without what it adds.
    line, both = (backend.encode(text, add_special_tokens=False).ids for text in ("a\n", "a\na"))
    return (pack(added[:start]), pack(added[end:])) if both == line + plain else None


def _pattern(backend: tokenizers.Tokenizer) -> str | None:
    """By which a byte-level tokenizer cuts texts into words; None if it does not, or does something else, too."""
    if backend.pre_tokenizer is None:
        return None
    outer: dict[str, Any] = json.loads(backend.pre_tokenizer.__getstate__())
    match outer.get("pretokenizers", [outer]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return "GPT-2"
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
        case _:
            return None
