"""The time steps of Mamba2, which say how much tokens write and how much the state decays."""

from __future__ import annotations

import triton
import triton.language as tl

from radixkv.runtime.device.ops.cuda.delta_net.gates import softplus


@triton.jit
def time_step(x: tl.tensor, bias: tl.tensor, least: tl.tensor, most: tl.tensor) -> tl.tensor:
    """Returns the time step in float32, within its bounds.

    Args:
        x: what the layer's inputs have for a token and head.
        bias: of the head, float32.
        least, most: the bounds.
    """
    step = softplus(x.to(tl.float32) + bias)
    step = tl.maximum(step, least, tl.PropagateNan.ALL)
    return tl.minimum(step, most, tl.PropagateNan.ALL)
