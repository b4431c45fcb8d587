"""Backends of ``radixkv chat``: the engine in this process, or a server."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from radixkv.client.chunks import Usage
from radixkv.errors import ConfigError, context_length_exceeded

if TYPE_CHECKING:
    from radixkv.cli.server_client import ServerClient
    from radixkv.llm import LLM

Message = dict[str, str]


@dataclass(frozen=True)
class TurnStats:
    """Token counts and finish reason of one turn."""

    n_prompt_tokens: int
    n_cached_tokens: int | None
    """Prompt tokens taken from the prefix cache; None if the server does not report them."""
    n_new_tokens: int
    finish_reason: str


class ChatBackend(Protocol):
    """Generates the answers of a chat."""

    def answer(self, messages: list[Message]) -> Generator[str | TurnStats, None, None]:
        """Yields the answer's text in pieces, then its statistics. Closing the generator cancels the answer.

        Raises:
            RadixKVError: the answer failed.
            KeyboardInterrupt: Ctrl-C was pressed; the answer is cancelled.
        """
        ...


class LocalBackend:
    """Answers with the engine in this process.

    Args:
        llm: the engine; its model must have a chat template.
        settings: fields of ``SamplingParams`` that override the checkpoint's defaults, including ``max_tokens``,
            which is reduced to what the context has left.
    """

    def __init__(self, llm: LLM, settings: dict[str, Any]) -> None:
        self._llm = llm
        self._settings = settings

    def answer(self, messages: list[Message]) -> Generator[str | TurnStats, None, None]:
        """See ``ChatBackend.answer``."""
        prompt = self._llm.chat_prompt(messages)
        context_tokens = self._llm.max_prompt_and_answer
        n_tokens_left = context_tokens - len(prompt)
        if n_tokens_left < 1:
            raise context_length_exceeded(
                f"the conversation has {len(prompt)} tokens",
                context_tokens,
                advice="start a new one with /clear, or give a greater --max-model-len or --max-total-tokens",
                param="messages",
            )
        sampling = msgspec.structs.replace(
            self._llm.get_default_sampling_params(),
            **self._settings | {"max_tokens": min(self._settings["max_tokens"], n_tokens_left)},
        )
        n_shown = 0
        with _deferred_interrupts() as check, closing(self._llm.stream(prompt, sampling)) as outputs:
            for output in outputs:
                choice = output.outputs[0]
                yield choice.text[n_shown:]
                n_shown = len(choice.text)
                check()
            yield TurnStats(
                len(prompt), output.num_cached_tokens, len(choice.token_ids), choice.finish_reason or ""
            )


class ModelEntry(msgspec.Struct):
    """An entry of ``/v1/models``."""

    id: str


class ModelList(msgspec.Struct):
    """The response of ``/v1/models``."""

    data: list[ModelEntry]


class ServerBackend:
    """Answers with a server's ``/v1/chat/completions``.

    Args:
        server: the server's client.
        model: the model's name; None takes the first of ``/v1/models``.
        settings: further fields of the requests.

    Raises:
        RadixKVError: no model is given and ``/v1/models`` fails or lists none.
    """

    def __init__(self, server: ServerClient, model: str | None, settings: dict[str, Any]) -> None:
        self._server = server
        self._model = first_model(server) if model is None else model
        self._settings = settings

    def answer(self, messages: list[Message]) -> Generator[str | TurnStats, None, None]:
        """See ``ChatBackend.answer``."""
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage = Usage()
        finish_reason = ""
        for chunk in self._server.stream("/v1/chat/completions", body | self._settings):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                yield choice.content
                finish_reason = choice.finish_reason or finish_reason
        cached = None if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
        yield TurnStats(usage.prompt_tokens or 0, cached, usage.completion_tokens or 0, finish_reason)


def first_model(server: ServerClient, *, limit_s: float | None = None) -> str:
    """Returns the first of a server's models. Raises ``RadixKVError`` as ``ServerClient``, or if there is none."""
    models = server.get("/v1/models", ModelList, limit_s=limit_s).data
    if not models:
        raise ConfigError("the server lists no models; give a model's name with --model")
    return models[0].id


@contextmanager
def _deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Defers Ctrl-C to the end of a step. A second Ctrl-C exits with code 130.

    Yields:
        A function to call between steps; it raises ``KeyboardInterrupt`` if Ctrl-C was pressed.
    """
    interrupts: list[int] = []

    def record_interrupt(number: int, _: object) -> None:
        if interrupts:
            raise SystemExit(130)
        interrupts.append(number)

    def check() -> None:
        if interrupts:
            raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGINT, record_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous_handler)
