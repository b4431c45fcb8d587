"""Python's garbage collector, kept from stopping a client in the middle of a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30


@contextmanager
def young_collections_only() -> Iterator[None]:
    """While it lasts, what is there by now is not looked at, and what has survived two collections neither.

    A whole collection of a process that has imported this package takes tens of milliseconds, in which nothing is
    stamped.
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
