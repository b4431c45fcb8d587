"""From the runtime's tokens of one choice to the output that its caller sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Generic

import msgspec

from radixkv.generation.answer_text import AnswerText
from radixkv.generation.logprobs import RenderedT, TokenRenderer
from radixkv.generation.models import GenerationModel
from radixkv.generation.parts import Part, ReasoningPart, TextPart, ToolCallPart
from radixkv.wire.messages import TokenLogprobs, unpack_tokens
from radixkv.wire.sampling import SamplingParams

if TYPE_CHECKING:  # it imports Transformers, which few models need
    from radixkv.generation.parsers.answer_parser import AnswerParser


class OutputDelta(msgspec.Struct, Generic[RenderedT]):
    """Output of one choice: what is new, or everything so far. Consecutive ones can be concatenated."""

    parts: list[Part] = []
    """What the tokens say, in order. Neighbours are of different kinds, or different calls."""
    token_ids: list[int] = []
    logprobs: list[RenderedT] = []
    """One per token, as the API shows it; empty if it shows none."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``tool_calls``; None while the choice is running."""
    stop_reason: int | str | None = None
    """The stop string or the token of ``stop_token_ids`` that ended the choice."""

    @property
    def text(self) -> str:
        """The text of the answer itself."""
        match self.parts:
            case [TextPart(text)]:  # the most frequent
                return text
        return "".join([part.text for part in self.parts if isinstance(part, TextPart)])

    @property
    def only_text(self) -> str | None:
        """The text of output that is nothing but text: most pieces of a stream. None for all other output."""
        if self.finish_reason is not None or self.logprobs:
            return None
        match self.parts:
            case []:
                return ""
            case [TextPart(text)]:
                return text
        return None

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join([part.text for part in self.parts if isinstance(part, ReasoningPart)])

    @property
    def tool_calls(self) -> list[ToolCallPart]:
        """The calls of tools, in order."""
        return [part for part in self.parts if isinstance(part, ToolCallPart)]

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a token nor an end."""
        return not self.token_ids and self.finish_reason is None

    def add_text(self, text: str) -> None:
        """Appends text of the answer itself."""
        if not text:
            return
        if self.parts:
            self.add_part(TextPart(text))
        else:
            self.parts.append(TextPart(text))

    def add_part(self, part: Part) -> None:
        """Appends a part, or continues the last one with it if both are of one kind and, for calls, of one call."""
        last = self.parts[-1] if self.parts else None
        if isinstance(part, ToolCallPart):
            if isinstance(last, ToolCallPart) and last.index == part.index:
                last.arguments += part.arguments
                return
        elif isinstance(last, type(part)):
            last.text += part.text
            return
        self.parts.append(msgspec.structs.replace(part))  # a copy, because parts grow

    def add(self, later: OutputDelta[RenderedT]) -> None:
        """Appends the output that follows."""
        for part in later.parts:
            self.add_part(part)
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        if later.finish_reason is not None:
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class ChoiceStream(Generic[RenderedT]):
    """Turns the runtime's tokens of one choice into ``OutputDelta`` objects, and ends it at stop strings.

    Args:
        sampling: of the prompt.
        model: ends answers and turns them into text.
        render_token: renders a token's logprobs; None if the caller shows none.
        first_offset: characters before the answer in the choice's text, if ``render_token`` needs the offset of
            each token. None is faster; ``render_token`` then gets 0 as the offset.
        parser: splits the text into parts; None if all of it is text. It may look for special tokens, so the text
            has them then.
        prompt: the ids before the answer, as little-endian int32.
        repeats_partial: whether the text begins with the character that is incomplete at the end of the prompt's;
            see ``IncrementalDetokenizer``.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        model: GenerationModel,
        render_token: TokenRenderer[RenderedT] | None = None,
        first_offset: int | None = None,
        parser: AnswerParser | None = None,
        *,
        prompt: bytes = b"",
        repeats_partial: bool = False,
    ) -> None:
        self.n_tokens = 0
        self.is_ended = False
        """Whether the choice is complete; later tokens are dropped."""
        self._sampling = sampling
        self._tokenizer = model.tokenizer
        self._parser = parser
        self._text: AnswerText | None = None
        if model.tokenizer is not None:
            self._text = AnswerText(
                model.tokenizer,
                sampling.stop,
                prompt=prompt,
                includes_stop=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                skip_special_tokens=sampling.skip_special_tokens and parser is None,
                repeats_partial=repeats_partial,
            )
        self._render_token = render_token
        self._first_offset = first_offset
        self._goes_singly = bool(sampling.stop) or (render_token is not None and first_offset is not None)
        eos_token_ids = frozenset() if sampling.ignore_eos else model.eos_token_ids
        self._explicit_stop_ids = frozenset(sampling.stop_token_ids) - eos_token_ids
        """Tokens that are the ``stop_reason`` of an answer that they end."""
        self._n_reasoning_tokens: int | None = None
        """Tokens up to the end of the reasoning; None before it."""

    @property
    def n_reasoning_tokens(self) -> int:
        """Tokens up to the one that completes the end of the reasoning; all so far while it goes on.

        0 without a parser that finds reasoning, and for an answer that begins with anything else.
        """
        if self._n_reasoning_tokens is not None:
            return self._n_reasoning_tokens
        return self.n_tokens if self._parser is not None and self._parser.reasoning == "open" else 0

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
        ids, is_stopped = unpack_tokens(tokens), stop_token_id is not None
        offsets: Iterable[int] = repeat(self._first_offset or 0)
        if self._text is not None and self._goes_singly:
            offsets = self._push_singly(self._text, output, ids, is_stopped=is_stopped)
        elif self._text is not None and self._parser is not None and self._parser.is_reasoning_possible:
            self._push_reasoning(self._text, self._parser, output, ids, is_stopped=is_stopped)
        elif self._text is not None and finish_reason is not None and not self.n_tokens:
            self._add_text(output, self._text.decode_all(ids, is_stopped=is_stopped))
        elif self._text is not None:
            self._add_text(output, self._text.push(ids, is_stopped=is_stopped)[0])
        output.token_ids = ids
        self.n_tokens += len(ids)
        if self._render_token is not None:
            n_top = self._sampling.logprobs or 0
            output.logprobs = [
                self._render_token(self._tokenizer, token, offset, token_logprobs, n_top)
                for token, offset, token_logprobs in zip(ids, offsets, logprobs or repeat(None), strict=False)
            ]
        if finish_reason is not None or self._goes_singly:
            self._end(output, finish_reason, stop_token_id)
        return output

    def _add_text(self, output: OutputDelta[RenderedT], text: str) -> None:
        """Appends decoded text, which the parser may split into parts."""
        if self._parser is None:
            output.add_text(text)
            return
        for part in self._parser.feed(text):
            output.add_part(part)

    def _push_reasoning(
        self,
        text: AnswerText,
        parser: AnswerParser,
        output: OutputDelta[RenderedT],
        ids: list[int],
        *,
        is_stopped: bool,
    ) -> None:
        """Converts token by token while they may be reasoning, so that its end is known to the token."""
        n_read = 0
        while n_read < len(ids) and parser.is_reasoning_possible:
            is_last = n_read == len(ids) - 1
            self._add_text(output, text.push([ids[n_read]], is_stopped=is_stopped and is_last)[0])
            n_read += 1
            self._note_reasoning(parser, n_read)
        if n_read < len(ids):
            self._add_text(output, text.push(ids[n_read:], is_stopped=is_stopped)[0])

    def _note_reasoning(self, parser: AnswerParser, n_read: int) -> None:
        """Notes whether the reasoning has ended with the latest ``n_read`` tokens."""
        if parser.reasoning == "closed" and self._n_reasoning_tokens is None:
            self._n_reasoning_tokens = self.n_tokens + n_read

    def _push_singly(
        self, text: AnswerText, output: OutputDelta[RenderedT], ids: list[int], *, is_stopped: bool
    ) -> list[int]:
        """Converts token by token, so that the end does not depend on how tokens were grouped.

        Drops the ids after the one that completes a stop string. Returns the offset of each token.
        """
        pieces, offsets, has_matched = [], [], False
        for index, token in enumerate(ids):
            offsets.append((self._first_offset or 0) + text.n_characters)
            piece, has_matched = text.push([token], is_stopped=is_stopped and index == len(ids) - 1)
            if self._parser is not None and self._parser.is_reasoning_possible:
                self._add_text(output, piece)
                self._note_reasoning(self._parser, len(offsets))
            else:
                pieces.append(piece)
            if has_matched:
                break
        del ids[len(offsets) :]
        self._add_text(output, "".join(pieces))
        return offsets

    def _end(self, output: OutputDelta[RenderedT], finish_reason: str | None, stop_token_id: int | None) -> None:
        """Ends the choice at a stop string, which its remaining text may complete, or as the runtime did."""
        if self._text is not None:
            if finish_reason is not None and self._text.stop_string is None:
                self._add_text(output, self._text.finish()[0])
            if self._text.stop_string is not None:
                finish_reason, output.stop_reason = "stop", self._text.stop_string
        if self._parser is not None and finish_reason is not None:
            for part in self._parser.finish(is_cut=finish_reason != "stop"):
                output.add_part(part)
            if self._parser.n_calls and finish_reason == "stop":
                finish_reason = "tool_calls"
        if output.stop_reason is None and stop_token_id in self._explicit_stop_ids:
            output.stop_reason = stop_token_id
        output.finish_reason = finish_reason
        self.is_ended = finish_reason is not None
