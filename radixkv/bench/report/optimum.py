"""Hits of an infinite, token-exact prefix cache."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence

RequestTokens = tuple[Sequence[int], Sequence[Sequence[int]]]
"""A request's token ids: its prompt, and the answer of each of its choices."""


def optimum_cached_tokens(requests: Sequence[RequestTokens]) -> list[int]:
    """Returns for each request the prompt tokens that an infinite cache would have.

    That is the longest common prefix of its prompt with an earlier request's prompt followed by one of its answers.
    It is at most the prompt's length less one, since one token of each prompt must be computed. An answer's last
    token is never computed and so never cached. The choices of a request share its prompt, which counts once.
    Cost: O(n log n) comparisons of whole requests.

    Args:
        requests: the requests in the order in which they were sent. Each counts as computed when the next is sent,
            so requests that were in flight together may share.
    """
    seen: list[bytes] = []
    counts: list[int] = []
    for prompt, answers in requests:
        ids = array("i", prompt).tobytes()
        index = bisect_left(seen, ids)
        neighbours = seen[max(index - 1, 0) : index + 1]  # one of these has the longest common prefix
        common = max((_common_bytes(ids, other) for other in neighbours), default=0) // 4
        counts.append(max(min(common, len(prompt) - 1), 0))
        for computed in {array("i", answer[:-1]).tobytes() for answer in answers} or {b""}:
            insort(seen, ids + computed)
    return counts


def _common_bytes(one: bytes, other: bytes) -> int:
    """Returns the length of the common prefix, by binary search."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
