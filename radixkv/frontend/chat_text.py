"""The text that the model continues, from a chat's messages or from a plain prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.request_limits import check_model
from radixkv.frontend.served_model import Served
from radixkv.frontend.unsupported_fields import Unbuilt, refuse_unbuilt
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.messages import plain_messages

MAX_MESSAGES = 4096
"""Of one conversation: templates may look at all messages for each of them."""
_INLINE_MESSAGES, _INLINE_CHARACTERS = 32, 1 << 15
"""More are rendered in a thread, so that the event loop goes on; so many take less than a millisecond."""


async def conversation_text(
    messages: Sequence[dict[str, Any]],
    served: Served,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The messages by the checkpoint's chat template; encode it without special tokens of the tokenizer's own.

    Args:
        messages: OpenAI's; contents are texts, or lists of parts that are texts.
        served: says the template.
        add_generation_prompt: whether the text ends with the beginning of the assistant's answer.
        continue_final_message: whether it ends with the last message's content, which the answer goes on.
        variables: what else the template may read.

    Raises:
        InvalidRequest: for ``messages``, or the option that does not go with them.
    """
    template = served.chat_template
    if template is None:
        raise InvalidRequest(
            "this checkpoint has no chat template; start the server with --chat-template, or use /v1/completions",
            param="messages",
        )
    if not messages:
        raise InvalidRequest("messages is empty; give at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"there are {len(messages)} messages; at most {MAX_MESSAGES}", param="messages")
    if len(messages) > served.max_prompt_and_answer:
        raise ContextLengthExceeded(
            f"there are {len(messages)} messages, but this model's maximum context length is "
            f"{served.max_prompt_and_answer} tokens; shorten the conversation",
            param="messages",
        )
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in (variables or {}):
            raise InvalidRequest(f"{name} is a field of its own", param="chat_template_kwargs")
    options = {
        **(variables or {}),
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    if len(messages) <= _INLINE_MESSAGES and _n_characters(messages) <= _INLINE_CHARACTERS:
        return _text(template, messages, options)
    return await served.alone.run(partial(_text, template, messages, options))


def _n_characters(messages: Sequence[dict[str, Any]]) -> int:
    """About how much there is to render."""
    values = (value for message in messages for value in message.values())
    return sum(len(value) if isinstance(value, str) else len(msgspec.json.encode(value)) for value in values)


def _text(template: ChatTemplate, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> str:
    return template.render(plain_messages(messages), **options)


class TextRequest(Unbuilt, kw_only=True):
    """A text, or messages for the chat template."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds those of its own; by default to texts, and not to what a template wrote."""

    def adds_special_tokens(self) -> bool:
        """The same, decided."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


def check_text_request(asked: TextRequest, prompt: object, served: Served) -> None:
    """Refuses what has neither a prompt nor messages, or both, and what asks for another model.

    Raises:
        InvalidRequest: for the prompt, or a field of a feature that is not built.
        ModelNotFound: for the model.
    """
    refuse_unbuilt(asked)
    check_model(asked.model, served)
    if (prompt is None) == (asked.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")


async def rendered_text(asked: TextRequest, served: Served) -> str:
    """The text of a request's messages, by the chat template."""
    return await conversation_text(
        asked.messages or [],
        served,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
        variables=asked.chat_template_kwargs,
    )
