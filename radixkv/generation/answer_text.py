"""The text of an answer while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.generation.detokenizer import IncrementalDetokenizer
from radixkv.generation.stop import StopStrings
from radixkv.text.tokenizer import Tokenizer


class AnswerText:
    """Detokenizes one answer up to its first stop string.

    Args:
        tokenizer: the model's tokenizer.
        stop: strings that end the answer.
        prompt: the ids before the answer, as little-endian int32.
        includes_stop: whether the text includes the stop string, or the text of the stop token.
        min_tokens: stop strings that end within this many tokens are ignored.
        skip_special_tokens: whether the text leaves out special tokens.
        repeats_partial: as in ``IncrementalDetokenizer``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        prompt: bytes = b"",
        includes_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        repeats_partial: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt, skip_special_tokens=skip_special_tokens, repeats_partial=repeats_partial
        )
        self._stop = StopStrings(stop, includes_stop=includes_stop)
        self._includes_stop = includes_stop
        self._has_stop = bool(stop)
        self._n_early = min_tokens
        """How many of the next tokens still count towards ``min_tokens``."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that matched, if any."""
        return self._stop.matched

    @property
    def n_characters(self) -> int:
        """Length of the decoded text so far, including the stop string and everything after it."""
        return self._detokenizer.n_characters

    def push(self, ids: Sequence[int], *, is_stopped: bool = False) -> tuple[str, bool]:
        """Returns the text that is safe to show, and whether a stop string has matched. O(new ids).

        Args:
            ids: the next tokens.
            is_stopped: whether the last of them is a stop token or an end-of-sequence token.
        """
        if is_stopped and not self._includes_stop:
            ids = ids[:-1]
        if not self._has_stop:
            return self._detokenizer.push(ids), False
        early = ""
        if self._n_early:
            n_early = min(self._n_early, len(ids))
            self._n_early -= n_early
            early, _ = self._stop.push(self._detokenizer.push(ids[:n_early]), is_early=True)
            ids = ids[n_early:]
        text, has_matched = self._stop.push(self._detokenizer.push(ids))
        return early + text, has_matched

    def decode_all(self, ids: Sequence[int], *, is_stopped: bool = False) -> str:
        """Returns the text of a whole answer without stop strings: faster than ``push`` and ``finish``. O(ids).

        Args:
            ids: all tokens of the answer; none were pushed before.
            is_stopped: as in ``push``.
        """
        if is_stopped and not self._includes_stop:
            ids = ids[:-1]
        return self._detokenizer.decode_all(ids)

    def finish(self) -> tuple[str, bool]:
        """Returns the rest of the text after the last token, and whether a stop string has matched."""
        text, has_matched = self._stop.push(self._detokenizer.finish(), is_early=self._n_early > 0)
        return text + self._stop.finish(), has_matched
