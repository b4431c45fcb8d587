"""Chat templates: rendering a conversation as the prompt text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from radixkv.checkpoints.special_tokens import named_special_tokens
from radixkv.errors import CheckpointError, InvalidRequest, context_length_exceeded
from radixkv.text.call_forms import CallForm, find_call_form
from radixkv.text.named_templates import find_templates
from radixkv.text.template_budget import MAX_OPERATIONS, MAX_RENDER_S, OperationBudget
from radixkv.text.template_sandbox import BUDGET, SandboxedEnvironment, TemplateRaised

MAX_RENDERED_CHARACTERS = 1 << 24
"""Rendering stops with an error at a longer text."""

_MAX_PROBE_OPERATIONS, _MAX_PROBE_S = 1 << 16, 1.0
"""Limits of each rendering that finds out how the template reads calls."""
_END_MARKER = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message. Its trailing space shows whether the template strips the content."""


class ChatTemplate:
    """A sandboxed Jinja template, rendered as Transformers does. Thread-safe.

    Calls in the history are shown in the form that the template reads, which is found out once, in milliseconds.

    Args:
        source: the template's text.
        tokens: special tokens that the template may use, by name, such as ``bos_token``.
        origin: where the template comes from, for error messages.

    Raises:
        CheckpointError: the text is not a valid template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], origin: str) -> None:
        self.source = source
        """The template's text."""
        self.with_tools = self
        """The template that renders conversations with tools."""
        self._tokens = dict(tokens)
        try:
            self._template = SandboxedEnvironment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"{origin} is not a chat template: {error}; give another with --chat-template"
            ) from error
        except RecursionError:
            raise CheckpointError(
                f"{origin} is nested too deeply for a chat template; give another with --chat-template"
            ) from None
        self._call_form = find_call_form(self._probe) if "tool_calls" in source else CallForm()

    @classmethod
    def load(cls, folder: Path, override: Path | None = None) -> ChatTemplate | None:
        """Loads a checkpoint's template, or returns None if the checkpoint has none.

        A checkpoint may have several templates with names, which ``find_templates`` finds. As in Transformers, the
        one named ``tool_use`` renders conversations with tools, and ``default`` all others.

        Args:
            folder: the folder of the tokenizer, whose files also define the special tokens.
            override: a file with the template to use instead, or the name of one of the checkpoint's.

        Raises:
            CheckpointError: a file cannot be read, or is not a valid template, or there is none of that name.
        """
        tokens = named_special_tokens(folder)
        if override is not None and override.exists():
            return cls(_read_override(override, ()), tokens, str(override))
        named = find_templates(folder)
        if override is not None:
            source, origin = named.get(str(override)) or (_read_override(override, named), str(override))
            return cls(source, tokens, origin)
        if not named:
            return None
        if "default" not in named:
            _, origin = next(iter(named.values()))
            raise CheckpointError(
                f"{origin} has templates named {', '.join(sorted(named))}, and none is named default; choose one "
                "with --chat-template"
            )
        templates = {
            name: cls(source, tokens, origin)
            for name, (source, origin) in named.items()
            if name in ("default", "tool_use")
        }
        templates["default"].with_tools = templates.get("tool_use", templates["default"])
        return templates["default"]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        budget: OperationBudget | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Renders a conversation, including special tokens: encode it with ``adds_special_tokens=False``.

        Args:
            messages: dictionaries of JSON types with ``role``, ``content`` and whatever else the template reads, as
                ``normalize_messages`` returns them.
            budget: None for ``MAX_OPERATIONS`` and ``MAX_RENDER_S``.
            add_generation_prompt: whether the text ends with the header of the assistant's answer.
            continue_final_message: whether the text ends with the last message's content, for the model to
                continue.
            variables: further variables of the template.

        Raises:
            InvalidRequest: the template rejects the messages.
            ContextLengthExceeded: the text has more than ``MAX_RENDERED_CHARACTERS``.
            BudgetExceeded: rendering takes more than its budget.

        Cost: depends on the template; usually O(length of the messages).
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message excludes add_generation_prompt; set add_generation_prompt to false",
                param="continue_final_message",
            )
        template = self.with_tools if variables.get("tools") else self
        messages = template._call_form.apply(messages)
        if continue_final_message:
            messages, final = _with_end_marker(messages)
        budget = budget or OperationBudget(MAX_OPERATIONS, MAX_RENDER_S)
        text = template._render(messages, variables | {"add_generation_prompt": add_generation_prompt}, budget)
        return _cut_at_marker(text, final) if continue_final_message else text

    def _probe(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str | None:
        """Renders messages as they are; returns None if the template cannot."""
        try:
            return self._render(messages, variables, OperationBudget(_MAX_PROBE_OPERATIONS, _MAX_PROBE_S))
        except InvalidRequest:
            return None

    def _render(
        self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any], budget: OperationBudget
    ) -> str:
        # As in Transformers, variables of the request override special tokens.
        variables = {"tools": None, "documents": None, "add_generation_prompt": False, **self._tokens, **given}
        variables |= {"messages": messages, BUDGET: budget}
        pieces: list[str] = []
        n_characters = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                n_characters += len(piece)
                if n_characters > MAX_RENDERED_CHARACTERS:
                    raise context_length_exceeded(
                        f"the chat template renders the messages to more than {MAX_RENDERED_CHARACTERS} characters",
                        None,
                        param="messages",
                    )
        except TemplateRaised as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from error
        except InvalidRequest:
            raise
        except Exception as error:  # a template expression may raise anything; the text may quote the messages
            raise InvalidRequest(
                f"the chat template cannot render the messages ({type(error).__name__}); check roles, contents and "
                "chat_template_kwargs",
                param="messages",
            ) from error
        return "".join(pieces)


def _with_end_marker(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Returns the messages with a marker at the end of the last one's content, and that content."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequest(
            "continue_final_message needs a last message with text to continue", param="continue_final_message"
        )
    return [*messages[:-1], {**messages[-1], "content": content + _END_MARKER}], content


def _cut_at_marker(text: str, final: str) -> str:
    mark = text.rfind(_END_MARKER.strip())
    if mark < 0 or final.strip() not in text:
        raise InvalidRequest(
            "the chat template changes the last message, so it cannot be continued; leave "
            "continue_final_message out",
            param="continue_final_message",
        )
    is_kept = text.startswith(_END_MARKER, mark)
    return text[:mark] if is_kept else text[:mark].rstrip()


def _read_override(path: Path, named: Collection[str]) -> str:
    """Returns the text of the file that the user named, which may be a pipe such as ``<(command)``."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = f", or name one of the checkpoint's templates: {', '.join(sorted(named))}" if named else ""
        raise CheckpointError(f"{path} cannot be read: {error}; check the file{names}") from error
