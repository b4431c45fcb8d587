"""What an infinite, token-exact cache could have saved."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence


def optimum_cached_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Prompt tokens that some earlier prompt already began with, summed over the prompts in their order.

    Each counts its longest common prefix with any earlier prompt, at most its length less one: one token of each
    prompt must be computed. Answers do not count as seen. O(n log n) comparisons of whole prompts.
    """
    seen: list[bytes] = []
    total = 0
    for prompt in prompts:
        text = array("i", prompt).tobytes()
        place = bisect_left(seen, text)
        neighbours = seen[max(place - 1, 0) : place + 1]  # in sorted order, one of these two shares the most
        common = max((_common_bytes(text, other) for other in neighbours), default=0) // 4
        total += max(min(common, len(prompt) - 1), 0)
        seen.insert(place, text)
    return total


def _common_bytes(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
