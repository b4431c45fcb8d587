"""Bodies of OpenAI requests, with the extension fields of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.frontend.http.body_decoder import (
    BodyDecoder,
    Int64,
    Messages,
    check_messages,
    check_prompt,
    check_tools,
    check_values,
)
from radixkv.frontend.shared_fields import PromptCacheOptions, SharedSampling
from radixkv.generation.chat_rendering import effort_variables
from radixkv.settings.compat import Place, refusals
from radixkv.wire.sampling import MAX_LOGPROBS


class StreamOptions(msgspec.Struct):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class PredictionPart(msgspec.Struct):
    """A part of OpenAI's ``prediction``."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct):
    """OpenAI's ``prediction``: what the client expects the answer to be, or to be like."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        """All of it as one text."""
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])


class GenerationRequest(SharedSampling, kw_only=True):
    """Fields that completions and chat share. Null means the default."""

    model: str | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: Int64 | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Int64 | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    skip_reading_prefix_cache: bool | None = False
    priority: Int64 | None = None
    session_id: str | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    return_cached_tokens_details: bool | None = False
    explain_cache: bool | None = False

    @property
    def breakpoint_ttl_s(self) -> float:
        """How long a breakpoint that names no time lives, in seconds."""
        return (self.prompt_cache_options or PromptCacheOptions()).ttl_s

    @property
    def pin_s(self) -> float | None:
        """How long whole prompts are pinned, in seconds; None if they are not."""
        return None if self.prompt_cache_options is None else self.prompt_cache_options.pin_s

    def names_tokens_by_id(self, *, default: bool) -> bool:
        """Returns whether logprobs name tokens by their ids; ``default``, if the request does not say."""
        return default if self.return_tokens_as_token_ids is None else self.return_tokens_as_token_ids

    @property
    def n_choices(self) -> int:
        """Number of choices per prompt."""
        return 1 if self.n is None or self.is_for_cache else self.n

    @property
    def is_only_echo(self) -> bool:
        """Whether only the prompt is echoed and nothing is generated."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def is_for_cache(self) -> bool:
        """Whether only the prompt is computed, for the cache; what says how to answer does not count."""
        return not self.echo and self.requested_max_tokens[1] == 0

    @property
    def requested_max_tokens(self) -> tuple[str | None, int | None]:
        """The field that limits the answer's tokens, and its value; both None for the default."""
        return None if self.max_tokens is None else "max_tokens", self.max_tokens

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[str | int | Sequence[int]]
    logprobs: bool | Int64 | None = None

    @property
    def n_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report per token; None for no logprobs."""
        return None if isinstance(self.logprobs, bool) else self.logprobs


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    expected_pause_s: float | None = None

    @property
    def n_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report per token; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def requested_max_tokens(self) -> tuple[str | None, int | None]:
        """The field that limits the answer's tokens, and its value; both None for the rest of the context."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().requested_max_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables that the chat template may read besides the messages."""
        return effort_variables(self.reasoning_effort) | (self.chat_template_kwargs or {})


_completions = BodyDecoder(
    CompletionRequest, {"prompt": check_prompt}, refusals(Place.COMPLETIONS), ids_field="prompt"
)
_chats = BodyDecoder(
    ChatRequest,
    {"messages": check_messages, "tools": check_tools, "prediction": check_values("prediction")},
    refusals(Place.CHATS),
)


def parse_completion(
    body: bytes, max_prompt_tokens: int, misspelt: dict[str, str] | None = None
) -> CompletionRequest:
    """Parses a completion request. Raises ``InvalidRequest``, whose text never repeats a part of the body."""
    request = _completions.decode(body, max_prompt_tokens, misspelt)
    _check(request)
    if request.logprobs is True:
        raise InvalidRequest("logprobs is true; it must be a whole number here", param="logprobs")
    return request


def parse_chat(body: bytes, max_prompt_tokens: int, misspelt: dict[str, str] | None = None) -> ChatRequest:
    """Parses a chat request. Raises ``InvalidRequest``, whose text never repeats a part of the body."""
    request = _chats.decode(body, max_prompt_tokens, misspelt)
    _check(request)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return request


def _check(request: GenerationRequest) -> None:
    options = request.prompt_cache_options
    if options is not None and (options.prewarm or options.comparison_response_id is not None):
        name = "prewarm" if options.prewarm else "comparison_response_id"
        raise UnsupportedFeature(
            f"prompt_cache_options.{name} is a field of /v1/responses, as OpenAI's is; use it there",
            param="prompt_cache_options",
        )
    if request.is_for_cache:
        for name in ("stream", "prompt_logprobs", "logprobs"):
            value = getattr(request, name)
            if value is not None and value is not False:  # 0 asks for the logprobs of the tokens themselves
                raise InvalidRequest(
                    f"max_tokens is 0, which generates nothing, and {name} asks for output", param=name
                )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if request.stream and request.use_beam_search:
        raise InvalidRequest(
            "use_beam_search cannot be streamed, because the answers are known at the end only; leave out stream",
            param="use_beam_search",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs")
