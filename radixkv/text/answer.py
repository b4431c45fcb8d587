"""The text of an answer as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.text.decode import IncrementalDecoder
from radixkv.text.stop import StopStrings
from radixkv.text.tokenizer import Tokenizer


class AnswerText:
    """One answer: ids in, text up to the first stop string out."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop = StopStrings(stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met."""
        return self._stop.met

    def push(self, ids: Sequence[int]) -> tuple[str, bool]:
        """The text to show now, and whether a stop string was met. O(new ids)."""
        return self._stop.push(self._decoder.push(ids))

    def finish(self) -> tuple[str, bool]:
        """What is left to show when no more ids come, and whether a stop string was met, now or before."""
        text, met = self._stop.push(self._decoder.finish())
        return text + self._stop.finish(), met
