"""Stop strings in text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first, wherever the pieces are cut.

    Of several that end at the same character the longest counts. Nothing of the stop string is ever shown.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        beginnings = {text[:length] for text in stop for length in range(1, len(text))}
        self._beginnings = tuple(sorted(beginnings, key=len, reverse=True))
        self._held = ""
        self.met: str | None = None
        """The stop string that was met."""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was met; after that all text is dropped.

        What could still be the beginning of a stop string is held back. O(length of text and stop strings).
        """
        if self.met is not None:
            return "", True
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self.met = text[start:end]
            self._held = ""
            return text[:start], True
        n_shown = len(text) - self._n_held(text)
        self._held = text[n_shown:]
        return text[:n_shown], False

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _n_held(self, text: str) -> int:
        if not text.endswith(self._beginnings):
            return 0
        return next(len(beginning) for beginning in self._beginnings if text.endswith(beginning))
