"""Child map of a radix tree node that finds the neighbours of a missing key."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Sequence
from typing import TypeVar

_BUCKET_SIZE = 16

_Child = TypeVar("_Child")


class Children(dict[bytes, _Child]):
    """Maps a child's first page (the bytes of its tokens) to the child.

    Up to 32 children ``neighbours`` scans the dictionary; beyond that an index of ordered buckets is kept. See
    docs/decisions/0004-order-of-children.md.
    """

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        super().__init__()
        self._buckets: _Buckets | None = None

    def add(self, first_page: bytes, child: _Child) -> None:
        """Adds a child; no other child may have the same first page. O(log children) amortised."""
        self[first_page] = child
        if self._buckets is not None:
            self._buckets.add(first_page, self)
        elif len(self) > 2 * _BUCKET_SIZE:
            self._buckets = _Buckets(self)

    def remove(self, first_page: bytes) -> None:
        """Removes a child. O(log children) amortised."""
        del self[first_page]
        if self._buckets is not None:
            self._buckets.remove(first_page, self)

    def neighbours(self, page: bytes) -> tuple[bytes | None, bytes | None]:
        """Returns the greatest first page below ``page`` and the smallest one above it, in byte order.

        No child shares a longer prefix with ``page`` than the better of these two. ``page`` itself must not be a
        key. O(log children).
        """
        if self._buckets is not None:
            return self._buckets.neighbours(page, self)
        return _nearest_below(self, page), _nearest_above(self, page)

    def is_ordered(self) -> bool:
        """Returns whether the buckets, if there are any, are consistent with the children. O(children)."""
        return self._buckets is None or self._buckets.covers(self)


class _Buckets:
    """Keys partitioned by range into sorted buckets.

    A removed key stays in its bucket until half of the bucket's keys are removed ones. A removal therefore touches
    only the lower bounds, which fit the processor's caches, and not the keys, which do not: four times faster than
    a sorted list at a million children. Every bucket contains at least one current key.

    The methods take the current keys as ``live``; all other keys in the buckets count as removed.
    """

    __slots__ = ("_buckets", "_lower_bounds", "_n_removed")

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._lower_bounds = [b""]
        """``_buckets[i]`` contains the keys from ``_lower_bounds[i]`` to below ``_lower_bounds[i + 1]``."""
        self._buckets = [sorted(keys)]
        self._n_removed = [0]
        """Removed keys that are still in each bucket."""

    def add(self, key: bytes, live: Container[bytes]) -> None:
        index = bisect_right(self._lower_bounds, key) - 1
        bucket = self._buckets[index]
        insort(bucket, key)
        if len(bucket) > 2 * _BUCKET_SIZE:
            self._rebalance(index, live)

    def remove(self, key: bytes, live: Container[bytes]) -> None:
        index = bisect_right(self._lower_bounds, key) - 1
        self._n_removed[index] += 1
        if 2 * self._n_removed[index] >= len(self._buckets[index]):
            self._rebalance(index, live)

    def neighbours(self, key: bytes, live: Container[bytes]) -> tuple[bytes | None, bytes | None]:
        index = bisect_right(self._lower_bounds, key) - 1
        bucket = self._buckets[index]
        position = bisect_left(bucket, key)
        below, above = _last_of(bucket[:position], live), _first_of(bucket[position:], live)
        if below is None and index > 0:
            below = _last_of(self._buckets[index - 1], live)
        if above is None and index + 1 < len(self._buckets):
            above = _first_of(self._buckets[index + 1], live)
        return below, above

    def covers(self, live: Iterable[bytes]) -> bool:
        """Returns whether every live key is in the bucket of its range, and no bucket is without one."""
        keys = set(live)
        ranges = zip(self._lower_bounds, [*self._lower_bounds[1:], None], self._buckets, strict=True)
        covered: list[bytes] = []
        for lower_bound, upper_bound, bucket in ranges:
            in_bucket = keys.intersection(bucket)
            in_range = all(lower_bound <= key and (upper_bound is None or key < upper_bound) for key in in_bucket)
            if not in_range or (not in_bucket and keys):
                return False
            covered += in_bucket
        return len(covered) == len(keys)

    def _rebalance(self, index: int, live: Container[bytes]) -> None:
        """Drops a bucket's removed keys; splits the bucket if it is still too long, deletes it if it is empty."""
        keys = sorted({key for key in self._buckets[index] if key in live})
        self._n_removed[index] = 0
        if len(keys) > _BUCKET_SIZE:
            middle = len(keys) // 2
            self._buckets[index : index + 1] = [keys[:middle], keys[middle:]]
            self._lower_bounds.insert(index + 1, keys[middle])
            self._n_removed.insert(index + 1, 0)
        elif keys or len(self._buckets) == 1:
            self._buckets[index] = keys
        else:
            del self._buckets[index]
            del self._n_removed[index]
            del self._lower_bounds[max(index, 1)]


def _last_of(keys: Sequence[bytes], live: Container[bytes]) -> bytes | None:
    return next((key for key in reversed(keys) if key in live), None)


def _first_of(keys: Iterable[bytes], live: Container[bytes]) -> bytes | None:
    return next((key for key in keys if key in live), None)


def _nearest_below(keys: Iterable[bytes], page: bytes) -> bytes | None:
    return max((key for key in keys if key < page), default=None)


def _nearest_above(keys: Iterable[bytes], page: bytes) -> bytes | None:
    return min((key for key in keys if key > page), default=None)
