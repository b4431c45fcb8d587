"""Logprobs in SGLang's format: lists of ``[logprob, id, text]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from radixkv.frontend.api.sglang.translation import GeneratePrompt
from radixkv.generation.logprobs import finite_logprob, finite_top_logprobs, token_text
from radixkv.generation.output import OutputDelta
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import TokenLogprobs, unpack_tokens

Entry = tuple[float | None, int, str | None]


@dataclass(frozen=True, slots=True)
class RenderedToken:
    """A generated token with its logprobs, as a response shows it."""

    logprob: float | None
    token: int
    text: str | None
    top: msgspec.Raw
    """JSON of the likeliest tokens."""


class _GrowingList:
    """An append-only JSON list that encodes each item once, although every event of a stream repeats the list."""

    def __init__(self) -> None:
        self._encoded = bytearray()

    def append(self, item: Entry | msgspec.Raw) -> None:
        """Encodes and appends an item."""
        self._encoded += b"," if self._encoded else b"["
        self._encoded += msgspec.json.encode(item)

    @property
    def json(self) -> msgspec.Raw:
        """The list so far. O(length), for the copy."""
        return msgspec.Raw(b"".join((self._encoded or b"[", b"]")))


class _Logprobs:
    """Logprobs of tokens in a row.

    Args:
        kind: ``input`` or ``output``.
        prompt: says whether the likeliest tokens are shown.
    """

    def __init__(self, kind: str, prompt: GeneratePrompt) -> None:
        self._kind = kind
        self._has_top_logprobs = bool(prompt.prompt.sampling.logprobs)
        self._entries, self._top_logprobs = _GrowingList(), _GrowingList()

    def fields(self) -> dict[str, Any]:
        """Returns the fields of ``meta_info`` so far."""
        entries = {f"{self._kind}_token_logprobs": self._entries.json}
        return entries | ({f"{self._kind}_top_logprobs": self._top_logprobs.json} if self._has_top_logprobs else {})

    def _add(self, entry: Entry, top: msgspec.Raw) -> None:
        self._entries.append(entry)
        self._top_logprobs.append(top)


class InputLogprobs(_Logprobs):
    """Logprobs of a prompt, from its token ``logprobs_from`` on; that one has None."""

    def __init__(self, prompt: GeneratePrompt, tokenizer: Tokenizer | None) -> None:
        super().__init__("input", prompt)
        self._tokenizer = tokenizer if prompt.returns_text else None
        self._n_skipped = prompt.logprobs_from or 0
        """How many of the coming logprobs belong to tokens before ``logprobs_from``."""
        ids = [] if prompt.logprobs_from is None else unpack_tokens(prompt.prompt.tokens)[prompt.logprobs_from :]
        self._tokens = iter(ids)
        """The tokens whose logprobs have not come."""
        if ids:
            self._add(_entry(None, next(self._tokens), self._tokenizer), _raw(None))

    def absorb(self, token_logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds the logprobs of the next tokens, from the prompt's second on."""
        requested = token_logprobs[self._n_skipped :]
        self._n_skipped -= len(token_logprobs) - len(requested)
        for logprobs in requested:
            token = next(self._tokens)
            entry = _entry(finite_logprob(logprobs, token), token, self._tokenizer)
            self._add(entry, _raw(_top(logprobs, self._tokenizer)))


class OutputLogprobs(_Logprobs):
    """Logprobs of one choice."""

    def __init__(self, prompt: GeneratePrompt) -> None:
        super().__init__("output", prompt)

    def absorb(self, output: OutputDelta[RenderedToken]) -> None:
        """Adds the logprobs of new output."""
        for rendered in output.logprobs:
            self._add((rendered.logprob, rendered.token, rendered.text), rendered.top)


def render_with_text(
    tokenizer: Tokenizer | None, token: int, offset: int, token_logprobs: TokenLogprobs | None, n_top: int
) -> RenderedToken:
    """Renders a generated token with texts."""
    logprob = None if token_logprobs is None else finite_logprob(token_logprobs, token)
    top = [] if token_logprobs is None else _top(token_logprobs, tokenizer)
    return RenderedToken(logprob, token, token_text(tokenizer, token) or "", _raw(top))


def render_without_text(
    tokenizer: Tokenizer | None, token: int, offset: int, token_logprobs: TokenLogprobs | None, n_top: int
) -> RenderedToken:
    """Renders a generated token with null in place of texts."""
    return replace(render_with_text(None, token, offset, token_logprobs, n_top), text=None)


def _entry(logprob: float | None, token: int, tokenizer: Tokenizer | None) -> Entry:
    return logprob, token, token_text(tokenizer, token)


def _top(token_logprobs: TokenLogprobs, tokenizer: Tokenizer | None) -> list[Entry]:
    return [_entry(logprob, token, tokenizer) for token, logprob in finite_top_logprobs(token_logprobs)]


def _raw(value: object) -> msgspec.Raw:
    # Encoded as soon as the token arrives, so that encoding the whole response is fast.
    return msgspec.Raw(msgspec.json.encode(value))
