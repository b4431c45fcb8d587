"""Files of results: the runs that `radixkv bench --output-file` wrote, grouped by what they asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from radixkv.bench.load.record import Measurement
from radixkv.bench.report.compared_metrics import METRICS
from radixkv.bench.report.run_metrics import Figures, figures
from radixkv.errors import ConfigError

ABOUT = frozenset({"date", "request_timeout_s", "cache_flushed", "accounting", "environment"})
"""Keys of a line that say neither what was asked nor what was measured."""

MEASURED = frozenset(figures(Measurement([], duration=1.0)))
"""Keys of what was measured."""


@dataclass(frozen=True)
class Group:
    """The runs of a file that asked the same."""

    file: str
    parameters: dict[str, Any]
    """What was asked: workload, its parameters, model, load, ``cache``."""
    runs: list[Figures] = field(default_factory=list)

    @property
    def cache(self) -> str | None:
        value: str | None = self.parameters.get("cache")
        return value


def read_groups(path: Path) -> list[Group]:
    """A file's runs, in the order in which each group begins. Raises ``ConfigError``."""
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


def parameters_of(run: Figures) -> dict[str, Any]:
    """What a line says was asked, how the cache was set among it."""
    return {key: value for key, value in run.items() if key not in MEASURED | ABOUT}


def _run(line: bytes, place: str) -> Figures:
    try:
        run: Figures = msgspec.json.decode(line, type=dict[str, Any])
        msgspec.convert(run, _Shape)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place} is not a run of `radixkv bench`: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{place} is not JSON: {error}") from None
    if all(metric.of(run) is None for metric in METRICS):
        raise ConfigError(f"{place} has none of a run's figures, such as {METRICS[0].key}; give another file")
    return run


class _CacheReport(msgspec.Struct):
    cache_hit_rate_pct: float | None = None


class _Environment(msgspec.Struct):
    processor: str | None = None
    cores: int | None = None
    gpu: str | None = None


_Shape = msgspec.defstruct(
    "_Shape",
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
"""What is read of a line, and of which types it is."""
