"""Mutants of the radix tree that several tests must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.tree.forest import Forest


def after_each_split(patch: pytest.MonkeyPatch, change: Callable[[Any, Any], None]) -> None:
    """Changes the nodes above and below each split of the tree, in this order."""

    def split(self: Forest, lower: Any, n_pages: int) -> Any:
        upper = original(self, lower, n_pages)
        change(upper, lower)
        return upper

    original = Forest.split
    patch.setattr(Forest, "split", split)
