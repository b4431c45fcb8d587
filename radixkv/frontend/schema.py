"""The OpenAI schema of completions: a body becomes a ``CompletionRequest`` or an error.

A body is read in two passes, because decoding cannot be interrupted and holds up every other request: the first
only finds where each field is, and only fields whose size and structure can be served are decoded.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from radixkv.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature, shortened

MAX_PROMPTS = 64
MAX_FIELD_BYTES = 1 << 16
"""The longest JSON of a field other than the prompt."""

_AT_FIELD = re.compile(r"`\$\.(\w+)")
_MISSING_FIELD = re.compile(r"required field `(\w+)`")
_OPENING = re.compile(rb"\s*\[\s*(.)", re.DOTALL)

Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer that is short enough to be repeated in an error."""


class Unbuilt(msgspec.Struct, kw_only=True):
    """Fields of features that this release does not have. Null and the default ask for nothing."""

    n: int | None = 1
    best_of: int | None = 1
    logprobs: int | bool | None = False
    prompt_logprobs: int | bool | None = False
    echo: bool | None = False
    suffix: str | None = ""
    logit_bias: dict[str, float] | None = msgspec.field(default_factory=dict)
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    length_penalty: float | None = 1.0
    use_beam_search: bool | None = False
    min_p: float | None = 0.0
    min_tokens: int | None = 0
    priority: int | None = 0
    session_id: str | None = ""
    response_format: dict[str, Any] | None = msgspec.field(default_factory=lambda: {"type": "text"})
    tools: list[Any] | None = msgspec.field(default_factory=list)
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    prompt_embeds: Any = None
    lora_path: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    allowed_token_ids: list[int] | None = msgspec.field(default_factory=list)
    bad_words: list[str] | None = msgspec.field(default_factory=list)
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = True
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    no_stop_trim: bool | None = False
    stop_regex: str | list[str] | None = ""
    min_new_tokens: int | None = 0
    extra_key: str | list[str] | None = ""
    structural_tag: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    session_params: Any = None
    vllm_xargs: Any = None
    ec_transfer_params: Any = None
    thinking_token_budget: int | None = None
    truncation_side: Any = None
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
    return_cached_tokens_details: bool | None = False


class StreamOptions(msgspec.Struct):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CompletionRequest(Unbuilt, kw_only=True):
    """The body of ``POST /v1/completions``; unknown fields are ignored."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool | None = False
    return_token_ids: bool | None = False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


_completion_request = msgspec.json.Decoder(CompletionRequest)
_fields = msgspec.json.Decoder(
    msgspec.defstruct(
        "_Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in CompletionRequest.__struct_fields__]
    )
)
_NEUTRAL = msgspec.structs.asdict(Unbuilt())


def parse_completion(body: bytes, max_prompt_tokens: int) -> CompletionRequest:
    """The request in a body. O(length), and at once: tens of milliseconds for megabytes.

    Raises:
        InvalidRequest: its text never holds a part of the body.
    """
    try:
        fields = {name: bytes(raw) for name, raw in msgspec.structs.asdict(_fields.decode(body)).items()}
        _check_size(fields, max_prompt_tokens)
        # What was skipped, such as all but the last of a repeated field, is not decoded.
        found = (b'"' + name.encode() + b'":' + raw for name, raw in fields.items() if raw)
        request = _completion_request.decode(b"{" + b",".join(found) + b"}")
    except msgspec.ValidationError as error:
        text = str(error)
        field = _AT_FIELD.search(text) or _MISSING_FIELD.search(text)
        raise InvalidRequest(text, param=field.group(1) if field else None) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Their texts tell byte positions at best, and a wrong cause for half of a surrogate pair.
        raise InvalidRequest("the body is not valid JSON in UTF-8") from None
    _refuse_unbuilt(request)
    return request


def _check_size(fields: dict[str, bytes], max_prompt_tokens: int) -> None:
    """Refuses what would take long to decode and could not be served."""
    for name, raw in fields.items():
        if name == "prompt":
            _check_prompt(raw, max_prompt_tokens)
        elif len(raw) > MAX_FIELD_BYTES and name in _NEUTRAL:
            raise _unsupported(name, None)
        elif len(raw) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{name} has {len(raw)} bytes of JSON; at most {MAX_FIELD_BYTES}", param=name)


def _check_prompt(raw: bytes, max_prompt_tokens: int) -> None:
    """Refuses too many prompts or ids by counting brackets, quotes and commas."""
    opening = _OPENING.match(raw)
    if opening is None:
        return
    if opening[1] == b'"':
        # Where a string ends with a backslash this counts too few.
        check_prompt_count((raw.count(b'"') - raw.count(b'\\"')) // 2)
        return
    n_lists = raw.count(b"[") - 1
    if b'"' in raw or (n_lists and opening[1] != b"["):
        raise mixed_prompt()
    check_prompt_count(n_lists)
    for ids in raw.split(b"]"):
        n_ids = ids.strip(b"[, \t\r\n").count(b",") + 1
        if n_ids > max_prompt_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {n_ids} tokens, but the context holds {max_prompt_tokens}; shorten it",
                param="prompt",
            )


def mixed_prompt() -> InvalidRequest:
    """The error of a prompt that is of several kinds."""
    return InvalidRequest(
        "prompt mixes strings, token ids and lists; give a string, strings, token ids or lists of them",
        param="prompt",
    )


def check_prompt_count(count: int) -> None:
    """Raises ``InvalidRequest`` for too many prompts."""
    if count > MAX_PROMPTS:
        raise InvalidRequest(f"{count} prompts; at most {MAX_PROMPTS} a request", param="prompt")


def _unsupported(name: str, value: object) -> UnsupportedFeature:
    # Numbers only: whatever else a client sends is not repeated to it.
    shown = f" {shortened(value)}" if isinstance(value, int | float) else ""
    return UnsupportedFeature(f"{name}{shown} is not supported in this release; leave it out", param=name)


def _refuse_unbuilt(request: CompletionRequest) -> None:
    values = msgspec.structs.asdict(request)
    for name, neutral in _NEUTRAL.items():
        value = values[name]
        # False equals 0, but `logprobs: 0` asks for something.
        if value is not None and (type(value) is not type(neutral) or value != neutral):
            raise _unsupported(name, value)
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options is for stream: true only", param="stream_options")
    if options is not None and options.continuous_usage_stats:
        raise UnsupportedFeature(
            "stream_options.continuous_usage_stats is not supported in this release; leave it out",
            param="stream_options",
        )
