"""The record of a prompt's positions while it is computed, from which its ``wire.cache_use.CacheUse`` is
counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, TypeAlias

from radixkv.wire.cache_use import CacheUse

Source: TypeAlias = Literal["computed", "copied", "loaded", "fetched", "shared", "added"]
"""What happened to positions of a prompt: a row computed them, a part of a page was copied, the host tier or the
stores behind it gave them, among these one that servers share, or their pages entered the tree with the request."""
_Range: TypeAlias = tuple[int, int]


class CacheUseRecord:
    """Collects what happens to a prompt's positions before its first output token, and then counts them once.

    A preempted request may compute positions that were loaded or copied for it before, and load others again: what
    a row has computed counts as computed, and what was both loaded and copied as loaded.

    Args:
        counted: the count, if it is known from the beginning: nothing for a choice that follows another one.
    """

    __slots__ = ("_ranges", "counted")

    def __init__(self, counted: CacheUse | None = None) -> None:
        self.counted = counted
        """None until the prompt is computed."""
        self._ranges: defaultdict[Source, list[_Range]] = defaultdict(list)

    def note(self, source: Source, first: int, last: int) -> None:
        """Notes that positions ``first .. last - 1`` have this source. Does nothing after the count. O(1)."""
        if self.counted is None:
            self._ranges[source].append((first, last))

    def count(self, n_prompt: int) -> None:
        """Counts the positions of a prompt of ``n_prompt`` tokens. O(ranges · log ranges)."""
        ranges = self._ranges
        computed, loaded = ranges["computed"], ranges["loaded"]
        n_computed = _n_positions(computed)
        n_loaded = _n_positions(computed + loaded) - n_computed if loaded else 0
        n_fetched = min(n_loaded, _n_positions(computed + ranges["fetched"]) - n_computed) if n_loaded else 0
        n_shared = min(n_fetched, _n_positions(computed + ranges["shared"]) - n_computed) if n_fetched else 0
        copied, n_copied = ranges["copied"], 0
        if copied:
            n_copied = _n_positions(computed + loaded + copied) - n_computed - n_loaded
        self.counted = CacheUse(
            n_prompt - n_computed,
            n_copied,
            n_loaded,
            n_fetched,
            n_added=_n_positions(ranges["added"]),
            n_shared=n_shared,
        )
        ranges.clear()


def _n_positions(ranges: Sequence[_Range]) -> int:
    """Returns the number of positions in half-open ranges, which may overlap. O(ranges · log ranges)."""
    n_positions = end = 0
    for first, last in sorted(ranges):
        n_positions += max(0, last - max(first, end))
        end = max(end, last)
    return n_positions
