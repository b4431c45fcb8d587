"""Checks and defaults of request fields that the OpenAI and the SGLang API share."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from radixkv.config import MAX_SEED
from radixkv.errors import ContextLengthExceeded, InvalidRequest
from radixkv.frontend.http.errors import ModelNotFound
from radixkv.frontend.served_model import ServedModel
from radixkv.sampling import NO_SEED, SamplingParams

MAX_SALT_BYTES = 128
"""Longest ``cache_salt``, in UTF-8."""
MAX_PROMPT_LOGPROBS = 1 << 21
"""Most logprobs of prompt tokens in one response; each takes about 60 bytes of JSON."""

_MAX_TOKENS_DEFAULT = "max_new_tokens"
"""The checkpoint's sampling default that caps every answer."""


def check_model(name: str | None, served_model: ServedModel) -> None:
    """Raises ``ModelNotFound`` unless ``name`` is None or the served model's."""
    if name is not None and name != served_model.name:
        raise ModelNotFound(f"this server serves the model {served_model.name!r} only", param="model")


def check_cache_salt(salt: str | None) -> None:
    """Raises ``InvalidRequest`` for a ``cache_salt`` longer than ``MAX_SALT_BYTES``."""
    if len((salt or "").encode()) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt is longer than {MAX_SALT_BYTES} bytes", param="cache_salt")


def max_tokens_of_prompt_only(min_tokens: int | None) -> int:
    """Returns the ``max_tokens`` to submit for a request with ``max_tokens`` 0.

    It is 1: the step that computes the prompt also samples one token, which the response leaves out.

    Raises:
        InvalidRequest: ``min_tokens`` is above 0.
    """
    if min_tokens is not None and min_tokens > 0:
        raise InvalidRequest(f"min_tokens is {min_tokens}; it must be at most max_tokens, 0", param="min_tokens")
    return 1


def check_n_prompt_logprobs(prompts: Iterable[tuple[SamplingParams, int]], field: str) -> None:
    """Raises ``InvalidRequest`` for more prompt logprobs than ``MAX_PROMPT_LOGPROBS``.

    Args:
        prompts: per prompt its sampling parameters and its number of tokens.
        field: the request field to name in the error.
    """
    requested = [
        (n_tokens, sampling.prompt_logprobs)
        for sampling, n_tokens in prompts
        if sampling.prompt_logprobs is not None
    ]
    n_logprobs = sum(n_tokens * (n_top + 1) for n_tokens, n_top in requested)
    if n_logprobs > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{field} of {sum(n_tokens for n_tokens, _ in requested)} prompt tokens would return {n_logprobs} "
            f"log-probabilities; at most {MAX_PROMPT_LOGPROBS} a request, so ask for fewer or send fewer prompts",
            param=field,
        )


def fold_seed(seed: int | None) -> int | None:
    """Maps a request's seed to the range of ``SamplingParams``.

    OpenAI allows negative seeds. Seeds with equal lower 63 bits are the same seed; -1 means no seed, as in vLLM.
    """
    return None if seed is None or seed == NO_SEED else seed & MAX_SEED


def recommended_sampling(served_model: ServedModel) -> dict[str, float | int]:
    """Returns the checkpoint's defaults for fields of ``SamplingParams``, without its limit on answers."""
    return {name: value for name, value in served_model.default_sampling.items() if name != _MAX_TOKENS_DEFAULT}


def clamp_max_tokens(
    sampling: SamplingParams,
    served_model: ServedModel,
    n_prompt: int,
    max_tokens_field: str | None,
    prompt_field: str,
) -> SamplingParams:
    """Clamps ``max_tokens`` to the context and to the checkpoint's limit.

    Args:
        sampling: as requested.
        served_model: gives the length of the context.
        n_prompt: tokens of the prompt.
        max_tokens_field: the field that set ``max_tokens``; None if it is a default.
        prompt_field: the field with the prompt.

    Raises:
        ContextLengthExceeded: the prompt and the requested ``max_tokens`` do not fit; a default is clamped instead.
    """
    room = served_model.max_prompt_and_answer - n_prompt
    requested = sampling.max_tokens if max_tokens_field is not None and sampling.max_tokens is not None else 1
    if requested > room:
        raise ContextLengthExceeded(
            f"the prompt has {n_prompt} tokens and {requested} more are requested, but this model's maximum "
            f"context length is {served_model.max_prompt_and_answer} tokens; shorten one of them",
            param=max_tokens_field if max_tokens_field is not None and room >= 1 else prompt_field,
        )
    limits = (room, sampling.max_tokens, served_model.default_sampling.get(_MAX_TOKENS_DEFAULT))
    return msgspec.structs.replace(sampling, max_tokens=min(int(limit) for limit in limits if limit is not None))
