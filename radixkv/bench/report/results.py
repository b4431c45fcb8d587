"""Reading of result files, with the runs grouped by their parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from radixkv.bench.load.record import Measurement
from radixkv.bench.report.compared_metrics import METRICS
from radixkv.bench.report.run_metrics import Metrics, run_metrics
from radixkv.errors import ConfigError

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
        ("environment", _Environment | None, None),
        *((metric.key, float | None, None) for metric in METRICS if not metric.of_cache),
    ],
)
"""Types of the keys of a line that are used here."""
