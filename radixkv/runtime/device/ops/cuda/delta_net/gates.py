"""The gates of a gated delta net: how much a token writes, and how much the state decays before."""

from __future__ import annotations

import triton
import triton.language as tl


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
    step = tl.load(source + N_HEADS, is_token, 0.0).to(tl.float32) + tl.load(decay_bias)
    # The logarithm of 1 + exp(x), which is x where exp(x) is large.
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    decay = -tl.exp(tl.load(log_decay)) * step
    return tl.where(is_token, 1.0 / (1.0 + tl.exp(-strength)), 0.0), tl.where(is_token, decay, 0.0)
