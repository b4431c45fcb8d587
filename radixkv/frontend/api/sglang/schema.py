"""Body of SGLang's ``/generate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec

from radixkv.errors import InvalidRequest
from radixkv.frontend.field_names import naming_fields
from radixkv.frontend.http.body_decoder import BodyDecoder, Int64, check_prompt
from radixkv.frontend.shared_fields import SharedSampling
from radixkv.settings.compat import Place, Refusal, refusals

ValueT = TypeVar("ValueT")

DEFAULT_MAX_NEW_TOKENS = 128


class SamplingFields(SharedSampling, kw_only=True):
    """``sampling_params``; unknown fields are ignored, and null means the default."""

    max_new_tokens: Annotated[
        Int64 | msgspec.UnsetType | None,
        msgspec.Meta(
            description="Null generates to the end of the context. 0 computes the prompt and generates nothing."
        ),
    ] = msgspec.UNSET
    min_new_tokens: Int64 | None = None
    sampling_seed: Int64 | None = None
    seed: Annotated[Int64 | None, msgspec.Meta(description="Other servers' name of ``sampling_seed``.")] = None
    no_stop_trim: bool | None = None
    json_schema: str | None = None
    structural_tag: str | None = None


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
    lora_path: str | list[str | None] | None = None
    """Name of an adapter, for all prompts or for each; null or empty for the model alone."""
    model: Annotated[
        str | None,
        msgspec.Meta(description="A name of the model alone; ``lora_path`` chooses adapters."),
    ] = None
    session_id: str | None = None
    skip_reading_prefix_cache: bool | None = False
    explain_cache: bool | None = False

    @property
    def prompt_field(self) -> str:
        """The field that holds the prompts."""
        return "input_ids" if self.text is None else "text"


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


def parse_generate(
    body: bytes, max_prompt_tokens: int, misspelt: dict[str, str]
) -> tuple[GenerateRequest, SamplingFields | list[SamplingFields]]:
    """Parses a request and its ``sampling_params``: one for all prompts, or a list.

    Raises:
        InvalidRequest: the body is not valid; the text never repeats a part of it.
    """
    request = _requests.decode(body, max_prompt_tokens, misspelt)
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest("give either text or input_ids", param="text")
    sampling = bytes(request.sampling_params)
    if not sampling.lstrip().startswith(b"["):
        return request, _sampling_fields(sampling, misspelt)
    items = msgspec.json.decode(sampling, type=list[msgspec.Raw])
    return request, [_sampling_fields(bytes(item), misspelt) for item in items]


def for_each(value: ValueT | list[ValueT] | None, default: ValueT, n_prompts: int, name: str) -> list[ValueT]:
    """Returns one value per prompt, from one for all or a list. Raises ``InvalidRequest`` for another length."""
    if not isinstance(value, list):
        return [default if value is None else value] * n_prompts
    if len(value) != n_prompts:
        raise InvalidRequest(f"{name} has {len(value)} items for {n_prompts} prompts", param=name)
    return value


def _sampling_fields(raw: bytes, misspelt: dict[str, str]) -> SamplingFields:
    if raw.strip() == b"null":
        return SamplingFields()
    if not raw.lstrip().startswith(b"{"):
        raise InvalidRequest("sampling_params must be an object or a list of them", param="sampling_params")
    return _sampling.decode(raw, 0, misspelt)


def _prompt_check(name: str) -> Callable[[bytes, int], None]:
    """Returns ``check_prompt`` with ``name`` as the field in its errors."""

    def check(raw: bytes, max_prompt_tokens: int) -> None:
        with naming_fields(lambda _: name):
            check_prompt(raw, max_prompt_tokens)

    return check


_MISPLACED = {
    name: Refusal(
        name,
        "is a field of sampling_params; give it there",
        (_FIXED_DEFAULTS[name],) if name in _FIXED_DEFAULTS else (),
        kind=InvalidRequest,
        shows_value=False,
    )
    for name in SamplingFields.__struct_fields__
}
"""Fields of ``sampling_params``, which would be ignored at the top level of the body."""

_requests = BodyDecoder(
    GenerateRequest,
    {"text": _prompt_check("text"), "input_ids": _prompt_check("input_ids")},
    _MISPLACED | refusals(Place.GENERATE),
    ids_field="input_ids",
)
_sampling = BodyDecoder(SamplingFields, {}, refusals(Place.GENERATE_SAMPLING))
