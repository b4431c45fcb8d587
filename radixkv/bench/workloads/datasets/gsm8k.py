"""Reading of word problems in GSM8K's format."""

from __future__ import annotations

from pathlib import Path

import msgspec

from radixkv.bench.workloads.datasets.formats import PROBLEMS
from radixkv.bench.workloads.datasets.lines import Items, read_lines
from radixkv.bench.workloads.problems.problem import Problem


def read_problems(path: Path, *, skip_bad_lines: bool = False) -> Items[Problem]:
    """Reads a file with one ``{"question": text, "answer": text}`` in a line; ignores other fields.

    Raises:
        ConfigError: as ``read_lines``.
    """
    decoder = msgspec.json.Decoder(Problem)
    return read_lines(path, decoder.decode, expected=PROBLEMS, skip_bad_lines=skip_bad_lines)
