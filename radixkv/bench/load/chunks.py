"""One event of an OpenAI-compatible stream, as far as the load generator reads it."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec

from radixkv.errors import RadixKVError

MAX_CHOICES = 1024
"""An index beyond it is not believed."""

NULL = msgspec.Raw(b"null")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class BadReply(RadixKVError):
    """A server's reply that is an error, or that ends early.

    Args:
        kind: the ``error_kind`` of the request's record.
        message: what is wrong.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: Count
    completion_tokens: Count = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Delta(msgspec.Struct, frozen=True):
    """What a choice of a chat gained."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct, frozen=True):
    """What a choice gained; ``text`` of a completion, ``delta`` of a chat.

    The prompt's ids stay as they came, for ``read_token_ids``: a prompt of 100,000 tokens takes milliseconds.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHOICES)] = 0
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: msgspec.Raw = NULL
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        """The answer's text; a server that keeps reasoning apart means it not to be sent back."""
        return (self.delta.content if self.delta is not None else self.text) or ""

    @property
    def has_output(self) -> bool:
        """Whether there is anything of the model's."""
        delta = self.delta
        is_apart = delta is not None and (delta.reasoning_content or delta.reasoning or delta.tool_calls)
        return bool(self.said or self.token_ids or is_apart)


class Chunk(msgspec.Struct, frozen=True):
    """What one event says."""

    choices: list[Choice] = []
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = NULL
    """In chats; completions have them in the choice."""
    error: Any = None


def read_token_ids(text: bytes) -> array[int]:
    """A JSON array of token ids, as int32. Raises ``BadReply`` if it is none."""
    try:
        return array("i", msgspec.json.decode(text, type=list[TokenId]))
    except msgspec.MsgspecError as error:
        raise BadReply("stream", f"the prompt's token ids are none: {error}") from None


def read_chunk(data: bytes) -> Chunk:
    """The event. Raises ``BadReply`` if it is none, or tells an error."""
    try:
        chunk = msgspec.json.decode(data, type=Chunk)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadReply("stream", f"an event is not a completion chunk: {error}") from None
    if chunk.error is not None:
        raise BadReply("server", f"the server reported {msgspec.json.encode(chunk.error).decode()[:300]}")
    return chunk
