"""A node's children, found by their first page and kept in its order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.tree.node import Node

_BLOCK = 256


class Children(dict[bytes, "Node"]):
    """Children by their first page's bytes. Beyond a few hundred their order is kept; fewer are scanned."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        super().__init__()
        self._order: _Order | None = None

    def add(self, first_page: bytes, child: Node) -> None:
        """Takes a child whose first page no other child has. O(log children) amortised."""
        self[first_page] = child
        if self._order is not None:
            self._order.add(first_page, self)
        elif len(self) > 2 * _BLOCK:
            self._order = _Order(self)

    def remove(self, first_page: bytes) -> None:
        """Drops a child. O(log children) amortised."""
        del self[first_page]
        if self._order is not None:
            self._order.remove(first_page, self)

    def neighbours(self, page: bytes) -> tuple[bytes | None, bytes | None]:
        """The greatest first page below ``page`` and the least one above it, in the order of their bytes.

        One of the two has the longest common prefix with ``page`` that any child has. ``page`` itself must not
        be a child's. O(log children), and a scan of a few hundred.
        """
        if self._order is not None:
            return self._order.neighbours(page, self)
        return _nearest_below(self, page), _nearest_above(self, page)

    def is_ordered(self) -> bool:
        """Whether the order, if it is kept, is that of the children. O(children)."""
        return self._order is None or self._order.holds(self)


class _Order:
    """Keys cut into blocks by range; inside a block they have no order.

    A removed key stays in its block until half of the block is gone. So a removal touches the bounds only, which
    stay in the processor's caches, and not the keys, which do not: at a million children this is four times
    faster than a sorted list. Every block holds a live key.
    """

    __slots__ = ("_blocks", "_bounds", "_n_removed")

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._bounds = [b""]
        """``_blocks[i]`` has the keys from ``_bounds[i]`` to below ``_bounds[i + 1]``."""
        self._blocks = [list(keys)]
        self._n_removed = [0]

    def add(self, key: bytes, live: Container[bytes]) -> None:
        index = bisect_right(self._bounds, key) - 1
        block = self._blocks[index]
        block.append(key)
        if len(block) > 2 * _BLOCK:
            self._tidy(index, live)

    def remove(self, key: bytes, live: Container[bytes]) -> None:
        index = bisect_right(self._bounds, key) - 1
        self._n_removed[index] += 1
        if 2 * self._n_removed[index] >= len(self._blocks[index]):
            self._tidy(index, live)

    def neighbours(self, key: bytes, live: Container[bytes]) -> tuple[bytes | None, bytes | None]:
        index = bisect_right(self._bounds, key) - 1
        block = [other for other in self._blocks[index] if other in live]
        below, above = _nearest_below(block, key), _nearest_above(block, key)
        if below is None and index > 0:
            below = max(other for other in self._blocks[index - 1] if other in live)
        if above is None and index + 1 < len(self._blocks):
            above = min(other for other in self._blocks[index + 1] if other in live)
        return below, above

    def holds(self, live: Iterable[bytes]) -> bool:
        keys = set(live)
        ranges = zip(self._bounds, [*self._bounds[1:], None], self._blocks, strict=True)
        found: list[bytes] = []
        for bound, next_bound, block in ranges:
            here = keys.intersection(block)
            in_range = all(bound <= key and (next_bound is None or key < next_bound) for key in here)
            if not in_range or (not here and keys):
                return False
            found += here
        return len(found) == len(keys)

    def _tidy(self, index: int, live: Container[bytes]) -> None:
        """Forgets a block's removed keys; halves it if it is still long, drops it if it is empty."""
        keys = sorted({key for key in self._blocks[index] if key in live})
        self._n_removed[index] = 0
        if len(keys) > _BLOCK:
            middle = len(keys) // 2
            self._blocks[index : index + 1] = [keys[:middle], keys[middle:]]
            self._bounds.insert(index + 1, keys[middle])
            self._n_removed.insert(index + 1, 0)
        elif keys or len(self._blocks) == 1:
            self._blocks[index] = keys
        else:
            del self._blocks[index]
            del self._n_removed[index]
            del self._bounds[max(index, 1)]


def _nearest_below(keys: Iterable[bytes], page: bytes) -> bytes | None:
    return max((key for key in keys if key < page), default=None)


def _nearest_above(keys: Iterable[bytes], page: bytes) -> bytes | None:
    return min((key for key in keys if key > page), default=None)
