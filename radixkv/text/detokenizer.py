"""Token ids to text while they come."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

from radixkv.text.tokenizer import Tokenizer

_CONTEXT = 8
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_BAD_BYTE = tuple(f"<0x{byte:02X}>" for byte in _INCOMPLETE.encode())


class IncrementalDecoder:
    """Decodes one answer piece by piece; the pieces together are ``tokenizer.decode`` of all its ids.

    One case differs: in a run of single-byte tokens (``<0x0A>``), ``decode`` makes U+FFFD of every byte when one
    is bad. Here only the bytes that are no character become U+FFFD: a character is shown with its last byte, and
    cannot be taken back when a bad byte follows.

    Byte-level vocabularies give bytes, which are decoded as they come. Of others the last few tokens stay as
    context. They are decoded again with each push, because a token's text depends on what stands before it: a
    character whose bytes lie in several tokens, a leading space that is dropped at the beginning only. No character
    is longer than four bytes, so that eight tokens are always enough.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.n_characters = 0
        """How much text all pieces have."""
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._units: list[tuple[str, ...]] = []
        """One token each, or the single-byte tokens of a whole character."""
        self._open: list[str] = []
        """The single-byte tokens of a character that is not complete."""
        errors = "replace" if tokenizer.is_byte_level else "strict"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._n_shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain: whole characters only. O(new ids)."""
        if self._tokenizer.is_byte_level:
            piece = self._utf8.decode(self._tokenizer.join_bytes(ids, skip_special_tokens=self._skips_special))
        else:
            piece = self._push_units(ids)
        self.n_characters += len(piece)
        return piece

    def _push_units(self, ids: Sequence[int]) -> str:
        n_units = len(self._units)
        for token_id in ids:
            token = self._tokenizer.token(token_id, skip_special_tokens=self._skips_special)
            if token is not None:
                self._take(token)
        if len(self._units) == n_units:
            return ""
        text = self._text()
        n_certain = _n_certain(text)
        piece = text[self._n_shown : n_certain]
        self._n_shown = n_certain
        if len(self._units) >= 2 * _CONTEXT:
            del self._units[:-_CONTEXT]
            self._n_shown = _n_certain(self._text())
        return piece

    def whole(self, ids: Sequence[int]) -> str:
        """The text of all ids of an answer of which nothing was pushed. O(ids)."""
        if self._tokenizer.joins_bytes:
            return self.push(ids) + self.finish()
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)
        self.n_characters += len(text)
        return text

    def finish(self) -> str:
        """What is left when no more ids come; an incomplete character gives U+FFFD."""
        if self._tokenizer.is_byte_level:
            piece = self._utf8.decode(b"", final=True)
        else:
            self._close()
            piece = self._text()[self._n_shown :]
            self._units.clear()
            self._n_shown = 0
        self.n_characters += len(piece)
        return piece

    def _take(self, token: str) -> None:
        byte = self._tokenizer.byte(token)
        if byte is None:
            self._close()
            self._units.append((token,))
            return
        try:
            is_whole = self._utf8.decode(byte) != ""
        except UnicodeDecodeError:
            if self._open:  # the byte is bad as the next one, and may be good as the first
                self._close()
                self._take(token)
            else:
                self._utf8.reset()
                self._units.append(_BAD_BYTE)
            return
        self._open.append(token)
        if is_whole:
            self._units.append(tuple(self._open))
            self._open.clear()

    def _close(self) -> None:
        """Gives up on the incomplete character."""
        self._units += [_BAD_BYTE] * len(self._open)
        self._open.clear()
        self._utf8.reset()

    def _text(self) -> str:
        return self._tokenizer.join(list(itertools.chain.from_iterable(self._units)))


def _n_certain(text: str) -> int:
    # However many bytes of a character are there, decoding makes one U+FFFD of them.
    return len(text) - 1 if text.endswith(_INCOMPLETE) else len(text)
