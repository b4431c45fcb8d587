"""Parsing of the events of a streamed completion in OpenAI's format."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from radixkv.client.errors import BadReply

MAX_CHOICES = 1024
"""Upper bound of a choice's index; a larger index is an error of the server."""
MAX_TOOL_CALLS = 1024
"""Upper bound of a tool call's index; a larger index is an error of the server."""

NULL = msgspec.Raw(b"null")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class Usage(msgspec.Struct, frozen=True):
    """The server's token counts; None: it does not report them."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class FunctionDelta(msgspec.Struct, frozen=True):
    """The new part of a called function's name and arguments."""

    name: str | None = None
    arguments: str | None = None
    """A piece of JSON text."""


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The new part of a tool call; ``id`` and the function's name come in the call's first delta."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOOL_CALLS)] = 0
    id: str | None = None
    function: FunctionDelta = FunctionDelta()


class ChatDelta(msgspec.Struct, frozen=True):
    """The new output of a chat's choice."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """The new output of a choice: ``text`` in completions, ``delta`` in chats.

    ``prompt_token_ids`` stay undecoded until ``read_token_ids``: decoding 100,000 ids takes milliseconds.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHOICES)] = 0
    text: str | None = None
    delta: ChatDelta | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: msgspec.Raw = NULL
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        """The new text of the answer, without reasoning that the server returns in a field of its own."""
        return (self.delta.content if self.delta is not None else self.text) or ""

    @property
    def reasoning(self) -> str:
        """The new reasoning that the server returns in a field of its own, under either of its names."""
        delta = self.delta
        return "" if delta is None else delta.reasoning_content or delta.reasoning or ""

    @property
    def tool_calls(self) -> Sequence[ToolCallDelta]:
        """The new parts of tool calls."""
        return (self.delta.tool_calls if self.delta is not None else None) or ()

    @property
    def has_output(self) -> bool:
        """Whether the event has output of the model: text, token ids, reasoning or tool calls."""
        return bool(self.content or self.token_ids or self.reasoning or self.tool_calls)


class Chunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    choices: list[ChunkChoice] = []
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = NULL
    """The prompt's token ids in chats; completions have them in the choice."""
    error: Any = None


def read_token_ids(text: bytes) -> array[int]:
    """Decodes a JSON array of token ids to int32.

    Raises:
        BadReply: ``text`` is no array of token ids.
    """
    try:
        return array("i", msgspec.json.decode(text, type=list[TokenId]))
    except msgspec.MsgspecError as error:
        raise BadReply("stream", f"prompt_token_ids are not token ids: {error}") from None


def read_chunk(data: bytes) -> Chunk:
    """Decodes an event.

    Raises:
        BadReply: ``data`` is no completion chunk, or reports an error of the server.
    """
    try:
        chunk = msgspec.json.decode(data, type=Chunk)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadReply("stream", f"an event is not a completion chunk: {error}") from None
    if chunk.error is not None:
        raise BadReply("server", f"the server reported {msgspec.json.encode(chunk.error).decode()[:300]}")
    return chunk
