"""How long a step will take on the device, from the steps before it."""

from __future__ import annotations

from radixkv.runtime.step.plan import StepPlan

_WEIGHT = 0.25
"""Weight of a new measurement in a moving average."""
MIN_PROMPT_TOKENS = 256
"""A step with some prompt tokens, but fewer than this, is not measured: most of its time does not depend on their
number."""


class StepTimeForecast:
    """Forecasts the duration of steps.

    A step of decode rows takes as long as the shorter of the last two with about as many rows; a draft counts as a
    row. Prompts add a time per token, a moving average: a step in which the device waited for the host makes the
    next forecasts longer. Where nothing is known the forecast is shorter, or 0.
    """

    def __init__(self) -> None:
        self._decode_s: dict[int, tuple[float, float]] = {}
        """The last two steps without prompts, by the number of bits of the number of rows."""
        self._prompt_token_s = 0.0

    def record(self, plan: StepPlan, seconds: float) -> None:
        """Takes the measured time of a step into account. O(rows)."""
        n_decode, n_prompt = plan.n_decode + plan.n_drafts, plan.n_prompt_tokens
        if not n_prompt:
            _, last = self._decode_s.get(n_decode.bit_length(), (seconds, seconds))
            self._decode_s[n_decode.bit_length()] = last, seconds
        elif n_prompt >= MIN_PROMPT_TOKENS:
            token_s = max(0.0, seconds - self._decode_seconds(n_decode)) / n_prompt
            average = self._prompt_token_s or token_s
            self._prompt_token_s = average + _WEIGHT * (token_s - average)

    def prompt_tokens(self, n_decode: int, seconds: float) -> int | None:
        """Returns how many tokens of prompts a step with decode rows computes in a time; None if that is not known.

        At least ``MIN_PROMPT_TOKENS``, so that prompts go on where decode rows alone take as long.
        """
        if not self._prompt_token_s:
            return None
        return max(MIN_PROMPT_TOKENS, int((seconds - self._decode_seconds(n_decode)) / self._prompt_token_s))

    def seconds(self, plan: StepPlan) -> float:
        """Returns the forecast. O(rows)."""
        return self._decode_seconds(plan.n_decode + plan.n_drafts) + plan.n_prompt_tokens * self._prompt_token_s

    def _decode_seconds(self, n_rows: int) -> float:
        return min(self._decode_s.get(n_rows.bit_length(), (0.0, 0.0)))
