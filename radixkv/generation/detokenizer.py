"""Incremental detokenization."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Sequence

from radixkv.text.tokenizer import Tokenizer

_CONTEXT_UNITS = 8
_MAX_PARTIAL_BYTES = 3
"""Most bytes of an incomplete UTF-8 character."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BAD_BYTE_UNIT = tuple(f"<0x{byte:02X}>" for byte in _REPLACEMENT.encode())


class IncrementalDetokenizer:
    """Decodes the tokens of one answer as they arrive.

    The pieces concatenate to what the answer adds to the text of its prompt: to ``tokenizer.decode`` of the ids of
    both, without the characters at its start that it shares with ``tokenizer.decode`` of the prompt.

    There is one difference. In a run of single-byte tokens (``<0x0A>``), ``decode`` turns every byte into U+FFFD if
    one of them is invalid. This class turns only the invalid bytes into U+FFFD: a character is returned with its
    last byte and cannot be taken back when an invalid byte follows.

    Tokens of a byte-level vocabulary are bytes, which an incremental UTF-8 decoder decodes. For other vocabularies
    the last few tokens are kept as context and decoded again with each push, because the text of a token depends on
    the tokens before it: the bytes of a character may be spread over several tokens, and a leading space may be
    dropped only at the start of the text. A character has at most four bytes, so eight tokens of context suffice.
    At first they are the last tokens of the prompt.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the ids before the answer, as little-endian int32. Only the last few are read.
        skip_special_tokens: whether the text leaves out special tokens.
        repeats_partial: whether the pieces begin with the last ``n_partial`` characters of the prompt's text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: bytes = b"",
        *,
        skip_special_tokens: bool = True,
        repeats_partial: bool = False,
    ) -> None:
        self.n_partial = 0
        """How many U+FFFD the prompt's text ends with that stand for a character which the answer may complete."""
        self.n_characters = 0
        """Characters returned so far."""
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._units: list[tuple[str, ...]] = []
        """The tokens of the context. A unit is one token, or the single-byte tokens of one whole character."""
        self._partial_character: list[str] = []
        """The single-byte tokens of the incomplete character at the end."""
        errors = "replace" if tokenizer.is_byte_level else "strict"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._n_returned = 0
        if tokenizer.is_byte_level:
            self._begin_after_bytes(prompt)
        else:
            self._begin_after_units(prompt)
        self._has_context = bool(self._units or self.n_partial)
        self._n_repeated = 0 if repeats_partial else self.n_partial
        """How many U+FFFD at the start of the next text are part of the prompt's text."""

    def push(self, ids: Sequence[int]) -> str:
        """Returns the new text, whole characters only. O(new ids)."""
        if self._tokenizer.is_byte_level:
            piece = self._utf8.decode(self._tokenizer.decode_bytes(ids, skip_special_tokens=self._skips_special))
        else:
            piece = self._push_units(ids)
        return self._new(piece)

    def _begin_after_bytes(self, prompt: bytes) -> None:
        """Begins with the bytes of the character that is incomplete at the end of the prompt."""
        tail = b""
        for token_id in _from_the_end(prompt):
            tail = self._tokenizer.decode_bytes([token_id], skip_special_tokens=self._skips_special) + tail
            if len(tail) >= _MAX_PARTIAL_BYTES:
                break
        self._utf8.decode(tail[-_MAX_PARTIAL_BYTES:])
        self.n_partial = int(self._utf8.getstate()[0] != b"")

    def _begin_after_units(self, prompt: bytes) -> None:
        """Begins with the last tokens of the prompt as context."""
        names = (
            self._tokenizer.token(token_id, skip_special_tokens=self._skips_special)
            for token_id in _from_the_end(prompt)
        )
        tail = list(itertools.islice((name for name in names if name is not None), _CONTEXT_UNITS))
        for name in reversed(tail):
            self._append_token(name)
        text = self._text()
        self._n_returned = _n_final_characters(text)
        self.n_partial = len(text) - self._n_returned + len(self._partial_character)

    def _new(self, piece: str) -> str:
        """Returns what is new of a piece, which may begin with characters of the prompt's text."""
        if self._n_repeated and piece:
            n_same = len(piece) - len(piece.lstrip(_REPLACEMENT))
            n_dropped = min(n_same, self._n_repeated)
            self._n_repeated = self._n_repeated - n_dropped if n_same == len(piece) else 0
            piece = piece[n_dropped:]
        self.n_characters += len(piece)
        return piece

    def _push_units(self, ids: Sequence[int]) -> str:
        n_units = len(self._units)
        for token_id in ids:
            token = self._tokenizer.token(token_id, skip_special_tokens=self._skips_special)
            if token is not None:
                self._append_token(token)
        if len(self._units) == n_units:
            return ""
        text = self._text()
        n_final = _n_final_characters(text)
        piece = text[self._n_returned : n_final]
        self._n_returned = n_final
        if len(self._units) >= 2 * _CONTEXT_UNITS:
            del self._units[:-_CONTEXT_UNITS]
            self._n_returned = _n_final_characters(self._text())
        return piece

    def decode_all(self, ids: Sequence[int]) -> str:
        """Returns the text of a whole answer, with nothing pushed before. O(ids)."""
        if self._tokenizer.has_byte_fallback or self._has_context:
            return self.push(ids) + self.finish()
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)
        self.n_characters += len(text)
        return text

    def finish(self) -> str:
        """Returns the rest of the text after the last id; an incomplete character becomes U+FFFD."""
        if self._tokenizer.is_byte_level:
            piece = self._utf8.decode(b"", final=True)
        else:
            self._give_up_character()
            piece = self._text()[self._n_returned :]
            self._units.clear()
            self._n_returned = 0
        return self._new(piece)

    def _append_token(self, token: str) -> None:
        byte = self._tokenizer.byte(token)
        if byte is None:
            self._give_up_character()
            self._units.append((token,))
            return
        try:
            is_whole = self._utf8.decode(byte) != ""
        except UnicodeDecodeError:
            if self._partial_character:  # invalid as a continuation byte, perhaps valid as a first byte
                self._give_up_character()
                self._append_token(token)
            else:
                self._utf8.reset()
                self._units.append(_BAD_BYTE_UNIT)
            return
        self._partial_character.append(token)
        if is_whole:
            self._units.append(tuple(self._partial_character))
            self._partial_character.clear()

    def _give_up_character(self) -> None:
        """Turns the bytes of the incomplete character into bad bytes."""
        self._units += [_BAD_BYTE_UNIT] * len(self._partial_character)
        self._partial_character.clear()
        self._utf8.reset()

    def _text(self) -> str:
        return self._tokenizer.decode_tokens(list(itertools.chain.from_iterable(self._units)))


def _n_final_characters(text: str) -> int:
    # Decoding turns any number of bytes of an incomplete character into one U+FFFD.
    return len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)


def _from_the_end(prompt: bytes) -> Iterator[int]:
    """Returns the ids of a prompt, the last one first."""
    return (int.from_bytes(prompt[end - 4 : end], "little") for end in range(len(prompt), 0, -4))
