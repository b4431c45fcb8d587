"""What one step gave: plain ints, and the handle by which a launched step is awaited."""

from __future__ import annotations

from typing import Protocol

import msgspec

from radixkv.wire import TokenLogprobs


class StepResult(msgspec.Struct, frozen=True):
    """What a step gave, row by row in the plan's order."""

    tokens: tuple[int, ...]
    """The sampled id; -1 where none was asked for or the row is not finite."""
    finite: tuple[bool, ...]
    """Whether the row's last hidden state and logits, and those that it scored with, are finite."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Of the sampled tokens, row by row, where asked for; empty if no row asks."""
    scores: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    """Of the scored tokens, row by row, one a target; empty if no row asks."""
    attention_seconds: float = 0.0
    """What attention took on the device, all layers together; on the CPU with the writing of K and V."""


class Pending(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Waits for the step. Raises ``DeviceError`` if it failed, as do all steps launched after it and
        before the failure was seen."""
        ...
