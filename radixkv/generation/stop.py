"""Stop string matching in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that ends first, wherever the text is split into pieces.

    If several stop strings end at the same character, the longest matches. Text that may be the start of a stop
    string is held back.

    Args:
        stop: the stop strings.
        includes_stop: whether the returned text includes the matched stop string.
    """

    def __init__(self, stop: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._includes_stop = includes_stop
        prefixes = {text[:length] for text in stop for length in range(1, len(text))}
        self._prefixes = tuple(sorted(prefixes, key=len, reverse=True))
        self._pending = ""
        self._n_early = 0
        """How many characters of the pending text are too early to be the end of a stop string."""
        self.matched: str | None = None
        """The stop string that matched."""

    def push(self, text: str, *, is_early: bool = False) -> tuple[str, bool]:
        """Returns the text that is safe to show, and whether a stop string has matched. O(text and stop strings).

        After a match all further text is dropped.

        Args:
            text: the next piece.
            is_early: whether the piece lies within ``min_tokens``: a stop string may start there, but not end.
        """
        if self.matched is not None:
            return "", True
        if not self._stop:
            return text, False
        text = self._pending + text
        n_early = len(text) if is_early else self._n_early
        if (match := self._first(text, n_early)) is not None:
            start, end = match
            self.matched = text[start:end]
            self._pending = ""
            return text[: end if self._includes_stop else start], True
        n_shown = len(text) - self._n_pending(text)
        self._pending = text[n_shown:]
        self._n_early = max(0, n_early - n_shown)
        return text[:n_shown], False

    def finish(self) -> str:
        """Returns the text still held back, after the last piece."""
        pending, self._pending = self._pending, ""
        return pending

    def _first(self, text: str, n_early: int) -> tuple[int, int] | None:
        """Returns start and end of the first stop string that ends after the early text."""
        starts = [(text.find(stop, max(0, n_early - len(stop) + 1)), stop) for stop in self._stop]
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _n_pending(self, text: str) -> int:
        if not text.endswith(self._prefixes):
            return 0
        return next(len(prefix) for prefix in self._prefixes if text.endswith(prefix))
