"""One choice of an answer: what the runtime sends in, text and figures out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from radixkv.frontend.in_flight import Delta
from radixkv.frontend.logprobs import ShownToken, ShowToken
from radixkv.sampling import SamplingParams
from radixkv.text.answer_text import AnswerText
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import NewTokens, TokenLogprobs, unpack_tokens


class Vocabulary(Protocol):
    """What must be known of a model to end answers and to write them."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: answers have token ids only."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer though nobody asked for it."""
        ...


@dataclass
class Piece:
    """What a choice gained; several in a row can be put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ShownToken] = field(default_factory=list)
    """One a token, if they are shown."""
    finish_reason: str | None = None
    """None while more may come."""
    stop_reason: int | str | None = None
    """The stop string, or the token of ``stop_token_ids``, that ended it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.token_ids and self.finish_reason is None

    def add(self, later: Piece) -> None:
        """Takes what came after it."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        if later.finish_reason is not None:
            self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Choice:
    """One answer to a prompt so far.

    Args:
        sampling: the prompt's.
        vocabulary: the model's.
        show: makes what is shown of a token's log-probabilities; None: nothing is.
        n_before: characters that stand before the answer in the choice's text.
    """

    def __init__(
        self, sampling: SamplingParams, vocabulary: Vocabulary, show: ShowToken | None = None, n_before: int = 0
    ) -> None:
        self.n_tokens = 0
        self.is_ended = False
        """Whether all that belongs to it has come; what still comes is dropped."""
        self._sampling = sampling
        self._tokenizer = vocabulary.tokenizer
        self._text = None if vocabulary.tokenizer is None else answer_text(sampling, vocabulary.tokenizer)
        self._show = show
        self._n_before = n_before
        self._unasked_ends = frozenset() if sampling.ignore_eos else vocabulary.eos_token_ids

    def absorb(self, delta: Delta | NewTokens) -> Piece:
        """Takes what came; after a piece with ``finish_reason`` all pieces are empty. O(tokens)."""
        piece = Piece()
        if self.is_ended:
            return piece
        ids = unpack_tokens(bytes(delta.tokens))
        if self._sampling.stop or self._show is not None:
            piece.text, self.is_ended = self._take_singly(piece, delta, ids)
        else:
            piece.text, self.is_ended = self._take_together(delta, ids), False
            piece.token_ids = ids
        self.n_tokens += len(piece.token_ids)
        if self.is_ended:
            self._stop(piece)
        elif delta.finish_reason is not None:
            piece.text += self._finish(piece, delta)
        return piece

    def _take_together(self, delta: Delta | NewTokens, ids: Sequence[int]) -> str:
        """Where no text ends it. Returns the text to show."""
        is_stopped = delta.stop_token_id is not None
        if self._text is None:
            return ""
        if delta.finish_reason is not None and not self.n_tokens:
            return self._text.whole(ids, is_stopped=is_stopped)
        return self._text.push(ids, is_stopped=is_stopped)[0]

    def _take_singly(self, piece: Piece, delta: Delta | NewTokens, ids: Sequence[int]) -> tuple[str, bool]:
        """Token by token, so that the end does not depend on how many came together.

        Returns the text to show, and whether a stop string was met.
        """
        texts, is_met = [], False
        for place, token in enumerate(ids):
            if self._show is not None:
                figures = delta.logprobs[place] if delta.logprobs else None
                piece.logprobs.append(self._shown(token, figures, self._show))
            piece.token_ids.append(token)
            is_stop_token = delta.stop_token_id is not None and place == len(ids) - 1
            if self._text is not None:
                more, is_met = self._text.push([token], is_stopped=is_stop_token)
                texts.append(more)
            if is_met:
                break
        return "".join(texts), is_met

    def _finish(self, piece: Piece, delta: Delta | NewTokens) -> str:
        """Ends it as the runtime says, unless its last text has a stop string."""
        self.is_ended = True
        text, is_met = ("", False) if self._text is None else self._text.finish()
        if is_met:
            self._stop(piece)
            return text
        piece.finish_reason = delta.finish_reason
        token = delta.stop_token_id
        if token in self._sampling.stop_token_ids and token not in self._unasked_ends:
            piece.stop_reason = token
        return text

    def _stop(self, piece: Piece) -> None:
        piece.finish_reason = "stop"
        piece.stop_reason = None if self._text is None else self._text.stop_string

    def _shown(self, token: int, figures: TokenLogprobs | None, show: ShowToken) -> ShownToken:
        offset = self._n_before + (0 if self._text is None else self._text.n_characters)
        return show(self._tokenizer, token, offset, figures, self._sampling.logprobs or 0)


def answer_text(sampling: SamplingParams, tokenizer: Tokenizer) -> AnswerText:
    """The text of an answer, as ``sampling`` wants it."""
    return AnswerText(
        tokenizer,
        sampling.stop,
        includes_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
        skip_special_tokens=sampling.skip_special_tokens,
    )
