"""Loading of token workloads from a Python file with ``ALL``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Phases = Sequence[Sequence[tuple[list[int], int]]]
"""A workload: phases of requests that are sent together, each as token ids and a number of new tokens."""

Workloads = Mapping[str, Callable[..., Phases]]
"""Functions that generate workloads, by name; their arguments are sizes."""

TOKEN_WORKLOADS = Path(__file__).with_name("token_workloads.py")
"""The file of the workloads that engines are compared by."""


def load_workloads(path: Path) -> Workloads:
    """Runs the Python file and returns its ``ALL``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{path} is not a Python file"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    workloads: Workloads = module.ALL
    return workloads
