"""``radixkv simulate`` in this process."""

from __future__ import annotations

from radixkv.cli import main


def simulate(*flags: object) -> int:
    """Runs the command; returns its exit status."""
    return main(["simulate", *map(str, flags)])
