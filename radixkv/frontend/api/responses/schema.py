"""Bodies of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from radixkv.frontend.http.body_decoder import BodyDecoder, Int64, check_values
from radixkv.frontend.shared_fields import PromptCacheOptions
from radixkv.settings.compat import Place, refusals


class Reasoning(msgspec.Struct):
    """``reasoning``: how much the model reasons before it answers."""

    effort: str | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """``text.format``: what the answer must match."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """``text``."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/responses``, with radixkv's fields about cache and queue."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = False
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        msgspec.Meta(description="A prompt that does not fit is refused with both values."),
    ] = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: Int64 | None = None
    expected_pause_s: float | None = None
    kv_budget: Int64 | None = None
    explain_cache: bool | None = False

    @property
    def prewarms(self) -> bool:
        """Whether only the prompt is computed, for the cache."""
        return self.prompt_cache_options is not None and bool(self.prompt_cache_options.prewarm)

    @property
    def compared_id(self) -> str | None:
        """The id of the response to whose request this one is compared; None for no comparison."""
        return None if self.prompt_cache_options is None else self.prompt_cache_options.comparison_response_id


_CHECKS = {name: check_values(name) for name in ("input", "instructions", "tools", "text")}

parse_responses = BodyDecoder(ResponsesRequest, _CHECKS, refusals(Place.RESPONSES)).decode
"""Parses a body. Raises ``InvalidRequest``, whose text never repeats a part of the body."""
