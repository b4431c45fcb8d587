"""The text of an answer as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.text.detokenizer import IncrementalDecoder
from radixkv.text.stop import StopStrings
from radixkv.text.tokenizer import Tokenizer


class AnswerText:
    """One answer: ids in, text up to the first stop string out.

    Args:
        tokenizer: the model's.
        stop: strings that end the answer.
        includes_stop: whether the stop string, or the token that ends the answer, is part of the text.
        min_tokens: no stop string ends within so many tokens.
        skip_special_tokens: whether special tokens are left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = StopStrings(stop, includes_stop=includes_stop)
        self._includes_stop = includes_stop
        self._n_early = min_tokens
        """How many of the next tokens come too early to end a stop string."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met."""
        return self._stop.met

    @property
    def n_characters(self) -> int:
        """How long the text of all ids is so far, the stop string and what follows it included."""
        return self._decoder.n_characters

    def push(self, ids: Sequence[int], *, is_stopped: bool = False) -> tuple[str, bool]:
        """The text to show now, and whether a stop string was met. O(new ids).

        Args:
            ids: the next tokens.
            is_stopped: whether the last of them is one that ends the answer.
        """
        if is_stopped and not self._includes_stop:
            ids = ids[:-1]
        early = ""
        if self._n_early:
            n_early = min(self._n_early, len(ids))
            self._n_early -= n_early
            early, _ = self._stop.push(self._decoder.push(ids[:n_early]), is_early=True)
            ids = ids[n_early:]
        text, met = self._stop.push(self._decoder.push(ids))
        return early + text, met

    def whole(self, ids: Sequence[int], *, is_stopped: bool = False) -> str:
        """The text of an answer without stop strings, all at once: what ``push`` and ``finish`` give, sooner.

        O(ids).

        Args:
            ids: all of them; nothing was pushed before.
            is_stopped: as for ``push``.
        """
        if is_stopped and not self._includes_stop:
            ids = ids[:-1]
        return self._decoder.whole(ids)

    def finish(self) -> tuple[str, bool]:
        """What is left to show when no more ids come, and whether a stop string was met, now or before."""
        text, met = self._stop.push(self._decoder.finish(), is_early=self._n_early > 0)
        return text + self._stop.finish(), met
