"""What the settings of a row mean to both samplers, and the random numbers that they draw with.

Settings apply in this order: logit bias, bans, penalties, token mask, temperature, ``top_k``, ``min_p``, ``top_p``.
Swapping ``top_k`` and ``min_p`` would make no difference. Of equal logits the smaller id comes first: in a greedy
choice, in ``top_k``, and in listed logprobs. ``top_p`` after ``top_k`` keeps the fewest tokens whose sum reaches
the share; without ``top_k`` it keeps or drops tokens of equal weight together. Logprobs are those of the original
logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import DeviceError
from radixkv.runtime.step.plan import RowSampling

MIN_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: all weights but the largest would be zero in float32."""

_WORD = (1 << 32) - 1


def is_greedy(sampling: RowSampling) -> bool:
    """Whether a row takes its likeliest token."""
    return sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1


def top_k_of(sampling: RowSampling, vocab_size: int) -> int:
    """Returns how many of the likeliest tokens to draw from; 0 for all."""
    if is_greedy(sampling):
        return 1
    return sampling.top_k if sampling.top_k < vocab_size else 0


def uniforms(seed: int, index: int, n_rounds: int = 0) -> tuple[float, float]:
    """Returns two random numbers in [0, 1) that depend on the arguments alone.

    They are the first two words of Philox4x32-10 with the seed as its key, as ``tl.philox`` computes them in CUDA's
    kernels.

    Args:
        seed: of the request, 64 bits.
        index: of the token in the request's output.
        n_rounds: number of draws for this token that were rejected.
    """
    key_0, key_1 = seed & _WORD, seed >> 32 & _WORD
    word_0, word_1, word_2, word_3 = index, n_rounds, 0, 0
    for _ in range(10):
        product_0, product_2 = 0xD2511F53 * word_0, 0xCD9E8D57 * word_2
        word_0, word_1 = product_2 >> 32 ^ word_1 ^ key_0, product_2 & _WORD
        word_2, word_3 = product_0 >> 32 ^ word_3 ^ key_1, product_0 & _WORD
        key_0, key_1 = key_0 + 0x9E3779B9 & _WORD, key_1 + 0xBB67AE85 & _WORD
    return _uniform(word_0), _uniform(word_1)


def check_targets(targets: NDArray[np.integer], vocab_size: int) -> None:
    """Raises ``DeviceError`` if a token for prompt logprobs is outside the vocabulary."""
    if len(targets) and not 0 <= targets.min() <= targets.max() < vocab_size:
        raise DeviceError(
            f"prompt logprobs of a token id that is not between 0 and {vocab_size - 1} "
            f"(ids from {targets.min()} to {targets.max()})"
        )


def _uniform(word: int) -> float:
    """Returns a float32 in [0, 1), as Triton's ``uint_to_uniform_float`` does: a set sign bit flips the others."""
    return float(np.float32(word if word < 1 << 31 else _WORD - word) * np.float32(4.6566127342e-10))
