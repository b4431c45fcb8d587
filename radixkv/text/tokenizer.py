"""Text to token ids and back."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers

from radixkv.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from radixkv.text.segment_cache import Stretches, pack

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CACHED_TOKENS = 1 << 15


class Tokenizer:
    """A checkpoint's ``tokenizer.json``. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._stretches = Stretches.of(backend)
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._decoder = backend.decoder
        self.joins_bytes = self._decoder is not None and self._decoder.decode(["<0x41>"]) == "A"
        """Whether single-byte tokens (``<0xE4>``) become characters, as in sentencepiece vocabularies."""
        self.is_byte_level = isinstance(self._decoder, decoders.ByteLevel)
        """Whether a text is the bytes of its tokens, one after the other."""
        self._names_bytes = self._decoder is not None and self._decoder.decode(["Ġ"]) == " "
        self.token_bytes = functools.lru_cache(_CACHED_TOKENS)(self._find_bytes)
        """The bytes that a token adds to a text, given its id; none beyond the vocabulary.

        Those of an answer's tokens together are its text; a special token's are its name.
        """

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads ``tokenizer.json``. Raises ``CheckpointError`` if it is missing or corrupt."""
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing; give a checkpoint with a tokenizer, or send prompts as token ids"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; fetch the checkpoint again") from error
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the package raises nothing narrower
            raise CheckpointError(f"{path} is not a tokenizer: {error}; fetch the checkpoint again") from error

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included; the model's may be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def longest_token_characters(self) -> int | None:
        """Most characters of a text that one of its ids stands for; None if that may be any number.

        Known for byte-level vocabularies that hold all bytes and whose text is not normalized: any other may
        leave out characters, or make one unknown token of many. O(vocabulary).
        """
        layout = json.loads(self._backend.to_str())
        outer = layout["pre_tokenizer"] or {}
        steps = outer.get("pretokenizers", [outer])
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        is_complete = (
            layout["normalizer"] is None
            and layout["model"]["type"] == "BPE"
            and any(step.get("type") == "ByteLevel" for step in steps)
            and all(step["type"] == "ByteLevel" or step.get("behavior") == "Isolated" for step in steps)
            and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
            and not any(token["lstrip"] or token["rstrip"] for token in layout["added_tokens"])
        )
        return max(map(len, vocabulary)) if is_complete else None

    def encode(self, text: str, limit: int | None = None, *, adds_special_tokens: bool = True) -> bytes:
        """Little-endian int32 ids. O(length). Other threads run meanwhile.

        Names of special tokens in the text become those tokens.

        Args:
            text: any.
            limit: most tokens.
            adds_special_tokens: whether the tokenizer adds those of its own, such as one for the beginning. A chat
                template has written them already.

        Raises:
            InvalidRequest: the text holds half of a surrogate pair, which is no character.
            ContextLengthExceeded: there are more than ``limit`` tokens.
        """
        (encoded,) = self.encode_all([text], limit, adds_special_tokens=adds_special_tokens)
        return _unless_error(encoded)

    def encode_here(self, text: str, limit: int | None = None, *, adds_special_tokens: bool = True) -> bytes:
        """What ``encode`` gives, by the calling thread alone: it waits for no text of other threads.

        For short texts: many processors are faster, and so is one change of threads for all of a long one.
        """
        if self._stretches is None:
            return self.encode(text, limit, adds_special_tokens=adds_special_tokens)
        if (error := _lone_surrogate(text)) is not None:
            raise error
        ids = self._stretches.encode_here(text, adds_special_tokens=adds_special_tokens)
        return _unless_error(_within(ids, limit))

    def encode_all(
        self, texts: Sequence[str], limit: int | None = None, *, adds_special_tokens: bool = True
    ) -> list[bytes | InvalidRequest]:
        """What ``encode`` gives for each text, or the error that it raises. All processors take part."""
        errors = [_lone_surrogate(text) for text in texts]
        whole = [text for text, error in zip(texts, errors, strict=True) if error is None]
        if self._stretches is None:
            # Of the package's ways to encode only those for batches let other threads run.
            encodings = self._backend.encode_batch_fast(whole, add_special_tokens=adds_special_tokens)
            found = iter([pack(encoding.ids) for encoding in encodings])
        else:
            found = iter(self._stretches.encode_all(whole, adds_special_tokens=adds_special_tokens))
        return [_within(next(found), limit) if error is None else error for error in errors]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids together; bytes that are no character give U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """The token's name; None for one that ``decode`` skips: special, or beyond the vocabulary."""
        is_skipped = skip_special_tokens and token_id in self._special
        return None if is_skipped else self._backend.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """A token's text by itself, as beside log-probabilities; a part of a character gives U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def join_bytes(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> bytes:
        """The bytes of tokens of a byte-level vocabulary; part of a character may be first or last. O(ids)."""
        special = self._special if skip_special_tokens else ()
        return b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in special])

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens that are given by name; ``decode`` is this after looking the ids up."""
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)

    def byte(self, token: str) -> bytes | None:
        """The one byte that the token stands for by its name (``<0xE4>``), as in sentencepiece vocabularies."""
        return bytes.fromhex(token[3:5]) if self.joins_bytes and _BYTE_TOKEN.fullmatch(token) else None

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if (byte := self.byte(token)) is not None:
            return byte
        if self._names_bytes and _BYTE_LETTERS.keys() >= set(token):
            return bytes(_BYTE_LETTERS[letter] for letter in token)
        # What it adds to itself, because some decoders drop a space at the beginning of a text.
        return self.join([token, token])[len(self.join([token])) :].encode()


def _lone_surrogate(text: str) -> InvalidRequest | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return InvalidRequest(
            f"the text has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
            "send whole characters",
            param="prompt",
        )
    return None


def _unless_error(encoded: bytes | InvalidRequest) -> bytes:
    if isinstance(encoded, InvalidRequest):
        raise encoded
    return encoded


def _within(ids: bytes, limit: int | None) -> bytes | ContextLengthExceeded:
    n_tokens = len(ids) // 4
    if limit is None or n_tokens <= limit:
        return ids
    return ContextLengthExceeded(
        f"the prompt has {n_tokens} tokens, but this model's maximum context length is {limit} tokens; shorten it",
        param="prompt",
    )


def _byte_letters() -> dict[str, int]:
    """The byte of each letter of byte-level vocabularies: visible Latin-1 for itself, others from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_LETTERS = _byte_letters()
