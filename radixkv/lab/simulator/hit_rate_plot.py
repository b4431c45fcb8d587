"""The plot of a simulation: hit rate by capacity."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.lab.bench.formatting import format_tokens
from radixkv.lab.bench.report.html_page import (
    AMBER,
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    Section,
    entitle,
    label_ends,
    new_figure,
    style,
    write_page,
)
from radixkv.lab.simulator.recording import Recording
from radixkv.lab.simulator.result_table import remarks, title
from radixkv.lab.simulator.simulation import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES = {"oracle": (ORANGE, 3.2), "adaptive": (AMBER, 1.6), "lfuda": (PURPLE, 1.6), "lru": (BLUE, 1.6)}
"""Colour and line width of each policy. The narrow lines are drawn last, on top."""


def plot(
    results: Sequence[Result],
    recording: Recording,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    folder: Path,
) -> None:
    """Writes the self-contained page ``index.html`` and the plot ``hit_rate_by_capacity.png``.

    Args:
        results: results of one recording; the last one has an infinite capacity.
        recording: the recording that was replayed.
        titles: titles of the printed table's columns.
        rows: its cells.
        folder: an existing, writable folder.

    Raises:
        ConfigError: a file cannot be written, or matplotlib is not installed.
    """
    infinite = results[-1]
    result = Section(
        "Hit rate by capacity",
        "\n".join(remarks(results, recording)),
        titles,
        rows,
        _draw_figure(results, recording),
        f"Hit rate against capacity for each policy, and {infinite.hit_rate_pct:.1f}% of an infinite capacity.",
        "hit_rate_by_capacity.png",
    )
    settings = Section("Recording and settings", title(recording, infinite.concurrency, infinite.ends_known))
    write_page(folder / "index.html", f"radixkv simulate: {recording.name}", [result, settings])


def _draw_figure(results: Sequence[Result], recording: Recording) -> Figure:
    *finite, infinite = results
    figure = new_figure(9, 4.5)
    axes = figure.add_subplot()
    style(axes, x_title="capacity of the cache (tokens, logarithmic)", y_title="prompt tokens from the cache (%)")
    capacities = sorted({_n_tokens(result) for result in finite})
    axes.set_xscale("log")
    axes.axhline(infinite.hit_rate_pct, color=GREEN, linewidth=1.2, linestyle=(0, (4, 3)))
    labels = [(capacities[-1], infinite.hit_rate_pct, f"infinite {infinite.hit_rate_pct:.1f}%", GREEN)]
    for policy, (colour, width) in _STYLES.items():
        points = sorted((_n_tokens(r), r.hit_rate_pct) for r in finite if r.policy == policy)
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, color=colour, linewidth=width, marker="o", markersize=3 * width, clip_on=False)
            labels.append((xs[-1], ys[-1], f"{policy} {ys[-1]:.1f}%", colour))
    axes.set_xticks(capacities, [format_tokens(capacity) for capacity in capacities])
    axes.minorticks_off()
    axes.set_xlim(capacities[0] / 1.3, capacities[-1])  # leaves room for the labels at the right
    axes.set_ylim(0, max(1.0, 1.12 * max(result.hit_rate_pct for result in results)))
    largest = max((r for r in finite if r.policy == infinite.policy), key=_n_tokens)
    n_tokens = format_tokens(_n_tokens(largest))
    replayed = title(recording, infinite.concurrency, infinite.ends_known).splitlines()[0]
    today = datetime.datetime.now(datetime.UTC).date()  # and no machine, on which hit rates do not depend
    entitle(
        figure,
        f"Hit rate: {largest.hit_rate_pct:.1f}% with {n_tokens} tokens ({largest.policy}), "
        f"{infinite.hit_rate_pct:.1f}% with an infinite cache",
        f"{replayed}; {today}",
    )
    label_ends(axes, labels)
    return figure


def _n_tokens(result: Result) -> int:
    """Returns the capacity of all tiers."""
    return sum(n or 0 for n in (result.capacity_tokens, result.host_capacity_tokens, result.disk_capacity_tokens))
