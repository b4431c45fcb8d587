"""The page of runs and its pictures: what ``radixkv bench --plot`` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from radixkv.bench.report.charts import Run, hit_rate, itl, off_on, throughput, ttft
from radixkv.bench.report.html_page import Section, write_page
from radixkv.bench.report.result_table import parts, remarks
from radixkv.bench.report.results import parameters_of
from radixkv.errors import ConfigError

__all__ = ["Run", "plot"]

PICTURES = ("off_on.png", "ttft.png", "itl.png", "throughput.png", "hit_rate.png")
"""All that there may be beside a page."""


def plot(runs: Sequence[Run], folder: Path) -> None:
    """Writes ``index.html``, which needs no other file, and each of its pictures as a PNG, instead of earlier ones.

    A picture of which nothing was measured is left out, and so are runs in which every request failed.

    Args:
        runs: one, or the same requests with the cache off and on.
        folder: is there, and can be written to.

    Raises:
        ConfigError: a file cannot be written or removed, or matplotlib is not there.
    """
    _remove_pictures(folder)
    drawn = [run for run in runs if run.figures["completed"]]
    title = f"radixkv bench: {runs[0].figures['workload']}"
    write_page(folder / "index.html", title, [_described(runs), *_charts(drawn), _table(runs)])


def _remove_pictures(folder: Path) -> None:
    """Those of an earlier run: they would pass for this one's where this one has none."""
    for name in PICTURES:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot remove {folder / name}: {error.strerror}") from None


def _charts(runs: Sequence[Run]) -> Iterator[Section]:
    if len(runs) == 2:
        yield off_on(*runs)
    if runs:
        yield ttft(runs)
    streamed = [run for run in runs if run.samples.itl_s]
    if streamed:
        yield itl(streamed)
    if runs:
        yield throughput(runs)
    caching = [run for run in runs if _has_hit_rate(run) and (run.figures["cache"] != "off" or len(runs) == 1)]
    if caching:
        yield hit_rate(caching[-1])


def _has_hit_rate(run: Run) -> bool:
    return any(value is not None for value in run.samples.hit_rate_pct)


def _described(runs: Sequence[Run]) -> Section:
    """What was run, and what to know of it."""
    said = [f"{run.name}: {remark}" for run in runs for remark in remarks(run.figures)]
    first = runs[0].figures
    environment = first.get("environment") or {}
    told = {
        **parameters_of(first),
        "date": first.get("date"),
        **{key: environment.get(key) for key in ("commit", "processor", "cores", "gpu")},
    }
    rows = [(key, _text(value)) for key, value in told.items() if key != "cache" and value not in (None, {}, [])]
    return Section("What was measured", "\n".join(said), rows=rows)


def _table(runs: Sequence[Run]) -> Section:
    """All lines of the boxes side by side."""
    columns = [dict(row for _, rows in parts(run.figures) for row in rows) for run in runs]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    return Section(
        "All figures",
        columns=["", *(run.name for run in runs)],
        rows=[[label.rstrip(":"), *(column.get(label, "") for column in columns)] for label in labels],
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
