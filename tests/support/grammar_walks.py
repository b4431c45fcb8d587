"""Random answers that follow a grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.checkpoints import resolve
from radixkv.runtime.structured.matcher import Grammar, MaskFiller
from radixkv.runtime.structured.vocabulary import Vocabulary, read_vocabulary

CLOSING = frozenset(b'"}], ')
"""Bytes that end parts of JSON."""


def tiny_vocabulary() -> Vocabulary:
    """Returns the vocabulary of the embedded model."""
    tiny = resolve("tiny")
    return read_vocabulary(tiny.folder, tiny.vocab_size, sorted(tiny.eos_token_ids))


@dataclass
class Walk:
    """One answer."""

    ids: list[int]
    text: bytes
    has_ended: bool
    """Whether it ended by itself."""


class Walker:
    """Chooses random tokens among those that a grammar allows."""

    def __init__(self, vocabulary: Vocabulary, closing: frozenset[int] = CLOSING) -> None:
        self._vocabulary = vocabulary
        self._filler = MaskFiller(1)
        self._masks = np.zeros((1, vocabulary.n_mask_words), np.int32)
        self._closing = {i for i, token in enumerate(vocabulary.tokens) if token and closing.issuperset(token)}

    def walk(self, grammar: Grammar, choices: random.Random, max_tokens: int) -> Walk:
        """Returns an answer of at most ``max_tokens`` tokens; some tend to close what is open."""
        matcher = grammar.new_matcher()
        ids: list[int] = []
        haste = choices.random()
        while len(ids) < max_tokens and not matcher.has_ended:
            self._filler.fill([matcher], self._masks)
            allowed = allowed_ids(self._masks[0])
            assert allowed, f"no token may follow {self._text(ids)!r}"
            ends = [one for one in allowed if one in self._vocabulary.eos_token_ids]
            closing = [one for one in allowed if one in self._closing]
            if ends and choices.random() < 0.5:
                ids.append(ends[0])
            elif closing and choices.random() < haste:
                ids.append(choices.choice(closing))
            else:
                ids.append(choices.choice(allowed))
            assert matcher.accept(ids[-1]), f"the mask allows {ids[-1]} after {self._text(ids[:-1])!r}"
        return Walk(ids, self._text(ids), matcher.has_ended)

    def _text(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._vocabulary.tokens[one] for one in ids)


def allowed_ids(mask: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[int]:
    """Returns the token ids that a mask allows."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
