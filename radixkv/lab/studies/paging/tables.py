"""The printed tables of the study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from radixkv.lab.bench.formatting import plural
from radixkv.lab.studies.paging.schemes import RADIX, RESERVE_MAXIMUM, Granule
from radixkv.lab.studies.paging.study import ResultLine

Columns = Sequence[str]
Rows = list[list[str]]


class Target(NamedTuple):
    """A claim of the paging literature, compared with the result of one workload."""

    text: str
    """The claim."""
    value: float
    """The measured value."""
    is_met: bool
    """Whether the value meets the claim."""


SCHEME_COLUMNS = (
    *("scheme", "MUR %", "used", "reserved", "internal", "external", "free", "cached", "FI %", "DR %"),
    *("tokens/slot", "MBS", "TaS", "retracted"),
)
SCHEME_LEGEND = """\
While requests wait. MUR, memory utilisation rate: % of the allocated slots that hold KV. The next
six columns are % of the pool and add up to 100. FI, fragmentation index: internal and external.
DR, duplication rate: % of the used slots that hold a copy. tokens/slot: tokens of running sequences
per used slot, which sharing increases. MBS, maximum batch size: most sequences at once. TaS,
throughput at saturation: answer tokens per step, which is the mean batch. 2 MiB/32: granules of
2 MiB in two tensors, of K and of V of all 32 layers; otherwise each layer has two of its own."""

LOST_LEGEND = "Pages: allocated slots that are empty or hold a copy, in % of allocated slots, by page size:"

COST_COLUMNS = ("page size", "entries", "host us", "retracted", "batch")
COST_LEGEND = """\
All workloads together: block-table entries per 1,000 tokens, processor time of scheduler, cache and
tree per answer token, retractions, and the sum of the mean batches."""


def scheme_heading(lines: Sequence[ResultLine]) -> str:
    """Returns the heading above the table of one workload."""
    line = lines[-1]
    left_out = f", {line['left_out']:,} too long" if line["left_out"] else ""
    return (
        f"{line['workload']}: {plural(line['sequences'], 'sequence')}{left_out}; {line['lengths']}; "
        f"pool of {line['pool_tokens']:,} tokens, at most {line['max_model_len']:,} a sequence"
    )


def scheme_label(line: ResultLine) -> str:
    """Returns the name of a scheme with the size of its pages or granules."""
    if n_bytes := line["granule_bytes"]:
        return f"{line['scheme']}, {Granule(n_bytes, line['layers_in_a_tensor']).name}"
    return f"{line['scheme']}, {line['page_size']}" if line["page_size"] else str(line["scheme"])


def scheme_table(lines: Sequence[ResultLine]) -> tuple[Columns, Rows]:
    """Returns the table of all schemes on one workload."""
    shares = ("utilisation", "occupied", "reserved", "internal", "external", "free", "cached")
    return SCHEME_COLUMNS, [
        [
            scheme_label(line),
            *(f"{line[f'{share}_pct']:.1f}" for share in (*shares, "fragmentation", "duplicate")),
            f"{line['tokens_per_slot']:.2f}",
            str(line["largest_batch"]),
            f"{line['mean_batch']:.1f}",
            str(line["retractions"]),
        ]
        for line in lines
    ]


def targets(lines: Sequence[ResultLine]) -> list[Target]:
    """Compares the results of ``radix`` on one workload with the claims of the literature; none without it.

    The claim about batches needs the line of ``reserve-maximum`` too.
    """
    by_scheme = {line["scheme"]: line for line in lines}
    radix, reserving = by_scheme.get(RADIX), by_scheme.get(RESERVE_MAXIMUM)
    if radix is None:
        return []
    reached = [
        _target("MUR: utilisation (%)", radix["utilisation_pct"], ">", 95),
        _target("FI: fragmentation, internal and external (%)", radix["fragmentation_pct"], "<", 5),
        _target("DR: copies (%)", radix["duplicate_pct"], "<", 3),
    ]
    if reserving is not None:
        ratio = radix["largest_batch"] / reserving["largest_batch"]
        reached.append(_target("MBS: largest batch / that of reserve-maximum", ratio, ">", 4))
    return reached


def target_lines(reached: Sequence[Target]) -> list[str]:
    """Returns one printed line per target."""
    return [f"  {target.text}: {target.value:.2f}, {'met' if target.is_met else 'NOT met'}" for target in reached]


def lost_table(lines: Sequence[ResultLine]) -> tuple[Columns, Rows]:
    """Returns the table of the share of lost slots by page size and workload."""
    return _crossed("page size", "workload", lines, lambda line: f"{line['lost_pct']:.2f}")


def cost_table(lines: Sequence[ResultLine]) -> tuple[Columns, Rows]:
    """Returns the costs of pages over all workloads, for each page size that has results of every workload."""
    return COST_COLUMNS, [
        [
            str(size),
            f"{sum(line['entries_per_1000_tokens'] for line in size_lines) / len(size_lines):.1f}",
            f"{host_us(size_lines):.2f}",
            str(sum(line["retractions"] for line in size_lines)),
            f"{sum(line['mean_batch'] for line in size_lines):.0f}",
        ]
        for size, size_lines in complete_page_sizes(lines)
    ]


def host_us(size_lines: Sequence[ResultLine]) -> float:
    """Returns the host time per answer token in microseconds, averaged over workloads."""
    return float(sum(line["host_us_per_token"] for line in size_lines) / len(size_lines))


def complete_page_sizes(lines: Sequence[ResultLine]) -> list[tuple[int, list[ResultLine]]]:
    """Returns the lines of each page size that has results of every workload, ascending.

    Averages over fewer workloads would not be comparable.
    """
    n_workloads = len({line["workload"] for line in lines})
    sizes = sorted({line["page_size"] for line in lines})
    groups = [(size, [line for line in lines if line["page_size"] == size]) for size in sizes]
    return [(size, size_lines) for size, size_lines in groups if len(size_lines) == n_workloads]


def page_size_remarks(
    lines: Sequence[ResultLine], workloads: Sequence[str], page_sizes: Sequence[int]
) -> list[str]:
    """Returns remarks on missing results and on the page size with the least waste, claimed to be near 16."""
    known = {(line["workload"], line["page_size"]) for line in lines}
    remarks = []
    for name in workloads:
        missing = [str(size) for size in page_sizes if (name, size) not in known]
        if missing:
            sizes = "size" if len(missing) == 1 else "sizes"
            remarks.append(f"no results of {name} at page {sizes} {', '.join(missing)}: memory never ran out")
    return [*remarks, *_best_page_size(lines)]


CURVE_LEGEND = """\
Answer tokens per second by batch size, up to where the memory of a scheme ends. The layout is paged
in all of them: reservation only limits how many sequences run."""

SATURATION_COLUMNS = (
    *("scheme", "length", "memory ends", "TaS", "at batch", "/ reserve-max", "KOR %", "scheduling/attn %"),
    "retracted",
)
PCTS_OF_ATTENTION = ("cache_pct_of_attention", "management_pct_of_attention")
SATURATION_LEGEND = """\
TaS, throughput at saturation: the best answer tokens per second of a scheme. KOR, kernel overhead
ratio: time of page cache and tree in % of attention. scheduling/attn: the same of all work of the
scheduler. Both need the time of attention, which is measured on the CPU only."""


def curve_table(lines: Sequence[ResultLine]) -> tuple[Columns, Rows]:
    """Returns the table of throughput by batch size and scheme at one length."""
    (_, *names), rows = _crossed("batch size", "scheme", lines, lambda line: f"{line['output_throughput']:.0f}")
    return ["batch", *names], rows


def saturation_lines(lines: Sequence[ResultLine]) -> list[ResultLine]:
    """Returns the line with the best throughput of each scheme at each length."""
    best: dict[tuple[int, str], ResultLine] = {}
    for line in lines:
        key = line["length"], line["scheme"]
        if key not in best or line["output_throughput"] > best[key]["output_throughput"]:
            best[key] = line
    return [best[key] for key in sorted(best, key=lambda key: key[0])]


def saturation_table(best: Sequence[ResultLine]) -> tuple[Columns, Rows]:
    """Returns the table of ``saturation_lines``, each compared with ``reserve-maximum`` at its length."""
    ratios = [_throughput_ratio(line, best) for line in best]
    return SATURATION_COLUMNS, [
        [
            line["scheme"],
            str(line["length"]),
            "-" if line["memory_ends_at"] is None else str(line["memory_ends_at"]),
            f"{line['output_throughput']:.0f}",
            str(line["batch_size"]),
            "-" if ratio is None else f"{ratio:.2f}",
            *("-" if line[name] is None else f"{line[name]:.2f}" for name in PCTS_OF_ATTENTION),
            str(line["retractions"]),
        ]
        for line, ratio in zip(best, ratios, strict=True)
    ]


def measured_targets(best: Sequence[ResultLine]) -> list[Target]:
    """Compares ``radix`` at each length of ``saturation_lines`` with the claims of the literature."""
    reached = []
    for line in best:
        if line["scheme"] != RADIX:
            continue
        where = f"length {line['length']}"
        if (ratio := _throughput_ratio(line, best)) is not None:
            reached.append(_target(f"{where}: TaS / that of reserve-maximum", ratio, ">", 2))
        if (kor := line["cache_pct_of_attention"]) is not None:
            reached.append(_target(f"{where}: KOR (%)", kor, "<", 5))
    return reached


def _throughput_ratio(line: ResultLine, best: Sequence[ResultLine]) -> float | None:
    for other in best:
        if (other["length"], other["scheme"]) == (line["length"], RESERVE_MAXIMUM):
            return float(line["output_throughput"] / other["output_throughput"])
    return None


def _best_page_size(lines: Sequence[ResultLine]) -> list[str]:
    groups = complete_page_sizes(lines)
    if len(groups) < 2:
        return []
    losses = {size: sum(line["lost_pct"] for line in size_lines) / len(size_lines) for size, size_lines in groups}
    costs = {size: host_us(size_lines) for size, size_lines in groups}
    least_lost, cheapest = min(losses, key=losses.__getitem__), min(costs, key=costs.__getitem__)
    where = "the same page size" if cheapest == least_lost else f"page size {cheapest}"
    comparison = (
        ""
        if cheapest == least_lost
        else f", {costs[least_lost] / costs[cheapest]:.1f} times as much at {least_lost}"
    )
    return [
        f"fewest slots are lost at page size {least_lost} ({losses[least_lost]:.2f}% on average over workloads); "
        f"host time is lowest at {where} ({costs[cheapest]:.2f} us per token{comparison})"
    ]


def _crossed(
    row: str, column: str, lines: Sequence[ResultLine], cell: Callable[[ResultLine], str]
) -> tuple[Columns, Rows]:
    """Returns the table of the lines' cells by the fields ``row`` and ``column``; ``-`` where there is no line."""
    field = row.replace(" ", "_")
    names = dict.fromkeys(line[column] for line in lines)
    known = {(line[field], line[column]): cell(line) for line in lines}
    sizes = sorted({line[field] for line in lines})
    return [row, *names], [[str(size), *(known.get((size, name), "-") for name in names)] for size in sizes]


def _target(text: str, value: float, sign: Literal["<", ">"], limit: float) -> Target:
    return Target(f"{text} {sign} {limit:g}", value, value > limit if sign == ">" else value < limit)
