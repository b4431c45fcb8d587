"""Stop strings in text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first, wherever the pieces are cut.

    Of several that end at the same character the longest counts. What could still be the beginning of one is held
    back.

    Args:
        stop: the strings.
        includes_stop: whether the one that is met is shown.
    """

    def __init__(self, stop: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._includes_stop = includes_stop
        beginnings = {text[:length] for text in stop for length in range(1, len(text))}
        self._beginnings = tuple(sorted(beginnings, key=len, reverse=True))
        self._held = ""
        self._n_early = 0
        """How many characters of what is held came too early to end a stop string."""
        self.met: str | None = None
        """The stop string that was met."""

    def push(self, text: str, *, is_early: bool = False) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was met; after that all text is dropped.

        A stop string may begin, but not end, in text that is early. O(length of text and stop strings).
        """
        if self.met is not None:
            return "", True
        if not self._stop:
            return text, False
        text = self._held + text
        n_early = len(text) if is_early else self._n_early
        if (found := self._first(text, n_early)) is not None:
            start, end = found
            self.met = text[start:end]
            self._held = ""
            return text[: end if self._includes_stop else start], True
        n_shown = len(text) - self._n_held(text)
        self._held = text[n_shown:]
        self._n_early = max(0, n_early - n_shown)
        return text[:n_shown], False

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, n_early: int) -> tuple[int, int] | None:
        """Start and end of the first stop string that ends behind the early text."""
        starts = [(text.find(stop, max(0, n_early - len(stop) + 1)), stop) for stop in self._stop]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _n_held(self, text: str) -> int:
        if not text.endswith(self._beginnings):
            return 0
        return next(len(beginning) for beginning in self._beginnings if text.endswith(beginning))
