"""A conversation to answer, which every API with messages translates its requests into, and its prompt."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.chat_text import conversation_text
from radixkv.frontend.field_names import naming_fields
from radixkv.frontend.kept_answers import AnswerKeeper
from radixkv.frontend.prompt_encoding import EncodedConversation, encode_conversation
from radixkv.frontend.prompt_pins import breakpoint_pins, check_breakpoints
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.models import GenerationModel
from radixkv.generation.params import clamp_max_tokens, request_sampling_params
from radixkv.generation.tools import SkippedTool, ToolUse, parse_tool_use
from radixkv.settings.limits import MAX_PINS, check_cache_salt, check_session_id
from radixkv.wire.messages import PromptPin, Submit

if TYPE_CHECKING:
    from radixkv.generation.parsers.answer_parser import AnswerParser


MAX_COUNTED_CHARACTERS = 1 << 20
"""Longest text that exceeds the context and is tokenized all the same, to count its tokens."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation to answer once."""

    messages: Sequence[dict[str, Any]]
    """In OpenAI's chat format. Text parts may have ``prompt_cache_breakpoint`` with a ``ttl``."""
    tools: Sequence[Mapping[str, Any]] = ()
    """In OpenAI's chat format."""
    skipped_tools: Sequence[SkippedTool] = ()
    """Further tools of the request, which are no functions."""
    tool_choice: object = None
    """In OpenAI's chat format."""
    parallel_tool_calls: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """By the names of ``SamplingParams``; None counts as omitted."""
    max_tokens: int | None = None
    """None: the rest of the context."""
    fits_max_tokens: bool = False
    """Whether ``max_tokens`` is reduced to the rest of the context; otherwise more than that is an error."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """The request's names of ``messages``, ``max_tokens`` and fields of ``SamplingParams``, where they differ."""
    continue_final_message: bool = False
    """Whether the answer continues the last message."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the chat template."""
    pin_s: float | None = None
    """How long the whole prompt is pinned, in seconds; None: only its breakpoints are."""
    cache_salt: str = ""
    session_id: str = ""
    priority: int = 0

    def tool_use(self) -> ToolUse:
        """Checks and returns the tools. Raises ``InvalidRequest``."""
        return parse_tool_use(list(self.tools), self.tool_choice, self.parallel_tool_calls, self.skipped_tools)

    def field_name(self, name: str) -> str:
        """Returns the request's name of a field."""
        return self.field_names.get(name, name)


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat, with what is needed to read its answers."""

    submit: Submit
    text: str
    """The rendered messages."""
    tools: ToolUse
    splits_reasoning: bool
    ends_with_context: bool = False
    """Whether an answer of the greatest length ends because the context does, and not by the request's limit."""
    keeper: AnswerKeeper | None = None
    """Keeps the answers for later turns; None if they are not kept."""

    def open_parser(self, model: GenerationModel) -> AnswerParser | None:
        """Returns a parser of one answer; None if all of its text is plain text."""
        return model.open_parser(self.text, self.tools, has_reasoning=self.splits_reasoning)


async def chat_text(chat: Chat, tools: ToolUse, served_model: ServedModel) -> str:
    """Returns the text of a conversation, rendered by the chat template. Raises ``InvalidRequest``."""
    with naming_fields(chat.field_name):
        return await conversation_text(
            chat.messages,
            served_model,
            add_generation_prompt=not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            tools=tools,
            variables=chat.variables,
        )


async def chat_tokens(text: str, chat: Chat, served_model: ServedModel, tenant: str) -> EncodedConversation:
    """Returns the tokens of ``chat_text``. Raises ``InvalidRequest``, also if there are none."""
    field_name = chat.field_name("messages")
    encoded = await encode_conversation(text, chat.cache_salt, served_model, field_name, tenant=tenant)
    if not encoded.tokens:
        raise InvalidRequest("the chat template renders the messages as an empty text", param=field_name)
    return encoded


async def count_tokens(chat: Chat, served_model: ServedModel, tenant: str) -> int:
    """Returns the length of a conversation's prompt in tokens, also if it exceeds the context.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
        ContextLengthExceeded: as well as the context, it exceeds ``MAX_COUNTED_CHARACTERS``.
    """
    check_cache_salt(chat.cache_salt)
    text = await chat_text(chat, chat.tool_use(), served_model)
    try:
        encoded = await chat_tokens(text, chat, served_model, tenant)
    except ContextLengthExceeded as error:
        if error.n_prompt is not None:
            return error.n_prompt
        if len(text) > MAX_COUNTED_CHARACTERS:
            raise
        tokenizer = served_model.require_tokenizer(chat.field_name("messages"))
        encode = partial(tokenizer.encode, text, adds_special_tokens=False, namespace=tenant)
        return len(await served_model.serial.run(encode)) // 4
    return len(encoded.tokens) // 4


async def prompt_tokens(chat: Chat, served_model: ServedModel, tenant: str) -> bytes:
    """Returns the little-endian int32 ids of a conversation's prompt. Raises ``InvalidRequest``."""
    check_cache_salt(chat.cache_salt)
    text = await chat_text(chat, chat.tool_use(), served_model)
    return (await chat_tokens(text, chat, served_model, tenant)).tokens


async def chat_prompt(chat: Chat, served_model: ServedModel, tenant: str) -> ChatPrompt:
    """Checks a conversation and returns its prompt; long ones are rendered and encoded in a thread.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
    """
    served_model.check_priority(chat.priority)
    check_cache_salt(chat.cache_salt)
    check_session_id(chat.session_id)
    tools = chat.tool_use()
    served_model.check_tools(tools)
    with naming_fields(chat.field_name):
        check_breakpoints(chat.messages, 0.0)
        sampling = request_sampling_params(chat.sampling, chat.max_tokens, served_model)
    text = await chat_text(chat, tools, served_model)
    with naming_fields(chat.field_name):
        sampling = served_model.constrained(sampling, text, tools, chat.variables)
    encoded = await chat_tokens(text, chat, served_model, tenant)
    is_default = chat.max_tokens is None or chat.fits_max_tokens
    max_tokens_field = None if is_default else chat.field_name("max_tokens")
    n_prompt, messages_field = len(encoded.tokens) // 4, chat.field_name("messages")
    sampling = clamp_max_tokens(sampling, served_model, n_prompt, max_tokens_field, messages_field)
    room = served_model.max_prompt_and_answer - n_prompt
    ends_with_context = sampling.max_tokens == room != chat.max_tokens
    prompt = Submit(
        id=uuid.uuid4().hex,
        tokens=encoded.tokens,
        sampling=sampling,
        cache_salt=chat.cache_salt,
        priority=chat.priority,
        session_id=chat.session_id,
    )
    prompt = await _with_pins(prompt, chat, text, served_model, tenant)
    return ChatPrompt(
        prompt,
        text,
        tools,
        splits_reasoning=True,
        ends_with_context=ends_with_context,
        keeper=encoded.open_keeper(),
    )


async def _with_pins(prompt: Submit, chat: Chat, text: str, served_model: ServedModel, tenant: str) -> Submit:
    """Returns the prompt with the pins of the conversation, or as it is where nothing can be pinned."""
    if not served_model.pins_prompts:
        return prompt
    whole = [] if chat.pin_s is None else [PromptPin(len(prompt.tokens) // 4, chat.pin_s)]
    pins = await breakpoint_pins(
        chat.messages,
        text,
        prompt.tokens,
        served_model,
        default_ttl_s=0.0,
        cache_salt=chat.cache_salt,
        tenant=tenant,
        max_pins=MAX_PINS - len(whole),
    )
    return msgspec.structs.replace(prompt, pins=(*pins, *whole))
