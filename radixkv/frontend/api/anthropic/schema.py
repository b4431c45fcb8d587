"""Bodies of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from radixkv.frontend.http.body_decoder import BodyDecoder, Int64, Messages, check_messages, check_values
from radixkv.settings.compat import Place, refusals


class Thinking(msgspec.Struct):
    """``thinking``: whether the model reasons before it answers."""

    type: str


class OutputFormat(msgspec.Struct):
    """``output_config.format``: what the answer must match."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """``output_config``."""

    effort: str | None = None
    format: OutputFormat | None = None


class CacheControl(msgspec.Struct):
    """``cache_control`` of a whole prompt."""

    ttl: str | None = None


class Diagnostics(msgspec.Struct):
    """``diagnostics``: asks what has changed since an earlier message."""

    previous_message_id: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/messages/count_tokens``: the fields that make the prompt."""

    model: str | None = None
    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_salt: str | None = None
    context_management: Annotated[
        dict[str, Any] | None,
        msgspec.Meta(description="Edits of the conversation by the server. None is made, and the reply says so."),
    ] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of ``POST /v1/messages``, with radixkv's fields about cache and queue."""

    max_tokens: Annotated[int, msgspec.Meta(ge=0, description="0 only computes the prompt, for the cache.")]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    stream: bool | None = False
    cache_control: CacheControl | None = None
    diagnostics: Diagnostics | None = None
    thread: dict[str, Any] | None = None
    session_id: str | None = None
    priority: Int64 | None = None
    expected_pause_s: float | None = None
    kv_budget: Int64 | None = None
    explain_cache: bool | None = False

    @property
    def prewarms(self) -> bool:
        """Whether only the prompt is computed, for the cache."""
        return self.max_tokens == 0

    @property
    def compared_id(self) -> str | None:
        """The id of the message to whose request this one is compared; None for no comparison."""
        return None if self.diagnostics is None else self.diagnostics.previous_message_id


_CHECKS = {
    "messages": check_messages,
    "system": check_values("system"),
    "tools": check_values("tools"),
    "output_config": check_values("output_config"),
}

parse_messages = BodyDecoder(MessagesRequest, _CHECKS, refusals(Place.MESSAGES)).decode
"""Parses a body of ``/v1/messages``. Raises ``InvalidRequest``, whose text never repeats a part of the body."""
parse_count_tokens = BodyDecoder(CountTokensRequest, _CHECKS, refusals(Place.MESSAGES)).decode
"""Parses a body of ``/v1/messages/count_tokens``. Raises as ``parse_messages`` does."""
