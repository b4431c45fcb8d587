"""Prompts as token ids, for servers and studies that are not to depend on a tokenizer."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

from radixkv.bench.session import Request
from radixkv.errors import CheckpointError
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.messages import plain_messages
from radixkv.text.tokenizer import Tokenizer


class PromptEncoder:
    """Encodes prompts as ``radixkv serve`` does.

    Args:
        folder: has ``tokenizer.json``, and for chats a chat template.

    Raises:
        CheckpointError: there is no tokenizer, or it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.load(folder)

    def encode(self, request: Request) -> Request:
        """The same request with token ids. O(length).

        Raises:
            InvalidRequest: the prompt holds half a character, or the chat template refuses it.
            CheckpointError: it is a chat, and there is no chat template.
        """
        prompt = request.prompt
        if isinstance(prompt, tuple):
            return request
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        elif self._template is None:
            raise CheckpointError(f"{self._folder} has no chat template to encode chats with; send them as texts")
        else:
            text = self._template.render(plain_messages(prompt))
            ids = self._tokenizer.encode(text, adds_special_tokens=False)
        return replace(request, prompt=struct.unpack(f"<{len(ids) // 4}i", ids))
