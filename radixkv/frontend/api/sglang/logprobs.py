"""Log-probabilities as SGLang shows them: lists of ``[logprob, id, text]``."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from radixkv.frontend.api.sglang.prompts import Asked
from radixkv.frontend.choice_stream import Piece
from radixkv.frontend.logprobs import ShownToken, own_logprob, shown_logprob
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import TokenLogprobs, unpack_tokens

Entry = tuple[float | None, int, str | None]


class _GrowingList:
    """A JSON list. Each event of a stream has it as far as it has come, so that its items are encoded once."""

    def __init__(self) -> None:
        self._encoded = bytearray()

    def append(self, item: Entry | msgspec.Raw) -> None:
        """Puts an item at the end."""
        self._encoded += b"," if self._encoded else b"["
        self._encoded += msgspec.json.encode(item)

    @property
    def json(self) -> msgspec.Raw:
        """What it has. O(length), to copy it."""
        return msgspec.Raw(b"".join((self._encoded or b"[", b"]")))


class PromptFigures:
    """Those of a prompt's tokens, from the first that was asked for; that one has no log-probability."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer | None) -> None:
        self._has_tops = _has_tops(asked)
        self._tokenizer = tokenizer if asked.has_texts else None
        self._n_entries = 0
        self._entries, self._tops = _GrowingList(), _GrowingList()
        self._tokens = [] if asked.scored_from is None else unpack_tokens(asked.prompt.tokens)[asked.scored_from :]
        self._n_skipped = asked.scored_from or 0
        """Tokens whose figures come, and are not wanted."""
        if self._tokens:
            self._add(_entry(None, self._tokens[0], self._tokenizer), None)

    def absorb(self, figures: Sequence[TokenLogprobs]) -> None:
        """The next tokens' figures; the prompt's first token has none."""
        wanted = figures[self._n_skipped :]
        self._n_skipped -= len(figures) - len(wanted)
        for one in wanted:
            token = self._tokens[self._n_entries]
            self._add(_entry(own_logprob(one, token), token, self._tokenizer), _top(one, self._tokenizer))

    def shown(self) -> dict[str, Any]:
        """As far as they have come."""
        entries = {"input_token_logprobs": self._entries.json}
        return entries | ({"input_top_logprobs": self._tops.json} if self._has_tops else {})

    def _add(self, entry: Entry, top: list[Entry] | None) -> None:
        self._n_entries += 1
        self._entries.append(entry)
        self._tops.append(_raw(top))


class AnswerFigures:
    """Those of an answer's tokens."""

    def __init__(self, asked: Asked) -> None:
        self._has_texts, self._has_tops = asked.has_texts, _has_tops(asked)
        self._entries, self._tops = _GrowingList(), _GrowingList()

    def absorb(self, gained: Piece) -> None:
        """The next tokens'."""
        for token, shown in zip(gained.token_ids, gained.logprobs, strict=True):
            self._entries.append((shown.logprob, token, shown.text if self._has_texts else None))
            self._tops.append(shown.likeliest)

    def shown(self) -> dict[str, Any]:
        """As far as they have come."""
        entries = {"output_token_logprobs": self._entries.json}
        return entries | ({"output_top_logprobs": self._tops.json} if self._has_tops else {})


def show_with_text(
    tokenizer: Tokenizer | None, token: int, offset: int, figures: TokenLogprobs | None, n_likeliest: int
) -> ShownToken:
    """What is shown of a token of an answer."""
    entry = _entry(None if figures is None else own_logprob(figures, token), token, tokenizer)
    top = [] if figures is None else _top(figures, tokenizer)
    return ShownToken(entry[2] or "", entry[0], offset, _raw(top))


def show_without_text(
    tokenizer: Tokenizer | None, token: int, offset: int, figures: TokenLogprobs | None, n_likeliest: int
) -> ShownToken:
    """The same, with nulls for texts."""
    return show_with_text(None, token, offset, figures, n_likeliest)


def _has_tops(asked: Asked) -> bool:
    return bool(asked.prompt.sampling.logprobs)


def _entry(logprob: float | None, token: int, tokenizer: Tokenizer | None) -> Entry:
    return logprob, token, None if tokenizer is None else tokenizer.token_text(token)


def _top(figures: TokenLogprobs, tokenizer: Tokenizer | None) -> list[Entry]:
    ids = unpack_tokens(figures.top_ids)
    logprobs = struct.unpack(f"<{len(ids)}f", figures.top_logprobs)
    return [_entry(shown_logprob(logprob), token, tokenizer) for token, logprob in zip(ids, logprobs, strict=True)]


def _raw(value: object) -> msgspec.Raw:
    # Made where the token is, so that the whole reply is quick to make.
    return msgspec.Raw(msgspec.json.encode(value))
