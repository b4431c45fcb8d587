"""The names of the settings that ``LLM`` and its calls take, and those of other engines for them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from radixkv.errors import ConfigError
from radixkv.settings.compat import Place, SettingNames
from radixkv.settings.server_config import ServerConfig
from radixkv.settings.setting import settings_of
from radixkv.wire.sampling import BeamSearchParams, SamplingParams

Size = Any
"""A number, or a text that ``EngineConfig.of`` turns into one, as of a flag: ``4k``, ``80GiB``."""

_SAMPLING_HINTS = {name: f"SamplingParams({name}=...)" for name in SamplingParams.__struct_fields__}
"""Hints for sampling settings that are passed to ``generate`` or ``chat`` by mistake."""
_BEAM_SEARCH_HINTS = {field.name: f"BeamSearchParams({field.name}=...)" for field in fields(BeamSearchParams)}
_SERVER_FLAGS = [
    *(one.flag for one in settings_of(ServerConfig).values()),
    *"api_key_file disable_log_requests enable_metrics enable_cache_report enable_prompt_tokens_details".split(),
]
"""Flags of ``radixkv serve`` that mean nothing without a server."""
_SERVER_HINTS = {name: f"radixkv serve --{name.replace('_', '-')}" for name in _SERVER_FLAGS}
LLM_NAMES = SettingNames(
    Place.LLM, "LLM", ConfigError, hints=_SERVER_HINTS, typo_cutoff=0.8
)  # other engines have more than the table lists
GENERATE_NAMES = SettingNames(Place.LLM_GENERATE, "LLM.generate", ConfigError, hints=_SAMPLING_HINTS)
BEAM_SEARCH_NAMES = SettingNames(Place.LLM_GENERATE, "LLM.beam_search", ConfigError, hints=_BEAM_SEARCH_HINTS)
CHAT_NAMES = SettingNames(Place.LLM_CHAT, "LLM.chat", ConfigError, hints=_SAMPLING_HINTS)
