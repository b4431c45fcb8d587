"""Who answers in a chat: the engine in this process, or a server."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from radixkv.errors import ConfigError, ContextLengthExceeded

if TYPE_CHECKING:
    from radixkv.cli.server_client import Server
    from radixkv.llm import LLM

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """What an answer took."""

    n_prompt_tokens: int
    n_cached_tokens: int | None
    """Prompt tokens that were not computed; None: the server does not say."""
    n_new_tokens: int
    finish_reason: str


class Speaker(Protocol):
    """Answers a chat."""

    def answer(self, messages: list[Message]) -> Generator[str | Turn, None, None]:
        """The answer piece by piece, then what it took. Closing it ends the answer, and so does Ctrl-C.

        Raises:
            RadixKVError: there is no answer, or no more of it.
            KeyboardInterrupt: at Ctrl-C.
        """
        ...


class LocalSpeaker:
    """The engine in this process.

    Args:
        llm: its model needs a chat template.
        settings: fields of ``SamplingParams`` that differ from the checkpoint's defaults, ``max_tokens`` among
            them; an answer has fewer where the context has not so many left.
    """

    def __init__(self, llm: LLM, settings: dict[str, Any]) -> None:
        self._llm = llm
        self._settings = settings

    def answer(self, messages: list[Message]) -> Generator[str | Turn, None, None]:
        """As ``Speaker`` says."""
        prompt = self._llm.chat_prompt(messages)
        n_most = self._llm.max_prompt_and_answer
        n_room = n_most - len(prompt)
        if n_room < 1:
            raise ContextLengthExceeded(
                f"the conversation has {len(prompt)} tokens, and the context is {n_most} tokens; "
                "begin anew with /clear, or give a greater --max-model-len or --max-total-tokens",
                param="messages",
            )
        sampling = msgspec.structs.replace(
            self._llm.get_default_sampling_params(),
            **self._settings | {"max_tokens": min(self._settings["max_tokens"], n_room)},
        )
        n_shown = 0
        with _between_steps() as check, closing(self._llm.stream(prompt, sampling)) as outputs:
            for output in outputs:
                choice = output.outputs[0]
                yield choice.text[n_shown:]
                n_shown = len(choice.text)
                check()
            yield Turn(len(prompt), output.num_cached_tokens, len(choice.token_ids), choice.finish_reason or "")


class Model(msgspec.Struct):
    """Of what ``/v1/models`` lists."""

    id: str


class Models(msgspec.Struct):
    """What ``/v1/models`` answers."""

    data: list[Model]


class Delta(msgspec.Struct):
    """What a chunk adds to an answer."""

    content: str | None = None


class Choice(msgspec.Struct):
    """An answer, as far as a chunk has it."""

    delta: Delta | None = None
    finish_reason: str | None = None


class Details(msgspec.Struct):
    """Of the prompt."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens, as the server counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    """An event of ``/v1/chat/completions``."""

    choices: list[Choice] = []
    usage: Usage | None = None


class RemoteSpeaker:
    """A server's ``/v1/chat/completions``.

    Args:
        server: which one.
        model: the name of its model; None takes the first that it serves.
        settings: fields of the request.

    Raises:
        RadixKVError: the server does not say which model it serves, and none is given.
    """

    def __init__(self, server: Server, model: str | None, settings: dict[str, Any]) -> None:
        self._server = server
        self._model = _first_model(server) if model is None else model
        self._settings = settings

    def answer(self, messages: list[Message]) -> Generator[str | Turn, None, None]:
        """As ``Speaker`` says."""
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage = Usage()
        finish_reason = ""
        for chunk in self._server.stream("/v1/chat/completions", body | self._settings, Chunk):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                yield (choice.delta.content if choice.delta is not None else None) or ""
                finish_reason = choice.finish_reason or finish_reason
        cached = None if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
        yield Turn(usage.prompt_tokens or 0, cached, usage.completion_tokens or 0, finish_reason)


def _first_model(server: Server) -> str:
    models = server.get("/v1/models", Models).data
    if not models:
        raise ConfigError("the server at --base-url lists no model; give the name of one with --model")
    return models[0].id


@contextmanager
def _between_steps() -> Iterator[Callable[[], None]]:
    """Gives what raises ``KeyboardInterrupt`` if Ctrl-C came, which may tear no step apart; a second one leaves."""
    interrupts: list[int] = []

    def note(number: int, _: object) -> None:
        if interrupts:
            raise SystemExit(130)
        interrupts.append(number)

    def check() -> None:
        if interrupts:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
