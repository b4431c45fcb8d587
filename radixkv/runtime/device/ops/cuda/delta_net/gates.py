"""The gates of a gated delta net: how much a token writes, and how much the state decays before."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Returns ``log(1 + exp(x))`` of float32.

    Where ``exp(x)`` is small, ``1 + exp(x)`` loses most of its digits. The logarithm of what is left of them is
    right when it is multiplied by the quotient of the two.
    """
    grown = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + grown
    # Where nothing is left, both are 0.
    kept = tl.where(total == 1.0, 1.0, total - 1.0)
    small = tl.where(total == 1.0, grown, tl.log(total) * (grown / kept))
    return tl.where(x > 20.0, x, small)


@triton.jit
def read_gates(
    source: tl.tensor, is_token: tl.tensor, log_decay: tl.tensor, decay_bias: tl.tensor, N_HEADS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the strength of a head's update and the logarithm of its decay, in float32; 0 without a token.

    Args:
        source: address of the strength of each token, before its sigmoid; the decay is ``N_HEADS`` behind it.
        is_token: whether there is one.
        log_decay, decay_bias: addresses of the head's.
        N_HEADS: heads of values.
    """
    strength = tl.load(source, is_token, 0.0).to(tl.float32)
    step = softplus(tl.load(source + N_HEADS, is_token, 0.0).to(tl.float32) + tl.load(decay_bias))
    decay = -tl.exp(tl.load(log_decay)) * step
    return tl.where(is_token, 1.0 / (1.0 + tl.exp(-strength)), 0.0), tl.where(is_token, decay, 0.0)
