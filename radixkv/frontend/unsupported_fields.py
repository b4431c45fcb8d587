"""Request fields of unsupported features, refused by name."""

from __future__ import annotations

from typing import Any

import msgspec

from radixkv.errors import UnsupportedFeature, shortened


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Fields of OpenAI, vLLM and SGLang that are accepted only with an empty value or their default."""

    suffix: str | None = ""
    length_penalty: float | None = 1.0
    use_beam_search: bool | None = False
    session_id: str | None = ""
    response_format: dict[str, Any] | None = msgspec.field(default_factory=lambda: {"type": "text"})
    tools: list[Any] | None = msgspec.field(default_factory=list)
    tool_choice: Any = "none"
    functions: list[Any] | None = msgspec.field(default_factory=list)
    function_call: Any = "none"
    modalities: list[str] | None = msgspec.field(default_factory=lambda: ["text"])
    audio: Any = None
    web_search_options: Any = None
    chat_template: str | None = None
    documents: list[Any] | None = msgspec.field(default_factory=list)
    mm_processor_kwargs: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    prompt_embeds: Any = None
    lora_path: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    allowed_token_ids: list[int] | None = msgspec.field(default_factory=list)
    bad_words: list[str] | None = msgspec.field(default_factory=list)
    truncate_prompt_tokens: int | None = None
    truncation_side: Any = None
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    stop_regex: str | list[str] | None = ""
    min_new_tokens: int | None = 0
    max_new_tokens: Any = None
    max_token: Any = None
    sampling_params: Any = None
    extra_body: Any = None
    extra_key: str | list[str] | None = ""
    session_params: Any = None
    vllm_xargs: Any = None
    thinking_token_budget: int | None = None
    data_parallel_rank: int | None = None
    routed_dp_rank: int | None = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    input_ids: Any = None
    input_embeds: Any = None
    return_hidden_states: bool | None = False
    return_routed_experts: bool | None = False
    return_tokens_as_token_ids: bool | None = False


_ADVICE = {
    "best_of": "set n to the same, or leave it out",
    "extra_body": "give its fields at the top level of the body",
    "extra_key": "use cache_salt",
    "include_stop_str_in_output": "use no_stop_trim in sampling_params",
    "logprobs": "use return_logprob and top_logprobs_num",
    "max_new_tokens": "use max_tokens",
    "max_token": "use max_tokens",
    "max_tokens": "use max_new_tokens in sampling_params",
    "max_completion_tokens": "use max_new_tokens in sampling_params",
    "min_new_tokens": "use min_tokens",
    "min_tokens": "use min_new_tokens in sampling_params",
    "sampling_params": "give its fields at the top level of the body",
    "no_stop_trim": "use include_stop_str_in_output",
}
"""Advice for fields that have an equivalent; all others are to be left out."""

_EMPTY_OBJECT_FIELDS = ("guided_json", "json_schema", "web_search_options")
"""Fields in which ``{}`` is a request: for any JSON, or for a search without options."""

_NEUTRAL = msgspec.structs.asdict(UnsupportedFields())


def is_unsupported(name: str) -> bool:
    """Returns whether a field belongs to an unsupported feature."""
    return name in _NEUTRAL


def requests_nothing(name: str, value: object, neutral: object = None) -> bool:
    """Returns whether a value is null, empty or the field's ``neutral`` value."""
    if value is None or value in ("", []) or (value == {} and name not in _EMPTY_OBJECT_FIELDS):
        return True
    # False == 0 in Python, but a count of 0 may be a request.
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def refuse_unsupported(request: UnsupportedFields) -> None:
    """Raises ``UnsupportedFeature`` for the first field with a value that requests something."""
    values = msgspec.structs.asdict(request)
    for name, neutral in _NEUTRAL.items():
        if not requests_nothing(name, values[name], neutral):
            raise unsupported(name, values[name])


def unsupported(name: str, value: object = None, advice: str | None = None) -> UnsupportedFeature:
    """Returns the error for a field of an unsupported feature.

    Args:
        name: the field.
        value: its value, shown if it is a number or a Boolean.
        advice: what the client should do, if that depends on the route.
    """
    # Texts never repeat other parts of a body.
    shown = f" {shortened(value)}" if isinstance(value, int | float) else ""
    if isinstance(value, bool):
        shown = shown.lower()  # as in JSON
    advice = advice or _ADVICE.get(name, "leave it out")
    return UnsupportedFeature(f"{name}{shown} is not supported in this release; {advice}", param=name)
