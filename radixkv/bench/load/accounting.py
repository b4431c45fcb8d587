"""Tokens counted three times: by the client, in the answers' usage, and by the server's metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from radixkv.bench.load.record import Record

NAMES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "radixkv": ("prompt_tokens", "generation_tokens", ("prefix_cache_hits",)),
    "vllm": ("prompt_tokens", "generation_tokens", ("prefix_cache_hits", "gpu_prefix_cache_hits")),
    "sglang": ("prompt_tokens", "generation_tokens", ("cached_tokens",)),
}
"""Engine: its counters of prompt tokens, generated tokens, and prompt tokens that were cached, by their names since
that engine has them."""


class Tokens(msgspec.Struct, frozen=True):
    """Counts; None for what is not known."""

    prompt: int | None
    generated: int | None
    cached: int | None

    def __sub__(self, earlier: Tokens) -> Tokens:
        """What was added since."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(earlier), strict=True)
        return Tokens(*(None if None in (now, then) else now - then for now, then in pairs))


def counted_by_metrics(text: str) -> Tokens | None:
    """What ``/metrics`` says under this engine's names, vLLM's or SGLang's, summed over labels.

    None: it has none of those.

    Args:
        text: in Prometheus' format.
    """
    try:
        found = {family.name: family for family in text_string_to_metric_families(text)}
    except ValueError:
        return None
    totals = {
        name: sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))
        for name, family in found.items()
        if family.type == "counter"
    }
    counts = {name: round(total) for name, total in totals.items() if math.isfinite(total)}
    for engine, (prompt, generated, cached) in NAMES.items():
        if f"{engine}:{prompt}" in counts:
            hits = (counts.get(f"{engine}:{name}") for name in cached)
            return Tokens(
                counts[f"{engine}:{prompt}"],
                counts.get(f"{engine}:{generated}"),
                next((count for count in hits if count is not None), None),
            )
    return None


def counted_by_usage(records: Iterable[Record]) -> Tokens:
    """What the answers say of themselves."""
    good = [record for record in records if record.error is None]
    return Tokens(
        sum(record.n_prompt_tokens for record in good),
        sum(record.n_output_tokens for record in good),
        _sum(record.n_cached_tokens for record in good),
    )


def counted_by_client(records: Iterable[Record]) -> Tokens:
    """The token ids that came; a client cannot see what was cached."""
    good = [record for record in records if record.error is None]
    return Tokens(
        _sum(None if record.prompt_token_ids is None else len(record.prompt_token_ids) for record in good),
        _sum(None if record.token_ids is None else sum(map(len, record.token_ids)) for record in good),
        None,
    )


def accounting(records: Sequence[Record], metrics: Tokens | None) -> dict[str, Any]:
    """The three counts, and whether they agree where they are known; None: requests failed, which each counts its
    own way.

    Args:
        metrics: what they counted from the run's beginning to its end.
    """
    counts = {"client": counted_by_client(records), "usage": counted_by_usage(records), "metrics": metrics}
    known = [msgspec.structs.astuple(tokens) for tokens in counts.values() if tokens is not None]
    agree = all(len({count for count in column if count is not None}) <= 1 for column in zip(*known, strict=True))
    is_whole = all(record.error is None for record in records)
    told = {who: None if tokens is None else msgspec.structs.asdict(tokens) for who, tokens in counts.items()}
    return {**told, "agree": agree if is_whole else None}


def _sum(counts: Iterable[int | None]) -> int | None:
    """None if one is not known."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total
