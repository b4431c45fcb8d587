"""From OpenAI's requests to prompts for the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.api.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from radixkv.frontend.chat_text import conversation_text
from radixkv.frontend.in_flight import Prompt
from radixkv.frontend.prompt_encoding import check_ids, encode, encode_texts, separate
from radixkv.frontend.request_limits import (
    check_figures,
    check_model,
    check_salt,
    fitted,
    folded_seed,
    one_step,
    recommended,
)
from radixkv.frontend.served_model import Served
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
"""Fields that mean the same in a request and in ``SamplingParams``."""


async def completion_prompts(request: CompletionRequest, served: Served) -> list[Prompt]:
    """The request's prompts, encoded and checked. Long ones are encoded in a thread.

    Raises:
        InvalidRequest: naming the field that cannot be served.
    """
    _check(request, served)
    if request.max_tokens is None:
        max_tokens = SamplingParams().max_tokens
    else:
        max_tokens = one_step(request.min_tokens) if request.is_only_echo else request.max_tokens
    sampling = _sampling(request, served, max_tokens, request.n_logprobs)
    if request.echo and sampling.logprobs is not None:
        n_prompt_logprobs = max(sampling.logprobs, sampling.prompt_logprobs or 0)
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=n_prompt_logprobs)
    prompts = separate(request.prompt)
    adds_special_tokens = request.add_special_tokens is not False
    asked = None if request.max_tokens is None else "max_tokens"
    encoded = await encode(prompts, served, adds_special_tokens=adds_special_tokens)
    check_figures([(sampling, sum(map(len, encoded)) // 4)], _figures_field(request))
    return [
        _prompt(request, tokens, fitted(sampling, served, len(tokens) // 4, asked, "prompt")) for tokens in encoded
    ]


async def chat_prompt(request: ChatRequest, served: Served) -> Prompt:
    """The request's messages by the chat template, encoded and checked. Long ones are so in a thread.

    Raises:
        InvalidRequest: naming the field that cannot be served.
    """
    _check(request, served)
    asked, max_tokens = request.asked_max_tokens
    sampling = _sampling(request, served, max_tokens, request.n_logprobs)
    text = await conversation_text(
        request.messages,
        served,
        add_generation_prompt=request.adds_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        variables=request.template_variables,
    )
    (tokens,) = await encode_texts([text], served, "messages", adds_special_tokens=bool(request.add_special_tokens))
    if not tokens:
        raise InvalidRequest("the chat template makes no text of the messages", param="messages")
    check_figures([(sampling, len(tokens) // 4)], _figures_field(request))
    return _prompt(request, tokens, fitted(sampling, served, len(tokens) // 4, asked, "messages"))


async def echoed_texts(request: CompletionRequest, served: Served, prompts: Sequence[Prompt]) -> list[str]:
    """The prompts' texts: as they were given, or those of their ids; empty without a tokenizer."""
    given = separate(request.prompt)
    return [
        text if isinstance(text, str) else await asyncio.to_thread(_text, prompt, served)
        for text, prompt in zip(given, prompts, strict=True)
    ]


def _text(prompt: Prompt, served: Served) -> str:
    if served.tokenizer is None:
        return ""
    skips = prompt.sampling.skip_special_tokens
    return served.tokenizer.decode(unpack_tokens(prompt.tokens), skip_special_tokens=skips)


def _check(request: GenerationRequest, served: Served) -> None:
    check_model(request.model, served)
    check_salt(request.cache_salt)
    if request.stop and served.tokenizer is None:
        raise InvalidRequest(
            "stop strings need a tokenizer, and this checkpoint has none; start the server with --tokenizer",
            param="stop",
        )
    if request.stop_token_ids:
        check_ids(request.stop_token_ids, served, "stop_token_ids")
    if request.logit_bias:
        check_ids(list(request.logit_bias), served, "logit_bias")


def _figures_field(request: GenerationRequest) -> str:
    return "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"


def _sampling(
    request: GenerationRequest, served: Served, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """What the request asks for; where it does not say, what the checkpoint recommends."""
    fields = msgspec.structs.asdict(request)
    given = {name: fields[name] for name in _SAMPLING_FIELDS if fields[name] is not None}
    return SamplingParams(
        **(recommended(served) | given), max_tokens=max_tokens, logprobs=logprobs, seed=folded_seed(request.seed)
    )


def _prompt(request: GenerationRequest, tokens: bytes, sampling: SamplingParams) -> Prompt:
    return Prompt(
        tokens=tokens,
        sampling=sampling,
        cache_salt=request.cache_salt or "",
        reads_cache=not request.skip_reading_prefix_cache,
        priority=request.priority or 0,
    )
