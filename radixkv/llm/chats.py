"""The prompts of ``LLM.chat``, and what its answers must match."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from radixkv.generation.chat_rendering import render_chat
from radixkv.generation.models import GenerationModel
from radixkv.generation.parsers.answer_format import AnswerFormat
from radixkv.generation.parsers.formats import NONE, find_reasoning_format
from radixkv.generation.tools import ToolUse, parse_tool_use
from radixkv.llm.prompts import Message
from radixkv.wire.messages import unpack_tokens
from radixkv.wire.sampling import SamplingParams


class Chats:
    """Turns conversations into prompts.

    Args:
        model: has the chat template and the tokenizer.
        folder: the folder of the tokenizer.
        reasoning_parser: name of the model's format of reasoning, or ``none``; None finds it out.

    Raises:
        ConfigError: there is no format of that name.
    """

    def __init__(self, model: GenerationModel, folder: Path, reasoning_parser: str | None) -> None:
        find_reasoning_format(reasoning_parser, "")
        self._model = model
        self._folder = folder
        self._reasoning_parser = reasoning_parser

    def text(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """Renders a conversation; the arguments are those of ``LLM.chat``. Raises ``RequestError``."""
        self._model.require_tokenizer("messages")
        return render_chat(
            messages,
            self._model,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=parse_tool_use(tools),
            variables=chat_template_kwargs,
        )

    def tokens(self, text: str) -> list[int]:
        """Returns the token ids of a rendered conversation. Raises ``RequestError``."""
        tokenizer = self._model.require_tokenizer("messages")
        return unpack_tokens(tokenizer.encode(text, adds_special_tokens=False))

    def constrained(
        self, sampling: SamplingParams, text: str, variables: Mapping[str, Any] | None
    ) -> SamplingParams:
        """Returns sampling parameters whose format, if they have one, begins after the answer's reasoning.

        Args:
            sampling: the caller's.
            text: the rendered conversation, which may have begun or ended the reasoning.
            variables: of the chat template, which may have switched the reasoning off.

        Raises:
            RequestError: the model's format of reasoning cannot come before a format.
        """
        if sampling.structured_outputs is None:
            return sampling
        model = dataclasses.replace(self._model, answer_format=self._answer_format)
        return model.constrained(sampling, text, ToolUse(), variables)

    @cached_property
    def _answer_format(self) -> AnswerFormat | None:
        """How the model writes its reasoning. Loading it takes seconds, and few callers need it."""
        template, tokenizer = self._model.chat_template, self._model.tokenizer
        return AnswerFormat.load(self._folder, template, NONE, self._reasoning_parser, tokenizer)
