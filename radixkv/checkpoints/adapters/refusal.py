"""Errors of adapters that cannot be served."""

from __future__ import annotations

from pathlib import Path

from radixkv.errors import CheckpointError, shortened


def refusal(path: Path, field: str, value: object, advice: str) -> CheckpointError:
    """Returns the error of a field of ``adapter_config.json``.

    Args:
        path: of the file.
        field: name of the field.
        value: of the field.
        advice: why the adapter cannot be served, and what to do.
    """
    return CheckpointError(f"{path}: {field} is {shortened(value)}; {advice}")
