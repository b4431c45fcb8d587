"""Encoding of prompts to token ids on the client."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

from radixkv.bench.session import BenchRequest
from radixkv.errors import CheckpointError
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.messages import normalize_messages
from radixkv.text.tokenizer import Tokenizer


class PromptEncoder:
    """Encodes prompts as ``radixkv serve`` does.

    Args:
        folder: a checkpoint's folder with ``tokenizer.json`` and, for chats, a chat template.

    Raises:
        CheckpointError: the tokenizer is missing or cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.load(folder)

    def encode(self, request: BenchRequest) -> BenchRequest:
        """Returns the request with token ids as its prompt. O(length).

        Raises:
            InvalidRequest: the prompt has a lone surrogate, or the chat template rejects the messages.
            CheckpointError: the prompt is a chat and the folder has no chat template.
        """
        prompt = request.prompt
        if isinstance(prompt, tuple):
            return request
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        elif self._template is None:
            raise CheckpointError(f"{self._folder} has no chat template to encode chats with; send them as texts")
        else:
            text = self._template.render(normalize_messages(prompt))
            ids = self._tokenizer.encode(text, adds_special_tokens=False)
        return replace(request, prompt=struct.unpack(f"<{len(ids) // 4}i", ids))
