"""Why a match ended where it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from radixkv.tree.digest import Digest, RecentDigests, digest_at, namespace_digest
from radixkv.tree.node import Namespace, Node, walk

Reason = Literal["whole", "differs", "evicted", "never_seen", "other_namespace"]


class Explanation(NamedTuple):
    """The answer to: why were only ``n_tokens`` of these tokens cached?"""

    reason: Reason
    """``whole``: all whole pages are cached. ``evicted``: the next page was, not long ago (told by its digest, so
    almost surely). ``other_namespace``: another namespace caches more. ``differs``: other pages follow here.
    ``never_seen``: nothing follows here.
    """
    n_tokens: int
    first_difference: int | None = None
    """Index of the first token that no cached sequence has; None unless other pages follow where the match ended.
    """
    common_below: int | None = None
    """Tokens that the next page has in common with the nearest cached page below it in the order of their bytes;
    None if there is none."""
    common_above: int | None = None
    cached_token: int | None = None
    """What the nearer of the two has at ``first_difference``."""
    namespace: Namespace | None = None
    """Of ``other_namespace``: the one that caches most,"""
    n_tokens_elsewhere: int | None = None
    """and how much that is."""


def explain_match(
    roots: Mapping[Namespace, Node],
    namespace: Namespace,
    tokens: bytes,
    width: int,
    digest: Digest,
    evicted: RecentDigests,
    contents: bool,
) -> Explanation:
    """Why the match of ``tokens`` in ``namespace`` ends; ``width`` is a page's bytes.

    O(edges + log children) and a digest of each page not digested before, then O(edges) for each other namespace
    unless the answer is ``whole`` or ``evicted``.

    Without ``contents`` there is no place and no token of a cached page, by which the page could be guessed token
    by token, and nothing of other namespaces.
    """
    root = roots.get(namespace)
    path, end, partial, n_partial = ([], 0, None, 0) if root is None else walk(root, tokens, width)
    end += n_partial * width
    page = tokens[end : end + width]
    if len(page) < width:
        return Explanation("whole", end // 4)

    below, above = None, None
    if root is None:  # also if all that the namespace had was evicted
        before = namespace_digest(digest, namespace)
    else:
        last = path[-1] if path else root
        at, n_pages = (last, len(last.pages)) if partial is None else (partial, n_partial)
        before = digest_at(digest, at, n_pages, width)
        below, above = _neighbours(last, partial, n_partial, page)
    was_evicted = digest(before, page) in evicted
    commons = [(_common_tokens(page, other), other) for other in (below, above) if other is not None]
    reason: Reason = "differs" if commons else "never_seen"
    if not contents:
        return Explanation("evicted" if was_evicted else reason, end // 4)
    elsewhere, n_elsewhere = None, None
    if was_evicted:
        reason = "evicted"
    elif (longest := _longest_elsewhere(roots, tokens, width, end)) is not None:
        reason = "other_namespace"
        elsewhere, n_elsewhere = longest
    common, nearest = max(commons, default=(0, b""))
    return Explanation(
        reason,
        end // 4,
        first_difference=end // 4 + common if commons else None,
        common_below=None if below is None else _common_tokens(page, below),
        common_above=None if above is None else _common_tokens(page, above),
        cached_token=_token_at(nearest, common) if commons else None,
        namespace=elsewhere,
        n_tokens_elsewhere=n_elsewhere,
    )


def _neighbours(last: Node, partial: Node | None, n_partial: int, page: bytes) -> tuple[bytes | None, bytes | None]:
    """The cached pages below and above ``page`` where the match ended."""
    if partial is not None:
        only = bytes(partial.key[n_partial * len(page) : (n_partial + 1) * len(page)])
        return (only, None) if only < page else (None, only)
    return (None, None) if last.children is None else last.children.neighbours(page)


def _longest_elsewhere(
    roots: Mapping[Namespace, Node], tokens: bytes, width: int, longest: int
) -> tuple[Namespace, int] | None:
    """The namespace that caches most of the tokens, and how many, if that is more than ``longest`` bytes."""
    found = None
    for namespace, root in roots.items():
        _, end, _, n_partial = walk(root, tokens, width)
        if end + n_partial * width > longest:
            longest = end + n_partial * width
            found = namespace, longest // 4
    return found


def _token_at(page: bytes, place: int) -> int:
    return int.from_bytes(page[4 * place : 4 * place + 4], "little", signed=True)


def _common_tokens(page: bytes, other: bytes) -> int:
    differing = (at for at in range(0, len(page), 4) if page[at : at + 4] != other[at : at + 4])
    return next(differing, len(page)) // 4
