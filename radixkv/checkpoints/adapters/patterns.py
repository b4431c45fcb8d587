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
    lines = _answers(json.dumps(task).encode(), path)
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
            f"to match it with the names of modules takes more than {_CPU_S} s or {_BYTES >> 20} MiB; write a "
            "simpler pattern, or list the names",
        )
    return [*found]


def _answers(task: bytes, path: Path) -> list[str | list[tuple[int, str]]]:
    """Returns what the process has written until it ended."""
    command = [sys.executable, "-I", "-S", str(_PROGRAM)]
    try:
        output = subprocess.run(
            command, input=task, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_WAIT_S, check=False
        ).stdout
    except subprocess.TimeoutExpired as error:
        output = error.output or b""
    except OSError as error:
        raise CheckpointError(
            f"{path} has patterns, and no process can be started that matches them: {error}; load the adapter "
            "again later"
        ) from error
    complete, _, _ = output.rpartition(b"\n")
    return [json.loads(line) for line in complete.splitlines()]
