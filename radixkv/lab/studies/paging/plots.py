"""The plots of the study, on an HTML page with its tables."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.lab.bench.environment import environment, machine
from radixkv.lab.bench.report.html_page import (
    AMBER,
    BLUE,
    COLOURS,
    GRID_COLOUR,
    MUTED_COLOUR,
    ORANGE,
    PURPLE,
    SKY,
    TEXT_COLOUR,
    Section,
    entitle,
    label_ends,
    new_figure,
    style,
    write_page,
)
from radixkv.lab.studies.paging import tables
from radixkv.lab.studies.paging.recommendation import RECOMMENDATION_LEGEND
from radixkv.lab.studies.paging.schemes import RADIX
from radixkv.lab.studies.paging.study import ResultLine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SLOT_USES = (
    ("holds KV", BLUE, "white"),
    ("holds a copy", SKY, TEXT_COLOUR),
    ("reserved, used later", AMBER, TEXT_COLOUR),
    ("internal: never used", ORANGE, "white"),
    ("external: not contiguous", PURPLE, TEXT_COLOUR),
    ("cached, evictable", "#b8dccf", TEXT_COLOUR),
    ("free", GRID_COLOUR, TEXT_COLOUR),
)
"""Parts of a bar: the use of slots, the colour of the part, and the colour of the text on it."""

MIN_LABELLED_PCT = 4.5

MEASURED_COLOURS = {
    RADIX: BLUE,
    "paged": SKY,
    "oracle": PURPLE,
    "reserve-power-of-two": AMBER,
    "reserve-maximum": ORANGE,
    "static": MUTED_COLOUR,
}
"""The curves of the measured schemes, those drawn last on top."""


def plot(
    by_scheme: Sequence[ResultLine],
    by_page_size: Sequence[ResultLine],
    remarks: Sequence[str],
    recommendations: Sequence[tuple[str, str]],
    measured: Sequence[ResultLine],
    folder: Path,
) -> None:
    """Writes the self-contained page ``index.html`` and its plots.

    The plots are ``waste.png`` and ``utilisation.png``, ``page_size.png`` if page sizes were compared, and
    ``throughput.png`` if the engine was measured.

    Args:
        by_scheme: lines of ``compare_schemes``.
        by_page_size: lines of ``compare_page_sizes``.
        remarks: remarks on page sizes, one per line.
        recommendations: workloads with the recommended scheme and the reason.
        measured: lines of ``measure``; empty if the engine was not measured.
        folder: an existing, writable folder.

    Raises:
        ConfigError: a file cannot be written, or matplotlib is not installed.
    """
    caption = _caption(by_scheme[0])
    by_workload = _by_workload(by_scheme)
    results = [
        (lines[0]["workload"], "; ".join(tables.target_lines(tables.targets(lines)))) for lines in by_workload
    ]
    sections = [
        Section("Result", f"{caption}.", rows=results),
        Section(
            "Memory usage",
            figure=_draw_slot_usage(by_scheme, caption),
            file="waste.png",
            alt_text="Contents of the pool for each workload and scheme: KV, copies, and each kind of waste.",
        ),
        Section(
            "Utilisation",
            figure=_draw_utilisation(by_scheme, caption),
            file="utilisation.png",
            alt_text="Share of allocated slots that hold KV, by scheme and workload.",
        ),
        *(
            Section(lines[0]["workload"], tables.scheme_heading(lines), *tables.scheme_table(lines))
            for lines in by_workload
        ),
        Section("What the columns mean", tables.SCHEME_LEGEND),
    ]
    if by_page_size:
        sections += [
            Section(
                "Page size",
                "\n".join(remarks),
                *tables.lost_table(by_page_size),
                figure=_draw_page_sizes(by_page_size, caption),
                file="page_size.png",
                alt_text="Slots that are empty or hold a copy, and host time per token, by page size.",
            ),
            Section("Cost of pages", tables.COST_LEGEND, *tables.cost_table(by_page_size)),
        ]
    if recommendations:
        sections.append(Section("Recommendation", RECOMMENDATION_LEGEND, rows=recommendations))
    if measured:
        best = tables.saturation_lines(measured)
        sections.append(
            Section(
                "Throughput of the engine",
                f"{tables.SATURATION_LEGEND}\n" + "; ".join(tables.target_lines(tables.measured_targets(best))),
                *tables.saturation_table(best),
                figure=_draw_throughput(measured),
                file="throughput.png",
                alt_text="Answer tokens per second by batch size, for each scheme and length.",
            )
        )
    write_page(folder / "index.html", "radixkv bench paging: memory by pages and by reservation", sections)


def _caption(line: ResultLine) -> str:
    """Returns what is the same in all charts: the sizes, the machine and the day."""
    sizes = f"pool of {line['pool_tokens']:,} tokens, at most {line['max_model_len']:,} tokens a sequence"
    today = datetime.datetime.now(datetime.UTC).date()
    return f"simulated without a model; {sizes}; {machine(environment())}; {today}"


def _draw_slot_usage(lines: Sequence[ResultLine], caption: str) -> Figure:
    workloads = _by_workload(lines)
    figure = new_figure(9.5, 1.1 + len(workloads) * (0.4 + 0.23 * len(workloads[0])))
    rows = figure.subplots(len(workloads), 1, sharex=True, squeeze=False)
    for axes, lines_of_workload in zip(rows[:, 0], workloads, strict=True):
        style(axes, title=lines_of_workload[0]["workload"])
        axes.grid(False)
        starts = [0.0] * len(lines_of_workload)
        positions = range(len(lines_of_workload))
        for index, (label, colour, text_colour) in enumerate(SLOT_USES):
            widths = [_slot_shares(line)[index] for line in lines_of_workload]
            axes.barh(positions, widths, 0.78, starts, color=colour, label=label, edgecolor="white", linewidth=0.6)
            for position, start, width in zip(positions, starts, widths, strict=True):
                if width >= MIN_LABELLED_PCT:
                    axes.text(
                        start + width / 2,
                        position,
                        f"{width:.0f}",
                        color=text_colour,
                        fontsize=8,
                        ha="center",
                        va="center",
                    )
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_yticks(positions, [tables.scheme_label(line) for line in lines_of_workload])
        axes.set_ylim(len(lines_of_workload) - 0.45, -0.55)
        axes.set_xlim(0, 100)
    rows[-1, 0].set_xlabel("token slots of the pool, while requests wait (%)", fontsize=9.5, color=MUTED_COLOUR)
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    entitle(figure, _slot_usage_title(lines), caption)
    return figure


def _slot_usage_title(lines: Sequence[ResultLine]) -> str:
    losses = [line["lost_pct"] for line in lines if line["scheme"] == RADIX]
    if not losses:
        return "Use of the pool's slots"
    workloads = "1 workload" if len(losses) == 1 else f"{len(losses)} workloads"
    return f"Pages shared by prefix lose at most {max(losses):.1f}% of the allocated slots in {workloads}"


def _slot_shares(line: ResultLine) -> list[float]:
    copies = line["occupied_pct"] * line["duplicate_pct"] / 100
    names = ("reserved_pct", "internal_pct", "external_pct", "cached_pct", "free_pct")
    return [line["occupied_pct"] - copies, copies, *(line[name] for name in names)]


def _draw_utilisation(lines: Sequence[ResultLine], caption: str) -> Figure:
    workloads = _by_workload(lines)
    values = [[line["utilisation_pct"] for line in lines_of_workload] for lines_of_workload in workloads]
    schemes = [tables.scheme_label(line) for line in workloads[0]]
    figure = new_figure(9, 1.3 + 0.4 * len(schemes))
    axes = figure.add_subplot()
    style(axes)
    axes.grid(False)
    columns = list(zip(*values, strict=True))
    axes.imshow(columns, cmap="Blues", vmin=0, vmax=140, aspect="auto")
    for row, column in enumerate(columns):
        for position, value in enumerate(column):
            text_colour = "white" if value > 85 else TEXT_COLOUR
            axes.text(position, row, f"{value:.1f}", ha="center", va="center", color=text_colour, fontsize=10)
    axes.set_xticks(range(len(workloads)), [lines_of_workload[0]["workload"] for lines_of_workload in workloads])
    axes.set_yticks(range(len(schemes)), schemes)
    axes.spines["bottom"].set_visible(False)
    entitle(figure, "Memory utilisation rate: allocated slots that hold KV or a copy (%)", caption)
    return figure


def _draw_page_sizes(lines: Sequence[ResultLine], caption: str) -> Figure:
    sizes = sorted({line["page_size"] for line in lines})
    figure = new_figure(9.5, 4.6)
    lost, cost = figure.subplots(1, 2, width_ratios=(1.7, 1))
    style(
        lost,
        title="Slots that are empty or hold a copy",
        x_title="page size (tokens)",
        y_title="share of the allocated slots (%)",
    )
    labels = []
    for colour, lines_of_workload in zip(COLOURS, _by_workload(lines), strict=False):
        losses = [line["lost_pct"] for line in lines_of_workload]
        page_sizes = [line["page_size"] for line in lines_of_workload]
        lost.plot(page_sizes, losses, color=colour, linewidth=2, marker="o", markersize=4, clip_on=False)
        labels.append((page_sizes[-1], losses[-1], lines_of_workload[0]["workload"], colour))
    style(
        cost,
        title="Host time per token",
        x_title="page size (tokens)",
        y_title="scheduler, cache and tree (microseconds)",
    )
    times = [(size, tables.host_us(size_lines)) for size, size_lines in tables.complete_page_sizes(lines)]
    cost.plot(*zip(*times, strict=True), color=TEXT_COLOUR, linewidth=2, marker="o", markersize=4, clip_on=False)
    for axes in (lost, cost):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    entitle(figure, "Slots lost and host time by page size", caption)
    label_ends(lost, labels)
    return figure


def _draw_throughput(lines: Sequence[ResultLine]) -> Figure:
    lengths = sorted({line["length"] for line in lines})
    figure = new_figure(max(5.6 * len(lengths), 9.4), 4.6)  # the title needs as much
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=True):
        style(axes, title=f"{length:,} tokens a sequence", x_title="batch size (sequences at once)")
        for index, (name, colour) in enumerate(MEASURED_COLOURS.items()):
            curve = [line for line in lines if (line["length"], line["scheme"]) == (length, name)]
            curve.sort(key=lambda line: line["batch_size"])
            if not curve:
                continue
            sizes, rates = [line["batch_size"] for line in curve], [line["output_throughput"] for line in curve]
            ends = curve[-1]["memory_ends_at"]
            label = name if ends is None else f"{name}, until {ends}"
            axes.plot(
                sizes, rates, color=colour, linewidth=2, marker="o", markersize=3.5, clip_on=False, label=label
            )
            # Schemes without sharing run at the same speed: squares, smaller on top, show where their memory ends.
            axes.plot(sizes[-1:], rates[-1:], color=colour, marker="s", markersize=14 - 2 * index, clip_on=False)
        sizes = sorted({line["batch_size"] for line in lines if line["length"] == length})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks := [size for size in sizes if size.bit_count() == 1], [str(size) for size in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=9)
    panels[0].set_ylabel("answer tokens per second", fontsize=9.5, color=MUTED_COLOUR)
    line = lines[0]
    caption = (
        f"{line['model']} on {line['device']}; pool of {line['pool_tokens']:,} tokens, at most "
        f"{line['max_model_len']:,} tokens a sequence; {machine(environment())}; "
        f"{datetime.datetime.now(datetime.UTC).date()}"
    )
    entitle(figure, "Throughput by batch size, up to the batch at which the memory of each scheme ends", caption)
    return figure


def _by_workload(lines: Sequence[ResultLine]) -> list[list[ResultLine]]:
    names = dict.fromkeys(line["workload"] for line in lines)
    return [[line for line in lines if line["workload"] == name] for name in names]
