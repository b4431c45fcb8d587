"""Translation of ``/generate`` requests to prompts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.api.sglang.schema import DEFAULT_MAX_NEW_TOKENS, GenerateRequest, SamplingFields, for_each
from radixkv.frontend.field_names import naming_fields
from radixkv.frontend.prompt_encoding import PromptEncoder, split_prompts
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.models import GenerationModel
from radixkv.generation.params import (
    check_n_prompt_logprobs,
    clamp_max_tokens,
    max_tokens_of_prompt_only,
    request_sampling_params,
)
from radixkv.settings.compat import naming
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams
from radixkv.wire.structured_outputs import StructuredOutputs

_SGLANG_NAMES: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "include_stop_str_in_output": "no_stop_trim",
}
"""Names in ``SamplingParams`` to SGLang's names."""


@dataclass(frozen=True)
class GeneratePrompt:
    """One prompt of a ``/generate`` request, with the options of its response."""

    prompt: Submit
    rid: str
    """The client's id of the request; empty if it gave none."""
    logprobs_from: int | None
    """Index of the first prompt token to report a logprob for; None for no prompt token."""
    returns_text: bool
    """Whether logprobs have the tokens' texts."""
    generates: bool
    """False if the prompt is only computed, for the cache or for its logprobs."""
    format_field: str | None
    """The field that says what the answer must match; None if it may be anything."""


async def generate_prompts(
    request: GenerateRequest,
    sampling: SamplingFields | list[SamplingFields],
    served_model: ServedModel,
    tenant: str,
) -> list[GeneratePrompt]:
    """Checks the request and encodes its prompts, long ones in a thread.

    Args:
        request: the body.
        sampling: its ``sampling_params``, one for all prompts or a list.
        served_model: the model, without an adapter.
        tenant: who has sent it.

    Raises:
        InvalidRequest: a field cannot be served; ``param`` is SGLang's name of it.
    """
    given = request.text if request.text is not None else request.input_ids
    assert given is not None
    with naming_fields(lambda name: request.prompt_field if name == "prompt" else name):
        prompts = split_prompts(given if isinstance(given, str) else list(given))
    served_model.check_request(request.priority, request.cache_salt, request.session_id)
    n_prompts = len(prompts)
    adapters = for_each(request.lora_path, None, n_prompts, "lora_path")
    models = [served_model.named(name or None, "lora_path") for name in adapters]
    logprob_options = _logprob_options(request, n_prompts)
    settings = for_each(sampling, SamplingFields(), n_prompts, "sampling_params")
    samplings = [
        _sampling(fields, *options, served_model) for fields, options in zip(settings, logprob_options, strict=True)
    ]
    with naming_fields(lambda name: request.prompt_field if name == "prompt" else name):
        encoded = await PromptEncoder(served_model=served_model, tenant=tenant).prompts(prompts)
    n_tokens = [len(tokens) // 4 for tokens in encoded]
    check_n_prompt_logprobs(zip(samplings, n_tokens, strict=True), "top_logprobs_num")
    return [
        _generate_prompt(request, model, tenant, tokens, fields, sampling, rid, start)
        for model, tokens, fields, sampling, rid, (_, start) in zip(
            models, encoded, settings, samplings, _rids(request, n_prompts), logprob_options, strict=True
        )
    ]


def _generate_prompt(
    request: GenerateRequest,
    served_model: ServedModel,
    tenant: str,
    tokens: bytes,
    fields: SamplingFields,
    sampling: SamplingParams,
    rid: str,
    start: int,
) -> GeneratePrompt:
    n_prompt = len(tokens) // 4
    if start >= n_prompt:
        raise InvalidRequest(
            f"logprob_start_len is {start}; the prompt has {n_prompt} tokens", param="logprob_start_len"
        )
    if request.stream and fields.max_new_tokens == 0 and sampling.logprobs is None:
        raise InvalidRequest(
            "max_new_tokens is 0, which generates nothing, and stream asks for output", param="stream"
        )
    max_tokens_field = "max_new_tokens" if isinstance(fields.max_new_tokens, int) else None
    prompt = Submit(
        id=uuid.uuid4().hex,
        tokens=tokens,
        sampling=clamp_max_tokens(sampling, served_model, n_prompt, max_tokens_field, request.prompt_field),
        namespace=served_model.namespace(tenant, request.cache_salt),
        reads_cache=not request.skip_reading_prefix_cache,
        priority=request.priority or 0,
        session_id=request.session_id or "",
    )
    has_prompt_logprobs = sampling.logprobs is not None and start >= 0
    return GeneratePrompt(
        prompt,
        rid,
        start if has_prompt_logprobs else None,
        bool(request.return_text_in_logprobs),
        fields.max_new_tokens != 0,
        next((name for name in _STRUCTURED if getattr(fields, name)), None),
    )


def _logprob_options(request: GenerateRequest, n_prompts: int) -> list[tuple[int | None, int]]:
    """Returns per prompt how many of the likeliest tokens to report, and from which prompt token on.

    The count is None for no logprobs, the start -1 for those of the answer only.
    """
    flags = for_each(request.return_logprob, False, n_prompts, "return_logprob")
    counts = for_each(request.top_logprobs_num, 0, n_prompts, "top_logprobs_num")
    starts = for_each(request.logprob_start_len, -1, n_prompts, "logprob_start_len")
    for start in starts:
        if start < -1:
            raise InvalidRequest(
                f"logprob_start_len is {start}; it must be -1, for the answer only, or a position in the prompt",
                param="logprob_start_len",
            )
    return [
        (count, start) if flag else (None, -1) for flag, count, start in zip(flags, counts, starts, strict=True)
    ]


def _sampling(fields: SamplingFields, n_logprobs: int | None, start: int, model: GenerationModel) -> SamplingParams:
    """Returns the request's sampling parameters, with the checkpoint's defaults for omitted fields."""
    values = msgspec.structs.asdict(fields) | {
        "min_tokens": fields.min_new_tokens,
        "include_stop_str_in_output": fields.no_stop_trim,
        "seed": fields.seed if fields.sampling_seed is None else fields.sampling_seed,
        "logprobs": n_logprobs,
        "prompt_logprobs": n_logprobs if start >= 0 else None,
        "structured_outputs": _structured_outputs(fields),
    }
    max_tokens = DEFAULT_MAX_NEW_TOKENS if fields.max_new_tokens is msgspec.UNSET else fields.max_new_tokens
    with naming(_SGLANG_NAMES):
        if max_tokens == 0:
            max_tokens = max_tokens_of_prompt_only(fields.min_new_tokens)
        return request_sampling_params(values, max_tokens, model)


def _structured_outputs(fields: SamplingFields) -> StructuredOutputs | None:
    names = [name for name in _STRUCTURED if getattr(fields, name)]
    if len(names) > 1:
        raise InvalidRequest(f"{' and '.join(names)} are given; give one of them", param=names[1])
    return StructuredOutputs(**{_STRUCTURED[name]: getattr(fields, name) for name in names}) if names else None


_STRUCTURED: Mapping[str, str] = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
"""SGLang's names of the fields of ``StructuredOutputs``."""


def _rids(request: GenerateRequest, n_prompts: int) -> list[str]:
    if isinstance(request.rid, str) and n_prompts > 1:
        return [f"{request.rid}_{index}" for index in range(n_prompts)]
    return for_each(request.rid, "", n_prompts, "rid")
