"""Garbage collection settings of a measured run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30
"""A threshold that is not reached."""


@contextmanager
def young_collections_only() -> Iterator[None]:
    """Context in which existing objects and the oldest generation are not collected.

    A full collection takes tens of milliseconds in a process that has imported this package, and no time stamps are
    taken meanwhile.
    """
    first, second, third = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(first, second, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(first, second, third)
        gc.unfreeze()
