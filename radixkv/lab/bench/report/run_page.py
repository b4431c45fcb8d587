"""HTML page of runs, as written by ``radixkv bench --plot``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from radixkv.errors import ConfigError
from radixkv.lab.bench.report.charts import Run, cache_comparison, hit_rate, itl, throughput, ttft
from radixkv.lab.bench.report.compare import parameters_of
from radixkv.lab.bench.report.html_page import Section, write_page
from radixkv.lab.bench.report.result_table import main_rows, remarks, table_sections

__all__ = ["Run", "plot"]

CHART_FILES = ("off_on.png", "ttft.png", "itl.png", "throughput.png", "hit_rate.png")
"""Names of all charts that may be saved beside the page."""


def plot(runs: Sequence[Run], folder: Path) -> None:
    """Writes a self-contained ``index.html`` and each of its charts as a PNG; replaces those of an earlier run.

    Leaves out charts without measurements, and draws no run in which every request failed.

    Args:
        runs: one run, or two of the same requests with the cache off and on.
        folder: an existing folder that can be written to.

    Raises:
        ConfigError: a file cannot be written or removed, or matplotlib is missing.
    """
    _remove_charts(folder)
    drawn = [run for run in runs if run.metrics["completed"]]
    title = f"radixkv bench: {runs[0].metrics['workload']}"
    sections = [_result(runs), *_charts(drawn), _metrics_table(runs), _parameters(runs)]
    write_page(folder / "index.html", title, sections)


def _remove_charts(folder: Path) -> None:
    """Removes the charts of an earlier run, which could be mistaken for those of this run."""
    for name in CHART_FILES:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot remove {folder / name}: {error.strerror}") from None


def _result(runs: Sequence[Run]) -> Section:
    """Returns the section with the main metrics, and with what limits their meaning."""
    first, last = runs[0], runs[-1]
    rows: list[tuple[str, ...]] = list(main_rows(first.metrics, last.metrics))
    columns, paragraph = ["", first.name, last.name, "better"], [f"{last.caption}."]
    if len(runs) == 1:
        columns, rows = columns[:2], [row[:2] for row in rows]
    else:
        paragraph.append("The same requests with the prefix cache off and on. Better is above 1x, also for times.")
    paragraph += [f"{run.name}: {remark}" for run in runs for remark in remarks(run.metrics)]
    return Section("Result", "\n".join(paragraph), columns, rows)


def _charts(runs: Sequence[Run]) -> Iterator[Section]:
    if len(runs) == 2:
        yield cache_comparison(*runs)
    if runs:
        yield ttft(runs)
    streamed = [run for run in runs if run.samples.itl_s]
    if streamed:
        yield itl(streamed)
    if runs:
        yield throughput(runs)
    caching = [run for run in runs if _has_hit_rate(run) and (run.metrics["cache"] != "off" or len(runs) == 1)]
    if caching:
        yield hit_rate(caching[-1])


def _has_hit_rate(run: Run) -> bool:
    return any(value is not None for value in run.samples.hit_rate_pct)


def _parameters(runs: Sequence[Run]) -> Section:
    """Returns the section of parameters and environment."""
    first = runs[0].metrics
    environment = first.get("environment") or {}
    values = {
        **parameters_of(first),
        "date": first.get("date"),
        **{key: environment.get(key) for key in ("commit", "processor", "cores", "gpu")},
    }
    rows = [(key, _text(value)) for key, value in values.items() if key != "cache" and value not in (None, {}, [])]
    return Section("Settings and environment", rows=rows)


def _metrics_table(runs: Sequence[Run]) -> Section:
    """Returns the section with the rows of all runs' result tables side by side."""
    columns = [dict(row for _, rows in table_sections(run.metrics) for row in rows) for run in runs]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    return Section(
        "All metrics",
        columns=["", *(run.name for run in runs)],
        rows=[[label.rstrip(":"), *(column.get(label, "") for column in columns)] for label in labels],
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
