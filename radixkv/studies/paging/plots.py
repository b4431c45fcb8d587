"""The study as pictures, on a page with its tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.bench.report.html_page import (
    AMBER,
    BLUE,
    COLOURS,
    FAINT,
    INK,
    ORANGE,
    PURPLE,
    QUIET,
    SKY,
    Section,
    label_ends,
    new_figure,
    save,
    style,
    write_page,
)
from radixkv.studies.paging.study import Figures
from radixkv.studies.paging.tables import (
    COST_COLUMNS,
    COST_LEGEND,
    SCHEME_COLUMNS,
    SCHEME_LEGEND,
    cost_rows,
    host_us,
    lost_columns,
    lost_rows,
    scheme_cells,
    scheme_heading,
    target_lines,
    targets,
    whole_sizes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = (
    ("holds KV", BLUE, "white"),
    ("holds a copy", SKY, INK),
    ("reserved, used later", AMBER, INK),
    ("internal: never used", ORANGE, "white"),
    ("external: in the wrong place", PURPLE, INK),
    ("cached, for whoever needs it", "#b8dccf", INK),
    ("free", FAINT, INK),
)
"""Of a bar: what slots are used for, its colour, and that of a number on it."""

MIN_LABELLED_PCT = 4.5


def plot(
    by_scheme: Sequence[Figures], by_page_size: Sequence[Figures], remarks: Sequence[str], folder: Path
) -> None:
    """Writes ``index.html``, which needs no other file, and its pictures: ``waste.png``, ``utilisation.png`` and
    ``page_size.png``, the last only if page sizes were compared.

    Args:
        by_scheme: what ``compare_schemes`` gave.
        by_page_size: what ``compare_page_sizes`` gave.
        remarks: on page sizes, a line each.
        folder: is there, and can be written to.

    Raises:
        ConfigError: a file cannot be written, or matplotlib is not there.
    """
    waste, utilisation = _waste(by_scheme), _utilisation(by_scheme)
    save(waste, folder / "waste.png")
    save(utilisation, folder / "utilisation.png")
    sections = [
        Section(
            "What the memory is used for",
            SCHEME_LEGEND,
            figure=waste,
            described="For each workload and scheme what the pool holds: KV, copies, and each kind of waste.",
        ),
        Section(
            "Utilisation",
            figure=utilisation,
            described="Scheme by workload: the share of the slots that sequences have that hold KV.",
        ),
        *(
            Section(
                lines[0]["workload"],
                "\n".join([scheme_heading(lines), "Targets:", *target_lines(targets(lines))]),
                SCHEME_COLUMNS,
                [scheme_cells(of) for of in lines],
            )
            for lines in _by_workload(by_scheme)
        ),
    ]
    if by_page_size:
        curve = _page_sizes(by_page_size)
        save(curve, folder / "page_size.png")
        sections += [
            Section(
                "Page size",
                "\n".join(remarks),
                lost_columns(by_page_size),
                lost_rows(by_page_size),
                curve,
                "By page size: the slots that hold nothing or a copy, and the host's time for a token.",
            ),
            Section("What pages cost", COST_LEGEND, COST_COLUMNS, cost_rows(by_page_size)),
        ]
    write_page(folder / "index.html", "radixkv bench paging: memory by pages and by reservation", sections)


def _waste(lines: Sequence[Figures]) -> Figure:
    workloads = _by_workload(lines)
    figure = new_figure(9, 0.9 + 1.55 * len(workloads))
    rows = figure.subplots(len(workloads), 1, sharex=True, squeeze=False)
    for axes, of_workload in zip(rows[:, 0], workloads, strict=True):
        style(axes, title=of_workload[0]["workload"])
        axes.grid(False)
        starts = [0.0] * len(of_workload)
        places = range(len(of_workload))
        for index, (label, colour, ink) in enumerate(PARTS):
            widths = [_parts(of)[index] for of in of_workload]
            axes.barh(places, widths, 0.78, starts, color=colour, label=label, edgecolor="white", linewidth=0.6)
            for place, start, width in zip(places, starts, widths, strict=True):
                if width >= MIN_LABELLED_PCT:
                    axes.text(
                        start + width / 2, place, f"{width:.0f}", color=ink, fontsize=8, ha="center", va="center"
                    )
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_yticks(places, [of["scheme"] for of in of_workload])
        axes.set_ylim(len(of_workload) - 0.45, -0.55)
        axes.set_xlim(0, 100)
    rows[-1, 0].set_xlabel("token slots of the pool, while requests wait (%)", fontsize=9.5, color=QUIET)
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    return figure


def _parts(of: Figures) -> list[float]:
    copies = of["occupied_pct"] * of["duplicate_pct"] / 100
    names = ("reserved_pct", "internal_pct", "external_pct", "cached_pct", "free_pct")
    return [of["occupied_pct"] - copies, copies, *(of[name] for name in names)]


def _utilisation(lines: Sequence[Figures]) -> Figure:
    workloads = _by_workload(lines)
    values = [[of["utilisation_pct"] for of in of_workload] for of_workload in workloads]
    schemes = [of["scheme"] for of in workloads[0]]
    figure = new_figure(8, 1.4 + 0.5 * len(schemes))
    axes = figure.add_subplot()
    style(axes, title="Slots that hold KV or a copy, of those that sequences have (%)")
    axes.grid(False)
    columns = list(zip(*values, strict=True))
    axes.imshow(columns, cmap="Blues", vmin=0, vmax=140, aspect="auto")
    for row, column in enumerate(columns):
        for place, value in enumerate(column):
            ink = "white" if value > 85 else INK
            axes.text(place, row, f"{value:.1f}", ha="center", va="center", color=ink, fontsize=10)
    axes.set_xticks(range(len(workloads)), [of_workload[0]["workload"] for of_workload in workloads])
    axes.set_yticks(range(len(schemes)), schemes)
    axes.spines["bottom"].set_visible(False)
    return figure


def _page_sizes(lines: Sequence[Figures]) -> Figure:
    sizes = sorted({of["page_size"] for of in lines})
    figure = new_figure(9.5, 4.6)
    lost, cost = figure.subplots(1, 2, width_ratios=(1.7, 1))
    style(
        lost,
        title="Slots that are empty or hold a copy",
        x_title="page size (tokens)",
        y_title="of what sequences have (%)",
    )
    labels = []
    for colour, of_workload in zip(COLOURS, _by_workload(lines), strict=False):
        losses = [of["lost_pct"] for of in of_workload]
        there = [of["page_size"] for of in of_workload]
        lost.plot(there, losses, color=colour, linewidth=2, marker="o", markersize=4, clip_on=False)
        labels.append((there[-1], losses[-1], of_workload[0]["workload"], colour))
    style(cost, title="Host time a token", x_title="page size (tokens)", y_title="scheduler, cache and tree (µs)")
    times = [(size, host_us(group)) for size, group in whole_sizes(lines)]
    cost.plot(
        [size for size, _ in times],
        [time for _, time in times],
        color=INK,
        linewidth=2,
        marker="o",
        markersize=4,
        clip_on=False,
    )
    for axes in (lost, cost):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    label_ends(lost, labels)
    return figure


def _by_workload(lines: Sequence[Figures]) -> list[list[Figures]]:
    names = dict.fromkeys(of["workload"] for of in lines)
    return [[of for of in lines if of["workload"] == name] for name in names]
