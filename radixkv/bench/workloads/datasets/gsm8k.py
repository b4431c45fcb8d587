"""Word problems in GSM8K's format."""

from __future__ import annotations

from pathlib import Path

import msgspec

from radixkv.bench.workloads.datasets.formats import PROBLEMS
from radixkv.bench.workloads.datasets.lines import Items, read_lines
from radixkv.bench.workloads.problems.problem import Problem


def read_problems(path: Path, *, skip_bad_lines: bool = False) -> Items[Problem]:
    """The problems of a file of ``{"question": text, "answer": text}`` a line; other fields are ignored.

    Raises:
        ConfigError: as ``read_lines``.
    """
    decoder = msgspec.json.Decoder(Problem)
    return read_lines(path, decoder.decode, wanted=PROBLEMS, skip_bad_lines=skip_bad_lines)
