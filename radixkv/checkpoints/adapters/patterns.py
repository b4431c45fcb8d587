"""Regular expressions of an adapter, matched in a process of their own, which is ended if they take too long.

Python's ``re`` has PEFT's semantics, but some patterns take it longer than the universe is old, and no other thread
of the process runs meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from radixkv.checkpoints.adapters.refusal import refusal
from radixkv.errors import CheckpointError

_CPU_S = 5
"""How long the processor may take to match all patterns of an adapter. Real ones take it milliseconds."""
_WAIT_S = 60
"""How long to wait for that at most, on a busy machine."""
_BYTES = 1 << 30
"""Most memory that the process may have."""
_PROGRAM = Path(__file__).with_name("pattern_process.py")


class Pattern(NamedTuple):
    """A regular expression, which may not be one."""

    text: str
    kind: Literal["whole", "begin", "index"]
    """Whether it matches whole names, beginnings of names, or beginnings with a group ``index``."""
    field: str
    """Of ``adapter_config.json``, for errors."""
    value: object
    """What the field has."""


class Match(NamedTuple):
    """The first pattern of a group that matches a name."""

    number: int
    """In its group."""
    layer: str
    """The index of a layer, which its group ``index`` has matched; empty without one."""


def first_matches(
    groups: Sequence[Sequence[Pattern]], names: Sequence[str], path: Path
) -> list[Mapping[str, Match]]:
    """Returns for each group the names that one of its patterns matches.

    Args:
        groups: patterns, of which the first that matches decides.
        names: those to match, without duplicates.
        path: of the adapter's file, for errors.

    Raises:
        CheckpointError: a pattern is no regular expression, or takes too long; names its field and the pattern.

    Cost: a process of 30 ms, unless there is no pattern. Other threads run meanwhile.
    """
    patterns = [(group, number, one) for group, some in enumerate(groups) for number, one in enumerate(some)]
    found: list[dict[str, Match]] = [{} for _ in groups]
    if not patterns or not names:
        return [*found]
    task = {
        "names": names,
        "groups": [[(one.text, one.kind) for one in group] for group in groups],
        "cpu_s": _CPU_S,
        "bytes": _BYTES,
    }
    lines, limit = _answers(json.dumps(task).encode(), path)
    for line, (group, number, pattern) in zip(lines, patterns, strict=False):
        if isinstance(line, str):
            raise refusal(path, pattern.field, pattern.value, f"it is not a regular expression: {line}; correct it")
        for place, index in line:
            found[group][names[place]] = Match(number, index)
    if len(lines) < len(patterns):
        _, _, pattern = patterns[len(lines)]
        raise refusal(
            path,
            pattern.field,
            pattern.value,
            f"to match it with the names of modules takes more than {limit}; write a simpler pattern, or list the "
            "names",
        )
    return [*found]


def _answers(task: bytes, path: Path) -> tuple[list[str | list[tuple[int, str]]], str]:
    """Returns what the process has written until it ended, and the limit that has ended it, if one has."""
    command = [sys.executable, "-I", "-S", str(_PROGRAM)]
    try:
        process = subprocess.run(
            command, input=task, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_WAIT_S, check=False
        )
        output, is_slow = process.stdout, process.returncode < 0  # a signal ends it when its time is over
    except subprocess.TimeoutExpired as error:
        output, is_slow = error.output or b"", True
    except OSError as error:
        raise CheckpointError(
            f"{path} has patterns, and no process can be started that matches them: {error}; load the adapter "
            "again later"
        ) from error
    complete, _, _ = output.rpartition(b"\n")
    limit = f"{_CPU_S} s" if is_slow else f"{_BYTES >> 20} MiB of memory"
    return [json.loads(line) for line in complete.splitlines()], limit
