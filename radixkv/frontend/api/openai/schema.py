"""OpenAI's requests, with the fields that vLLM and SGLang add under their spelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.http.body_decoder import BodyDecoder, Whole, check_messages, check_prompt
from radixkv.frontend.unsupported_fields import Unbuilt, refuse_unbuilt, unsupported
from radixkv.sampling import MAX_LOGPROBS


class StreamOptions(msgspec.Struct):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(Unbuilt, kw_only=True):
    """What completions and chat share. Null means the default."""

    model: str | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    n: Whole | None = None
    best_of: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Whole | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool | None = False
    priority: Whole | None = None
    return_token_ids: bool | None = False
    return_cached_tokens_details: bool | None = False

    @property
    def n_choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def is_only_echo(self) -> bool:
        """Whether the prompt is wanted, and no answer."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """Whether every chunk says the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[str | int | Sequence[int]]
    logprobs: bool | Whole | None = None
    max_completion_tokens: Any = None
    top_logprobs: Any = None

    @property
    def n_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside each; None for no log-probabilities."""
        return None if isinstance(self.logprobs, bool) else self.logprobs


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    reasoning_effort: str | None = None

    @property
    def n_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report beside each; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> tuple[str | None, int | None]:
        """The field that says the most tokens, and what it says; None, None for the rest of the context."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return None if self.max_tokens is None else "max_tokens", self.max_tokens

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the text ends with the beginning of the assistant's answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template may read besides the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})


_OF_CHATS = {"max_completion_tokens": ("max_tokens", None), "top_logprobs": ("logprobs", 0)}
"""Fields that only chats have; those of completions that grant the same, as some clients send both alike; and what
asks for nothing."""

_completions = BodyDecoder(CompletionRequest, {"prompt": check_prompt}, ids_field="prompt")
_chats = BodyDecoder(ChatRequest, {"messages": check_messages})


def parse_completion(body: bytes, max_prompt_tokens: int) -> CompletionRequest:
    """The completion request in a body. Raises ``InvalidRequest``, which never repeats a part of the body."""
    request = _completions.decode(body, max_prompt_tokens)
    _check(request)
    for name, (instead, neutral) in _OF_CHATS.items():
        value = getattr(request, name)
        if value not in (None, neutral, getattr(request, instead)):
            raise unsupported(name, value, f"use {instead}")
    if request.logprobs is True:
        raise InvalidRequest("logprobs is true; it must be a whole number here", param="logprobs")
    return request


def parse_chat(body: bytes, max_prompt_tokens: int) -> ChatRequest:
    """The chat request in a body. Raises ``InvalidRequest``, which never repeats a part of the body."""
    request = _chats.decode(body, max_prompt_tokens)
    _check(request)
    if request.echo:
        raise unsupported("echo")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return request


def _check(request: GenerationRequest) -> None:
    refuse_unbuilt(request)
    if request.best_of not in (None, 1, request.n_choices):
        raise unsupported("best_of", request.best_of)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is for stream: true only", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is for replies that are no stream", param="prompt_logprobs")
