"""SGLang's ``/generate``: its body, in its own spelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.http.body_decoder import BodyDecoder, Whole, check_prompt
from radixkv.frontend.unsupported_fields import asks_nothing, unsupported

ValueT = TypeVar("ValueT")

DEFAULT_MAX_NEW_TOKENS = 128


class SamplingFields(msgspec.Struct, kw_only=True):
    """``sampling_params``; unknown fields are ignored, and null means the default."""

    max_new_tokens: Whole | msgspec.UnsetType | None = msgspec.UNSET
    """Null: to the end of the context. 0: the prompt is computed, and nothing is generated."""
    min_new_tokens: Whole | None = None
    n: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: Whole | None = None
    seed: Whole | None = None
    """The same as ``sampling_seed``, in everybody else's spelling."""
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
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
    logprob_start_len: Whole | list[Whole] | None = -1
    top_logprobs_num: Whole | list[Whole] | None = 0
    return_text_in_logprobs: bool | None = False
    rid: str | list[str] | None = None
    priority: Whole | None = None
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


_UNBUILT: Mapping[str, object] = {
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
"""Features that are not built, and what asks for nothing besides an empty value."""

_SAME_ANYWAY: Mapping[str, object] = {
    "min_new_tokens": 0,
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
"""Sampling settings whose default no checkpoint changes."""


def parse_generate(body: bytes, max_prompt_tokens: int) -> GenerateRequest:
    """The request in a body. Raises ``InvalidRequest``, which never repeats a part of the body."""
    request = _requests.decode(body, max_prompt_tokens)
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest("give either text or input_ids", param="text")
    _refuse_unbuilt(request)
    for name, neutral in _BELOW.items():
        if not asks_nothing(name, getattr(request, name), neutral):
            raise InvalidRequest(f"{name} is a field of sampling_params; give it there", param=name)
    return request


def parse_sampling(raw: bytes, n_prompts: int) -> list[SamplingFields]:
    """The sampling settings of each prompt. Raises ``InvalidRequest`` for the field inside ``sampling_params``."""
    if not raw.lstrip().startswith(b"["):
        return [_sampling_fields(raw)] * n_prompts
    items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    fields = [_sampling_fields(bytes(item)) for item in items]
    return for_each(fields, SamplingFields(), n_prompts, "sampling_params")


def for_each(value: ValueT | list[ValueT] | None, default: ValueT, n_prompts: int, name: str) -> list[ValueT]:
    """One value a prompt, from one for all or a list. Raises ``InvalidRequest`` for a list of another length."""
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
    _refuse_unbuilt(fields)
    return fields


def _as_field(name: str) -> Callable[[bytes, int], None]:
    """``check_prompt`` for a field of another name."""

    def check(raw: bytes, max_prompt_tokens: int) -> None:
        try:
            check_prompt(raw, max_prompt_tokens)
        except InvalidRequest as error:
            error.param = name
            raise

    return check


_BELOW = {
    name: _SAME_ANYWAY.get(name, _UNBUILT.get(name))
    for name in SamplingFields.__struct_fields__
    if name not in GenerateRequest.__struct_fields__
}
"""Fields of ``sampling_params`` alone, and what asks for nothing: beside it anything else would be ignored."""

_Body = msgspec.defstruct("_Body", [(name, Any, None) for name in _BELOW], bases=(GenerateRequest,), kw_only=True)
_requests = BodyDecoder(
    cast(type[GenerateRequest], _Body),
    {"text": _as_field("text"), "input_ids": _as_field("input_ids")},
    ids_field="input_ids",
)
_sampling = BodyDecoder(SamplingFields, {})


def _refuse_unbuilt(fields: msgspec.Struct) -> None:
    for name, value in msgspec.structs.asdict(fields).items():
        if name in _UNBUILT and not asks_nothing(name, value, _UNBUILT[name]):
            raise unsupported(name, value)
