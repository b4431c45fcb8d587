"""The prompts and conversations that callers of ``LLM`` pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from radixkv.errors import InvalidRequest, shortened

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dictionary with ``prompt`` or ``prompt_token_ids`` and optionally ``cache_salt``."""

Message = Mapping[str, Any]
"""A chat message: ``role``, ``content``, and whatever else the chat template reads."""

ValueT = TypeVar("ValueT")


def split_prompt(prompt: Prompt, cache_salt: object = "") -> tuple[str | Sequence[int], str]:
    """Returns a prompt's text or token ids, and its salt: ``cache_salt`` if it has none of its own.

    Raises:
        InvalidRequest: the prompt is malformed.
    """
    if isinstance(prompt, Mapping):
        given = prompt.get("cache_salt")
        cache_salt = cache_salt if given is None else given
        prompt = _content(prompt)
    if not isinstance(cache_salt, str):
        raise InvalidRequest(f"cache_salt is {shortened(cache_salt)}; it must be text", param="cache_salt")
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise InvalidRequest(f"a prompt is {type(prompt).__name__}; decode it to text first", param="prompt")
    return prompt, cache_salt


def as_prompt_list(prompts: Prompt | Sequence[Prompt] | None) -> Sequence[Prompt]:
    """Returns the prompts as a list; a single prompt becomes a list of one. Raises ``InvalidRequest``."""
    given: Any = prompts
    if not isinstance(given, Sequence | Mapping):
        raise InvalidRequest(f"prompts is {shortened(given)}; give a text, or a list of prompts", param="prompts")
    is_one = isinstance(given, str | bytes | bytearray | Mapping) or (
        given and all(type(token) is int for token in given)
    )
    return cast("Sequence[Prompt]", [given] if is_one else given)


def as_conversation_list(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """Returns the conversations as a list; a single one becomes a list of one. Raises ``InvalidRequest``."""
    given: Any = messages
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise InvalidRequest(
            f"messages is {shortened(given)}; give a non-empty list of messages or of conversations",
            param="messages",
        )
    conversations = [given] if isinstance(given[0], Mapping) else given
    for conversation in conversations:
        _check_conversation(conversation)
    return conversations


def broadcast(
    name: str, kind: type[ValueT], values: ValueT | Sequence[ValueT] | None, default: ValueT, prompts: Sequence[Any]
) -> Sequence[ValueT]:
    """Returns one value for each prompt: ``values`` if it is a list, else ``values`` or the default repeated.

    Raises:
        InvalidRequest: a value is not of type ``kind``, or the list's length differs from that of the prompts.
    """
    if values is None or isinstance(values, kind):
        return [default if values is None else values] * len(prompts)
    if not isinstance(values, Sequence) or not all(isinstance(one, kind) for one in values):
        raise InvalidRequest(
            f"{name} is {shortened(values)}; give one of type {kind.__name__}, or a list of them", param=name
        )
    if len(values) != len(prompts):
        raise InvalidRequest(
            f"{len(values)} {name} for {len(prompts)} prompts; give one, or one for each prompt", param=name
        )
    return values


def _content(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown:
        raise InvalidRequest(
            f"a prompt has unknown keys {', '.join(sorted(map(shortened, unknown)))}; use prompt or "
            "prompt_token_ids, and cache_salt",
            param="prompt",
        )
    given = [prompt[name] for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("a prompt must have exactly one of prompt and prompt_token_ids", param="prompt")
    content: str | Sequence[int] = given[0]
    return content


def _check_conversation(conversation: object) -> None:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise InvalidRequest(
            f"a conversation is {shortened(conversation)}; it must be a non-empty list of messages",
            param="messages",
        )
    for message in conversation:
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"a message is {shortened(message)}; it must be a dictionary with role and content",
                param="messages",
            )
