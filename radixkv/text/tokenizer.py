"""Text to token ids and back."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import pre_tokenizers

from radixkv.errors import CheckpointError, ContextLengthExceeded, InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A checkpoint's ``tokenizer.json``. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._decoder = backend.decoder
        self._joins_bytes = self._decoder is not None and self._decoder.decode(["<0x41>"]) == "A"

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

    def encode(self, text: str, limit: int | None = None) -> bytes:
        """Little-endian int32 ids, with the special tokens that the tokenizer itself adds. O(length).

        Other threads run meanwhile.

        Raises:
            InvalidRequest: the text holds half of a surrogate pair, which is no character.
            ContextLengthExceeded: there are more than ``limit`` tokens.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
                "send whole characters",
                param="prompt",
            ) from error
        # Of the package's ways to encode only those for batches let other threads run.
        (encoding,) = self._backend.encode_batch_fast([text])
        if limit is not None and len(encoding) > limit:
            raise ContextLengthExceeded(
                f"the prompt has {len(encoding)} tokens, but the context holds {limit}; shorten it", param="prompt"
            )
        ids = encoding.ids
        return struct.pack(f"<{len(ids)}i", *ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all ids together, without special tokens; bytes that are no character give U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def token(self, token_id: int) -> str | None:
        """The token's name; None for one that ``decode`` skips: special, or beyond the vocabulary."""
        return None if token_id in self._special else self._backend.id_to_token(token_id)

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens that are given by name; ``decode`` is this after looking the ids up."""
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)

    def byte(self, token: str) -> bytes | None:
        """The one byte that the token stands for by its name (``<0xE4>``), as in sentencepiece vocabularies."""
        return bytes.fromhex(token[3:5]) if self._joins_bytes and _BYTE_TOKEN.fullmatch(token) else None
