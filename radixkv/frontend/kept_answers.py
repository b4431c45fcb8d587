"""The token ids of answers, for the next turns of their conversations.

A chat template renders an earlier answer as text, and a tokenizer may choose other tokens for it than the model
wrote. The prompt would then differ from what is cached. So tokens of answers are kept, and stand in later prompts
where the same text stands at the same place.

A *segment* is a text up to the end of an end-of-sequence token. The *place* of a segment is a digest of the cache
salt, of the adapter and of all text before it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from radixkv.frontend.in_flight import TokenDelta
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import unpack_tokens
from radixkv.wire.namespace import CacheNamespace

MAX_KEPT_BYTES = 1 << 26
"""Most memory of kept answers. A token takes 4 bytes and its text about as many, so these are some eight million
tokens: more than the KV pool of one GPU has, and the tokens of an answer without KV save little."""
_ENTRY_BYTES = 256
"""About the memory of an entry beside its text and its tokens."""
_DECODED_BYTES = 1 << 10
"""Bytes of tokens that are decoded together. Each alone would take several times as long."""
_REASONING = "<think>"
"""A prompt may begin the reasoning of an answer, which templates leave out of the history."""


@dataclass(frozen=True, slots=True)
class History:
    """A rendered conversation, with the tokens of its segments that are kept answers."""

    pieces: list[str | bytes]
    """In order: texts to encode one by one, and kept tokens as little-endian int32."""
    place: bytes
    """Digest of the sequence before ``rest``, under which an answer that follows is kept."""
    rest: str
    """The text after the last end-of-sequence token."""
    separator: int | None
    """The last end-of-sequence token; None without one."""
    n_same: int
    """Segments that are answers of this server."""
    n_otherwise: int
    """Other segments at whose place this server gave an answer."""
    turn: str
    """Id of the request whose answer stood last at the last of these places, also where answers before it stand
    without their reasoning now; empty if there is none."""

    @property
    def has_kept_tokens(self) -> bool:
        """Whether any tokens are known."""
        return any(isinstance(piece, bytes) for piece in self.pieces)


class _Found(NamedTuple):
    """What is kept of the answers at the place of a segment."""

    tokens: bytes | None
    """Of the answer whose text the segment is; None if it is none of them."""
    turn: str
    """The id of that answer's request, else of the latest answer's."""
    header: str
    """What stood before the latest answer in its segment."""
    as_written: str | None
    """The latest answer, if the segment is that without its beginning, such as its reasoning."""


class KeptAnswers:
    """An LRU cache of answers' tokens by conversation. Thread-safe.

    The tokens of a segment are found only for exactly its text. What stands before it is compared by a digest: if
    two digests were equal by chance, a prompt would still say what the client wrote, in other tokens.

    Args:
        tokenizer: of the model; ``Tokenizer.separators`` says at which tokens texts may be cut.
        separators: end-of-sequence tokens at which texts are cut, id by text; at least one.
        max_bytes: most memory; the least recently used answers are dropped first.
    """

    def __init__(
        self, tokenizer: Tokenizer, separators: Mapping[str, int], max_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        self.n_same = 0
        """Answers of this server that later prompts contained as the model wrote them."""
        self.n_otherwise = 0
        """Answers of this server that later prompts contained with another text."""
        self.n_bytes = 0
        """About the memory of what is kept."""
        self._tokenizer = tokenizer
        self._separators = dict(separators)
        self._ids = frozenset(self._separators.values())
        # The longest of the alternatives that begin at one place must come first, as in the tokenizer.
        longest_first = sorted(separators, key=len, reverse=True)
        self._end = re.compile("|".join(map(re.escape, longest_first)))
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[bytes, str], bytes] = OrderedDict()
        """The id of its request, a zero byte and the tokens of each answer, by place and segment. By place and an
        empty text: the id of the request of the latest answer, a zero character, and what stood before the answer
        in its segment."""
        self._latest: dict[bytes, str] = {}
        """By place, the segment of the latest answer while it is in ``_entries``, which counts its memory: the same
        object."""

    @classmethod
    def create(cls, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> KeptAnswers | None:
        """Returns an empty cache, or None if texts cannot be cut at the model's end-of-sequence tokens."""
        separators = tokenizer.separators(eos_token_ids)
        return cls(tokenizer, separators) if separators else None

    def look_up(self, text: str, namespace: CacheNamespace) -> History:
        """Finds the kept answers in a rendered conversation. O(text), some 2 µs for 1,000 characters.

        Args:
            text: of the conversation.
            namespace: of the beginning of the prompt; others have other answers. Another adapter writes the same
                text in other tokens.
        """
        # This digest has a fixed length, so no salt and text can be those of another pair. No tenant's name and no
        # adapter's digest has a zero character.
        names = f"{namespace.tenant}\0{namespace.adapter}\0{namespace.cache_salt}"
        digest = xxhash.xxh3_128(xxhash.xxh3_128_digest(names.encode()))
        pieces: list[str | bytes] = []
        separator: int | None = None
        start = n_plain = n_same = n_otherwise = 0
        turn = ""
        written: xxhash.xxh3_128 | None = None
        """Of the text with answers as the model wrote them, from the first one on that has lost its reasoning here:
        the answers that followed it are kept by that. None while no answer has."""
        with self._lock:
            for match in self._end.finditer(text):
                end = match.end()
                segment = text[start:end]
                answer = self._find(digest.digest(), segment)
                if answer is not None:
                    if answer.tokens is not None:
                        pieces += [text[n_plain:start], answer.tokens]
                        n_plain, n_same = end, n_same + 1
                        written = None
                    elif segment.startswith(answer.header):
                        n_otherwise += 1
                    if answer.as_written is not None:
                        written = digest.copy()
                elif written is not None:
                    answer = self._find(written.digest(), segment)
                if answer is not None:
                    turn = answer.turn
                if written is not None:
                    as_written = None if answer is None else answer.as_written
                    written.update((as_written or segment).encode(errors="surrogatepass"))
                digest.update(segment.encode(errors="surrogatepass"))
                start, separator = end, self._separators[match[0]]
            place, rest = digest.digest(), text[start:]
            if (tokens := self._cut_answer(place, rest)) is not None:
                pieces += [text[n_plain:start], tokens]
                n_plain = len(text)
        pieces.append(text[n_plain:])
        shown = [piece for piece in pieces if piece] or [""]
        return History(shown, place, rest, separator, n_same, n_otherwise, turn)

    def open_keeper(self, history: History, prompt: bytes, turn: str) -> AnswerKeeper:
        """Returns what keeps the answers to a prompt, and counts the answers in its history.

        Args:
            history: of the prompt.
            prompt: all its tokens, as little-endian int32 ids.
            turn: id of the request.
        """
        with self._lock:
            self.n_same += history.n_same
            self.n_otherwise += history.n_otherwise
        rest_tokens = prompt[_after_last(history.separator, prompt) :]
        return AnswerKeeper(self, self._tokenizer, history.place, history.rest, rest_tokens, turn)

    def keep(self, place: bytes, header: str, header_tokens: bytes, answer: str, tokens: bytes, turn: str) -> bool:
        """Keeps an answer if its last token, and no other, is one of the separators; returns whether it is so.

        O(answer).

        Args:
            place: of the answer's segment.
            header: text of the prompt before the answer, in its segment.
            header_tokens: of that text, as little-endian int32 ids.
            answer: the answer's text, with that of special tokens.
            tokens: of the answer, as little-endian int32 ids.
            turn: id of its request.
        """
        segment = header + answer
        end = self._end.search(segment)
        if end is None or end.end() < len(segment) or int.from_bytes(tokens[-4:], "little") not in self._ids:
            return False
        begun = header.rfind(_REASONING)
        with self._lock:
            self._put(place, segment, turn.encode() + b"\0" + header_tokens + tokens)
            self._put(place, "", f"{turn}\0{header if begun < 0 else header[:begun]}".encode())
            self._latest[place] = segment
            while self.n_bytes > self._max_bytes:
                (oldest_place, oldest), value = self._entries.popitem(last=False)
                self.n_bytes -= _size(oldest, value)
                if not oldest or self._latest.get(oldest_place) == oldest:
                    self._latest.pop(oldest_place, None)
        return True

    def _find(self, place: bytes, segment: str) -> _Found | None:
        """Returns what is kept of the answers at a place; None if nothing is. O(segment)."""
        if not self._has_answer(place):
            return None
        tokens, turn, header = self._get(place, segment)
        as_written = self._as_written(place, segment, header) if tokens is None else None
        return _Found(tokens, turn, header, as_written)

    def _as_written(self, place: bytes, segment: str, header: str) -> str | None:
        """Returns the latest answer at a place if the segment is that answer without its beginning, such as its
        reasoning; else None. O(segment)."""
        latest = self._latest.get(place)
        if latest is None:
            return None  # it was dropped before the text before it
        is_shorter = len(segment) < len(latest) and segment.startswith(header) and latest.startswith(header)
        if not is_shorter or not latest.endswith(segment[len(header) :]):
            return None
        for key in (latest, ""):  # in the order of ``_get``
            self._entries.move_to_end((place, key))
        return latest

    def _cut_answer(self, place: bytes, rest: str) -> bytes | None:
        """Returns the tokens of a text that is an answer without its end-of-sequence token."""
        if not rest or not self._has_answer(place):
            return None
        for separator in self._separators:
            if (tokens := self._get(place, rest + separator)[0]) is not None:
                return tokens[:-4]
        return None

    def _has_answer(self, place: bytes) -> bool:
        return (place, "") in self._entries

    def _get(self, place: bytes, segment: str) -> tuple[bytes | None, str, str]:
        """Returns the tokens of an answer, None if it is not kept, the id of its request, or else of that of the
        latest answer there, and the text before the latest one."""
        entry = self._entries.get((place, segment))
        if entry is not None:
            self._entries.move_to_end((place, segment))
        # The text before the answers comes after them, so that it is not dropped before them.
        self._entries.move_to_end((place, ""))
        turn, _, header = self._entries[place, ""].decode().partition("\0")
        if entry is None:
            return None, turn, header
        own_turn, _, tokens = entry.partition(b"\0")
        return tokens, own_turn.decode(), header

    def _put(self, place: bytes, segment: str, value: bytes) -> None:
        old = self._entries.pop((place, segment), None)
        if old is not None:
            self.n_bytes -= _size(segment, old)
        self._entries[place, segment] = value
        self.n_bytes += _size(segment, value)


class AnswerKeeper:
    """Collects the tokens of the answers to one prompt, and keeps each answer that the model itself ended.

    Args:
        kept_answers: where they are kept.
        tokenizer: gives the bytes of tokens.
        place: that of the answers' segment.
        header: text of the prompt in the answers' segment.
        header_tokens: of that text, as little-endian int32 ids.
        turn: id of the request.
    """

    def __init__(
        self,
        kept_answers: KeptAnswers,
        tokenizer: Tokenizer,
        place: bytes,
        header: str,
        header_tokens: bytes,
        turn: str,
    ) -> None:
        self.has_kept = False
        """Whether an answer was kept."""
        self._kept_answers = kept_answers
        self._tokenizer = tokenizer
        self._place = place
        self._header = header
        self._header_tokens = header_tokens
        self._turn = turn
        self._answers: dict[int, tuple[bytearray, bytearray, bytearray]] = {}
        """The tokens of each choice so far, their text in UTF-8, and the last tokens, which that does not have."""

    def add(self, delta: TokenDelta) -> None:
        """Adds new tokens of a choice, or its end. O(tokens), 0.2 µs each."""
        if (answer := self._answers.get(delta.choice)) is None:
            answer = self._answers[delta.choice] = (bytearray(), bytearray(), bytearray())
        tokens, text, undecoded = answer
        tokens += delta.tokens
        undecoded += delta.tokens
        if delta.finish_reason is None and len(undecoded) < _DECODED_BYTES:
            return
        text += self._tokenizer.decode_bytes(unpack_tokens(undecoded), skip_special_tokens=False)
        undecoded.clear()
        if delta.finish_reason is None:
            return
        del self._answers[delta.choice]
        try:
            written = text.decode()
        except UnicodeDecodeError:
            return  # no text of a client is equal to it
        self.has_kept |= self._kept_answers.keep(
            self._place, self._header, self._header_tokens, written, bytes(tokens), self._turn
        )


def _after_last(token_id: int | None, prompt: bytes) -> int:
    """Returns the offset after the last such token of a prompt, which has one; 0 for None. O(bytes after it)."""
    if token_id is None:
        return 0
    wanted = token_id.to_bytes(4, "little")
    found = prompt.rindex(wanted)
    while found % 4:  # the bytes may be parts of two other tokens
        found = prompt.rindex(wanted, 0, found + 3)
    return found + 4


def _size(segment: str, value: bytes) -> int:
    return sys.getsizeof(segment) + len(value) + _ENTRY_BYTES
