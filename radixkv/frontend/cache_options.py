"""OpenAI's ``prompt_cache_options``: how long a prompt is pinned, and whether all of it is."""

from __future__ import annotations

from typing import Literal

import msgspec

from radixkv.wire.request_limits import parse_ttl

DEFAULT_TTL = "30m"
"""OpenAI's default of ``prompt_cache_options.ttl``."""


class PromptCacheOptions(msgspec.Struct):
    """OpenAI's ``prompt_cache_options``. Raises ``InvalidRequest`` for a ``ttl`` that is no time."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None

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
        """How long the whole prompt is pinned, in seconds; None if only its breakpoints are."""
        return None if self.mode == "explicit" else self.ttl_s
