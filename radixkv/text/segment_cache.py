"""Cache of the token ids of text segments.

Prompts repeat: examples, instructions, all earlier turns of a chat. A text is split into segments that are
tokenized one by one, and a segment that was seen before is not tokenized again. Splitting must not change the ids.
Whether a cut is safe depends on the pattern by which the tokenizer splits a text into words, so only known patterns
are supported.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_letters, digits

import tokenizers

from radixkv.text.separators import is_local
from radixkv.text.tokenizer_bounds import CL100K_WORDS, steps_of

_NEEDS_TEXT_BEFORE_NEWLINE = {
    # Llama 3, Qwen 2 and 3: the word with a newline extends to the last of consecutive newlines and ends there.
    CL100K_WORDS % r"\p{N}{1,3}": False,
    CL100K_WORDS % r"\p{N}": False,
    # GPT-2: the last of consecutive white space characters is a word of its own, but only if other text follows.
    "GPT-2": True,
}
"""The word patterns with a safe cut: after a newline and before an ASCII letter or digit, no word spans the cut and
no look-ahead crosses it. The value says whether this holds only if the line does not end with white space."""
_SEGMENT_STARTS = frozenset(ascii_letters + digits)

MIN_SEGMENT_CHARACTERS = 256
"""Minimum length of every segment but the last of a text. Cuts are found from the start of the text on, so texts
with a common prefix have the same segments."""
MAX_BATCH_CHARACTERS = 1 << 15
"""Most characters in one call of the tokenizer; other threads get their turn between calls. An encoding takes
hundreds of bytes a token until the call ends."""
MAX_CACHED_SEGMENT_CHARACTERS = 1 << 13
"""Longer segments are not cached."""
MAX_CACHED_CHARACTERS = 1 << 22
"""Capacity of the cache in characters; the least recently used segments are evicted first. A segment counts as at
least ``MIN_SEGMENT_CHARACTERS``. The cached ids take about one byte a character."""


class SegmentCache:
    """An LRU cache of token ids by text segment. Thread-safe.

    Args:
        backend: tokenizes segments that are not cached.
        needs_text_before: whether a text is cut only after lines that do not end with white space.
        added_ids: the special tokens that the tokenizer adds before and after a text, as little-endian int32.
        min_segment_characters: the minimum length of every segment but the last of a text.
        max_batch_characters: most characters in one call of the tokenizer.
        max_cached_characters: capacity in characters, of which a segment counts as at least the minimum length.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        needs_text_before: bool,
        added_ids: tuple[bytes, bytes],
        min_segment_characters: int = MIN_SEGMENT_CHARACTERS,
        max_batch_characters: int = MAX_BATCH_CHARACTERS,
        max_cached_characters: int = MAX_CACHED_CHARACTERS,
    ) -> None:
        self._min_segment_characters = min_segment_characters
        self._max_batch_characters = max_batch_characters
        self._max_cached_characters = max_cached_characters
        self._backend = backend
        self._needs_text_before = needs_text_before
        self._added_ids = added_ids
        self._lock = threading.Lock()
        self._ids: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """By namespace and segment."""
        self._n_characters = 0

    @classmethod
    def create(
        cls, backend: tokenizers.Tokenizer, *, min_segment_characters: int = MIN_SEGMENT_CHARACTERS
    ) -> SegmentCache | None:
        """Returns a cache for the tokenizer, or None if no safe cuts are known for it."""
        needs_text_before = _NEEDS_TEXT_BEFORE_NEWLINE.get(_split_pattern(backend) or "")
        has_newline = any("\n" in token.content for token in backend.get_added_tokens_decoder().values())
        # NFC, which a local tokenizer may have, never merges an ASCII letter or digit with the character before it.
        if needs_text_before is None or has_newline or not is_local(backend):
            return None
        if (added_ids := _added_ids(backend)) is None:
            return None
        return cls(
            backend,
            needs_text_before=needs_text_before,
            added_ids=added_ids,
            min_segment_characters=min_segment_characters,
        )

    def encode_batch(self, texts: Sequence[str], *, adds_special_tokens: bool, namespace: str = "") -> list[bytes]:
        """Returns the little-endian int32 ids of each text. O(length).

        Uses all processors. Concurrent calls take turns, ``max_batch_characters`` at a time.

        Args:
            texts: the texts.
            adds_special_tokens: whether the tokenizer adds its special tokens.
            namespace: only segments of texts with the same one are found, so that nobody can tell by the time what
                others have sent.
        """
        return self._encode(texts, adds_special_tokens, self._max_batch_characters, namespace)

    def encode_inline(self, text: str, *, adds_special_tokens: bool, namespace: str = "") -> bytes:
        """Returns the little-endian int32 ids of one text, without waiting for other threads' calls. O(length)."""
        # The tokenizers package runs a batch of one on the calling thread, a larger one on its own thread pool.
        return self._encode([text], adds_special_tokens, 1, namespace)[0]

    def _encode(
        self, texts: Sequence[str], adds_special_tokens: bool, max_batch_characters: int, namespace: str
    ) -> list[bytes]:
        split_texts = [self._split(text) for text in texts]
        distinct = list(dict.fromkeys(segment for segments in split_texts for segment in segments))
        ids_by_segment = self._lookup(distinct, namespace)
        for new in batches(
            [segment for segment in distinct if segment not in ids_by_segment], max_batch_characters
        ):
            # Only the package's batch methods release the GIL.
            encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
            encoded = {segment: pack_ids(encoding.ids) for segment, encoding in zip(new, encodings, strict=True)}
            self._insert(encoded, namespace)
            ids_by_segment |= encoded
        before, after = self._added_ids if adds_special_tokens else (b"", b"")
        return [
            b"".join([before, *(ids_by_segment[segment] for segment in segments), after])
            for segments in split_texts
        ]

    def _split(self, text: str) -> list[str]:
        segments, start = [], 0
        cut = text.find("\n", self._min_segment_characters - 1) + 1
        while cut:
            if text[cut : cut + 1] in _SEGMENT_STARTS and (
                not self._needs_text_before or "!" <= text[cut - 2] <= "~"
            ):
                segments.append(text[start:cut])
                start = cut
            cut = text.find("\n", max(cut, start + self._min_segment_characters - 1)) + 1
        return [*segments, text[start:]]

    def _lookup(self, distinct: Sequence[str], namespace: str) -> dict[str, bytes]:
        ids_by_segment: dict[str, bytes] = {}
        with self._lock:
            for segment in distinct:
                key = namespace, segment
                if (ids := self._ids.get(key)) is not None:
                    ids_by_segment[segment] = ids
                    self._ids.move_to_end(key)
        return ids_by_segment

    def _insert(self, encoded: Mapping[str, bytes], namespace: str) -> None:
        with self._lock:
            for segment, ids in encoded.items():
                key = namespace, segment
                if len(segment) <= MAX_CACHED_SEGMENT_CHARACTERS and key not in self._ids:
                    self._ids[key] = ids
                    self._n_characters += self._charged_characters(segment)
            while self._n_characters > self._max_cached_characters:
                (_, oldest), _ = self._ids.popitem(last=False)
                self._n_characters -= self._charged_characters(oldest)

    def _charged_characters(self, segment: str) -> int:
        # Even the entry of a one-character text takes some 200 bytes.
        return max(len(segment), self._min_segment_characters)


def batches(texts: Sequence[str], max_batch_characters: int) -> Iterator[list[str]]:
    """Yields the texts in batches of at most that many characters; a longer text is a batch of its own."""
    batch: list[str] = []
    n_characters = 0
    for text in texts:
        if batch and n_characters + len(text) > max_batch_characters:
            yield batch
            batch, n_characters = [], 0
        batch.append(text)
        n_characters += len(text)
    if batch:
        yield batch


def pack_ids(ids: Sequence[int]) -> bytes:
    """Returns the ids as little-endian int32."""
    return struct.pack(f"<{len(ids)}i", *ids)


def _added_ids(backend: tokenizers.Tokenizer) -> tuple[bytes, bytes] | None:
    """Returns the ids that the tokenizer adds before and after a text; None if its post-processor does more."""
    plain, added = (backend.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    is_added = backend.encode("a").special_tokens_mask
    start = is_added.index(0) if 0 in is_added else 0
    end = start + len(plain)
    if not plain or added[start:end] != plain or not all(is_added[:start]) or not all(is_added[end:]):
        return None
    # A post-processor may also repeat the text.
    line, both = (backend.encode(text, add_special_tokens=False).ids for text in ("a\n", "a\na"))
    return (pack_ids(added[:start]), pack_ids(added[end:])) if both == line + plain else None


def _split_pattern(backend: tokenizers.Tokenizer) -> str | None:
    """Returns the regex by which a byte-level tokenizer splits words; None for any other pre-tokenizer."""
    match steps_of(backend.pre_tokenizer, "pretokenizers"):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return "GPT-2"
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
        case _:
            return None
