"""The two halves of a step after its launch, and its results."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.wire.messages import TokenLogprobs


class StepResult(msgspec.Struct, frozen=True):
    """Results of a step, in the order of the plan's rows.

    A row has one sampled position, its last token's, and one more for each draft: the positions before it.
    """

    tokens: tuple[int, ...]
    """Sampled token id of each sampled position; -1 if the row samples none or is not finite."""
    finite: tuple[bool, ...]
    """Whether each row's hidden states and logits at sampled positions, and those of its prompt logprobs, are
    finite."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Logprobs of each sampled token; None if the row requests none or is not finite. Empty if none does."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    """Prompt logprobs of each row, one for each of its ``Scoring.targets``; None if the row has no ``Scoring`` or
    is not finite. Empty if no row has ``Scoring``."""
    device_seconds: float = 0.0
    """Time of the step on the device: from its launch, or from the end of the step before if that came later. It
    includes gaps in which the device waits for the host's launches or for token masks."""
    pooled: tuple[bytes | None, ...] = ()
    """What each row's ``Row.pooling`` asks for, little-endian float32; None if that is None or the row is not
    finite. Empty if no row has it."""
    page_scores: tuple[float, ...] = ()
    """The mean of |V| / |K| over the tokens, heads and layers of each of ``Row.scored_pages``, row after row, with
    the Euclidean norms of a head's K and V of a token."""


class TokenMasks(NamedTuple):
    """Which tokens may be sampled at positions of a step's masked rows."""

    positions: tuple[int, ...]
    """Sampled positions of the plan, in any order. At one that is not listed although its ``RowSampling.is_masked``
    is set, all tokens may be sampled; what is sampled counts for nothing."""
    bits: NDArray[np.int32]
    """[positions, ceil(vocab / 32)], C-contiguous: bit ``i`` of word ``w`` allows token ``32 * w + i``. Each mask
    allows at least one token."""


class LaunchedStep(Protocol):
    """Handle of a launched step whose tokens are not sampled yet."""

    def sample(self, masks: TokenMasks | None) -> SampledStep:
        """Samples the step's tokens, without waiting. Called exactly once, and before the next launch.

        A device may sample at the launch if no row is masked; this call only returns the handle then.

        Args:
            masks: of the masked rows; None if there is none to constrain.

        Raises:
            DeviceError: the step failed. So have all steps launched after it.
            DeviceLost: the device cannot be used any more.
        """


class SampledStep(Protocol):
    """Handle of a step whose sampling is enqueued; the device may still compute it."""

    @property
    def is_done(self) -> bool:
        """Whether the device has computed the step, or failed, so that ``result`` does not wait for it."""

    def result(self) -> StepResult:
        """Waits for the step and returns its result.

        Raises:
            DeviceError: the step failed. The caller must discard the results of all steps launched after it.
            DeviceLost: the device cannot be used any more.
        """
