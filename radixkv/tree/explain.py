"""Explanation of a cache miss: why a match ended where it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from radixkv.tree.digest import Digest, RecentDigests, digest_at, namespace_digest
from radixkv.tree.node import TOKEN_BYTES, Namespace, Node, walk

Reason = Literal["whole", "differs", "evicted", "never_seen", "other_namespace"]


class Explanation(NamedTuple):
    """Why only ``n_tokens`` tokens of a prompt are cached."""

    reason: Reason
    """Why the match ended.

    - ``whole``: it did not; every whole page of the prompt is cached.
    - ``evicted``: the next page was cached until recently. Known by its 64-bit digest, so almost certain.
    - ``other_namespace``: another namespace has more of the prompt cached.
    - ``differs``: the cached pages that continue the match have other tokens.
    - ``never_seen``: no cached page continues the match.
    """
    n_tokens: int
    """Length of the match in tokens, in whole pages."""
    first_difference: int | None = None
    """Index of the first token that no cached sequence shares; None if no cached page continues the match."""
    common_below: int | None = None
    """Leading tokens that the next page shares with its lower neighbour in byte order; None without a neighbour."""
    common_above: int | None = None
    """Leading tokens that the next page shares with its upper neighbour in byte order; None without a neighbour."""
    cached_token: int | None = None
    """Token at ``first_difference`` of the neighbour that shares more tokens."""
    namespace: Namespace | None = None
    """With ``other_namespace``: the namespace that has the longest prefix of the prompt cached."""
    n_tokens_elsewhere: int | None = None
    """With ``other_namespace``: the length of that prefix in tokens."""


def explain_match(
    roots: Mapping[Namespace, Node],
    namespace: Namespace,
    tokens: bytes,
    page_bytes: int,
    digest: Digest,
    evicted: RecentDigests,
    contents: bool,
) -> Explanation:
    """Explains why the match of ``tokens`` in ``namespace`` ends where it does.

    O(edges + log children) and a digest of each page without one. Then O(edges) for each other namespace, unless
    the reason is ``whole`` or ``evicted``.

    Args:
        roots: the root of each namespace.
        namespace: the prompt's.
        tokens: the prompt's, little-endian int32.
        page_bytes: bytes of one page's tokens.
        digest: the tree's digest function.
        evicted: digests of the first pages of recently evicted runs.
        contents: False withholds other namespaces, and everything that would let a client guess a cached page token
            by token: ``first_difference``, ``cached_token`` and the common lengths.
    """
    root = roots.get(namespace)
    path, end, partial, n_partial = ([], 0, None, 0) if root is None else walk(root, tokens, page_bytes)
    end += n_partial * page_bytes
    page = tokens[end : end + page_bytes]
    if len(page) < page_bytes:
        return Explanation("whole", end // TOKEN_BYTES)

    below, above = None, None
    if root is None:  # nothing cached, perhaps because all of it was evicted
        parent_digest = namespace_digest(digest, namespace)
    else:
        last = path[-1] if path else root
        node, n_pages = (last, len(last.pages)) if partial is None else (partial, n_partial)
        parent_digest = digest_at(digest, node, n_pages, page_bytes)
        below, above = _neighbours(last, partial, n_partial, page)
    was_evicted = digest(parent_digest, page) in evicted
    neighbours = [(_common_tokens(page, other), other) for other in (below, above) if other is not None]
    reason: Reason = "differs" if neighbours else "never_seen"
    if not contents:
        return Explanation("evicted" if was_evicted else reason, end // TOKEN_BYTES)
    elsewhere, n_elsewhere = None, None
    if was_evicted:
        reason = "evicted"
    elif (longest := _longest_elsewhere(roots, tokens, page_bytes, end)) is not None:
        reason = "other_namespace"
        elsewhere, n_elsewhere = longest
    n_nearest, nearest = max(neighbours, default=(0, b""))
    return Explanation(
        reason,
        end // TOKEN_BYTES,
        first_difference=end // TOKEN_BYTES + n_nearest if neighbours else None,
        common_below=None if below is None else _common_tokens(page, below),
        common_above=None if above is None else _common_tokens(page, above),
        cached_token=_token_at(nearest, n_nearest) if neighbours else None,
        namespace=elsewhere,
        n_tokens_elsewhere=n_elsewhere,
    )


def _neighbours(last: Node, partial: Node | None, n_partial: int, page: bytes) -> tuple[bytes | None, bytes | None]:
    """Returns the cached pages below and above ``page``, in byte order, among those that continue the match."""
    if partial is not None:
        following = bytes(partial.key[n_partial * len(page) : (n_partial + 1) * len(page)])
        return (following, None) if following < page else (None, following)
    return (None, None) if last.children is None else last.children.neighbours(page)


def _longest_elsewhere(
    roots: Mapping[Namespace, Node], tokens: bytes, page_bytes: int, longest: int
) -> tuple[Namespace, int] | None:
    """Returns the namespace with the longest match and its tokens; None if no match exceeds ``longest`` bytes."""
    match = None
    for namespace, root in roots.items():
        _, end, _, n_partial = walk(root, tokens, page_bytes)
        if end + n_partial * page_bytes > longest:
            longest = end + n_partial * page_bytes
            match = namespace, longest // TOKEN_BYTES
    return match


def _token_at(page: bytes, index: int) -> int:
    return int.from_bytes(page[TOKEN_BYTES * index : TOKEN_BYTES * (index + 1)], "little", signed=True)


def _common_tokens(page: bytes, other: bytes) -> int:
    """Returns how many leading tokens two pages have in common."""
    starts = range(0, len(page), TOKEN_BYTES)
    differing = (
        start for start in starts if page[start : start + TOKEN_BYTES] != other[start : start + TOKEN_BYTES]
    )
    return next(differing, len(page)) // TOKEN_BYTES
