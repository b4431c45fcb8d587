"""The counters of a server that a run reads from its ``/metrics``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

COUNTER_NAMES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "radixkv": ("prompt_tokens", "generation_tokens", ("prefix_cache_hits",)),
    "vllm": ("prompt_tokens", "generation_tokens", ("prefix_cache_hits", "gpu_prefix_cache_hits")),
    "sglang": ("prompt_tokens", "generation_tokens", ("cached_tokens",)),
}
"""Names of each engine's counters of prompt tokens, generated tokens and cached prompt tokens.

Cached prompt tokens have one name for each name that the engine's versions have given them.
"""
_DRAFTS = "spec_decode_num"
"""How the names of counters of drafts begin, in vLLM and here."""


class TokenCounts(msgspec.Struct, frozen=True):
    """Numbers of tokens; None: not known."""

    prompt: int | None
    generated: int | None
    cached: int | None

    def __sub__(self, earlier: TokenCounts) -> TokenCounts:
        """Returns the increase since ``earlier``."""
        return TokenCounts(*map(_increase, msgspec.structs.astuple(self), msgspec.structs.astuple(earlier)))


class DraftTokenCounts(msgspec.Struct, frozen=True):
    """What became of the guesses of speculative decoding."""

    draft_tokens: int
    accepted_tokens: int
    steps_without_overlap: int | None = None
    """Steps in which the host did not work beside the device; None: not known."""
    by_source: dict[str, tuple[int, int]] = {}
    """Drafted and accepted tokens by what guessed them; empty if it is not known, or nothing was guessed."""

    def __sub__(self, earlier: DraftTokenCounts) -> DraftTokenCounts:
        """Returns the increase since ``earlier``."""
        by_source: dict[str, tuple[int, int]] = {}
        for source, (n_drafted, n_accepted) in self.by_source.items():
            before = earlier.by_source.get(source, (0, 0))
            if n_drafted > before[0]:
                by_source[source] = (n_drafted - before[0], n_accepted - before[1])
        return DraftTokenCounts(
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            _increase(self.steps_without_overlap, earlier.steps_without_overlap),
            by_source,
        )


class ServerCounts(msgspec.Struct, frozen=True):
    """The counters of a server."""

    tokens: TokenCounts
    drafts: DraftTokenCounts | None
    """None: the server does no speculative decoding, or has no counters of it."""

    def __sub__(self, earlier: ServerCounts) -> ServerCounts:
        """Returns the increase since ``earlier``."""
        drafts = None if self.drafts is None or earlier.drafts is None else self.drafts - earlier.drafts
        return ServerCounts(self.tokens - earlier.tokens, drafts)


def server_counts(text: str) -> ServerCounts | None:
    """Returns the counters of radixkv, vLLM or SGLang from ``/metrics``, summed over labels.

    None: there are no counters of these engines.

    Args:
        text: the metrics in Prometheus' format.
    """
    try:
        families = {family.name: family for family in text_string_to_metric_families(text)}
    except ValueError:
        return None
    counts: dict[str, int] = {}
    for name, family in families.items():
        samples = _samples(family)
        if family.type == "counter" and math.isfinite(total := sum(sample.value for sample in samples)):
            counts[name] = round(total)
    for engine, (prompt, generated, cached) in COUNTER_NAMES.items():
        if f"{engine}:{prompt}" in counts:
            hits = (counts.get(f"{engine}:{name}") for name in cached)
            tokens = TokenCounts(
                counts[f"{engine}:{prompt}"],
                counts.get(f"{engine}:{generated}"),
                next((count for count in hits if count is not None), None),
            )
            return ServerCounts(tokens, _draft_counts(f"{engine}:{_DRAFTS}", counts, families))
    return None


def _draft_counts(prefix: str, counts: Mapping[str, int], families: Mapping[str, Any]) -> DraftTokenCounts | None:
    n_drafted = counts.get(f"{prefix}_draft_tokens")
    n_accepted = counts.get(f"{prefix}_accepted_tokens")
    if n_drafted is None or n_accepted is None:
        return None
    drafted, accepted = (
        {sample.labels["source"]: round(sample.value) for sample in _samples(families.get(f"{prefix}_{name}"))}
        for name in ("draft_tokens_by_source", "accepted_tokens_by_source")
    )
    by_source = {source: (n_tokens, accepted.get(source, 0)) for source, n_tokens in drafted.items()}
    return DraftTokenCounts(n_drafted, n_accepted, counts.get(f"{prefix}_steps_without_overlap"), by_source)


def _samples(family: Any) -> list[Any]:
    """Returns the values of a family of metrics, without the times of their creation; none of no family."""
    samples = () if family is None else family.samples
    return [sample for sample in samples if not sample.name.endswith("_created")]


def _increase(now: int | None, then: int | None) -> int | None:
    return None if now is None or then is None else now - then
