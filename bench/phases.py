"""Workloads of token ids, which a Python file has as ``ALL``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Phases = Sequence[Sequence[tuple[list[int], int]]]
"""Requests that are asked together, phase after phase: token ids, and how many new tokens."""

Workloads = Mapping[str, Callable[..., Phases]]
"""By name; arguments make a workload smaller."""

TOKEN_WORKLOADS = Path(__file__).with_name("token_workloads.py")
"""The file of those that engines are compared by."""


def load_workloads(path: Path) -> Workloads:
    """``ALL`` of the file, which is run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{path} is no Python file"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    workloads: Workloads = module.ALL
    return workloads
