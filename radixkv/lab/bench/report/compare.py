"""Comparison of result files by improvement ratios and their spread."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from radixkv.errors import ConfigError, shortened
from radixkv.lab.bench.formatting import cell, plural
from radixkv.lab.bench.load.record import Measurement
from radixkv.lab.bench.report.run_metrics import METRICS, Metric, Metrics, run_metrics
from radixkv.terminal import Table

MAY_DIFFER = tuple(map(frozenset[str], ((), ("server",), ("cache",), ("server", "cache"))))
"""Sets of parameters in which compared runs may differ, in the order in which they are tried."""


class Ratio(msgspec.Struct, frozen=True):
    """Improvement of a metric over the first file; above 1 is better, also for times."""

    first: float | None
    """Median over the first file's runs."""
    this: float | None
    """Median over the other file's runs."""
    better: float | None
    """Median ratio over pairs of runs. None: a value is missing or 0."""
    least: float | None
    """Minimum ratio over pairs of runs."""
    most: float | None
    """Maximum ratio over pairs of runs."""
    verdict: str
    """``better``, ``worse``, ``equal``, ``inconclusive``, ``one pair`` or ``n/a``.

    ``better`` and ``worse``: all pairs agree. ``inconclusive``: the spread includes 1.
    """


class Comparison(msgspec.Struct, frozen=True):
    """A group of runs compared with a group of the first file."""

    first: str
    file: str
    workload: str
    first_cache: str | None
    cache: str | None
    n_pairs: int
    is_paired: bool
    """Whether runs are compared pair by pair in their order.

    Otherwise every run is compared with every run, since the groups have different numbers of runs.
    """
    ratios: dict[str, Ratio]
    notes: list[str]


def compare(paths: Sequence[Path], *, force: bool = False) -> list[Comparison]:
    """Compares every group of runs in the later files with the matching group of the first file.

    Groups match when they agree in all parameters that both have, so results of other versions can be compared.
    Groups that differ only in ``cache`` or ``server`` match if the choice is unique.

    Args:
        paths: two or more files of JSON lines.
        force: compare the groups that do not match as well, in the files' order; each file must have equally many.

    Raises:
        ConfigError: a file cannot be read or has no runs, or runs do not match.
    """
    if len(paths) < 2:
        raise ConfigError("one file cannot be compared; give two or more result files of `radixkv bench`")
    first, *others = [read_groups(path) for path in paths]
    return [_comparison(*pair) for other in others for pair in _match(first, other, force)]


def table(comparison: Comparison) -> str:
    """Returns a comparison as a text table."""
    caches = [cache or "as the server has it" for cache in (comparison.first_cache, comparison.cache)]
    cache = caches[0] if caches[0] == caches[1] else " / ".join(caches)
    pairs = plural(comparison.n_pairs, "pair")
    if not comparison.is_paired:
        pairs += ", every run with every run"
    heading = f"{comparison.workload}, cache {cache}: {comparison.file} against {comparison.first} ({pairs})"
    columns = Table(("", "first", "this", "better", "spread", "verdict"), (28, 8, 8, 7, 14, 12), align=">>><<")
    rows = []
    for metric in METRICS:
        ratio = comparison.ratios[metric.key]
        if ratio.first is not None or ratio.this is not None:
            better = "n/a" if ratio.better is None else f"{ratio.better:.2f}x"
            spread = "" if ratio.least is None else f"{ratio.least:.2f} to {ratio.most:.2f}"
            rows.append((metric.label, cell(ratio.first), cell(ratio.this), better, spread, ratio.verdict))
    return "\n".join([heading, columns.text(rows), *(f"note: {note}" for note in comparison.notes)])


def _match(first: Sequence[Group], other: Sequence[Group], force: bool) -> Iterator[tuple[Group, Group]]:
    """Yields pairs of groups: equal ones, then those with allowed differences, then with ``force`` all others."""
    unmatched_first, unmatched = list(first), list(other)
    for may_differ in MAY_DIFFER:
        for group in list(unmatched):
            similar = [each for each in unmatched_first if not _differences(each, group) - may_differ]
            rivals = [each for each in unmatched if similar and not _differences(similar[0], each) - may_differ]
            if len(similar) == 1 and len(rivals) == 1:
                yield similar[0], group
                unmatched_first.remove(similar[0])
                unmatched.remove(group)
    if not unmatched:
        return
    if not force or len(unmatched_first) != len(unmatched):
        raise ConfigError(_mismatch(first, unmatched_first, unmatched, force))
    yield from zip(unmatched_first, unmatched, strict=True)


def _differences(one: Group, other: Group) -> set[str]:
    """Returns the parameters that both groups have with different values."""
    common = one.parameters.keys() & other.parameters.keys()
    return {key for key in common if one.parameters[key] != other.parameters[key]}


def _mismatch(
    first: Sequence[Group], unmatched_first: Sequence[Group], unmatched: Sequence[Group], force: bool
) -> str:
    """Returns the text of the error."""
    group = unmatched[0]
    nearest = min(unmatched_first or first, key=lambda each: len(_differences(each, group)))
    differences = ", ".join(
        f"{key} ({shortened(nearest.parameters[key])} and {shortened(group.parameters[key])})"
        for key in sorted(_differences(nearest, group))
    )
    if not differences:
        return (
            f"runs of {nearest.file} and {group.file} cannot be matched: several agree in the parameters that both "
            "files have; give files whose runs all have the same parameters"
        )
    advice = "compare runs with the same parameters, or give --force"
    if force:
        advice = (
            "--force needs equally many groups of runs that do not match, best one in each file; "
            f"these have {len(unmatched_first)} and {len(unmatched)}"
        )
    elif len(unmatched_first) != len(unmatched):
        advice = "compare files that have the same groups of runs"
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


def _ratio(metric: Metric, pairs: Sequence[tuple[Metrics, Metrics]], first: Group, group: Group) -> Ratio:
    ratios: list[float] = []
    for run_of_first, run in pairs:
        before, after = metric.of(run_of_first), metric.of(run)
        better = metric.better(before, after)
        if better:
            ratios.append(better)
    is_known = len(ratios) == len(pairs)
    return Ratio(
        first=_median([metric.of(run) for run in first.runs]),
        this=_median([metric.of(run) for run in group.runs]),
        better=statistics.median(ratios) if is_known else None,
        least=min(ratios) if is_known else None,
        most=max(ratios) if is_known else None,
        verdict=_verdict(ratios) if is_known else "n/a",
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _verdict(ratios: Sequence[float]) -> str:
    minimum, maximum = min(ratios), max(ratios)
    if minimum == maximum == 1:
        return "equal"
    if len(ratios) == 1:
        return "one pair"
    if minimum <= 1 <= maximum:
        return "inconclusive"
    return "better" if minimum > 1 else "worse"


def _notes(first: Group, group: Group, pairs: Sequence[tuple[Metrics, Metrics]]) -> Iterator[str]:
    """Yields differences between the groups that affect the meaning of the ratios."""
    differences = _differences(first, group)
    if "server" in differences:
        servers = [_describe_server(each.parameters["server"]) for each in (first, group)]
        yield f"the servers differ: {servers[0]}, and {servers[1]}"
    for key in sorted(differences - {"cache", "server"}):
        yield f"{key} differs: {first.parameters[key]} and {group.parameters[key]}"
    for one, other in ((first, group), (group, first)):
        missing = sorted(one.parameters.keys() - other.parameters.keys())
        if missing:
            yield f"{other.file} does not have: {', '.join(missing)}"
    for each in (first, group):
        failed = sum(run.get("failed") or 0 for run in each.runs)
        if failed:
            yield f"{failed} requests of {each.file} failed"
        if any(run.get("aborted") for run in each.runs):
            yield f"{each.file} has a run that ended early"
    for key in ("processor", "cores", "gpu"):
        values = [{(run.get("environment") or {}).get(key) for run in each.runs} for each in (first, group)]
        if values[0] != values[1] and None not in values[0] | values[1]:
            yield f"{key} differs: {_join(values[0])} and {_join(values[1])}"
    for label, key in (("prompt", "total_input_tokens"), ("output", "total_output_tokens")):
        tokens = [{run.get(key) for run in each.runs} for each in (first, group)]
        if tokens[0] != tokens[1] and None not in tokens[0] | tokens[1]:
            yield f"{label} tokens differ: {_join(tokens[0])} and {_join(tokens[1])}"
    digests = [(one.get("outputs_sha256"), other.get("outputs_sha256")) for one, other in pairs]
    if all(one is not None and one == other for one, other in digests):
        yield "outputs are equal"
    elif all(one is not None and other is not None for one, other in digests):
        yield "outputs differ"


def _describe_server(flags: Sequence[str] | None) -> str:
    if flags is None:
        return "one that was running"
    return f"one with {' '.join(flags)}" if flags else "one with no flags"


def _join(values: set[Any]) -> str:
    return " / ".join(sorted(map(str, values)))


INFORMATIVE_KEYS = frozenset({"date", "request_timeout_s", "cache_flushed", "accounting", "environment"})
"""Keys of a line that are neither parameters nor metrics."""

METRIC_KEYS = frozenset(run_metrics(Measurement([], duration=1.0)))
"""Keys of the metrics."""


@dataclass(frozen=True)
class Group:
    """The runs of a file that have the same parameters."""

    file: str
    parameters: dict[str, Any]
    """Workload, its parameters, model, load and ``cache``."""
    runs: list[Metrics] = field(default_factory=list)

    @property
    def cache(self) -> str | None:
        value: str | None = self.parameters.get("cache")
        return value


def read_groups(path: Path) -> list[Group]:
    """Returns a file's groups of runs, in the order of their first runs.

    Raises:
        ConfigError: the file cannot be read, or has a line that is no run.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    groups: list[Group] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        run = _run(line, f"{path}, line {number}")
        parameters = parameters_of(run)
        group = next((each for each in groups if each.parameters == parameters), None)
        if group is None:
            group = Group(str(path), parameters)
            groups.append(group)
        group.runs.append(run)
    if not groups:
        raise ConfigError(f"{path} has no runs; give a file that `radixkv bench --output-file` wrote")
    return groups


def parameters_of(run: Metrics) -> dict[str, Any]:
    """Returns the keys of a line that are parameters of its run, including ``cache``."""
    return {key: value for key, value in run.items() if key not in METRIC_KEYS | INFORMATIVE_KEYS}


def _run(line: bytes, position: str) -> Metrics:
    try:
        run: Metrics = msgspec.json.decode(line, type=dict[str, Any])
        msgspec.convert(run, _LineSchema)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{position} is not a run of `radixkv bench`: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{position} is not JSON: {error}") from None
    if all(metric.of(run) is None for metric in METRICS):
        raise ConfigError(f"{position} has none of a run's metrics, such as {METRICS[0].key}; give another file")
    return run


class _CacheReport(msgspec.Struct):
    cache_hit_rate_pct: float | None = None


class _DraftReport(msgspec.Struct):
    acceptance_pct: float | None = None
    tokens_a_step: float | None = None


class _Environment(msgspec.Struct):
    processor: str | None = None
    cores: int | None = None
    gpu: str | None = None


_LineSchema = msgspec.defstruct(
    "_LineSchema",
    [
        ("workload", str),
        ("cache", str | None, None),
        ("server", list[str] | None, None),
        ("failed", int | None, None),
        ("aborted", str | None, None),
        ("total_input_tokens", int | None, None),
        ("outputs_sha256", str | None, None),
        ("cache_report", _CacheReport | None, None),
        ("draft_report", _DraftReport | None, None),
        ("environment", _Environment | None, None),
        *((metric.key, float | None, None) for metric in METRICS if metric.report is None),
    ],
)
"""Types of the keys of a line that are used here."""
