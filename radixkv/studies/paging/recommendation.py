"""The scheme that suits each workload, by the results of the study."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.studies.paging.schemes import NEEDS_ORACLE, RESERVE_MAXIMUM, SHARES_PAGES
from radixkv.studies.paging.study import ResultLine
from radixkv.studies.paging.tables import scheme_label

SIMPLEST_FIRST = (RESERVE_MAXIMUM, "reserve-factor", "resize", *SHARES_PAGES, "vattention", "vattention-shared")
"""Schemes that an engine can have, in the order of what they need: nothing, a mean, copies, block tables, a tree, and
a driver that maps granules."""
MAX_DIFFERENCE = 0.02
"""How much less than the best throughput a simpler scheme may have, as a fraction: such differences mean nothing."""

RECOMMENDATION_LEGEND = """\
Recommended, of the schemes that know no length in advance: the simplest of those within 2% of the best throughput (TaS)."""


def recommend(lines: Sequence[ResultLine]) -> str | None:
    """Returns the recommended scheme for a workload with the reason; None if no scheme that an engine can have ran.

    Args:
        lines: the results of all schemes on one workload.
    """
    candidates = [line for line in lines if line["scheme"] not in NEEDS_ORACLE]
    if not candidates:
        return None
    throughput = max(line["mean_batch"] for line in candidates)
    good = [line for line in candidates if line["mean_batch"] >= (1 - MAX_DIFFERENCE) * throughput]
    chosen = min(good, key=lambda line: (SIMPLEST_FIRST.index(line["scheme"]), -line["mean_batch"]))
    sentences = [
        f"{scheme_label(chosen)}. It runs {chosen['mean_batch']:.0f} sequences at once{_ratio(chosen, lines)}, because "
        f"{_cause(chosen)}."
    ]
    equal = [scheme_label(line) for line in good if line is not chosen]
    if equal:
        sentences.append(f"{' and '.join(equal)} need more and bring no more here.")
    if others := [line for line in candidates if line not in good]:
        second = max(others, key=lambda line: line["mean_batch"])
        sentences.append(f"Next: {scheme_label(second)}, {second['mean_batch']:.0f}.")
    return " ".join(sentences)


def _ratio(chosen: ResultLine, lines: Sequence[ResultLine]) -> str:
    for line in lines:
        if line["scheme"] == RESERVE_MAXIMUM and line is not chosen:
            return f", {chosen['mean_batch'] / line['mean_batch']:.1f} times as many as {RESERVE_MAXIMUM}"
    return ""


def _cause(chosen: ResultLine) -> str:
    filled = f"{chosen['utilisation_pct']:.0f}% of what it allocates holds KV"
    if chosen["tokens_per_slot"] >= 1 + MAX_DIFFERENCE:
        return f"a slot serves {chosen['tokens_per_slot']:.1f} tokens and {filled}"
    return filled
