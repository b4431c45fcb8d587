"""Incremental detokenization."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

from radixkv.text.tokenizer import Tokenizer

_CONTEXT_UNITS = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BAD_BYTE_UNIT = tuple(f"<0x{byte:02X}>" for byte in _REPLACEMENT.encode())


class IncrementalDetokenizer:
    """Decodes the tokens of one answer as they arrive; the pieces concatenate to ``tokenizer.decode`` of all ids.

    There is one difference. In a run of single-byte tokens (``<0x0A>``), ``decode`` turns every byte into U+FFFD if
    one of them is invalid. This class turns only the invalid bytes into U+FFFD: a character is returned with its
    last byte and cannot be taken back when an invalid byte follows.

    Tokens of a byte-level vocabulary are bytes, which an incremental UTF-8 decoder decodes. For other vocabularies
    the last few tokens are kept as context and decoded again with each push, because the text of a token depends on
    the tokens before it: the bytes of a character may be spread over several tokens, and a leading space may be
    dropped only at the start of the text. A character has at most four bytes, so eight tokens of context suffice.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
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

    def push(self, ids: Sequence[int]) -> str:
        """Returns the new text, whole characters only. O(new ids)."""
        if self._tokenizer.is_byte_level:
            piece = self._utf8.decode(self._tokenizer.decode_bytes(ids, skip_special_tokens=self._skips_special))
        else:
            piece = self._push_units(ids)
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
        if self._tokenizer.has_byte_fallback:
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
        self.n_characters += len(piece)
        return piece

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
