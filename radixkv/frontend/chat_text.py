"""Rendering of chat messages with the checkpoint's chat template."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from radixkv.errors import InvalidRequest, context_length_exceeded
from radixkv.frontend.http.body_decoder import Messages
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.prompts import render_chat
from radixkv.generation.tools import ToolUse, parse_tool_use
from radixkv.text.template_sandbox import BudgetExceeded, OperationBudget

MAX_MESSAGES = 4096
"""Most messages of a conversation: a template may loop over all messages for each of them."""
_MAX_INLINE_MESSAGES, _MAX_INLINE_CHARACTERS = 32, 1 << 15
"""Up to these sizes, render on the event loop: it takes less than a millisecond with an ordinary template."""
_MAX_INLINE_OPERATIONS, _MAX_INLINE_S = 1 << 14, 0.02
"""A template that takes longer is rendered again, in a thread."""


class TextRequest(msgspec.Struct, kw_only=True):
    """Base of request bodies that give either a prompt or chat messages."""

    model: str | None = None
    messages: Messages | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Annotated[
        bool | None,
        msgspec.Meta(
            description="Whether the tokenizer adds special tokens; default: to a prompt, not to rendered messages."
        ),
    ] = None

    def adds_generation_prompt(self) -> bool:
        """Returns ``add_generation_prompt`` or its default."""
        return self.add_generation_prompt is not False

    def adds_special_tokens(self) -> bool:
        """Returns ``add_special_tokens`` or its default."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


def check_text_request(request: TextRequest, prompt: object, served_model: ServedModel) -> None:
    """Checks the fields that all ``TextRequest`` bodies share.

    Args:
        request: the body.
        prompt: its prompt, if it gives one.
        served_model: the only model that it may name.

    Raises:
        InvalidRequest: the body gives neither a prompt nor messages, or both.
        ModelNotFound: it names another model.
    """
    served_model.check_name(request.model)
    if (prompt is None) == (request.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")


async def render_messages(request: TextRequest, served_model: ServedModel) -> str:
    """Renders a request's messages with the chat template. Raises ``InvalidRequest``."""
    return await conversation_text(
        request.messages or [],
        served_model,
        add_generation_prompt=request.adds_generation_prompt(),
        continue_final_message=bool(request.continue_final_message),
        tools=parse_tool_use(request.tools),
        variables=request.chat_template_kwargs,
    )


async def conversation_text(
    messages: Sequence[dict[str, Any]],
    served_model: ServedModel,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: ToolUse | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Does what ``render_chat`` does, without known nonces, and in a thread if the messages are long.

    Raises:
        InvalidRequest: as ``render_chat``, or there are no messages, or more than ``MAX_MESSAGES``.
        ContextLengthExceeded: there are more messages than the context has tokens.
    """
    if not messages:
        raise InvalidRequest("messages is empty; give at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"there are {len(messages)} messages; at most {MAX_MESSAGES}", param="messages")
    if len(messages) > served_model.max_prompt_and_answer:
        raise context_length_exceeded(
            f"there are {len(messages)} messages",
            served_model.max_prompt_and_answer,
            advice="shorten the conversation",
            param="messages",
        )
    kept = messages if served_model.nonce_filter is None else served_model.nonce_filter.remove(messages)
    render = partial(
        render_chat,
        kept,
        served_model,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        variables=variables,
    )
    shown = [*messages, *((tools and tools.definitions) or ())]
    if len(shown) <= _MAX_INLINE_MESSAGES and _n_characters(shown) <= _MAX_INLINE_CHARACTERS:
        with contextlib.suppress(BudgetExceeded):
            return render(budget=OperationBudget(_MAX_INLINE_OPERATIONS, _MAX_INLINE_S))
    return await served_model.serial.run(render)


def _n_characters(messages: Sequence[dict[str, Any]]) -> int:
    """Returns about how many characters the messages have."""
    values = (value for message in messages for value in message.values())
    return sum(len(value) if isinstance(value, str) else len(msgspec.json.encode(value)) for value in values)
