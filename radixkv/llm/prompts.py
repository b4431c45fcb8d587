"""Encoding of the prompts and conversations that callers of ``LLM`` pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from radixkv.errors import InvalidRequest, shortened
from radixkv.sampling import SamplingParams
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.messages import normalize_messages
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import pack_tokens

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dictionary with ``prompt`` or ``prompt_token_ids`` and optionally ``cache_salt``."""

Message = Mapping[str, Any]
"""A chat message: ``role``, ``content``, and whatever else the chat template reads."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in the form that the runtime takes."""

    text: str | None
    """The prompt's text; None if it was given as token ids."""
    tokens: bytes
    """Little-endian int32 ids."""
    cache_salt: str


class PromptEncoder:
    """Encodes prompts with a model's tokenizer and chat template. Both are optional.

    Args:
        folder: the folder of the tokenizer.
        chat_template: a file with the template to use instead of the folder's.
        eos_token_ids: the checkpoint's end-of-sequence ids.

    Raises:
        CheckpointError: a file is corrupt.
    """

    def __init__(self, folder: Path, chat_template: Path | None, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        self.eos_token_ids = eos_token_ids
        self._chat_template = ChatTemplate.load(folder, chat_template)

    def encode_prompt(self, prompt: Prompt, *, cache_salt: object = "") -> EncodedPrompt:
        """Encodes a prompt; ``cache_salt`` is the salt if the prompt has none of its own. O(length).

        Raises:
            InvalidRequest: the prompt is malformed, or is text and there is no tokenizer.
        """
        if isinstance(prompt, Mapping):
            given = prompt.get("cache_salt")
            cache_salt = cache_salt if given is None else given
            prompt = _content(prompt)
        salt = _check_salt(cache_salt)
        if isinstance(prompt, str):
            return EncodedPrompt(prompt, self._require_tokenizer("give prompts as token ids").encode(prompt), salt)
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise InvalidRequest(f"a prompt is {type(prompt).__name__}; decode it to text first", param="prompt")
        try:
            return EncodedPrompt(None, pack_tokens(prompt), salt)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(
                f"a prompt is neither text nor int32 token ids: {error}", param="prompt"
            ) from error

    def encode_chat(
        self, messages: Sequence[Message], *, template_kwargs: Mapping[str, Any], **options: bool
    ) -> bytes:
        """Returns the little-endian int32 ids of a conversation. Raises ``InvalidRequest``.

        Args:
            messages: see ``Message``.
            template_kwargs: further variables of the template.
            options: options of ``ChatTemplate.render``.
        """
        if not isinstance(template_kwargs, Mapping) or template_kwargs.keys() & (options.keys() | {"messages"}):
            raise InvalidRequest(
                f"chat_template_kwargs is {shortened(template_kwargs)}; it must be a dictionary without the keys "
                f"messages, {', '.join(options)}, which are separate arguments",
                param="chat_template_kwargs",
            )
        tokenizer = self._require_tokenizer("apply the chat template elsewhere and give token ids to generate")
        if self._chat_template is None:
            raise InvalidRequest(
                "this checkpoint has no chat template; give a file with one as chat_template, or use generate",
                param="messages",
            )
        text = self._chat_template.render(normalize_messages(messages), **options, **template_kwargs)
        return tokenizer.encode(text, adds_special_tokens=False)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises ``InvalidRequest`` if the settings need a tokenizer and there is none."""
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and this checkpoint has none", param="stop")

    def _require_tokenizer(self, advice: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"this checkpoint has no tokenizer; {advice}", param="prompt")
        return self.tokenizer


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


def _check_salt(salt: object) -> str:
    if not isinstance(salt, str):
        raise InvalidRequest(f"cache_salt is {shortened(salt)}; it must be text", param="cache_salt")
    return salt


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
