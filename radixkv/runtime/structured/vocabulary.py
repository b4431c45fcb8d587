"""The tokens of a checkpoint, as grammars see them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from radixkv.text.tokenizer import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of each token, and which tokens end an answer."""

    tokens: list[bytes]
    """By id. An empty one is never allowed: special tokens, and ids that the model has and the tokenizer lacks."""
    eos_token_ids: tuple[int, ...]
    """The tokens that may end an answer; at least one."""

    @property
    def n_mask_words(self) -> int:
        """Number of 32-bit words of a mask with one bit per token."""
        return -(-len(self.tokens) // 32)


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Reads the tokens of a checkpoint's tokenizer. Takes a second for 128,000 tokens.

    Args:
        folder: has ``tokenizer.json``.
        vocab_size: number of tokens that the model gives logits for.
        eos_token_ids: the tokens that may end an answer.

    Raises:
        CheckpointError: the tokenizer is missing or corrupt.
    """
    tokens = Tokenizer.load(folder).vocabulary()[:vocab_size]
    tokens += [b""] * (vocab_size - len(tokens))
    return Vocabulary(tokens, tuple(eos_token_ids))
