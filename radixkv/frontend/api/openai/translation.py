"""Translation of OpenAI's requests to prompts and conversations."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from radixkv.frontend.api.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from radixkv.frontend.api.openai.structured_fields import requested_field
from radixkv.frontend.chat import Chat
from radixkv.frontend.prompt_encoding import PromptEncoder, split_prompts
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.params import (
    check_n_prompt_logprobs,
    clamp_max_tokens,
    max_tokens_of_prompt_only,
    prompt_only_sampling_params,
    request_sampling_params,
)
from radixkv.wire.messages import PromptPin, Submit, unpack_tokens
from radixkv.wire.sampling import SamplingParams


def to_chat(request: ChatRequest) -> Chat:
    """Translates a request for a chat. Raises ``InvalidRequest``, which names the field."""
    max_tokens_field, max_tokens = request.requested_max_tokens
    return Chat(
        messages=request.messages,
        tools=request.tools or (),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        sampling=_sampling_fields(request, request.n_logprobs),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        field_names={"prewarm": "max_tokens"},
        generates=not request.is_for_cache,
        format_field=format_field(request),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        variables=request.template_variables,
        adds_special_tokens=bool(request.add_special_tokens),
        splits_reasoning=request.separate_reasoning is not False,
        reads_cache=not request.skip_reading_prefix_cache,
        breakpoint_ttl_s=request.breakpoint_ttl_s,
        pin_s=request.pin_s,
        demands_pins=True,
        cache_salt=request.cache_salt or "",
        session_id=request.session_id or "",
        priority=request.priority or 0,
        expected_pause_s=request.expected_pause_s,
        prediction="" if request.prediction is None else request.prediction.text,
    )


async def completion_prompts(request: CompletionRequest, served_model: ServedModel, tenant: str) -> list[Submit]:
    """Checks the request and encodes its prompts, long ones in a thread.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
    """
    served_model.check_request(request.priority, request.cache_salt, request.session_id)
    sampling = _completion_sampling(request, served_model)
    encoder = PromptEncoder(
        served_model=served_model, tenant=tenant, adds_special_tokens=request.add_special_tokens is not False
    )
    encoded = await encoder.prompts(split_prompts(request.prompt))
    logprobs_field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
    check_n_prompt_logprobs([(sampling, sum(map(len, encoded)) // 4)], logprobs_field)
    max_tokens_field = None if request.max_tokens is None else "max_tokens"
    name = uuid.uuid4().hex
    return [
        Submit(
            id=f"{name}-{index}" if index else name,
            tokens=tokens,
            sampling=clamp_max_tokens(sampling, served_model, len(tokens) // 4, max_tokens_field, "prompt"),
            namespace=served_model.namespace(tenant, request.cache_salt),
            reads_cache=not request.skip_reading_prefix_cache,
            priority=request.priority or 0,
            pins=() if request.pin_s is None else (PromptPin(len(tokens) // 4, request.pin_s),),
            session_id=request.session_id or "",
        )
        for index, tokens in enumerate(encoded)
    ]


def _completion_sampling(request: CompletionRequest, served_model: ServedModel) -> SamplingParams:
    if request.is_for_cache:
        served_model.check_caches("max_tokens")
        return prompt_only_sampling_params(_sampling_fields(request, None), served_model)
    max_tokens = SamplingParams().max_tokens if request.max_tokens is None else request.max_tokens
    if request.is_only_echo:
        max_tokens = max_tokens_of_prompt_only(request.min_tokens)
    fields = _sampling_fields(request, request.n_logprobs)
    sampling = request_sampling_params(fields, max_tokens, served_model)
    if not request.echo or sampling.logprobs is None:
        return sampling
    n_prompt_logprobs = max(sampling.logprobs, sampling.prompt_logprobs or 0)
    return msgspec.structs.replace(sampling, prompt_logprobs=n_prompt_logprobs)


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


def format_field(request: GenerationRequest) -> str:
    """Returns the field that says what answers must match, or ``tools``. Raises as ``requested_field``."""
    found = requested_field(request)
    return "tools" if found is None else found[0]


def _sampling_fields(request: GenerationRequest, n_logprobs: int | None) -> dict[str, Any]:
    """Returns what the request sets, by the names of ``SamplingParams``."""
    found = requested_field(request)
    structured_outputs = None if found is None else found[1]
    return msgspec.structs.asdict(request) | {"logprobs": n_logprobs, "structured_outputs": structured_outputs}
