"""How long steps take, from one result to the next, by their rows."""

from __future__ import annotations

from collections import Counter

_WEIGHT = 1 / 4
"""Weight of a new measurement in a moving average."""
_MAX_RATIO = 1.15
"""A measurement counts as so many times the average at most: more is a pause of the machine, or the launch of a
prompt, behind which the result was taken."""
_MAX_FIRST_RATIO = 2.0
"""The same of the first measurements of a number of rows, which may be far from the guess."""
_N_FIRST = 5
_FORGET = 0.9999
"""By which the time of steps that wait falls with each other step: what was slow once is tried again later."""
_ROW_SHARE = 0.006
"""Guess of what a row more costs, as a share of the step, where nothing was measured. It is rather too little: more
rows than were measured are tried then."""
_SHARE_WEIGHT = 1 / 16
"""Weight of a step in the shares of steps that compute prompts."""
_SHARE_DRIFT = 1 / 512
"""Weight of the share of all steps in that of steps after drafts, with each step that is not one."""
_WAIT_S = 1e-3
"""Guess of what it costs to wait for a result before the next launch, where nothing was measured."""


class StepCosts:
    """Learns the seconds from one step's result to the next one's.

    A step that *waits* is planned when the result before it is known; other steps overlap with the host's work.
    What was not measured is guessed from fewer rows that were, as a line goes on: not more than what the next more
    rows took, and not less than what the next fewer took. O(numbers of rows).

    Args:
        overlaps: whether the device computes beside the host, so that waiting costs time.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self._wait_s = _WAIT_S if overlaps else 0.0
        self._seconds: dict[bool, dict[int, float]] = {False: {}, True: {}}
        """Moving averages by whether the step waits, and by ``bucket``."""
        self._idle_s: dict[bool, dict[int, float]] = {False: {}, True: {}}
        """Moving averages of the device's idle time before steps that waited, by whether they computed prompts, and
        by ``bucket``."""
        self._counts: Counter[tuple[bool, int]] = Counter()
        """Measurements of steps, by whether they wait and by ``bucket``."""
        self._prompt_share, self._prompt_share_after_drafts = 0.0, 0.0
        """Decayed shares of steps that compute prompts, of all, and of those behind a step with drafts."""
        self._had_drafts = False

    @property
    def is_measured(self) -> bool:
        """Whether any step that does not wait was measured."""
        return bool(self._seconds[False])

    def record(self, n_rows: int, seconds: float, *, waits: bool, is_late: bool = False) -> float:
        """Takes a measured step into account; returns its seconds, without those of a pause.

        Args:
            n_rows: of the step, a draft counting as a row.
            seconds: from the result before to its own.
            waits: whether it was planned when the result before it was known.
            is_late: whether its result may have been taken late. It never raises an average then, but begins one:
                it is better than a guess.
        """
        for averages in (self._seconds[True], *self._idle_s.values()):
            for size in averages:
                averages[size] *= _FORGET
        averages, size = self._seconds[waits], bucket(n_rows)
        if averages:
            max_ratio = _MAX_RATIO if self._counts[waits, size] >= _N_FIRST else _MAX_FIRST_RATIO
            seconds = min(seconds, max_ratio * self.seconds(n_rows, waits=waits))
        if is_late:
            seconds = min(seconds, averages.get(size, seconds))
        self._counts[waits, size] += not is_late
        average = averages.setdefault(size, seconds)
        averages[size] = average + _WEIGHT * (seconds - average)
        return seconds

    def step_done(self, *, has_prompts: bool, has_drafts: bool) -> None:
        """Learns how often the step after one with drafts computes prompts. O(1).

        Drafts let answers end sooner, and other requests begin then: such a step computes prompts more often than
        others. While no step has drafts, the learned share drifts to that of all steps.
        """
        self._prompt_share += _SHARE_WEIGHT * (has_prompts - self._prompt_share)
        share, weight = (has_prompts, _SHARE_WEIGHT) if self._had_drafts else (self._prompt_share, _SHARE_DRIFT)
        self._prompt_share_after_drafts += weight * (share - self._prompt_share_after_drafts)
        self._had_drafts = has_drafts

    def record_idle(self, n_rows: int, seconds: float, *, has_prompts: bool, is_late: bool) -> None:
        """Takes the idle time of the device before a step that waited into account.

        Args:
            n_rows: of the step, without drafts.
            seconds: from the result before to its own, less the device's.
            has_prompts: whether the step computed prompts.
            is_late: whether its result may have been taken late.
        """
        averages, size = self._idle_s[has_prompts], bucket(n_rows)
        average = averages.get(size)
        if average is None:
            averages[size] = seconds
        elif not is_late or seconds < average:
            averages[size] = average + _WEIGHT * (min(seconds, _MAX_FIRST_RATIO * average) - average)

    def more_seconds_after_drafts(self, n_rows: int) -> float:
        """Returns the expected extra idle time before the step after one with drafts: that step always waits."""
        return self._prompt_share_after_drafts * self.more_seconds(n_rows)

    def more_seconds(self, n_rows: int) -> float:
        """Returns how much longer the device is idle before a step that waits if it computes prompts, too.

        Its launch takes the host longer.

        Args:
            n_rows: of the step, without drafts.
        """
        return max(0.0, self.idle_seconds(n_rows, has_prompts=True) - self.idle_seconds(n_rows, has_prompts=False))

    def idle_seconds(self, n_rows: int, *, has_prompts: bool) -> float:
        """Returns how long the device is idle before a step that waits.

        What was not measured is that of the next fewer rows, or in proportion to the next more.

        Args:
            n_rows: of the step, without drafts.
            has_prompts: whether it computes prompts.
        """
        averages, wanted = self._idle_s[has_prompts], bucket(n_rows)
        if not averages:
            return self._wait_s
        size = max((size for size in averages if size <= wanted), default=min(averages))
        return averages[size] if size <= wanted else averages[size] * wanted / size

    def seconds(self, n_rows: int, *, waits: bool) -> float:
        """Returns how long a step of so many rows takes, a draft counting as a row."""
        wanted = bucket(n_rows)
        averages = self._seconds[waits]
        if wanted in averages:
            return averages[wanted]
        if averages:
            below = sorted(size for size in averages if size < wanted)
            if not below:
                return averages[min(averages)]
            nearest = averages[below[-1]]
            row_s = _ROW_SHARE * nearest
            if len(below) > 1:
                row_s = max(row_s, (nearest - averages[below[-2]]) / (below[-1] - below[-2]))
            guess = nearest + row_s * (wanted - below[-1])
            above = min((size for size in averages if size > wanted), default=None)
            return guess if above is None else max(nearest, min(guess, averages[above]))
        if waits and self._seconds[False]:
            return self.seconds(n_rows, waits=False) + self._wait_s
        return 1 + _ROW_SHARE * wanted


def bucket(n_rows: int) -> int:
    """Returns the number of rows for which a step with ``n_rows`` is measured: a power of 2, or 1.5 times one."""
    power = 1 << (n_rows - 1).bit_length()
    return power if power < 4 or n_rows > power * 3 // 4 else power * 3 // 4
