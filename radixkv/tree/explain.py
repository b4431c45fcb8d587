"""Explanation of a cache miss: why a match ended where it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from radixkv.tree.digest import Digest, RecentDigests, digest_at, namespace_digest
from radixkv.tree.neighbours import Neighbours, find_neighbours
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
    """Index of the first token that no cached sequence shares; None if no cached page continues the match, or if
    one has all tokens of the prompt."""
    common_below: int | None = None
    """Leading tokens that the next page shares with its lower neighbour in byte order; None without a neighbour."""
    common_above: int | None = None
    """Leading tokens that the next page shares with its upper neighbour in byte order; None without a neighbour."""
    cached_tokens: bytes = b""
    """Tokens of the neighbour that shares more, from ``first_difference`` to the end of its page."""
    namespace: Namespace | None = None
    """With ``other_namespace``: the namespace that has the longest prefix of the prompt cached."""
    n_tokens_elsewhere: int | None = None
    """With ``other_namespace``: the length of that prefix in tokens."""
    n_partial: int = 0
    """Leading tokens after the match that a computed page shares, whose KV a request can therefore copy."""

    @property
    def cached_token(self) -> int | None:
        """The first of ``cached_tokens``; None if there is none."""
        first = self.cached_tokens[:TOKEN_BYTES]
        return int.from_bytes(first, "little", signed=True) if first else None


def explain_match(
    roots: Mapping[Namespace, Node],
    namespace: Namespace,
    tokens: bytes,
    page_bytes: int,
    digest: Digest,
    evicted: RecentDigests,
    contents: bool,
    max_namespaces: int | None = None,
) -> Explanation:
    """Explains why the match of ``tokens`` in ``namespace`` ends where it does.

    O(edges + log children) and, once anything was evicted, a digest of each page without one. Then O(edges) for
    each other namespace, unless the reason is ``whole`` or ``evicted``.

    Args:
        roots: the root of each namespace.
        namespace: the prompt's.
        tokens: the prompt's, little-endian int32.
        page_bytes: bytes of one page's tokens.
        digest: the tree's digest function.
        evicted: digests of the first pages of recently evicted runs.
        contents: False withholds other namespaces, and everything that would let a client guess a cached page token
            by token: ``n_partial``, ``first_difference``, ``cached_tokens`` and the common lengths.
        max_namespaces: if there are more in all, other namespaces are ignored; None: no limit.
    """
    root = roots.get(namespace)
    path, end, partial, n_partial = ([], 0, None, 0) if root is None else walk(root, tokens, page_bytes)
    end += n_partial * page_bytes
    page = tokens[end : end + page_bytes]
    neighbours = Neighbours(None, None)
    if root is None:  # nothing cached, perhaps because all of it was evicted
        was_evicted = len(evicted) > 0 and digest(namespace_digest(digest, namespace), page) in evicted
    else:
        last = path[-1] if path else root
        node, n_pages = (last, len(last.pages)) if partial is None else (partial, n_partial)
        was_evicted = len(evicted) > 0 and digest(digest_at(digest, node, n_pages, page_bytes), page) in evicted
        if page:
            neighbours = find_neighbours(node, n_pages, page, page_bytes)

    below, above = neighbours
    nearest, source = neighbours.nearest, neighbours.nearest_computed
    reason: Reason = "never_seen" if nearest is None else "differs"
    if len(page) < page_bytes:
        reason = "whole"
    elif was_evicted:
        reason = "evicted"
    if not contents:
        return Explanation(reason, end // TOKEN_BYTES)
    elsewhere, n_elsewhere = None, None
    n_others = len(roots) - (root is not None)
    searches_others = n_others > 0 and (max_namespaces is None or len(roots) <= max_namespaces)
    if searches_others and reason in ("differs", "never_seen"):
        longest = _longest_elsewhere(roots, tokens, page_bytes, end)
        if longest is not None:
            reason = "other_namespace"
            elsewhere, n_elsewhere = longest
    differs = nearest is not None and nearest.n_common < len(page) // TOKEN_BYTES
    return Explanation(
        reason,
        end // TOKEN_BYTES,
        first_difference=end // TOKEN_BYTES + nearest.n_common if nearest is not None and differs else None,
        common_below=None if below is None else below.n_common,
        common_above=None if above is None else above.n_common,
        cached_tokens=nearest.tokens[TOKEN_BYTES * nearest.n_common :] if nearest is not None and differs else b"",
        namespace=elsewhere,
        n_tokens_elsewhere=n_elsewhere,
        n_partial=0 if source is None else source.n_common,
    )


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
