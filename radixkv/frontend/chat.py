"""The one pipeline of chats: messages of any API, to text by the chat template, to the tokens of a prompt."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from radixkv.errors import ContextLengthExceeded, InvalidRequest, context_length_exceeded
from radixkv.frontend.field_names import naming_fields
from radixkv.frontend.kept_answers import AnswerKeeper
from radixkv.frontend.prompt_encoding import EncodedConversation, PromptEncoder
from radixkv.frontend.prompt_pins import breakpoint_pins, check_breakpoints
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.chat_rendering import render_chat
from radixkv.generation.models import GenerationModel
from radixkv.generation.params import (
    check_n_prompt_logprobs,
    clamp_max_tokens,
    prompt_only_sampling_params,
    request_sampling_params,
)
from radixkv.generation.tools import SkippedTool, ToolUse, parse_tool_use
from radixkv.text.template_budget import BudgetExceeded, OperationBudget
from radixkv.wire.messages import PromptPin, Submit
from radixkv.wire.request_limits import MAX_PINS, check_cache_salt, check_expected_pause

if TYPE_CHECKING:
    from radixkv.generation.parsers.answer_parser import AnswerParser

MAX_MESSAGES = 4096
"""Most messages of a conversation: a template may loop over all messages for each of them."""
MAX_COUNTED_CHARACTERS = 1 << 20
"""Longest text that exceeds the context and is tokenized all the same, to count its tokens."""
_MAX_INLINE_MESSAGES, _MAX_INLINE_CHARACTERS = 32, 1 << 15
"""Up to these sizes, render on the event loop: it takes less than a millisecond with an ordinary template."""
_MAX_INLINE_OPERATIONS, _MAX_INLINE_S = 1 << 14, 0.02
"""A template that takes longer is rendered again, in a thread."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation to answer, which every API with messages translates its requests into."""

    messages: Sequence[dict[str, Any]]
    """In OpenAI's chat format. Text parts may have ``prompt_cache_breakpoint``, with or without a ``ttl``."""
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
    max_tokens_field: str | None = "max_tokens"
    """The field that sets ``max_tokens``, which the error names if the context has less room. None: ``max_tokens``
    is then reduced to the room, without an error."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """The request's names of ``messages``, ``max_tokens`` and fields of ``SamplingParams``, where they differ, and
    of ``prewarm``, by which it sets ``generates`` to False."""
    format_field: str = "tools"
    """The field that says what the answer must match; ``tools`` if only calls must match something."""
    add_generation_prompt: bool | None = None
    """Whether the text ends with the start of the assistant's message; None: unless that is continued."""
    continue_final_message: bool = False
    """Whether the answer continues the last message."""
    variables: Mapping[str, Any] | None = None
    """Further variables for the chat template."""
    adds_special_tokens: bool = False
    """Whether the tokenizer adds special tokens to the text."""
    splits_reasoning: bool = True
    """Whether reasoning is a part of its own, and no text."""
    reads_cache: bool = True
    breakpoint_ttl_s: float = 0.0
    """How long a breakpoint that names no time lives, in seconds."""
    pin_s: float | None = None
    """How long the whole prompt is pinned, in seconds; None: only its breakpoints are."""
    demands_pins: bool = False
    """Whether a request with pins fails on a server that pins nothing; otherwise the pins are dropped there."""
    cache_salt: str = ""
    model: str | None = None
    """The name that the request gives, which its route has looked up."""
    session_id: str = ""
    priority: int = 0
    expected_pause_s: float | None = None
    """How long it will be until the next turn, in seconds; 0: there is none. None: that is learnt."""
    prediction: str = ""
    """What the client expects the answer to be, or to be like."""
    generates: bool = True
    """False: only the prompt is computed, for the cache; what limits the answer does not count."""

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
    generates: bool = True
    """False leaves out the token that had to be generated, because only the prompt is wanted."""
    keeper: AnswerKeeper | None = None
    """Keeps the answers for later turns; None if they are not kept."""

    def open_parser(self, model: GenerationModel) -> AnswerParser | None:
        """Returns a parser of one answer; None if all of its text is plain text."""
        if model.answer_format is None:
            return None
        return model.answer_format.open_parser(self.text, self.tools, has_reasoning=self.splits_reasoning)


async def chat_prompt(chat: Chat, served_model: ServedModel, tenant: str) -> ChatPrompt:
    """Checks a conversation and returns its prompt; long ones are rendered and encoded in a thread.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
    """
    served_model.check_request(chat.priority, chat.cache_salt, chat.session_id)
    check_expected_pause(chat.expected_pause_s)
    tools = chat.tool_use()
    served_model.check_tools(tools)
    with naming_fields(chat.field_name):
        check_breakpoints(chat.messages, chat.breakpoint_ttl_s)
        if chat.generates:
            sampling = request_sampling_params(chat.sampling, chat.max_tokens, served_model)
        else:
            served_model.check_caches("prewarm")
            sampling = prompt_only_sampling_params(chat.sampling, served_model)
    text = await _text(chat, tools, served_model)
    if chat.generates:
        with naming_fields(chat.field_name):
            sampling = served_model.constrained(sampling, text, tools, chat.variables)
    encoder = _encoder(chat, served_model, tenant)
    encoded = await _encode(text, encoder)
    n_prompt = len(encoded.tokens) // 4
    room = served_model.ready.max_prompt_and_answer_of(n_prompt, sampling.kv_budget) - n_prompt
    check_n_prompt_logprobs([(sampling, n_prompt)], "prompt_logprobs")
    max_tokens_field = None if chat.max_tokens is None else chat.max_tokens_field
    sampling = clamp_max_tokens(sampling, served_model, n_prompt, max_tokens_field, chat.field_name("messages"))
    name = uuid.uuid4().hex
    keeper = encoded.open_keeper(name) if chat.generates else None
    submit = Submit(
        id=name,
        tokens=encoded.tokens,
        sampling=sampling,
        namespace=served_model.namespace(tenant, chat.cache_salt),
        reads_cache=chat.reads_cache,
        priority=chat.priority,
        pins=await _pins(chat, text, encoded.tokens, encoder),
        session_id=chat.session_id,
        prediction=await _prediction(chat, served_model, tenant),
        may_pause=served_model.learns_pauses and keeper is not None and sampling.n == 1,
        resumes=encoded.turn if chat.generates else "",
        expected_pause_s=chat.expected_pause_s,
    )
    if not chat.generates:
        return ChatPrompt(submit, text, tools, chat.splits_reasoning, generates=False)
    ends_with_context = sampling.max_tokens == room != chat.max_tokens
    return ChatPrompt(submit, text, tools, chat.splits_reasoning, ends_with_context, keeper=keeper)


async def prompt_tokens(chat: Chat, served_model: ServedModel, tenant: str) -> bytes:
    """Returns the little-endian int32 ids of a conversation's prompt. Raises ``InvalidRequest``."""
    check_cache_salt(chat.cache_salt)
    return (await _encode(await chat_text(chat, served_model), _encoder(chat, served_model, tenant))).tokens


async def chat_text(chat: Chat, served_model: ServedModel) -> str:
    """Returns the text of a conversation's prompt. Raises ``InvalidRequest``."""
    return await _text(chat, chat.tool_use(), served_model)


async def count_tokens(chat: Chat, served_model: ServedModel, tenant: str) -> int:
    """Returns the length of a conversation's prompt in tokens, also if it exceeds the context.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
        ContextLengthExceeded: as well as the context, it exceeds ``MAX_COUNTED_CHARACTERS``.
    """
    check_cache_salt(chat.cache_salt)
    text = await chat_text(chat, served_model)
    try:
        return len((await _encode(text, _encoder(chat, served_model, tenant))).tokens) // 4
    except ContextLengthExceeded as error:
        if error.n_prompt is not None:
            return error.n_prompt
        if len(text) > MAX_COUNTED_CHARACTERS:
            raise
        tokenizer = served_model.require_tokenizer(chat.field_name("messages"))
        encode = partial(tokenizer.encode, text, adds_special_tokens=False, namespace=tenant)
        return len(await served_model.one_at_a_time.run(encode)) // 4


async def _text(chat: Chat, tools: ToolUse, served_model: ServedModel) -> str:
    """Renders the messages with the chat template, without known nonces, and in a thread if they are long.

    Raises:
        InvalidRequest: as ``render_chat``, or there are no messages, or more than ``MAX_MESSAGES``.
        ContextLengthExceeded: there are more messages than the context has tokens.
    """
    with naming_fields(chat.field_name):
        messages = chat.messages
        _check_count(len(messages), served_model.max_prompt_and_answer)
        adds_prompt, continues = chat.add_generation_prompt, chat.continue_final_message
        render = partial(
            render_chat,
            messages if served_model.nonce_filter is None else served_model.nonce_filter.remove(messages),
            served_model,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            tools=tools,
            variables=chat.variables,
        )
        shown = [*messages, *(tools.definitions or ())]
        if len(shown) <= _MAX_INLINE_MESSAGES and _n_characters(shown) <= _MAX_INLINE_CHARACTERS:
            with contextlib.suppress(BudgetExceeded):
                return render(budget=OperationBudget(_MAX_INLINE_OPERATIONS, _MAX_INLINE_S))
        return await served_model.one_at_a_time.run(render)


def _check_count(n_messages: int, limit: int) -> None:
    if not n_messages:
        raise InvalidRequest("messages is empty; give at least one", param="messages")
    if n_messages > MAX_MESSAGES:
        raise InvalidRequest(f"there are {n_messages} messages; at most {MAX_MESSAGES}", param="messages")
    if n_messages > limit:
        what = f"there are {n_messages} messages"
        raise context_length_exceeded(what, limit, advice="shorten the conversation", param="messages")


def _n_characters(messages: Sequence[dict[str, Any]]) -> int:
    """Returns about how many characters the messages have."""
    values = (value for message in messages for value in message.values())
    return sum(len(value) if isinstance(value, str) else len(msgspec.json.encode(value)) for value in values)


async def _encode(text: str, encoder: PromptEncoder) -> EncodedConversation:
    """Returns the tokens of a prompt's text. Raises ``InvalidRequest``, also if there are none."""
    encoded = await encoder.conversation(text)
    if not encoded.tokens:
        raise InvalidRequest("the chat template renders the messages as an empty text", param=encoder.field)
    return encoded


def _encoder(chat: Chat, served_model: ServedModel, tenant: str) -> PromptEncoder:
    return PromptEncoder(
        served_model=served_model,
        tenant=tenant,
        cache_salt=chat.cache_salt,
        field=chat.field_name("messages"),
        adds_special_tokens=chat.adds_special_tokens,
    )


async def _prediction(chat: Chat, served_model: ServedModel, tenant: str) -> bytes:
    """Returns the tokens of the expected answer; none where drafts are off. Raises ``InvalidRequest``."""
    if not (chat.prediction and served_model.ready.has_drafts):
        return b""
    encoder = PromptEncoder(served_model=served_model, tenant=tenant, field="prediction", adds_special_tokens=False)
    try:
        (tokens,) = await encoder.texts([chat.prediction])
    except ContextLengthExceeded as error:
        what = "the prediction alone is longer"
        raise context_length_exceeded(what, error.limit, param="prediction") from None
    return tokens


async def _pins(chat: Chat, text: str, tokens: bytes, encoder: PromptEncoder) -> tuple[PromptPin, ...]:
    """Returns the prefixes of the prompt that the conversation pins."""
    if not (encoder.served_model.pins_prompts or chat.demands_pins):
        return ()
    whole = [] if chat.pin_s is None else [PromptPin(len(tokens) // 4, chat.pin_s)]
    pins = await breakpoint_pins(
        chat.messages,
        text,
        tokens,
        encoder,
        default_ttl_s=chat.breakpoint_ttl_s,
        max_pins=MAX_PINS - len(whole),
    )
    return (*pins, *whole)
