"""Conversion of OpenAI requests to prompts for the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.api.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from radixkv.frontend.chat_text import conversation_text
from radixkv.frontend.in_flight import Prompt
from radixkv.frontend.prompt_encoding import check_ids, encode_prompts, encode_texts, split_prompts
from radixkv.frontend.request_limits import (
    check_cache_salt,
    check_model,
    check_n_prompt_logprobs,
    clamp_max_tokens,
    fold_seed,
    max_tokens_of_prompt_only,
    recommended_sampling,
)
from radixkv.frontend.served_model import ServedModel
from radixkv.sampling import SamplingParams
from radixkv.wire import unpack_tokens

_SAMPLING_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)
"""Fields with the same name and meaning in a request and in ``SamplingParams``."""


async def completion_prompts(request: CompletionRequest, served_model: ServedModel) -> list[Prompt]:
    """Checks the request and encodes its prompts, long ones in a thread.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
    """
    _check(request, served_model)
    if request.max_tokens is None:
        max_tokens = SamplingParams().max_tokens
    else:
        max_tokens = max_tokens_of_prompt_only(request.min_tokens) if request.is_only_echo else request.max_tokens
    sampling = _sampling(request, served_model, max_tokens, request.n_logprobs)
    if request.echo and sampling.logprobs is not None:
        n_prompt_logprobs = max(sampling.logprobs, sampling.prompt_logprobs or 0)
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=n_prompt_logprobs)
    prompts = split_prompts(request.prompt)
    adds_special_tokens = request.add_special_tokens is not False
    max_tokens_field = None if request.max_tokens is None else "max_tokens"
    encoded = await encode_prompts(prompts, served_model, adds_special_tokens=adds_special_tokens)
    check_n_prompt_logprobs([(sampling, sum(map(len, encoded)) // 4)], _prompt_logprobs_field(request))
    return [
        _prompt(
            request, tokens, clamp_max_tokens(sampling, served_model, len(tokens) // 4, max_tokens_field, "prompt")
        )
        for tokens in encoded
    ]


async def chat_prompt(request: ChatRequest, served_model: ServedModel) -> Prompt:
    """Checks the request, applies the chat template and encodes the text, long ones in a thread.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` names it.
    """
    _check(request, served_model)
    max_tokens_field, max_tokens = request.requested_max_tokens
    sampling = _sampling(request, served_model, max_tokens, request.n_logprobs)
    text = await conversation_text(
        request.messages,
        served_model,
        add_generation_prompt=request.adds_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        variables=request.template_variables,
    )
    (tokens,) = await encode_texts(
        [text], served_model, "messages", adds_special_tokens=bool(request.add_special_tokens)
    )
    if not tokens:
        raise InvalidRequest("the chat template renders the messages as an empty text", param="messages")
    check_n_prompt_logprobs([(sampling, len(tokens) // 4)], _prompt_logprobs_field(request))
    return _prompt(
        request, tokens, clamp_max_tokens(sampling, served_model, len(tokens) // 4, max_tokens_field, "messages")
    )


async def echoed_texts(
    request: CompletionRequest, served_model: ServedModel, prompts: Sequence[Prompt]
) -> list[str]:
    """Returns the prompts' texts, decoded for prompts of token ids; without a tokenizer those are empty."""
    given = split_prompts(request.prompt)
    return [
        text if isinstance(text, str) else await asyncio.to_thread(_text, prompt, served_model)
        for text, prompt in zip(given, prompts, strict=True)
    ]


def _text(prompt: Prompt, served_model: ServedModel) -> str:
    if served_model.tokenizer is None:
        return ""
    skip_special_tokens = prompt.sampling.skip_special_tokens
    return served_model.tokenizer.decode(unpack_tokens(prompt.tokens), skip_special_tokens=skip_special_tokens)


def _check(request: GenerationRequest, served_model: ServedModel) -> None:
    check_model(request.model, served_model)
    check_cache_salt(request.cache_salt)
    if request.stop and served_model.tokenizer is None:
        raise InvalidRequest(
            "stop strings need a tokenizer, and this checkpoint has none; start the server with --tokenizer",
            param="stop",
        )
    if request.stop_token_ids:
        check_ids(request.stop_token_ids, served_model, "stop_token_ids")
    if request.logit_bias:
        check_ids(list(request.logit_bias), served_model, "logit_bias")


def _prompt_logprobs_field(request: GenerationRequest) -> str:
    return "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"


def _sampling(
    request: GenerationRequest, served_model: ServedModel, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Returns the request's sampling parameters, with the checkpoint's defaults for omitted fields."""
    fields = msgspec.structs.asdict(request)
    given = {name: fields[name] for name in _SAMPLING_FIELDS if fields[name] is not None}
    return SamplingParams(
        **(recommended_sampling(served_model) | given),
        max_tokens=max_tokens,
        logprobs=logprobs,
        seed=fold_seed(request.seed),
    )


def _prompt(request: GenerationRequest, tokens: bytes, sampling: SamplingParams) -> Prompt:
    return Prompt(
        tokens=tokens,
        sampling=sampling,
        cache_salt=request.cache_salt or "",
        reads_cache=not request.skip_reading_prefix_cache,
        priority=request.priority or 0,
    )
