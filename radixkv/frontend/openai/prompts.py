"""From OpenAI's requests to prompts for the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from radixkv.config import MAX_SEED
from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.answers import Prompt
from radixkv.frontend.encoding import check_ids, encode, encode_texts, separate
from radixkv.frontend.http.failure import ModelNotFound
from radixkv.frontend.openai.conversation import conversation_text
from radixkv.frontend.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from radixkv.frontend.served import Served
from radixkv.sampling import NO_SEED, SamplingParams
from radixkv.wire import unpack_tokens

MAX_SALT_BYTES = 128
MAX_PROMPT_FIGURES = 1 << 21
"""Log-probabilities of prompt tokens in one reply, which has some 60 bytes for each."""

_LIMIT = "max_new_tokens"
"""Of a checkpoint's recommendations, the one that limits every answer."""

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


def check_model(name: str | None, served: Served) -> None:
    """Raises ``ModelNotFound`` for another model than the one that is served."""
    if name is not None and name != served.name:
        raise ModelNotFound(f"this server serves the model {served.name!r} only", param="model")


def check_salt(salt: str | None) -> None:
    """Raises ``InvalidRequest`` for a ``cache_salt`` that the runtime would not take."""
    if len((salt or "").encode()) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt is longer than {MAX_SALT_BYTES} bytes", param="cache_salt")


def one_step(min_tokens: int | None) -> int:
    """``max_tokens`` of a prompt without an answer: it still takes a step, which computes and scores the prompt.

    Raises:
        InvalidRequest: for ``min_tokens`` of that answer.
    """
    if min_tokens is not None and min_tokens > 0:
        raise InvalidRequest(f"min_tokens is {min_tokens}; it must be at most max_tokens, 0", param="min_tokens")
    return 1


def check_figures(scored: Iterable[tuple[SamplingParams, int]], field: str) -> None:
    """Raises ``InvalidRequest`` if prompts have more log-probabilities than a reply may.

    Args:
        scored: of each prompt what is asked for, and its tokens.
        field: the one that asks.
    """
    wanted = [(n_tokens, one.prompt_logprobs) for one, n_tokens in scored if one.prompt_logprobs is not None]
    n_figures = sum(n_tokens * (n_likeliest + 1) for n_tokens, n_likeliest in wanted)
    if n_figures > MAX_PROMPT_FIGURES:
        raise InvalidRequest(
            f"{field} of {sum(n_tokens for n_tokens, _ in wanted)} prompt tokens would be {n_figures} numbers; at "
            f"most {MAX_PROMPT_FIGURES} a request, so ask for fewer or send fewer prompts",
            param=field,
        )


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


def folded_seed(seed: int | None) -> int | None:
    """A request's seed as one of ``SamplingParams``.

    OpenAI's may be negative: those of the same lower 63 bits are one seed, but for -1, which is none as in vLLM.
    """
    return None if seed is None or seed == NO_SEED else seed & MAX_SEED


def recommended(served: Served) -> dict[str, float | int]:
    """What the checkpoint recommends for fields of ``SamplingParams`` that a request leaves out."""
    return {name: value for name, value in served.default_sampling.items() if name != _LIMIT}


def fitted(
    sampling: SamplingParams, served: Served, n_prompt: int, asked: str | None, prompt_field: str
) -> SamplingParams:
    """Sampling whose ``max_tokens`` fits; only a default is made smaller, or what the checkpoint limits.

    Args:
        sampling: what the request asks for.
        served: says how much fits.
        n_prompt: tokens.
        asked: the field that says ``max_tokens``; None if that is a default.
        prompt_field: the field that holds the prompt.
    """
    room = served.max_prompt_and_answer - n_prompt
    wanted = sampling.max_tokens if asked is not None and sampling.max_tokens is not None else 1
    if wanted > room:
        raise ContextLengthExceeded(
            f"the prompt has {n_prompt} tokens and {wanted} more are wanted, but this model's maximum context "
            f"length is {served.max_prompt_and_answer} tokens; shorten one of them",
            param=asked if asked is not None and room >= 1 else prompt_field,
        )
    limits = (room, sampling.max_tokens, served.default_sampling.get(_LIMIT))
    return msgspec.structs.replace(sampling, max_tokens=min(int(limit) for limit in limits if limit is not None))


def _prompt(request: GenerationRequest, tokens: bytes, sampling: SamplingParams) -> Prompt:
    return Prompt(
        tokens=tokens,
        sampling=sampling,
        cache_salt=request.cache_salt or "",
        reads_cache=not request.skip_reading_prefix_cache,
        priority=request.priority or 0,
    )
