"""Tokenization and detokenization."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers

from radixkv.checkpoints.files import read_text
from radixkv.errors import (
    CheckpointError,
    ContextLengthExceeded,
    InvalidRequest,
    context_length_exceeded,
    shortened,
)
from radixkv.text.guarded_encoder import GuardedEncoder
from radixkv.text.panics import is_failure, raise_failure
from radixkv.text.segment_cache import SegmentCache, pack_ids
from radixkv.text.separators import find_separators
from radixkv.text.tokenizer_bounds import is_bounded, odd_decoder

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_CACHED_TOKENS = 1 << 15


class Tokenizer:
    """The tokenizer of a checkpoint's ``tokenizer.json``. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.is_bounded = is_bounded(backend)
        """Whether encoding takes no longer than a text of its length may; if not, ``encode_inline`` may wait for
        seconds."""
        self._guard = None if self.is_bounded else GuardedEncoder(backend.to_str())
        self._segment_cache = SegmentCache.create(backend) if self.is_bounded else None
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._decoder = backend.decoder
        self.has_byte_fallback = self._decoder is not None and self._decoder.decode(["<0x41>"]) == "A"
        """Whether decoding joins single-byte tokens (``<0xE4>``) to characters, as in sentencepiece."""
        self.is_byte_level = isinstance(self._decoder, decoders.ByteLevel)
        """Whether the UTF-8 bytes of a text are the concatenated bytes of its tokens."""
        self._uses_byte_letters = self._decoder is not None and self._decoder.decode(["Ġ"]) == " "
        self.token_bytes = functools.lru_cache(_MAX_CACHED_TOKENS)(self._compute_token_bytes)
        """Returns the bytes that the token of an id adds to a text; empty for an id beyond the vocabulary.

        The bytes of an answer's tokens concatenate to its text. The bytes of a special token are its name.
        """

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads ``tokenizer.json``. Raises ``CheckpointError`` if it is missing or corrupt."""
        path = folder / "tokenizer.json"
        if (text := read_text(path)) is None:
            raise CheckpointError(
                f"{path} is missing; give a checkpoint with a tokenizer, or send prompts as token ids"
            )
        try:
            backend = tokenizers.Tokenizer.from_str(text)
            if (decoder := odd_decoder(backend)) is not None:
                raise CheckpointError(
                    f"{path} has the decoder {shortened(decoder)} with a pattern or a long text, which may take "
                    "any time and memory; give another tokenizer with --tokenizer"
                )
            return cls(backend)
        except CheckpointError:
            raise
        except BaseException as error:  # the package raises nothing narrower
            if not is_failure(error):
                raise
            raise CheckpointError(f"{path} is not a tokenizer: {error}; fetch the checkpoint again") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; the model's ``vocab_size`` may be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def max_token_characters(self) -> int | None:
        """Most characters of a text that one token can stand for; None if there is no limit.

        There is a limit for byte-level vocabularies with all 256 bytes and no normalizer. Any other tokenizer may
        drop characters, or turn many of them into one unknown token. O(vocabulary).
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

    def encode(
        self, text: str, limit: int | None = None, *, adds_special_tokens: bool = True, namespace: str = ""
    ) -> bytes:
        """Returns the text's little-endian int32 ids. Releases the GIL. O(length).

        Names of special tokens in the text become those tokens.

        Args:
            text: any text.
            limit: maximum number of tokens.
            adds_special_tokens: whether the tokenizer adds its special tokens, such as the beginning of sequence. A
                chat template has written them already.
            namespace: texts with the same one are encoded sooner if they have parts in common.

        Raises:
            InvalidRequest: the text contains a lone surrogate, which is not a character.
            ContextLengthExceeded: there are more than ``limit`` tokens.
            TokenizerFailed: the tokenizer cannot encode the text, or not within limits of time and memory.
        """
        (encoded,) = self.encode_batch([text], limit, adds_special_tokens=adds_special_tokens, namespace=namespace)
        return _raise_if_error(encoded)

    def encode_inline(
        self, text: str, limit: int | None = None, *, adds_special_tokens: bool = True, namespace: str = ""
    ) -> bytes:
        """Does what ``encode`` does, on the calling thread and without waiting for texts of other threads.

        Use it for short texts. For long texts ``encode_batch`` is faster: it uses all processors.
        """
        if self._segment_cache is None:
            return self.encode(text, limit, adds_special_tokens=adds_special_tokens, namespace=namespace)
        if (refusal := _lone_surrogate(text)) is not None:
            raise refusal
        try:
            ids = self._segment_cache.encode_inline(
                text, adds_special_tokens=adds_special_tokens, namespace=namespace
            )
        except BaseException as error:
            raise_failure("encode the text", error)
        return _raise_if_error(_check_limit(ids, limit))

    def encode_batch(
        self,
        texts: Sequence[str],
        limit: int | None = None,
        *,
        adds_special_tokens: bool = True,
        namespace: str = "",
    ) -> list[bytes | InvalidRequest]:
        """Returns for each text what ``encode`` returns, or the error that it raises. Uses all processors.

        Raises:
            TokenizerFailed: the tokenizer cannot encode one of the texts, and does not say which.
        """
        errors = [_lone_surrogate(text) for text in texts]
        whole = [text for text, error in zip(texts, errors, strict=True) if error is None]
        if self._guard is not None:
            guarded = iter(self._guard.encode_batch(whole, limit, adds_special_tokens=adds_special_tokens))
            return [next(guarded) if error is None else error for error in errors]
        try:
            encoded = iter(self._encode_all(whole, adds_special_tokens, namespace))
        except BaseException as error:
            raise_failure("encode the text", error)
        return [_check_limit(next(encoded), limit) if error is None else error for error in errors]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids; bytes that are not valid UTF-8 become U+FFFD.

        Raises:
            TokenizerFailed: the tokenizer cannot decode them.
        """
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise_failure("decode the tokens", error)

    def token(self, token_id: int, *, skip_special_tokens: bool = True) -> str | None:
        """Returns the token's name; None if ``decode`` skips it: special tokens, and ids beyond the vocabulary."""
        is_skipped = skip_special_tokens and token_id in self._special
        return None if is_skipped else self._backend.id_to_token(token_id)

    def token_id(self, name: str) -> int | None:
        """Returns the id of the token with this name; None if there is none."""
        return self._backend.token_to_id(name)

    def token_text(self, token_id: int) -> str:
        """Returns the text of a single token, as logprobs show it; a partial character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> bytes:
        """Returns the bytes of tokens of a byte-level vocabulary; they may split a character. O(ids)."""
        special = self._special if skip_special_tokens else ()
        return b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in special])

    def separators(self, token_ids: Iterable[int]) -> dict[str, int]:
        """Returns those of the tokens at which a text can be cut without changing its ids: id by text.

        The ids of a text are then those of its parts, each with the separator at its end, encoded without the
        tokenizer's special tokens. There are none unless the tokenizer is byte-level BPE, without a normalizer or
        with NFC, and the token is special.
        """
        return find_separators(self._backend, token_ids) if self.is_byte_level else {}

    def vocabulary(self) -> list[bytes]:
        """Returns the bytes that each token adds to a text, by id; empty for special tokens and ids without one.

        Takes a second for 128,000 tokens.
        """
        n_ids = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return [b"" if one in self._special else self._compute_token_bytes(one) for one in range(n_ids)]

    def special_ids(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the ids of those names that are special tokens. O(names)."""
        ids = ((name, self._backend.token_to_id(name)) for name in names)
        return {name: token_id for name, token_id in ids if token_id is not None and token_id in self._special}

    def decode_tokens(self, tokens: Sequence[str]) -> str:
        """Returns the text of tokens given by name; ``decode`` looks up the names of ids and does the same."""
        if self._decoder is None:
            return " ".join(tokens)
        try:
            return str(self._decoder.decode(tokens))
        except BaseException as error:
            raise_failure("decode the tokens", error)

    def byte(self, token: str) -> bytes | None:
        """Returns the byte of a single-byte token (``<0xE4>``) of a sentencepiece vocabulary, else None."""
        return bytes.fromhex(token[3:5]) if self.has_byte_fallback and _BYTE_TOKEN.fullmatch(token) else None

    def _encode_all(self, texts: Sequence[str], adds_special_tokens: bool, namespace: str) -> list[bytes]:
        if self._segment_cache is not None:
            return self._segment_cache.encode_batch(
                texts, adds_special_tokens=adds_special_tokens, namespace=namespace
            )
        # Only the package's batch methods release the GIL.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=adds_special_tokens)
        return [pack_ids(encoding.ids) for encoding in encodings]

    def _compute_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if (byte := self.byte(token)) is not None:
            return byte
        if self._uses_byte_letters and _BYTE_LETTERS.keys() >= set(token):
            return bytes(_BYTE_LETTERS[letter] for letter in token)
        # The text that a second copy of the token adds to the first: some decoders drop a text's leading space.
        return self.decode_tokens([token, token])[len(self.decode_tokens([token])) :].encode()


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


def _raise_if_error(encoded: bytes | InvalidRequest) -> bytes:
    if isinstance(encoded, InvalidRequest):
        raise encoded
    return encoded


def _check_limit(ids: bytes, limit: int | None) -> bytes | ContextLengthExceeded:
    n_tokens = len(ids) // 4
    if limit is None or n_tokens <= limit:
        return ids
    return context_length_exceeded(f"the prompt has {n_tokens} tokens", limit, param="prompt", n_prompt=n_tokens)


def _byte_letters() -> dict[str, int]:
    """Returns the byte of each letter of a byte-level vocabulary, which uses GPT-2's alphabet.

    A visible Latin-1 character stands for its own byte; the other bytes are U+0100 and up, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LETTERS = _byte_letters()
