"""Comparison of a run's token counts by the client, the answers' ``usage`` and the server's ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from radixkv.lab.bench.load.record import Record
from radixkv.lab.bench.load.server_counters import TokenCounts


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
