"""Estimate of how long one place takes to give pages: a fixed time, and a time per token."""

from __future__ import annotations

_MIN_WEIGHT = 0.1
"""Weight of a new measurement in the moving averages, after the first ten."""
_MAX_OUTLIER = 4.0
"""A measurement counts as at most this many times the estimate: one fetch may have waited for something else."""


class FetchRate:
    """Fits a line through the measured times of fetches, of which the latest weigh most.

    Where all had about the same length, or the line makes no sense, it goes through the origin: then there is no
    fixed time. So a fetch of more than the mean length is never taken for slower than at the mean rate, and a
    shorter one never for faster.
    """

    def __init__(self) -> None:
        self._n = 0
        self._mean_tokens = self._mean_s = 0.0
        self._variance = self._covariance = 0.0
        """The variance of tokens, and their covariance with seconds."""

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._n > 0

    @property
    def s_per_token(self) -> float | None:
        """Mean time per token in seconds, with the fixed time; None before the first measurement."""
        return self._mean_s / self._mean_tokens if self._n else None

    def seconds(self, n_tokens: float) -> float:
        """Returns the estimated time of a fetch; 0 before the first measurement, and for no tokens. O(1)."""
        if not self._n or not n_tokens:
            return 0.0
        slope = self._covariance / self._variance if self._variance > 0 else -1.0
        if not 0 <= slope * self._mean_tokens <= self._mean_s:
            return n_tokens * self._mean_s / self._mean_tokens
        return self._mean_s + slope * (n_tokens - self._mean_tokens)

    def forget(self) -> None:
        """Forgets what was measured. O(1)."""
        self._n = 0

    def add(self, n_tokens: int, seconds: float) -> None:
        """Takes the measured time of a fetch into account. O(1)."""
        if self._n:
            seconds = min(seconds, _MAX_OUTLIER * self.seconds(n_tokens))
        self._n += 1
        weight = max(_MIN_WEIGHT, 1 / self._n)
        more_tokens, more_s = n_tokens - self._mean_tokens, seconds - self._mean_s
        self._mean_tokens += weight * more_tokens
        self._mean_s += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more_tokens**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_tokens * more_s)
