"""From the runtime's tokens of one choice to the output that its caller sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from radixkv.generation.answer_text import AnswerText
from radixkv.generation.logprobs import RenderedT, TokenRenderer
from radixkv.generation.models import GenerationModel
from radixkv.sampling import SamplingParams
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import TokenLogprobs, unpack_tokens


@dataclass(slots=True)
class TextPart:
    """Text of the answer itself."""

    text: str


@dataclass(slots=True)
class OutputDelta(Generic[RenderedT]):
    """Output of one choice: what is new, or everything so far. Consecutive ones can be concatenated."""

    parts: list[TextPart] = field(default_factory=list)
    """What the tokens say, in order. Neighbours are of different kinds."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RenderedT] = field(default_factory=list)
    """One per token, as the API shows it; empty if it shows none."""
    finish_reason: str | None = None
    """None while the choice is running."""
    stop_reason: int | str | None = None
    """The stop string or the token of ``stop_token_ids`` that ended the choice."""

    @property
    def text(self) -> str:
        """The text of the answer itself."""
        return "".join([part.text for part in self.parts])

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a token nor an end."""
        return not self.token_ids and self.finish_reason is None

    def add_text(self, text: str) -> None:
        """Appends text of the answer itself."""
        if not text:
            return
        if self.parts:
            self.parts[-1].text += text
        else:
            self.parts.append(TextPart(text))

    def add(self, later: OutputDelta[RenderedT]) -> None:
        """Appends the output that follows."""
        for part in later.parts:
            self.add_text(part.text)
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        if later.finish_reason is not None:
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class ChoiceStream(Generic[RenderedT]):
    """Turns the runtime's tokens of one choice into ``OutputDelta`` objects, and ends it at stop strings.

    Args:
        sampling: of the prompt.
        model: ends answers and turns them into text.
        render_token: renders a token's log-probabilities; None if the caller shows none.
        first_offset: characters before the answer in the choice's text, if ``render_token`` needs the offset of
            each token. None is faster; ``render_token`` then gets 0 as the offset.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        model: GenerationModel,
        render_token: TokenRenderer[RenderedT] | None = None,
        first_offset: int | None = None,
    ) -> None:
        self.n_tokens = 0
        self.is_ended = False
        """Whether the choice is complete; later tokens are dropped."""
        self._sampling = sampling
        self._tokenizer = model.tokenizer
        self._text = None if model.tokenizer is None else answer_text(sampling, model.tokenizer)
        self._render_token = render_token
        self._first_offset = first_offset
        self._goes_singly = bool(sampling.stop) or first_offset is not None
        self._eos_token_ids = frozenset() if sampling.ignore_eos else model.eos_token_ids

    def absorb(
        self,
        tokens: bytes | bytearray,
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: str | None = None,
        stop_token_id: int | None = None,
    ) -> OutputDelta[RenderedT]:
        """Returns the output of new tokens; it is empty once the choice has ended. O(tokens).

        Args:
            tokens: the next tokens, as little-endian int32 ids.
            logprobs: one per token, if the request asks for them.
            finish_reason: why the runtime ended the choice with these tokens; None if it did not.
            stop_token_id: the token that ended the choice, if one did; it is the last of ``tokens``.
        """
        output: OutputDelta[RenderedT] = OutputDelta()
        if self.is_ended:
            return output
        ids, has_stop_token = unpack_tokens(bytes(tokens)), stop_token_id is not None
        offsets: Sequence[int] = ()
        if self._goes_singly and self._text is not None:
            offsets, self.is_ended = self._push_singly(output, ids, has_stop_token)
            del ids[len(offsets) :]
        elif self._text is not None:
            is_whole = finish_reason is not None and not self.n_tokens
            if is_whole:
                output.add_text(self._text.decode_all(ids, is_stopped=has_stop_token))
            else:
                output.add_text(self._text.push(ids, is_stopped=has_stop_token)[0])
        output.token_ids = ids
        self.n_tokens += len(ids)
        if self._render_token is not None:
            n_top = self._sampling.logprobs or 0
            output.logprobs = [
                self._render_token(
                    self._tokenizer,
                    token,
                    offsets[index] if offsets else self._first_offset or 0,
                    logprobs[index] if logprobs else None,
                    n_top,
                )
                for index, token in enumerate(ids)
            ]
        if self.is_ended:
            self._stop(output)
        elif finish_reason is not None:
            self._finish(output, finish_reason, stop_token_id)
        return output

    def _push_singly(
        self, output: OutputDelta[RenderedT], ids: Sequence[int], has_stop_token: bool
    ) -> tuple[list[int], bool]:
        """Converts token by token, so that the end does not depend on how tokens were grouped.

        Returns the offset of each token, up to the one that completes a stop string, and whether one does.
        """
        assert self._text is not None
        texts, offsets, has_matched = [], [], False
        for index, token in enumerate(ids):
            offsets.append((self._first_offset or 0) + self._text.n_characters)
            text, has_matched = self._text.push([token], is_stopped=has_stop_token and index == len(ids) - 1)
            texts.append(text)
            if has_matched:
                break
        output.add_text("".join(texts))
        return offsets, has_matched

    def _finish(self, output: OutputDelta[RenderedT], finish_reason: str, stop_token_id: int | None) -> None:
        """Ends the choice as the runtime did, unless its remaining text completes a stop string."""
        self.is_ended = True
        if self._text is not None:
            text, has_matched = self._text.finish()
            output.add_text(text)
            if has_matched:
                self._stop(output)
                return
        output.finish_reason = finish_reason
        if stop_token_id in self._sampling.stop_token_ids and stop_token_id not in self._eos_token_ids:
            output.stop_reason = stop_token_id

    def _stop(self, output: OutputDelta[RenderedT]) -> None:
        output.finish_reason = "stop"
        output.stop_reason = None if self._text is None else self._text.stop_string


def answer_text(sampling: SamplingParams, tokenizer: Tokenizer) -> AnswerText:
    """Returns the detokenizer of an answer with the text options of ``sampling``."""
    return AnswerText(
        tokenizer,
        sampling.stop,
        includes_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
        skip_special_tokens=sampling.skip_special_tokens,
    )
