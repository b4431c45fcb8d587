"""Conversion of one choice's tokens to text and rendered logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from radixkv.frontend.in_flight import TokenDelta
from radixkv.frontend.logprobs import RenderedToken, TokenRenderer
from radixkv.sampling import SamplingParams
from radixkv.text.answer_text import AnswerText
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import NewTokens, TokenLogprobs, unpack_tokens


class Vocabulary(Protocol):
    """The part of a model that ends answers and turns them into text."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if answers have token ids only."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer without being in ``stop_token_ids``."""
        ...


@dataclass
class OutputDelta:
    """New output of one choice, ready for a response; consecutive ones can be concatenated."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RenderedToken] = field(default_factory=list)
    """One per token; empty if the response shows none."""
    finish_reason: str | None = None
    """None while the choice is running."""
    stop_reason: int | str | None = None
    """The stop string or the token of ``stop_token_ids`` that ended the choice."""

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a token nor an end."""
        return not self.token_ids and self.finish_reason is None

    def add(self, later: OutputDelta) -> None:
        """Appends the output that follows."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        if later.finish_reason is not None:
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class ChoiceStream:
    """Turns the runtime's tokens of one choice into ``OutputDelta`` objects, and ends it at stop strings.

    Args:
        sampling: of the prompt.
        vocabulary: of the model.
        render_token: renders a token's logprobs; None if the response shows none.
        n_before: characters before the answer in the choice's text, such as an echoed prompt.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        vocabulary: Vocabulary,
        render_token: TokenRenderer | None = None,
        n_before: int = 0,
    ) -> None:
        self.n_tokens = 0
        self.is_ended = False
        """Whether the choice is complete; later tokens are dropped."""
        self._sampling = sampling
        self._tokenizer = vocabulary.tokenizer
        self._text = None if vocabulary.tokenizer is None else answer_text(sampling, vocabulary.tokenizer)
        self._render_token = render_token
        self._n_before = n_before
        self._eos_token_ids = frozenset() if sampling.ignore_eos else vocabulary.eos_token_ids

    def absorb(self, delta: TokenDelta | NewTokens) -> OutputDelta:
        """Returns the output of new tokens; it is empty once the choice has ended. O(tokens)."""
        output = OutputDelta()
        if self.is_ended:
            return output
        ids = unpack_tokens(bytes(delta.tokens))
        if self._sampling.stop or self._render_token is not None:
            output.text, self.is_ended = self._convert_singly(output, delta, ids)
        else:
            output.text, self.is_ended = self._convert_together(delta, ids), False
            output.token_ids = ids
        self.n_tokens += len(output.token_ids)
        if self.is_ended:
            self._stop(output)
        elif delta.finish_reason is not None:
            output.text += self._finish(output, delta)
        return output

    def _convert_together(self, delta: TokenDelta | NewTokens, ids: Sequence[int]) -> str:
        """Returns the new text of tokens, when no stop string has to be looked for."""
        is_stopped = delta.stop_token_id is not None
        if self._text is None:
            return ""
        if delta.finish_reason is not None and not self.n_tokens:
            return self._text.decode_all(ids, is_stopped=is_stopped)
        return self._text.push(ids, is_stopped=is_stopped)[0]

    def _convert_singly(
        self, output: OutputDelta, delta: TokenDelta | NewTokens, ids: Sequence[int]
    ) -> tuple[str, bool]:
        """Converts token by token, so that the end does not depend on how tokens were grouped into deltas.

        Returns the new text, and whether a stop string was met.
        """
        texts, is_met = [], False
        for index, token in enumerate(ids):
            if self._render_token is not None:
                token_logprobs = delta.logprobs[index] if delta.logprobs else None
                output.logprobs.append(self._rendered(token, token_logprobs, self._render_token))
            output.token_ids.append(token)
            is_stop_token = delta.stop_token_id is not None and index == len(ids) - 1
            if self._text is not None:
                more, is_met = self._text.push([token], is_stopped=is_stop_token)
                texts.append(more)
            if is_met:
                break
        return "".join(texts), is_met

    def _finish(self, output: OutputDelta, delta: TokenDelta | NewTokens) -> str:
        """Ends the choice as the runtime did, unless its remaining text completes a stop string.

        Returns the remaining text.
        """
        self.is_ended = True
        text, is_met = ("", False) if self._text is None else self._text.finish()
        if is_met:
            self._stop(output)
            return text
        output.finish_reason = delta.finish_reason
        token = delta.stop_token_id
        if token in self._sampling.stop_token_ids and token not in self._eos_token_ids:
            output.stop_reason = token
        return text

    def _stop(self, output: OutputDelta) -> None:
        output.finish_reason = "stop"
        output.stop_reason = None if self._text is None else self._text.stop_string

    def _rendered(
        self, token: int, token_logprobs: TokenLogprobs | None, render_token: TokenRenderer
    ) -> RenderedToken:
        offset = self._n_before + (0 if self._text is None else self._text.n_characters)
        return render_token(self._tokenizer, token, offset, token_logprobs, self._sampling.logprobs or 0)


def answer_text(sampling: SamplingParams, tokenizer: Tokenizer) -> AnswerText:
    """Returns the detokenizer of an answer with the text options of ``sampling``."""
    return AnswerText(
        tokenizer,
        sampling.stop,
        includes_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
        skip_special_tokens=sampling.skip_special_tokens,
    )
