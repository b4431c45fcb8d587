"""Rendering of chats with the checkpoint's chat template, and of what requests say to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.errors import InvalidRequest, UnsupportedFeature, shortened
from radixkv.generation.models import GenerationModel
from radixkv.generation.tools import ToolUse
from radixkv.text.chat_messages import normalize_messages
from radixkv.text.template_budget import OperationBudget

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's chats."""
_NOT_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message")
"""What a chat template reads besides variables."""


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    model: GenerationModel,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: ToolUse | None = None,
    variables: Mapping[str, Any] | None = None,
    budget: OperationBudget | None = None,
) -> str:
    """Renders messages with the checkpoint's chat template.

    The text has its special tokens already: encode it without those that the tokenizer adds.

    Args:
        messages: in OpenAI's format; contents are texts or lists of text parts.
        model: provides the template.
        add_generation_prompt: whether the text ends with the start of the assistant's message.
        continue_final_message: whether the text ends within the last message, for the model to continue it.
        tools: the tools that the template shows to the model.
        variables: further variables for the template.
        budget: as ``ChatTemplate.render`` takes it.

    Raises:
        InvalidRequest: the template cannot render the messages with these options.
        UnsupportedFeature: there are tools, and the template does not read them.
        BudgetExceeded: rendering takes more than its budget.
    """
    if model.chat_template is None:
        raise InvalidRequest(
            "this checkpoint has no chat template; set a file with one (--chat-template), or give the prompt as "
            "text",
            param="messages",
        )
    check_template_variables(variables)
    if tools is not None and tools.mode != "none" and "tools" not in model.chat_template.with_tools.source:
        raise UnsupportedFeature(
            "the chat template does not show tools to the model; set a file with one that does "
            "(--chat-template), or leave tools out",
            param="tools",
        )
    shown = {} if tools is None or not tools.tools else {"tools": tools.definitions}
    normalized = normalize_messages(messages)
    _check_roles(normalized, model.chat_template.source)
    return model.chat_template.render(
        normalized,
        budget,
        **{**(variables or {}), **shown},
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )


def _check_roles(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Raises ``InvalidRequest`` for a role that neither OpenAI's API nor the chat template knows.

    Many templates would write any role into the prompt as it is.
    """
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in _ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise InvalidRequest(
                f"messages[{index}].role is {shortened(role)}, which is unknown; it must be one of "
                f"{', '.join(_ROLES)}, or one that the chat template names",
                param="messages",
            )


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Returns the variables of chat templates that switch reasoning on or off, and say how much of it.

    Args:
        effort: a request's ``reasoning_effort``; ``none`` switches reasoning off. None for the template's default.
    """
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"enable_thinking": True, "reasoning_effort": effort}


def check_template_variables(variables: Mapping[str, Any] | None) -> None:
    """Raises ``InvalidRequest`` if a request's ``chat_template_kwargs`` is no dictionary or sets another field."""
    if not isinstance(variables, Mapping | None):
        raise InvalidRequest(
            f"chat_template_kwargs is {shortened(variables)}; it must be a dictionary", param="chat_template_kwargs"
        )
    for name in _NOT_VARIABLES:
        if name in (variables or {}):
            raise InvalidRequest(
                f"chat_template_kwargs is not the place for {name}, which is a field of its own",
                param="chat_template_kwargs",
            )
