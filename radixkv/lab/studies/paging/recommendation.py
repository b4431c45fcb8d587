"""The scheme that suits each workload, by the results of the study."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.lab.studies.paging.schemes import PAGED, RADIX, RESERVE_MAXIMUM, WITH_GRANULES
from radixkv.lab.studies.paging.study import ResultLine
from radixkv.lab.studies.paging.tables import scheme_label

SIMPLEST_FIRST = (RESERVE_MAXIMUM, "reserve-factor", "resize", PAGED, RADIX, *WITH_GRANULES)
"""Schemes that know no length in advance, in the order of what they need: nothing, an average length, copies, block
tables, a tree, and a driver that maps granules."""
MAX_DIFFERENCE = 0.02
"""How much less than the best throughput a simpler scheme may have, as a fraction."""

RECOMMENDATION_LEGEND = """\
Recommended: of the schemes that know no length in advance, the simplest with at least 98% of the
best TaS."""


def recommend(lines: Sequence[ResultLine]) -> list[tuple[str, str]]:
    """Returns each workload with its recommended scheme and the reason.

    Args:
        lines: the results of ``compare_schemes``. Workloads that no possible scheme ran are left out.
    """
    names = dict.fromkeys(line["workload"] for line in lines if line["scheme"] in SIMPLEST_FIRST)
    return [(name, _recommendation([line for line in lines if line["workload"] == name])) for name in names]


def _recommendation(lines: Sequence[ResultLine]) -> str:
    candidates = [line for line in lines if line["scheme"] in SIMPLEST_FIRST]
    best = max(line["mean_batch"] for line in candidates)
    good = [line for line in candidates if line["mean_batch"] >= (1 - MAX_DIFFERENCE) * best]
    chosen = min(good, key=lambda line: (SIMPLEST_FIRST.index(line["scheme"]), -line["mean_batch"]))
    text = f"{scheme_label(chosen)}, with {chosen['mean_batch']:.0f} sequences at once"
    for line in lines:
        if line["scheme"] == RESERVE_MAXIMUM and line is not chosen:
            text += f", {chosen['mean_batch'] / line['mean_batch']:.1f} times {RESERVE_MAXIMUM}"
    text += f": {_cause(chosen)}"
    if equal := [scheme_label(line) for line in good if line is not chosen]:
        text += f". As good, but less simple: {' and '.join(equal)}"
    if others := [line for line in candidates if line not in good]:
        second = max(others, key=lambda line: line["mean_batch"])
        text += f". Next: {scheme_label(second)}, {second['mean_batch']:.0f}"
    return text


def _cause(chosen: ResultLine) -> str:
    filled = f"{chosen['utilisation_pct']:.0f}% of what it allocates holds KV"
    if chosen["tokens_per_slot"] >= 1 + MAX_DIFFERENCE:
        if chosen["scheme"] == PAGED:
            return f"choices share their prompts without a tree, and {filled}"
        return f"a slot serves {chosen['tokens_per_slot']:.1f} tokens, and {filled}"
    return f"{filled}, and too little is shared for a tree to pay"
