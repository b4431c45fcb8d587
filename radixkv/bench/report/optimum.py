"""What an infinite, token-exact cache could have saved."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence

Asked = tuple[Sequence[int], Sequence[Sequence[int]]]
"""A request's token ids: its prompt, and the answer of each of its choices."""


def optimum_cached_tokens(requests: Sequence[Asked]) -> list[int]:
    """For each request, the prompt tokens that were computed before, for an earlier one.

    That is the longest prefix which its prompt has in common with any earlier request's prompt and one of its
    answers, at most the prompt's length less one: one token of each prompt must be computed. An answer's last
    token never is. The choices of a request share its prompt, which counts once. O(n log n) comparisons of whole
    requests.

    Args:
        requests: in the order in which they were sent. Each is taken to be all computed when the next is sent, so
            that what is in flight together may share.
    """
    seen: list[bytes] = []
    counts: list[int] = []
    for prompt, answers in requests:
        text = array("i", prompt).tobytes()
        place = bisect_left(seen, text)
        neighbours = seen[max(place - 1, 0) : place + 1]  # in sorted order, one of these two shares the most
        common = max((_common_bytes(text, other) for other in neighbours), default=0) // 4
        counts.append(max(min(common, len(prompt) - 1), 0))
        for computed in {array("i", answer[:-1]).tobytes() for answer in answers} or {b""}:
            insort(seen, text + computed)
    return counts


def _common_bytes(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
