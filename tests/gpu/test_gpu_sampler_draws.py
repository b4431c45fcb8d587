"""The GPU's sampler draws every token as often as a plain oracle expects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kernel_support import on_device_only, on_kernels
from msgspec.structs import replace
from numpy.typing import NDArray
from sampler_support import DRAWN, VOCAB, history, normal, peaked, sample
from torch import Tensor

from radixkv.runtime.device.sampling.row_sampling import uniforms
from radixkv.runtime.step.plan import RowSampling
from support.sampler_oracle import probabilities

pytestmark = on_kernels

N_DRAWS = 20_000


def draws(logits: Tensor, row: RowSampling, n: int = N_DRAWS) -> list[int]:
    """Draws one token for each of ``n`` requests, which differ in either seed or index."""
    tokens: list[int] = []
    for first in range(0, n, 1000):
        rows = [
            replace(row, seed=31 * i if i % 2 else 7, index=5 if i % 2 else i)
            for i in range(first, min(first + 1000, n))
        ]
        tokens += sample(logits.expand(len(rows), -1).contiguous(), rows)[0]
    return tokens


def surprise(tokens: Sequence[int], expected: NDArray[np.float64]) -> float:
    """Returns how many standard deviations chi-square is above its mean; rare tokens are counted together."""
    counts = np.bincount(np.array(tokens), minlength=len(expected))
    assert not counts[expected == 0.0].any(), "a token of probability 0 was drawn"
    expected_counts = expected * len(tokens)
    common = expected_counts >= 5.0
    found = np.append(counts[common], counts[~common].sum())
    expected_counts = np.append(expected_counts[common], expected_counts[~common].sum())
    found, expected_counts = found[expected_counts > 0.0], expected_counts[expected_counts > 0.0]
    n = len(expected_counts) - 1
    assert n >= 3, "too few kinds of tokens to judge"
    chi_square = float((np.square(found - expected_counts) / expected_counts).sum())
    spread = 2.0 / (9.0 * n)
    return float(((chi_square / n) ** (1 / 3) - (1.0 - spread)) / spread**0.5)


CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.7},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 0.5},
    "top_k": {"top_k": 20},
    "large top_k": {"top_k": 300, "temperature": 3.0},
    "min_p": {"min_p": 0.05},
    "top_k and top_p": {"top_k": 50, "top_p": 0.8, "temperature": 1.2},
    "large top_k and top_p": {"top_k": 200, "top_p": 0.97, "temperature": 3.0},
    "min_p and top_p": {"min_p": 0.02, "top_p": 0.9},
    "all": {"top_k": 100, "top_p": 0.95, "min_p": 0.01, "temperature": 1.1},
}


@on_device_only
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_drawn_with_their_probabilities(name: str) -> None:
    logits = peaked()
    row = replace(DRAWN, **CASES[name])
    assert surprise(draws(logits, row), probabilities(logits, row).numpy()) < 4.0


@on_device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits(dtype: torch.dtype) -> None:
    logits = peaked().to(dtype)
    row = replace(DRAWN, temperature=0.9)
    assert surprise(draws(logits, row), probabilities(logits, row).numpy()) < 4.0


@on_device_only
def test_a_wrong_distribution_is_detected() -> None:
    logits = peaked()
    found = draws(logits, replace(DRAWN, temperature=1.5))
    assert surprise(found, probabilities(logits, DRAWN).numpy()) > 4.0


@on_device_only
@pytest.mark.parametrize("top_k", [0, 30])
def test_edits_come_before_the_draw(top_k: int) -> None:
    logits = peaked()
    likely = logits.argsort(descending=True).tolist()
    row = replace(
        DRAWN,
        top_k=top_k,
        top_p=0.95,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias=((likely[5], 1.0), (likely[60], 9.0), (likely[4], -2.0)),
        banned=(likely[0], likely[3]),
        history=history(likely[:10] * 2, likely[5:9] * 3),
    )
    assert surprise(draws(logits, row, N_DRAWS // 4), probabilities(logits, row).numpy()) < 4.0


@on_device_only
def test_equal_weights_are_kept_together_for_a_large_top_k() -> None:
    """The 200th largest is one of 300 equal logits: all of them are kept."""
    logits = torch.zeros(VOCAB)
    logits[:100] = 9.0
    logits[5000:5300] = 8.0
    found = set(draws(logits, replace(DRAWN, top_k=200, temperature=8.0), 3000))
    assert found <= {*range(100), *range(5000, 5300)}
    assert max(found) >= 5200


@on_device_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("top_k", "low", "high"), [(129, -90.0, -10.0), (200, -1.0, 1.0), (300, 0.0, 60.0)])
def test_a_large_top_k_keeps_only_the_likeliest(dtype: torch.dtype, top_k: int, low: float, high: float) -> None:
    """The temperature is so high that every kept token is drawn; tokens equal to the last one are kept, too."""
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.linspace(low, high, VOCAB)[torch.randperm(VOCAB, generator=generator)].to(dtype)
    kept = logits >= logits.sort(descending=True).values[top_k - 1]
    found = draws(logits, replace(DRAWN, top_k=top_k, temperature=1e3))
    assert set(found) == set(kept.nonzero()[:, 0].tolist())


def test_a_tiny_top_p_keeps_only_the_likeliest() -> None:
    logits = normal(6)
    likeliest = logits.argmax(-1).tolist()
    rows = [replace(DRAWN, top_p=top_p, top_k=top_k) for top_p in (1e-3, 1e-30, 1e-300) for top_k in (0, 9)]
    assert sample(logits, rows)[0] == likeliest


def test_equal_seeds_give_equal_tokens_and_others_differ() -> None:
    logits = torch.zeros(1, VOCAB)
    drawn = [
        replace(DRAWN, seed=seed, index=index) for seed in (0, 1, 1 << 40, (1 << 64) - 1) for index in range(5)
    ]
    tokens = sample(logits.expand(20, -1).contiguous(), drawn)[0]
    assert tokens == sample(logits.expand(20, -1).contiguous(), drawn)[0]
    assert Counter(tokens).most_common(1)[0][1] <= 2


def test_the_random_numbers_are_those_of_the_cpu() -> None:
    """Of 128 equal logits, the token is the random number's place among them."""
    drawn = [
        replace(DRAWN, top_k=128, seed=seed, index=index)
        for seed in (0, 1, 1 << 40, (1 << 64) - 1)
        for index in range(5)
    ]
    expected = [int(128 * uniforms(row.seed, row.index)[0]) for row in drawn]
    assert sample(torch.zeros(20, VOCAB), drawn)[0] == expected
