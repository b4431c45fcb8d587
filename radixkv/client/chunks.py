"""Parsing of the events of a streamed completion in OpenAI's format."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec

from radixkv.client.errors import BadReply

MAX_CHOICES = 1024
"""Upper bound of a choice's index; a larger index is an error of the server."""

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


class ChatDelta(msgspec.Struct, frozen=True):
    """The new output of a chat's choice."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


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
    def has_output(self) -> bool:
        """Whether the event has output of the model: text, token ids, reasoning or tool calls."""
        delta = self.delta
        has_other_output = delta is not None and (delta.reasoning_content or delta.reasoning or delta.tool_calls)
        return bool(self.content or self.token_ids or has_other_output)


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
