"""Fields that the bodies of several APIs share."""

from __future__ import annotations

from typing import Literal

import msgspec

from radixkv.frontend.http.body_decoder import Int64
from radixkv.wire.request_limits import parse_ttl

DEFAULT_TTL = "30m"
"""OpenAI's default of ``prompt_cache_options.ttl``."""


class PromptCacheOptions(msgspec.Struct):
    """OpenAI's ``prompt_cache_options``. Raises ``InvalidRequest`` for a ``ttl`` that is no time."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None
    prewarm: bool | None = None

    def __post_init__(self) -> None:
        parse_ttl(self.ttl_or_default, "prompt_cache_options")

    @property
    def ttl_or_default(self) -> str:
        """``ttl``, or OpenAI's default."""
        return DEFAULT_TTL if self.ttl is None else self.ttl

    @property
    def ttl_s(self) -> float:
        """``ttl`` or its default, in seconds."""
        return parse_ttl(self.ttl_or_default, "prompt_cache_options")

    @property
    def pin_s(self) -> float | None:
        """How long the whole prompt is pinned, in seconds; None if only its breakpoints are.

        A comparison alone asks for no pin: it changes nothing in the cache.
        """
        is_only_comparison = self.comparison_response_id is not None and not (self.mode or self.ttl or self.prewarm)
        return None if self.mode == "explicit" or is_only_comparison else self.ttl_s


class SharedSampling(msgspec.Struct, kw_only=True):
    """Fields about sampling that OpenAI's bodies and SGLang's ``sampling_params`` have. Null means the default."""

    n: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    kv_budget: Int64 | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
