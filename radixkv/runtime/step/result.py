"""Results of a step, and the handle of a launched step that returns them."""

from __future__ import annotations

from typing import Protocol

import msgspec

from radixkv.wire import TokenLogprobs


class StepResult(msgspec.Struct, frozen=True):
    """Results of a step. Every tuple with an entry for each row has the order of the plan's rows."""

    tokens: tuple[int, ...]
    """Sampled token id of each row; -1 if the row samples none or is not finite."""
    finite: tuple[bool, ...]
    """Whether each row's last hidden state and logits, and those of its prompt logprobs, are finite."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Logprobs of each row's sampled token; None if the row requests none or is not finite. Empty if none does."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    """Prompt logprobs of each row, one for each of its ``Scoring.targets``; None if the row has no ``Scoring`` or
    is not finite. Empty if no row has ``Scoring``."""
    attention_seconds: float = 0.0
    """Time of attention on the device, all layers together; on the CPU it includes the writes of K and V, on
    CUDA it is estimated from one layer."""


class PendingStep(Protocol):
    """Handle of a launched step."""

    def result(self) -> StepResult:
        """Waits for the step and returns its result.

        Raises:
            DeviceError: the step failed. The caller must discard the results of all steps launched after it.
            DeviceLost: the device cannot be used any more.
        """
        ...
