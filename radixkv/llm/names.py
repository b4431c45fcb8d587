"""The names of the settings that ``LLM`` and its calls take, and those of other engines for them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from radixkv.errors import ConfigError
from radixkv.settings.compat import Place, SettingNames
from radixkv.wire.sampling import BeamSearchParams, SamplingParams

NameT = TypeVar("NameT", str, str | None)
Size = Any
"""A number, or a text that ``SettingNames`` turns into one, as of a flag: ``4k``, ``80GiB``."""

_SAMPLING_HINTS = {name: f"SamplingParams({name}=...)" for name in SamplingParams.__struct_fields__}
"""Hints for sampling settings that are passed to ``generate`` or ``chat`` by mistake."""
_BEAM_SEARCH_HINTS = {field.name: f"BeamSearchParams({field.name}=...)" for field in fields(BeamSearchParams)}
_SERVER_SETTINGS = (
    "host port served_model_name api_key api_key_file tenants allowed_origins explain_contents keep_nonces "
    "priority_range metrics_compat stats_interval request_log disable_log_requests otlp_traces_endpoint "
    "heartbeat_timeout restart_runtime canary_interval max_body_bytes enable_metrics enable_cache_report "
    "enable_prompt_tokens_details return_tokens_as_token_ids"
)
"""Flags of ``radixkv serve`` that mean nothing without a server."""
_SERVER_HINTS = {name: f"radixkv serve --{name.replace('_', '-')}" for name in _SERVER_SETTINGS.split()}
LLM_NAMES = SettingNames(
    Place.LLM, "LLM", ConfigError, hints=_SERVER_HINTS, typo_cutoff=0.8
)  # other engines have more than the table lists
GENERATE_NAMES = SettingNames(Place.LLM_GENERATE, "LLM.generate", ConfigError, hints=_SAMPLING_HINTS)
BEAM_SEARCH_NAMES = SettingNames(Place.LLM_GENERATE, "LLM.beam_search", ConfigError, hints=_BEAM_SEARCH_HINTS)
CHAT_NAMES = SettingNames(Place.LLM_CHAT, "LLM.chat", ConfigError, hints=_SAMPLING_HINTS)


def as_name(name: NameT | Path) -> NameT | str:
    """Returns a folder as a string, which the configuration takes."""
    return str(name) if isinstance(name, Path) else name
