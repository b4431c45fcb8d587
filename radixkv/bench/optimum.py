"""What an infinite, token-exact cache could have saved."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence


def optimum_cached_tokens(requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> int:
    """Prompt tokens that were computed before, for an earlier request, summed over the requests in their order.

    Each counts the longest prefix that its prompt has in common with any earlier request's prompt and answer, at
    most its length less one: one token of each prompt must be computed. An answer's last token never is.
    O(n log n) comparisons of whole requests.

    Args:
        requests: a prompt and its answer each.
    """
    seen: list[bytes] = []
    total = 0
    for prompt, answer in requests:
        text = array("i", prompt).tobytes()
        place = bisect_left(seen, text)
        neighbours = seen[max(place - 1, 0) : place + 1]  # in sorted order, one of these two shares the most
        common = max((_common_bytes(text, other) for other in neighbours), default=0) // 4
        total += max(min(common, len(prompt) - 1), 0)
        insort(seen, text + array("i", answer[:-1]).tobytes())
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
