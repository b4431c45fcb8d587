"""Estimate of what is faster for pages in another tier: to load them or to compute them again."""

from __future__ import annotations

from radixkv.runtime.tiers.fetch_rate import FetchRate

_MIN_WEIGHT = 0.1
"""Weight of a new measurement in a moving average, after the first ten."""
_MAX_OUTLIER = 4.0
"""A measurement counts as at most this many times the average: one copy may have waited for something else."""
MIN_MEASURED_TOKENS = 512
"""Steps that compute fewer prompt tokens say little about the time of a token: most of theirs is fixed."""
_TURNS_S = 0.001
"""Time of a load beside its copy: the turns of the loop in which it is begun and noticed."""


class _Average:
    """A moving average of seconds per token; None before the first measurement."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._n = 0

    def add(self, measured: float) -> None:
        self._n += 1
        if self.value is None:
            self.value = measured
        else:
            weight = max(_MIN_WEIGHT, 1 / self._n)
            self.value += weight * (min(measured, _MAX_OUTLIER * self.value) - self.value)


class LoadCost:
    """Compares the time of a load with that of computing the same tokens, both from rates measured while serving.

    A page is computed and stored before it can be loaded. So the rate of computing and that of the fastest store,
    which stands in for that of loads before the first one, are known when the first decision is made. Without them,
    as for the first pages from disk after a restart, loading counts as faster.

    A load of n tokens takes a fixed time and n times ``load_s_per_token``. Those behind the host tier take a fetch
    before, from one or several places, whose rates ``fetch_rate`` has. Computing them takes n times
    ``compute_s_per_token``: the prompt's other tokens are computed in any case, and with them what is fixed.

    Args:
        n_more: tokens whose pages have the bytes that a load copies beside its pages: those of a state.
        min_measured_tokens: steps that compute fewer prompt tokens are not measured.
    """

    def __init__(self, n_more: int = 0, min_measured_tokens: int = MIN_MEASURED_TOKENS) -> None:
        self._n_more = n_more
        self._min_measured_tokens = min_measured_tokens
        self._load, self._compute, self._look_up = _Average(), _Average(), _Average()
        self._fetches: dict[int, FetchRate] = {}
        self._fastest_store: float | None = None

    @property
    def load_s_per_token(self) -> float | None:
        """Time of a copy from the host tier per token, in seconds."""
        return self._fastest_store if self._load.value is None else self._load.value

    @property
    def compute_s_per_token(self) -> float | None:
        """Time of a prompt's step per token, in seconds."""
        return self._compute.value

    @property
    def min_tokens(self) -> float:
        """Length in tokens above which a load from the host tier is faster than computing; infinite if none is."""
        load, compute = self.load_s_per_token, self.compute_s_per_token
        if load is None or compute is None:
            return 0.0
        return (_TURNS_S + self._n_more * load) / (compute - load) if compute > load else float("inf")

    @property
    def look_up_s(self) -> float:
        """Time of a lookup in seconds, with the turns of the loop beside it."""
        return _TURNS_S + (self._look_up.value or 0.0)

    def fetch_rate(self, place: int) -> FetchRate:
        """Returns the rate of fetches from a place behind the host tier, by its number. O(1)."""
        return self._fetches.setdefault(place, FetchRate())

    def gain_s(self, n_tokens: int, fetch_s: float = 0.0) -> float:
        """Returns how much sooner tokens are there if they are loaded and not computed; below 0 if later. O(1).

        Infinite before rates are known.

        Args:
            n_tokens: tokens to load from the host tier, with those to fetch before.
            fetch_s: time of the fetch.
        """
        load, compute = self.load_s_per_token, self.compute_s_per_token
        if load is None or compute is None:
            return float("inf")
        return n_tokens * compute - (_TURNS_S + (n_tokens + self._n_more) * load + fetch_s)

    def is_load_faster(self, n_host: int, n_fetched: int = 0, fetch_s: float = 0.0) -> bool:
        """Returns whether loading is faster than computing. O(1).

        With tokens behind the host tier, whether it is also faster to load them than to load those of the host tier
        alone and compute them.

        Args:
            n_host: tokens to load from the host tier.
            n_fetched: tokens after them to fetch before, and to load then.
            fetch_s: time of that fetch, and of a lookup before it.
        """
        gain_s = self.gain_s(n_host + n_fetched, fetch_s)
        return gain_s > 0 and (not n_fetched or gain_s > self.gain_s(n_host) or gain_s == float("inf"))

    def add_load(self, n_tokens: int, seconds: float) -> None:
        """Takes the measured time of a load into account. O(1)."""
        self._load.add(seconds / n_tokens)

    def add_store(self, n_tokens: int, seconds: float) -> None:
        """Takes the measured time of a store into account. O(1)."""
        s_per_token = seconds / n_tokens
        if self._fastest_store is None or s_per_token < self._fastest_store:
            self._fastest_store = s_per_token

    def add_look_up(self, seconds: float) -> None:
        """Takes the measured time of a lookup into account. O(1)."""
        self._look_up.add(seconds)

    def add_step(self, n_prompt_tokens: int, n_tokens: int, seconds: float) -> None:
        """Takes the measured time of a step into account, if it mostly computed prompts. O(1)."""
        if n_prompt_tokens >= max(self._min_measured_tokens, n_tokens // 2):
            self._compute.add(seconds / n_tokens)
