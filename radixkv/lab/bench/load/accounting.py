"""Comparison of a run's token counts by the client, the answers' ``usage`` and the server's ``/metrics``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from radixkv.lab.bench.load.record import Record

COUNTER_NAMES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "radixkv": ("prompt_tokens", "generation_tokens", ("prefix_cache_hits",)),
    "vllm": ("prompt_tokens", "generation_tokens", ("prefix_cache_hits", "gpu_prefix_cache_hits")),
    "sglang": ("prompt_tokens", "generation_tokens", ("cached_tokens",)),
}
"""Names of each engine's counters of prompt tokens, generated tokens and cached prompt tokens.

Cached prompt tokens have one name for each name that the engine's versions have given them.
"""


class TokenCounts(msgspec.Struct, frozen=True):
    """Numbers of tokens; None: not known."""

    prompt: int | None
    generated: int | None
    cached: int | None

    def __sub__(self, earlier: TokenCounts) -> TokenCounts:
        """Returns the increase since ``earlier``."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(earlier), strict=True)
        return TokenCounts(*(None if None in (now, then) else now - then for now, then in pairs))


def server_token_counts(text: str) -> TokenCounts | None:
    """Returns the counters of radixkv, vLLM or SGLang from ``/metrics``, summed over labels.

    None: there are no counters of these engines.

    Args:
        text: the metrics in Prometheus' format.
    """
    try:
        families = {family.name: family for family in text_string_to_metric_families(text)}
    except ValueError:
        return None
    totals = {
        name: sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))
        for name, family in families.items()
        if family.type == "counter"
    }
    counts = {name: round(total) for name, total in totals.items() if math.isfinite(total)}
    for engine, (prompt, generated, cached) in COUNTER_NAMES.items():
        if f"{engine}:{prompt}" in counts:
            hits = (counts.get(f"{engine}:{name}") for name in cached)
            return TokenCounts(
                counts[f"{engine}:{prompt}"],
                counts.get(f"{engine}:{generated}"),
                next((count for count in hits if count is not None), None),
            )
    return None


def accounting(records: Sequence[Record], metrics: TokenCounts | None) -> dict[str, Any]:
    """Returns the three counts of the requests that succeeded, and whether the known ones ``agree``.

    ``agree`` is None if a request failed: client and servers count failed requests differently.

    Args:
        records: all requests of the run.
        metrics: the increase of the server's counters during the run. None: not known.
    """
    good = [record for record in records if record.error is None]
    received = TokenCounts(
        _sum(None if record.prompt_token_ids is None else len(record.prompt_token_ids) for record in good),
        _sum(None if record.token_ids is None else sum(map(len, record.token_ids)) for record in good),
        None,  # the client cannot see which tokens were cached
    )
    usage = TokenCounts(
        sum(record.n_prompt_tokens for record in good),
        sum(record.n_output_tokens for record in good),
        _sum(record.n_cached_tokens for record in good),
    )
    counts = {"client": received, "usage": usage, "metrics": metrics}
    known = [msgspec.structs.astuple(tokens) for tokens in counts.values() if tokens is not None]
    agree = all(len({count for count in column if count is not None}) <= 1 for column in zip(*known, strict=True))
    tables = {
        source: None if tokens is None else msgspec.structs.asdict(tokens) for source, tokens in counts.items()
    }
    return {**tables, "agree": agree if len(good) == len(records) else None}


def _sum(counts: Iterable[int | None]) -> int | None:
    """Returns the sum; None if a count is None."""
    given = list(counts)
    known = [count for count in given if count is not None]
    return sum(known) if len(known) == len(given) else None
