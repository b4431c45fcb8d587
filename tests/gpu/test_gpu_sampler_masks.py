"""Token masks on the GPU's sampler: a mask does what a ban of all other tokens does."""

from __future__ import annotations

import random

import pytest
import torch
from msgspec.structs import replace
from sampler_support import DRAWN, GREEDY, VOCAB, history, normal, sample

from support.token_bits import masks_of

KINDS = (
    GREEDY,
    replace(DRAWN, seed=1),
    replace(DRAWN, seed=2, top_k=5, n_logprobs=3),
    replace(DRAWN, seed=3, frequency_penalty=0.5, repetition_penalty=1.3, history=history(range(9), range(90))),
    replace(GREEDY, logit_bias=((17, 20.0), (18, -3.0), (9000, 50.0)), n_logprobs=1),
)


@pytest.mark.parametrize("n_allowed", [1, 40, 8000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_is_a_ban_of_all_other_tokens(dtype: torch.dtype, n_allowed: int) -> None:
    """Every second row has a mask, so that rows and masks are numbered differently."""
    rng = random.Random(n_allowed)
    kinds = [KINDS[index // 2 % len(KINDS)] for index in range(2 * len(KINDS))]
    allowed = [rng.sample(range(VOCAB), n_allowed) if index % 2 else None for index in range(len(kinds))]
    masked = [replace(kind, is_masked=tokens is not None) for kind, tokens in zip(kinds, allowed, strict=True)]
    banned = [
        replace(kind, banned=() if tokens is None else tuple(sorted(set(range(VOCAB)) - set(tokens))))
        for kind, tokens in zip(kinds, allowed, strict=True)
    ]
    logits = normal(len(kinds)).to(dtype)
    tokens, logprobs = sample(logits, masked, masks=masks_of(allowed, VOCAB))
    assert (tokens, logprobs) == sample(logits, banned)
    assert all(one is None or token in one for token, one in zip(tokens, allowed, strict=True))


def test_more_masked_rows_than_are_edited_at_a_time() -> None:
    allowed = [[row, VOCAB - 1 - row] for row in range(200)]
    logits = normal(200, seed=3)
    tokens, _ = sample(logits, [replace(GREEDY, is_masked=True)] * 200, masks=masks_of(allowed, VOCAB))
    assert tokens == [max(pair, key=lambda token: logits[row, token]) for row, pair in enumerate(allowed)]


def test_a_masked_row_without_a_mask_samples_from_all_tokens() -> None:
    logits = normal(3)
    masked = [replace(row, is_masked=True) for row in KINDS[:3]]
    assert sample(logits, masked) == sample(logits, KINDS[:3])
