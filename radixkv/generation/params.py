"""Sampling parameters of a request: its fields, the checkpoint's defaults, and what the model allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from radixkv.errors import InvalidRequest, shortened
from radixkv.generation.models import GenerationModel
from radixkv.settings.config import MAX_SEED
from radixkv.wire.request_limits import check_ids, check_length
from radixkv.wire.sampling import MAX_TOKENS, NO_SEED, SamplingParams

MAX_PROMPT_LOGPROBS = 1 << 21
"""Most logprobs of prompt tokens in one response; each takes about 60 bytes of JSON."""

_MAX_TOKENS_DEFAULT = "max_new_tokens"
"""The checkpoint's limit on answers. The server caps every answer by it; for ``LLM`` it is the ``max_tokens`` of
calls without sampling parameters."""


def default_sampling_params(default_sampling: Mapping[str, float | int]) -> SamplingParams:
    """Returns the sampling parameters of a request that sets none, by the checkpoint's defaults."""
    fields: dict[str, Any] = dict(default_sampling)
    if _MAX_TOKENS_DEFAULT in fields:
        fields["max_tokens"] = fields.pop(_MAX_TOKENS_DEFAULT)
    return SamplingParams(**fields)


def request_sampling_params(
    fields: Mapping[str, Any], max_tokens: int | None, model: GenerationModel
) -> SamplingParams:
    """Returns a request's sampling parameters, with the checkpoint's defaults for omitted fields.

    A beam search has none of those defaults: nothing is sampled.

    Args:
        fields: by their names in ``SamplingParams``; None counts as omitted, and other names are ignored. ``seed``
            may be any integer: seeds with equal lower 63 bits are the same seed, and -1 means no seed, as in vLLM.
        max_tokens: limit of the answer; None for the rest of the context. Not 0: then only the prompt is computed,
            see ``prompt_only_sampling_params``.
        model: provides the defaults.

    Raises:
        InvalidRequest: a field is invalid, or as ``check_sampling``.
    """
    defaults = {} if fields.get("use_beam_search") else model.default_sampling
    values: dict[str, Any] = {name: value for name, value in defaults.items() if name != _MAX_TOKENS_DEFAULT}
    values |= {name: fields[name] for name in SamplingParams.__struct_fields__ if fields.get(name) is not None}
    if max_tokens is not None and not 0 <= max_tokens <= MAX_TOKENS:
        raise InvalidRequest(
            f"max_tokens is {shortened(max_tokens)}; it must be between 0, which only computes the prompt, and "
            f"{MAX_TOKENS}",
            param="max_tokens",
        )
    values["max_tokens"] = max_tokens
    seed = values.get("seed")
    values["seed"] = None if seed is None or seed == NO_SEED else seed & MAX_SEED
    sampling = SamplingParams(**values)
    check_sampling(sampling, model)
    return sampling


def check_sampling(sampling: SamplingParams, model: GenerationModel) -> None:
    """Raises ``InvalidRequest`` for ids outside the vocabulary, and for stop strings without a tokenizer."""
    if sampling.stop:
        model.require_tokenizer("stop")
    check_ids(sampling.stop_token_ids, model.vocab_size, "stop_token_ids")
    check_ids(sampling.logit_bias, model.vocab_size, "logit_bias")


def prompt_only_sampling_params(fields: Mapping[str, Any], model: GenerationModel) -> SamplingParams:
    """Returns the sampling parameters of a request that only computes its prompt for the cache.

    Args:
        fields: as for ``request_sampling_params``. They say how a later request answers, and are only checked;
            ``min_tokens`` is not compared with anything.
        model: as there.

    Raises:
        InvalidRequest: a field is invalid, as it would be in the later request.
    """
    request_sampling_params(fields, None, model)
    return SamplingParams(max_tokens=max_tokens_of_prompt_only(None))


def max_tokens_of_prompt_only(min_tokens: int | None) -> int:
    """Returns the ``max_tokens`` to submit for a request with ``max_tokens`` 0.

    It is 1: the step that computes the prompt also samples one token, which the response leaves out.

    Raises:
        InvalidRequest: ``min_tokens`` is above 0.
    """
    if min_tokens is not None and min_tokens > 0:
        raise InvalidRequest(f"min_tokens is {min_tokens}; it must be at most max_tokens, 0", param="min_tokens")
    return 1


def clamp_max_tokens(
    sampling: SamplingParams, model: GenerationModel, n_prompt: int, max_tokens_field: str | None, prompt_field: str
) -> SamplingParams:
    """Clamps ``max_tokens`` to the context and to the checkpoint's limit.

    Args:
        sampling: as requested.
        model: gives the length of the context.
        n_prompt: tokens of the prompt.
        max_tokens_field: the field that set ``max_tokens``; None if it is a default.
        prompt_field: the field with the prompt.

    Raises:
        ContextLengthExceeded: the prompt and the requested ``max_tokens`` do not fit; a default is clamped instead.
    """
    room = check_length(
        n_prompt,
        None if max_tokens_field is None else sampling.max_tokens,
        model.ready.max_prompt_and_answer_of(n_prompt, sampling.kv_budget),
        max_tokens_field=max_tokens_field or "max_tokens",
        prompt_field=prompt_field,
        reason=model.ready.limit_reason(n_prompt, sampling.kv_budget),
    )
    limits = (room, sampling.max_tokens, model.default_sampling.get(_MAX_TOKENS_DEFAULT))
    max_tokens = min(int(limit) for limit in limits if limit is not None)
    if max_tokens == sampling.max_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=max_tokens)


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
