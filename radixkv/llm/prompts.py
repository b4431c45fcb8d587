"""What a caller of ``LLM`` may give as prompts and conversations, and their token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from radixkv.errors import InvalidRequest, shortened
from radixkv.sampling import SamplingParams
from radixkv.text.chat_template import ChatTemplate
from radixkv.text.messages import plain_messages
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import pack_tokens

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dictionary with ``prompt`` or ``prompt_token_ids`` and perhaps ``cache_salt``."""

Message = Mapping[str, Any]
"""``role``, ``content``, and whatever else the chat template reads."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Encoded:
    """A prompt as the runtime takes it."""

    text: str | None
    """None if it was given as token ids."""
    tokens: bytes
    """Little-endian int32 ids."""
    cache_salt: str


class Encoder:
    """A model's tokenizer and chat template, as far as it has them.

    Args:
        folder: of the tokenizer.
        chat_template: a file with the template instead of the folder's.
        eos_token_ids: of the checkpoint.

    Raises:
        CheckpointError: a file is corrupt.
    """

    def __init__(self, folder: Path, chat_template: Path | None, eos_token_ids: frozenset[int]) -> None:
        self.tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        self.eos_token_ids = eos_token_ids
        self._chat_template = ChatTemplate.load(folder, chat_template)

    def prompt(self, prompt: Prompt, *, cache_salt: object = "") -> Encoded:
        """Its ids and its salt, which is ``cache_salt`` if it brings none. O(length). Raises ``InvalidRequest``."""
        if isinstance(prompt, Mapping):
            given = prompt.get("cache_salt")
            cache_salt = cache_salt if given is None else given
            prompt = _content(prompt)
        salt = _salt(cache_salt)
        if isinstance(prompt, str):
            return Encoded(prompt, self._with_tokenizer("give prompts as token ids").encode(prompt), salt)
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise InvalidRequest(f"a prompt is {type(prompt).__name__}; decode it to text first", param="prompt")
        try:
            return Encoded(None, pack_tokens(prompt), salt)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(
                f"a prompt is neither text nor int32 token ids: {error}", param="prompt"
            ) from error

    def chat(self, messages: Sequence[Message], *, template_kwargs: Mapping[str, Any], **options: bool) -> bytes:
        """The ids of a conversation. Raises ``InvalidRequest``.

        Args:
            messages: see ``Message``.
            template_kwargs: more that the template may read.
            options: those of ``ChatTemplate.render``.
        """
        if not isinstance(template_kwargs, Mapping) or template_kwargs.keys() & (options.keys() | {"messages"}):
            raise InvalidRequest(
                f"chat_template_kwargs is {shortened(template_kwargs)}; it must be a dictionary without messages, "
                f"{', '.join(options)}, which are arguments of their own",
                param="chat_template_kwargs",
            )
        tokenizer = self._with_tokenizer("apply the chat template elsewhere and give token ids to generate")
        if self._chat_template is None:
            raise InvalidRequest(
                "this checkpoint has no chat template; give a file with one as chat_template, or use generate",
                param="messages",
            )
        text = self._chat_template.render(plain_messages(messages), **options, **template_kwargs)
        return tokenizer.encode(text, adds_special_tokens=False)

    def check(self, sampling: SamplingParams) -> None:
        """Raises ``InvalidRequest`` for settings that need a tokenizer where there is none."""
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and this checkpoint has none", param="stop")

    def _with_tokenizer(self, advice: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(f"this checkpoint has no tokenizer; {advice}", param="prompt")
        return self.tokenizer


def several_prompts(prompts: Prompt | Sequence[Prompt] | None) -> Sequence[Prompt]:
    """A list of prompts, of one or several."""
    listed: Any = prompts
    if not isinstance(listed, Sequence | Mapping):
        raise InvalidRequest(f"prompts is {shortened(listed)}; give a text, or a list of prompts", param="prompts")
    is_one = isinstance(listed, str | bytes | bytearray | Mapping) or (
        listed and all(type(token) is int for token in listed)
    )
    return cast("Sequence[Prompt]", [listed] if is_one else listed)


def several_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """A list of conversations, of one or several."""
    listed: Any = messages
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise InvalidRequest(
            f"messages is {shortened(listed)}; give a list of messages, or of conversations, that is not empty",
            param="messages",
        )
    conversations = [listed] if isinstance(listed[0], Mapping) else listed
    for conversation in conversations:
        _check_conversation(conversation)
    return conversations


def each(
    name: str, kind: type[ValueT], values: ValueT | Sequence[ValueT] | None, default: ValueT, prompts: Sequence[Any]
) -> Sequence[ValueT]:
    """One value for each prompt: those given, the one given, or the default."""
    if values is None or isinstance(values, kind):
        return [default if values is None else values] * len(prompts)
    if not isinstance(values, Sequence) or not all(isinstance(one, kind) for one in values):
        raise InvalidRequest(
            f"{name} is {shortened(values)}; give one of type {kind.__name__}, or a list of them", param=name
        )
    if len(values) != len(prompts):
        raise InvalidRequest(
            f"{len(values)} {name} for {len(prompts)} prompts; give one, or one for each", param=name
        )
    return values


def _content(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown:
        raise InvalidRequest(
            f"a prompt has {', '.join(sorted(map(shortened, unknown)))}; only prompt or prompt_token_ids, and "
            "cache_salt, are known",
            param="prompt",
        )
    given = [prompt[name] for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("a prompt has not exactly one of prompt and prompt_token_ids", param="prompt")
    content: str | Sequence[int] = given[0]
    return content


def _salt(salt: object) -> str:
    if not isinstance(salt, str):
        raise InvalidRequest(f"cache_salt is {shortened(salt)}; it must be text", param="cache_salt")
    return salt


def _check_conversation(conversation: object) -> None:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise InvalidRequest(
            f"a conversation is {shortened(conversation)}; it must be a list of messages, and not empty",
            param="messages",
        )
    for message in conversation:
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                f"a message is {shortened(message)}; it must be a dictionary with role and content",
                param="messages",
            )
