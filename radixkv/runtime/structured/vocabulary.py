"""The tokens of a checkpoint, as grammars see them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.structured_outputs import SPECIAL_MARKS

_NO_TEXT = b"\xff"
"""A byte that UTF-8 never has."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of each token, and which tokens end an answer."""

    tokens: list[bytes]
    """By id. An empty one is never allowed: special tokens, and ids that the model has and the tokenizer lacks. The
    bytes of ``SPECIAL_MARKS`` are no UTF-8, so that no text matches them."""
    eos_token_ids: tuple[int, ...]
    """The tokens that may end an answer; at least one."""

    @property
    def n_mask_words(self) -> int:
        """Number of 32-bit words of a mask with one bit per token."""
        return -(-len(self.tokens) // 32)

    def mark_id(self, mark: str) -> int | None:
        """Returns the id of one of ``SPECIAL_MARKS``; None if it is no special token. O(tokens)."""
        text = _NO_TEXT + mark.encode()
        return self.tokens.index(text) if text in self.tokens else None


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Reads the tokens of a checkpoint's tokenizer. Takes a second for 128,000 tokens.

    Args:
        folder: has ``tokenizer.json``.
        vocab_size: number of tokens that the model gives logits for.
        eos_token_ids: the tokens that may end an answer.

    Raises:
        CheckpointError: the tokenizer is missing or corrupt.
    """
    tokenizer = Tokenizer.load(folder)
    tokens = tokenizer.vocabulary()[:vocab_size]
    tokens += [b""] * (vocab_size - len(tokens))
    for name, token_id in tokenizer.special_ids(SPECIAL_MARKS).items():
        if token_id < vocab_size and token_id not in eos_token_ids:
            tokens[token_id] = _NO_TEXT + name.encode()
    return Vocabulary(tokens, tuple(eos_token_ids))
