"""The chat format of the model: its chat template, and conversations rendered by it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from radixkv.text.chat_messages import normalize_messages
from radixkv.text.chat_template import ChatTemplate

BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
END_OF_TURN = "<|eot_id|>"
SPECIAL_TOKENS = (BEGIN, END, START_HEADER, END_HEADER, END_OF_TURN)
THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
TAGS = (TOOL_CALL, END_TOOL_CALL, "<tool_response>", "</tool_response>", THINK, END_THINK)
"""Tokens that are not special: they are a part of an answer's text, for whoever parses it."""

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8").strip()
"""Jinja chat template. Tools and calls are as in Hermes and Qwen, the headers as in Llama 3.

A conversation with more messages is rendered to a text that begins with the prompt of the earlier ones and with the
model's answer, if the client returns the answer with its ``reasoning_content``.
"""

Message = Mapping[str, Any]
"""A chat message in OpenAI's format."""

_ANSWER = re.compile(
    f"({re.escape(START_HEADER)}assistant{re.escape(END_HEADER)}\n\n)(.*?{re.escape(END_OF_TURN)})", re.DOTALL
)


class Conversation(NamedTuple):
    """A chat with the settings that its template takes."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """Definitions of tools in OpenAI's format."""
    enable_thinking: bool = False
    """Whether the assistant thinks before it answers."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema of the answer; the template does not show it."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template beside the messages."""
        return {"tools": [*self.tools] or None, "enable_thinking": self.enable_thinking}


class ChatFormat:
    """Renders conversations as the engine does."""

    def __init__(self) -> None:
        self._template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": BEGIN}, "the chat template of training")

    def prompt(self, conversation: Conversation) -> str:
        """Returns the prompt for the assistant's next message."""
        return self._render(conversation, add_generation_prompt=True)

    def parts(self, conversation: Conversation) -> Iterator[tuple[str, bool]]:
        """Yields the pieces of the whole conversation, and whether each is an answer of the assistant.

        An answer ends with the end of its turn. The first piece begins with the begin-of-text token.
        """
        text, position = self._render(conversation, add_generation_prompt=False), 0
        for match in _ANSWER.finditer(text):
            yield text[position : match.start(2)], False
            yield match[2], True
            position = match.end()
        if position < len(text):
            yield text[position:], False

    def _render(self, conversation: Conversation, *, add_generation_prompt: bool) -> str:
        return self._template.render(
            normalize_messages(conversation.messages),
            add_generation_prompt=add_generation_prompt,
            **conversation.template_variables,
        )
