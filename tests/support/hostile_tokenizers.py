"""Tokenizers of checkpoints that want to stop a server: a text with ``a`` takes any time or memory, or a panic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from radixkv.text import guarded_encoder


def give_up_soon(patch: pytest.MonkeyPatch) -> None:
    """Makes encoders wait no longer than tests may take."""
    patch.setattr(guarded_encoder, "DEADLINE_S", 0.5)
    patch.setattr(guarded_encoder, "MIN_CHARACTERS_PER_S", 1_000_000)


def byte_level() -> tokenizers.Tokenizer:
    """Returns a tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def splitting(pattern: str) -> tokenizers.Tokenizer:
    """Returns one that splits texts by a regular expression."""
    backend = byte_level()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    return backend


def normalizing(*steps: normalizers.Normalizer) -> tokenizers.Tokenizer:
    """Returns one that normalizes texts."""
    backend = byte_level()
    backend.normalizer = normalizers.Sequence(list(steps))
    return backend


def repeating(n: int) -> tokenizers.Tokenizer:
    """Returns one whose post-processor repeats the ids of each text ``n`` times."""
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single=["$A"] * n, pair="$A $B", special_tokens=[])
    return backend


HOSTILE: Mapping[str, Callable[[], tokenizers.Tokenizer]] = {
    "a pattern that takes exponential time until it panics": lambda: splitting(r"(a+)+$|."),
    "a pattern that takes quadratic time": lambda: splitting(r"a*x|."),
    "a normalizer that makes a long text": lambda: normalizing(normalizers.Replace("a", "b" * 500)),
    "normalizers that multiply": lambda: normalizing(*[normalizers.Replace("a", "aaaaaaaaa")] * 16),
    "a pattern that multiplies": lambda: normalizing(*[normalizers.Replace(Regex("a"), "aaaaaaaaa")] * 16),
    "a post-processor that repeats": lambda: repeating(2000),
    "a long text before each character of a word": lambda: _with_a_long_prefix(1_000_000),
    "bytes that are written as two again and again": lambda: _of_byte_levels(20),
}
"""By what they do."""
MULTIPLYING_ANY_TEXT = ("a post-processor that repeats", "bytes that are written as two again and again")


def _with_a_long_prefix(n: int) -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.model = models.BPE(backend.get_vocab(), [], continuing_subword_prefix="x" * n)
    return backend


def _of_byte_levels(n: int) -> tokenizers.Tokenizer:
    backend = byte_level()
    step = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([step] * n)
    return backend
