"""The study as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixkv.bench.plural import counted
from radixkv.studies.paging.study import LARGEST, PAGED, Figures

Cells = list[str]


class Target(NamedTuple):
    """What the paging literature claims, for one workload."""

    text: str
    value: float
    is_met: bool


SCHEME_COLUMNS = (
    "scheme",
    "used/had %",
    "used",
    "reserved",
    "internal",
    "external",
    "free",
    "cached",
    "copies %",
    "batch",
    "mean",
    "retracted",
)
SCHEME_LEGEND = """\
In % while requests wait: used/had is the utilisation, slots that hold KV of those that sequences have; the next six
are of the pool and add up to 100; copies are of the used. batch: most sequences at once."""

LOST_LEGEND = "Pages: of the slots that sequences have, those that are empty or hold a copy, in %, by page size:"

COST_COLUMNS = ("page size", "entries", "host us", "retracted", "batch")
COST_LEGEND = """\
All workloads together: block-table entries for 1,000 tokens, processor time of scheduler, cache and tree for a
token of an answer, retractions, and the sum of the mean batches."""


def scheme_heading(lines: Sequence[Figures]) -> str:
    """Over the lines of one workload."""
    of = lines[-1]
    left_out = f", {of['left_out']:,} too long" if of["left_out"] else ""
    return (
        f"{of['workload']}: {counted(of['sequences'], 'sequence')}{left_out}; {of['lengths']}; "
        f"pool of {of['pool_tokens']:,} tokens, at most {of['max_model_len']:,} a sequence"
    )


def scheme_cells(of: Figures) -> Cells:
    """A scheme on a workload."""
    shares = ("occupied", "reserved", "internal", "external", "free", "cached", "duplicate")
    name = f"{of['scheme']}, {of['page_size']}" if of["page_size"] else of["scheme"]
    return [
        name,
        *(f"{of[f'{share}_pct']:.1f}" for share in ("utilisation", *shares)),
        str(of["largest_batch"]),
        f"{of['mean_batch']:.1f}",
        str(of["retractions"]),
    ]


def targets(lines: Sequence[Figures]) -> list[Target]:
    """The engine's figures on one workload beside what is claimed for paging."""
    by_scheme = {of["scheme"]: of for of in lines}
    paged, reserving = by_scheme[PAGED], by_scheme[LARGEST]
    ratio = paged["largest_batch"] / reserving["largest_batch"]
    return [
        _above("utilisation (%)", paged["utilisation_pct"], 95),
        _below("fragmentation, internal and external (%)", paged["fragmentation_pct"], 5),
        _below("copies (%)", paged["duplicate_pct"], 3),
        _above("largest batch / that of reserving the maximum", ratio, 4),
    ]


def target_lines(reached: Sequence[Target]) -> list[str]:
    """One for each."""
    return [f"  {target.text}: {target.value:.2f}, {'met' if target.is_met else 'NOT met'}" for target in reached]


def lost_columns(lines: Sequence[Figures]) -> Cells:
    """Of the table by page size."""
    return ["page size", *dict.fromkeys(of["workload"] for of in lines)]


def lost_rows(lines: Sequence[Figures]) -> list[Cells]:
    """By page size: of the slots that sequences have, the share that is empty or holds a copy; - if not known."""
    names = dict.fromkeys(of["workload"] for of in lines)
    rows: list[Cells] = []
    for size, group in _by_page_size(lines):
        shown = {of["workload"]: f"{of['lost_pct']:.2f}" for of in group}
        rows.append([str(size), *(shown.get(name, "-") for name in names)])
    return rows


def cost_rows(lines: Sequence[Figures]) -> list[Cells]:
    """By page size at which no workload is missing: what pages cost, over all workloads."""
    return [
        [
            str(size),
            f"{sum(of['entries_per_1000_tokens'] for of in group) / len(group):.1f}",
            f"{host_us(group):.2f}",
            str(sum(of["retractions"] for of in group)),
            f"{sum(of['mean_batch'] for of in group):.0f}",
        ]
        for size, group in whole_sizes(lines)
    ]


def host_us(group: Sequence[Figures]) -> float:
    """Host time for a token of an answer, on average over workloads."""
    return float(sum(of["host_us_per_token"] for of in group) / len(group))


def whole_sizes(lines: Sequence[Figures]) -> list[tuple[int, list[Figures]]]:
    """Page sizes, ascending, and their lines; those at which a workload is missing compare with none."""
    n_workloads = len({of["workload"] for of in lines})
    return [(size, group) for size, group in _by_page_size(lines) if len(group) == n_workloads]


def page_size_remarks(lines: Sequence[Figures], workloads: Sequence[str], page_sizes: Sequence[int]) -> list[str]:
    """Which points are missing, and what the curve says about the claim that waste is least near 16."""
    known = {(of["workload"], of["page_size"]) for of in lines}
    remarks = []
    for name in workloads:
        missing = [str(size) for size in page_sizes if (name, size) not in known]
        if missing:
            sizes = "size" if len(missing) == 1 else "sizes"
            remarks.append(f"no figures of {name} at page {sizes} {', '.join(missing)}: memory never ran out")
    return [*remarks, *_least_lost(lines)]


def measured_columns() -> Cells:
    """Of the table of what was measured on a GPU."""
    return [
        *("scheme", "workload", "rows", "seconds", "output tok/s", "attention s"),
        *("cache s", "cache/attn %", "scheduling s", "sched/attn %"),
    ]


def measured_cells(of: Figures) -> Cells:
    """An engine on a workload."""
    return [
        of["scheme"],
        of["workload"],
        str(of["max_num_seqs"] or "default"),
        f"{of['duration']:.2f}",
        f"{of['output_throughput']:.0f}",
        f"{of['attention_seconds']:.3f}",
        f"{of['cache_seconds']:.3f}",
        f"{of['cache_pct_of_attention']:.2f}",
        f"{of['management_seconds']:.3f}",
        f"{of['management_pct_of_attention']:.2f}",
    ]


def measured_targets(paged: Figures, reserving: Figures) -> list[Target]:
    """The two runs of a workload beside what is claimed for paging."""
    ratio = paged["output_throughput"] / reserving["output_throughput"]
    return [
        _above("throughput / that of reserving the maximum", ratio, 2),
        _below("management of memory / attention (%)", paged["cache_pct_of_attention"], 5),
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned: the first column to the left, the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in (columns, *rows)
    )


def _least_lost(lines: Sequence[Figures]) -> list[str]:
    groups = whole_sizes(lines)
    if len(groups) < 2:
        return []  # there is nothing to compare
    losses = {size: sum(of["lost_pct"] for of in group) / len(group) for size, group in groups}
    costs = {size: host_us(group) for size, group in groups}
    least, cheapest = min(losses, key=losses.__getitem__), min(costs, key=costs.__getitem__)
    where = "there too" if cheapest == least else f"at {cheapest}"
    beside = "" if cheapest == least else f", at {least} {costs[least] / costs[cheapest]:.1f} times as much"
    return [
        f"least is lost at page size {least} ({losses[least]:.2f}% on average over workloads); least host time is "
        f"spent {where} ({costs[cheapest]:.2f} us a token{beside})"
    ]


def _by_page_size(lines: Sequence[Figures]) -> list[tuple[int, list[Figures]]]:
    sizes = sorted({of["page_size"] for of in lines})
    return [(size, [of for of in lines if of["page_size"] == size]) for size in sizes]


def _above(text: str, value: float, least: float) -> Target:
    return Target(f"{text} > {least:g}", value, value > least)


def _below(text: str, value: float, most: float) -> Target:
    return Target(f"{text} < {most:g}", value, value < most)
