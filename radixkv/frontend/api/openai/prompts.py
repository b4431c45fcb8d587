"""Conversion of OpenAI requests to prompts for the runtime."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.api.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from radixkv.frontend.api.openai.structured_fields import requested_structured_outputs
from radixkv.frontend.chat import ChatPrompt
from radixkv.frontend.chat_text import conversation_text
from radixkv.frontend.prompt_encoding import encode_conversation, encode_prompts, split_prompts
from radixkv.frontend.prompt_pins import breakpoint_pins, check_breakpoints
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.models import GenerationModel
from radixkv.generation.params import (
    check_n_prompt_logprobs,
    clamp_max_tokens,
    max_tokens_of_prompt_only,
    request_sampling_params,
)
from radixkv.generation.tools import parse_tool_use
from radixkv.settings.limits import MAX_PINS, check_cache_salt, check_session_id
from radixkv.wire.messages import PromptPin, Submit, unpack_tokens
from radixkv.wire.sampling import SamplingParams


async def completion_prompts(request: CompletionRequest, served_model: ServedModel, tenant: str) -> list[Submit]:
    """Checks the request and encodes its prompts, long ones in a thread.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
    """
    if request.max_tokens is None:
        max_tokens = SamplingParams().max_tokens
    else:
        max_tokens = max_tokens_of_prompt_only(request.min_tokens) if request.is_only_echo else request.max_tokens
    sampling = _sampling(request, served_model, max_tokens, request.n_logprobs)
    if request.echo and sampling.logprobs is not None:
        n_prompt_logprobs = max(sampling.logprobs, sampling.prompt_logprobs or 0)
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=n_prompt_logprobs)
    encoded = await encode_prompts(
        split_prompts(request.prompt),
        served_model,
        tenant=tenant,
        adds_special_tokens=request.add_special_tokens is not False,
    )
    max_tokens_field = None if request.max_tokens is None else "max_tokens"
    return _submits(request, encoded, sampling, served_model, max_tokens_field, "prompt")


async def chat_prompt(request: ChatRequest, served_model: ServedModel, tenant: str) -> ChatPrompt:
    """Checks the request, applies the chat template and encodes the text, long ones in a thread.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
    """
    check_breakpoints(request.messages, request.breakpoint_ttl_s)
    tools = parse_tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
    served_model.check_tools(tools)
    max_tokens_field, max_tokens = request.requested_max_tokens
    sampling = _sampling(request, served_model, max_tokens, request.n_logprobs)
    text = await conversation_text(
        request.messages,
        served_model,
        add_generation_prompt=request.adds_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        tools=tools,
        variables=request.template_variables,
    )
    sampling = served_model.constrained(sampling, text, tools, request.template_variables)
    encoded = await encode_conversation(
        text,
        request.cache_salt or "",
        served_model,
        "messages",
        tenant=tenant,
        adds_special_tokens=bool(request.add_special_tokens),
    )
    if not encoded.tokens:
        raise InvalidRequest("the chat template renders the messages as an empty text", param="messages")
    (prompt,) = _submits(request, [encoded.tokens], sampling, served_model, max_tokens_field, "messages")
    breakpoints = await breakpoint_pins(
        request.messages,
        text,
        encoded.tokens,
        served_model,
        default_ttl_s=request.breakpoint_ttl_s,
        cache_salt=request.cache_salt or "",
        tenant=tenant,
        max_pins=MAX_PINS - len(prompt.pins),
        adds_special_tokens=bool(request.add_special_tokens),
    )
    prompt = msgspec.structs.replace(prompt, pins=(*breakpoints, *prompt.pins)) if breakpoints else prompt
    return ChatPrompt(
        prompt,
        text,
        tools,
        splits_reasoning=request.separate_reasoning is not False,
        keeper=encoded.open_keeper(),
    )


async def echoed_texts(
    request: CompletionRequest, served_model: ServedModel, prompts: Sequence[Submit]
) -> list[str]:
    """Returns the prompts' texts, decoded for prompts of token ids; without a tokenizer those are empty."""
    given = split_prompts(request.prompt)
    return [
        text if isinstance(text, str) else await asyncio.to_thread(_text, prompt, served_model)
        for text, prompt in zip(given, prompts, strict=True)
    ]


def _text(prompt: Submit, served_model: ServedModel) -> str:
    if served_model.tokenizer is None:
        return ""
    skip_special_tokens = prompt.sampling.skip_special_tokens
    return served_model.tokenizer.decode(unpack_tokens(prompt.tokens), skip_special_tokens=skip_special_tokens)


def _sampling(
    request: GenerationRequest, served_model: ServedModel, max_tokens: int | None, n_logprobs: int | None
) -> SamplingParams:
    """Checks what does not depend on the prompt; returns the request's sampling parameters."""
    served_model.check_name(request.model)
    served_model.check_priority(request.priority)
    check_cache_salt(request.cache_salt or "")
    check_session_id(request.session_id or "")
    structured_outputs = requested_structured_outputs(request)
    fields = msgspec.structs.asdict(request) | {"logprobs": n_logprobs, "structured_outputs": structured_outputs}
    return request_sampling_params(fields, max_tokens, served_model)


def _implicit_pins(request: GenerationRequest, n_tokens: int) -> tuple[PromptPin, ...]:
    """Returns the pin of a whole prompt of ``n_tokens``, or none if the request asks for none."""
    options = request.prompt_cache_options
    if options is None or not options.pins_whole_prompt:
        return ()
    return (PromptPin(n_tokens, options.ttl_s),)


def _submits(
    request: GenerationRequest,
    encoded: Sequence[bytes],
    sampling: SamplingParams,
    model: GenerationModel,
    max_tokens_field: str | None,
    prompt_field: str,
) -> list[Submit]:
    logprobs_field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
    check_n_prompt_logprobs([(sampling, sum(map(len, encoded)) // 4)], logprobs_field)
    name = uuid.uuid4().hex
    return [
        Submit(
            id=f"{name}-{index}" if index else name,
            tokens=tokens,
            sampling=clamp_max_tokens(sampling, model, len(tokens) // 4, max_tokens_field, prompt_field),
            cache_salt=request.cache_salt or "",
            reads_cache=not request.skip_reading_prefix_cache,
            priority=request.priority or 0,
            pins=_implicit_pins(request, len(tokens) // 4),
            session_id=request.session_id or "",
        )
        for index, tokens in enumerate(encoded)
    ]
