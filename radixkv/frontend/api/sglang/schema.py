"""Body of SGLang's ``/generate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.http.body_decoder import BodyDecoder, Int64, check_prompt
from radixkv.frontend.unsupported_fields import requests_nothing, unsupported

ValueT = TypeVar("ValueT")

DEFAULT_MAX_NEW_TOKENS = 128


class SamplingFields(msgspec.Struct, kw_only=True):
    """``sampling_params``; unknown fields are ignored, and null means the default."""

    max_new_tokens: Int64 | msgspec.UnsetType | None = msgspec.UNSET
    """Null generates to the end of the context. 0 computes the prompt and generates nothing."""
    min_new_tokens: Int64 | None = None
    n: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: Int64 | None = None
    seed: Int64 | None = None
    """Other servers' name of ``sampling_seed``."""
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    min_tokens: Any = 0
    include_stop_str_in_output: Any = False
    logprobs: Any = None
    spaces_between_special_tokens: bool | None = True
    stop_regex: str | list[str] | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    custom_params: Any = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /generate``; unknown fields are ignored."""

    text: str | list[str] | None = None
    input_ids: list[int | Sequence[int]] | None = None
    sampling_params: msgspec.Raw = msgspec.Raw(b"null")
    stream: bool | None = False
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: Int64 | list[Int64] | None = -1
    top_logprobs_num: Int64 | list[Int64] | None = 0
    return_text_in_logprobs: bool | None = False
    rid: str | list[str] | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool | None = False
    token_ids_logprob: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    modalities: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    extra_key: str | list[str] | None = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    return_hidden_states: bool | list[bool] | None = False
    return_routed_experts: bool | None = False
    return_sampling_mask: bool | list[bool] | None = False
    return_entropy: bool | None = False
    return_prompt_token_ids: bool | None = False

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompts."""
        return "input_ids" if self.text is None else "text"


_UNSUPPORTED: Mapping[str, object] = {
    "min_tokens": 0,
    "include_stop_str_in_output": False,
    "logprobs": False,
    "spaces_between_special_tokens": True,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "return_sampling_mask": False,
    "return_entropy": False,
    "return_prompt_token_ids": False,
} | dict.fromkeys(
    (
        "max_tokens",
        "max_completion_tokens",
        "stop_regex",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "custom_params",
        "token_ids_logprob",
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "modalities",
        "lora_path",
        "session_params",
        "custom_logit_processor",
        "extra_key",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "routed_dp_rank",
        "data_parallel_rank",
    )
)
"""Fields of unsupported features, with the value that requests nothing, besides empty values."""

_FIXED_DEFAULTS: Mapping[str, object] = {
    "min_new_tokens": 0,
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
"""Sampling fields whose default does not depend on the checkpoint."""


def parse_generate(body: bytes, max_prompt_tokens: int) -> GenerateRequest:
    """Parses a request. Raises ``InvalidRequest``, whose text never repeats a part of the body."""
    request = _requests.decode(body, max_prompt_tokens)
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest("give either text or input_ids", param="text")
    _refuse_unsupported(request)
    for name, neutral in _NESTED_ONLY.items():
        if not requests_nothing(name, getattr(request, name), neutral):
            raise InvalidRequest(f"{name} is a field of sampling_params; give it there", param=name)
    return request


def parse_sampling(raw: bytes, n_prompts: int) -> list[SamplingFields]:
    """Parses the sampling settings of each prompt. Raises ``InvalidRequest`` for a field in ``sampling_params``."""
    if not raw.lstrip().startswith(b"["):
        return [_sampling_fields(raw)] * n_prompts
    items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    fields = [_sampling_fields(bytes(item)) for item in items]
    return for_each(fields, SamplingFields(), n_prompts, "sampling_params")


def for_each(value: ValueT | list[ValueT] | None, default: ValueT, n_prompts: int, name: str) -> list[ValueT]:
    """Returns one value per prompt, from one for all or a list. Raises ``InvalidRequest`` for another length."""
    if not isinstance(value, list):
        return [default if value is None else value] * n_prompts
    if len(value) != n_prompts:
        raise InvalidRequest(f"{name} has {len(value)} items for {n_prompts} prompts", param=name)
    return value


def _sampling_fields(raw: bytes) -> SamplingFields:
    if raw.strip() == b"null":
        return SamplingFields()
    if not raw.lstrip().startswith(b"{"):
        raise InvalidRequest("sampling_params must be an object or a list of them", param="sampling_params")
    fields = _sampling.decode(raw, 0)
    _refuse_unsupported(fields)
    return fields


def _prompt_check(name: str) -> Callable[[bytes, int], None]:
    """Returns ``check_prompt`` with ``name`` as the field in its errors."""

    def check(raw: bytes, max_prompt_tokens: int) -> None:
        try:
            check_prompt(raw, max_prompt_tokens)
        except InvalidRequest as error:
            error.param = name
            raise

    return check


_NESTED_ONLY = {
    name: _FIXED_DEFAULTS.get(name, _UNSUPPORTED.get(name))
    for name in SamplingFields.__struct_fields__
    if name not in GenerateRequest.__struct_fields__
}
"""Fields of ``sampling_params`` that the body itself lacks, with the value that requests nothing.

At the top level any other value is refused, because it would be ignored.
"""

_Body = msgspec.defstruct(
    "_Body", [(name, Any, None) for name in _NESTED_ONLY], bases=(GenerateRequest,), kw_only=True
)
_requests = BodyDecoder(
    cast(type[GenerateRequest], _Body),
    {"text": _prompt_check("text"), "input_ids": _prompt_check("input_ids")},
    ids_field="input_ids",
)
_sampling = BodyDecoder(SamplingFields, {})


def _refuse_unsupported(fields: msgspec.Struct) -> None:
    for name, value in msgspec.structs.asdict(fields).items():
        if name in _UNSUPPORTED and not requests_nothing(name, value, _UNSUPPORTED[name]):
            raise unsupported(name, value)
