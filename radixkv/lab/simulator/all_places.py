"""The oracle of recurrent states: a state at each multiple of a block."""

from __future__ import annotations

from radixkv.runtime.request import Request
from radixkv.runtime.states.places import Places, Use


class AllPlaces(Places):
    """Keeps the state at each multiple of a block of each prompt, for a cache with a slot for each of its pages.

    No other choice of states finds more of a prompt in the same pages.

    Args:
        block_tokens: positions are multiples of it.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def choose(self, request: Request, start: int, end: int, n_in_tree: int) -> dict[int, Use]:
        """See ``Places.choose``. O(blocks of the row)."""
        block = self._block_tokens
        return dict.fromkeys(range(-(-start // block) * block, end + 1, block), Use.SHARED)
