"""Files of runs side by side: how much better the runs of one are than those of another, and how sure that is."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from radixkv.bench.report.compared_metrics import METRICS, Metric
from radixkv.bench.report.results import Group, read_groups
from radixkv.bench.report.run_metrics import Figures
from radixkv.errors import ConfigError, shortened

MAY_DIFFER = tuple(map(frozenset[str], ((), ("server",), ("cache",), ("server", "cache"))))
"""In what runs that are compared may differ; the nearest are found first."""


class Ratio(msgspec.Struct, frozen=True):
    """How many times as good a figure is as the first file's: over 1 is better, also for times."""

    first: float | None
    """Medians of the runs."""
    this: float | None
    better: float | None
    """The median over pairs of runs; None where a value is missing or 0."""
    least: float | None
    most: float | None
    verdict: str
    """``better`` or ``worse`` where all pairs agree, ``equal``, ``inconclusive`` where the spread includes 1,
    ``one pair``, ``n/a``."""


class Comparison(msgspec.Struct, frozen=True):
    """A group of runs against the first file's."""

    first: str
    file: str
    workload: str
    first_cache: str | None
    cache: str | None
    n_pairs: int
    is_paired: bool
    """Run by run in their order; else every run with every run, since the files have different numbers of them."""
    ratios: dict[str, Ratio]
    notes: list[str]


def compare(paths: Sequence[Path], *, force: bool = False) -> list[Comparison]:
    """Every group of runs in the later files against the same group in the first.

    Runs belong together when they agree in all parameters that both name, so results of other versions compare as
    well. If only ``cache`` differs or how the server was started, and nothing else could be meant, that is what is
    compared.

    Args:
        paths: two or more files of JSON lines.
        force: compare what differs, group by group in the files' order; there must be equally many.

    Raises:
        ConfigError: a file that is not readable or holds no runs, or runs that asked for something different.
    """
    if len(paths) < 2:
        raise ConfigError("one file has nothing to be compared with; give two or more files of `radixkv bench`")
    first, *others = [read_groups(path) for path in paths]
    return [_comparison(*pair) for other in others for pair in _matched(first, other, force)]


def table(comparison: Comparison) -> str:
    """A comparison for people."""
    caches = [cache or "as the server has it" for cache in (comparison.first_cache, comparison.cache)]
    cache = caches[0] if caches[0] == caches[1] else " / ".join(caches)
    pairs = f"{comparison.n_pairs} pair{'s' if comparison.n_pairs > 1 else ''}"
    if not comparison.is_paired:
        pairs += ", every run with every run"
    lines = [
        f"{comparison.workload}, cache {cache}: {comparison.file} against {comparison.first} ({pairs})",
        f"{'':<28}{'first':>10}{'this':>10}{'better':>9}  {'spread':<16}verdict",
    ]
    for metric in METRICS:
        ratio = comparison.ratios[metric.key]
        if ratio.first is not None or ratio.this is not None:
            better = "n/a" if ratio.better is None else f"{ratio.better:.2f}x"
            spread = "" if ratio.least is None else f"{ratio.least:.2f} to {ratio.most:.2f}"
            values = f"{_text(ratio.first):>10}{_text(ratio.this):>10}"
            lines.append(f"{metric.label:<28}{values}{better:>9}  {spread:<16}{ratio.verdict}")
    return "\n".join([*lines, *(f"note: {note}" for note in comparison.notes)])


def _matched(first: Sequence[Group], other: Sequence[Group], force: bool) -> Iterator[tuple[Group, Group]]:
    """Pairs of groups: those that agree, then those that differ as they may, then what ``force`` lets by."""
    left, rest = list(first), list(other)
    for may_differ in MAY_DIFFER:
        for group in list(rest):
            alike = [each for each in left if not _differences(each, group) - may_differ]
            rivals = [each for each in rest if alike and not _differences(alike[0], each) - may_differ]
            if len(alike) == 1 and len(rivals) == 1:
                yield alike[0], group
                left.remove(alike[0])
                rest.remove(group)
    if not rest:
        return
    if not force or len(left) != len(rest):
        raise ConfigError(_refusal(first, left, rest, force))
    yield from zip(left, rest, strict=True)


def _differences(one: Group, other: Group) -> set[str]:
    common = one.parameters.keys() & other.parameters.keys()
    return {key for key in common if one.parameters[key] != other.parameters[key]}


def _refusal(first: Sequence[Group], left: Sequence[Group], rest: Sequence[Group], force: bool) -> str:
    group = rest[0]
    nearest = min(left or first, key=lambda each: len(_differences(each, group)))
    differences = ", ".join(
        f"{key} ({shortened(nearest.parameters[key])} and {shortened(group.parameters[key])})"
        for key in sorted(_differences(nearest, group))
    )
    if not differences:
        return (
            f"which runs of {nearest.file} and {group.file} belong together is not clear: several agree in the "
            "parameters that both name; give files with one kind of run each"
        )
    advice = "compare runs that asked the same, or give --force"
    if force:
        advice = (
            "--force needs equally many kinds of runs that do not match, best one in each file; "
            f"these have {len(left)} and {len(rest)}"
        )
    elif len(left) != len(rest):
        advice = "compare files that have the same kinds of runs"
    return f"runs of {nearest.file} and {group.file} differ in {differences}; {advice}"


def _comparison(first: Group, group: Group) -> Comparison:
    is_paired = len(first.runs) == len(group.runs)
    pairs = list(
        zip(first.runs, group.runs, strict=True) if is_paired else itertools.product(first.runs, group.runs)
    )
    return Comparison(
        first=first.file,
        file=group.file,
        workload=group.parameters["workload"],
        first_cache=first.cache,
        cache=group.cache,
        n_pairs=len(pairs),
        is_paired=is_paired,
        ratios={metric.key: _ratio(metric, pairs, first, group) for metric in METRICS},
        notes=list(_notes(first, group, pairs)),
    )


def _ratio(metric: Metric, pairs: Sequence[tuple[Figures, Figures]], first: Group, group: Group) -> Ratio:
    found: list[float] = []
    for run_of_first, run in pairs:
        before, after = metric.of(run_of_first), metric.of(run)
        better = metric.better(before, after)
        if better:
            found.append(better)
    is_known = len(found) == len(pairs)
    return Ratio(
        first=_median([metric.of(run) for run in first.runs]),
        this=_median([metric.of(run) for run in group.runs]),
        better=statistics.median(found) if is_known else None,
        least=min(found) if is_known else None,
        most=max(found) if is_known else None,
        verdict=_verdict(found) if is_known else "n/a",
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _verdict(ratios: Sequence[float]) -> str:
    least, most = min(ratios), max(ratios)
    if least == most == 1:
        return "equal"
    if len(ratios) == 1:
        return "one pair"
    if least <= 1 <= most:
        return "inconclusive"
    return "better" if least > 1 else "worse"


def _notes(first: Group, group: Group, pairs: Sequence[tuple[Figures, Figures]]) -> Iterator[str]:
    """What a reader must know before believing the ratios."""
    differences = _differences(first, group)
    if "server" in differences:
        servers = [_started(each.parameters["server"]) for each in (first, group)]
        yield f"the servers differ: {servers[0]}, and {servers[1]}"
    for key in sorted(differences - {"cache", "server"}):
        yield f"{key} differs: {first.parameters[key]} and {group.parameters[key]}"
    for one, other in ((first, group), (group, first)):
        lacking = sorted(one.parameters.keys() - other.parameters.keys())
        if lacking:
            yield f"{other.file} does not say: {', '.join(lacking)}"
    for each in (first, group):
        failed = sum(run.get("failed") or 0 for run in each.runs)
        if failed:
            yield f"{failed} requests of {each.file} failed"
        if any(run.get("aborted") for run in each.runs):
            yield f"{each.file} has a run that ended early"
    for key in ("processor", "cores", "gpu"):
        values = [{(run.get("environment") or {}).get(key) for run in each.runs} for each in (first, group)]
        if values[0] != values[1] and None not in values[0] | values[1]:
            yield f"{key} differs: {_listed(values[0])} and {_listed(values[1])}"
    for what, key in (("prompt", "total_input_tokens"), ("output", "total_output_tokens")):
        tokens = [{run.get(key) for run in each.runs} for each in (first, group)]
        if tokens[0] != tokens[1] and None not in tokens[0] | tokens[1]:
            yield f"{what} tokens differ: {_listed(tokens[0])} and {_listed(tokens[1])}"
    digests = [(one.get("outputs_sha256"), other.get("outputs_sha256")) for one, other in pairs]
    if all(one is not None and one == other for one, other in digests):
        yield "outputs are equal"
    elif all(one is not None and other is not None for one, other in digests):
        yield "outputs differ"


def _started(flags: Sequence[str] | None) -> str:
    """How a server was, in words."""
    if flags is None:
        return "one that was running"
    return f"one with {' '.join(flags)}" if flags else "one with no flags"


def _listed(values: set[Any]) -> str:
    return " / ".join(sorted(map(str, values)))


def _text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
