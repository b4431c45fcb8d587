"""Explanation of a cache miss: why a match ended where it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from radixkv.tree.digest import chained_xxh3_64, digest_at, namespace_digest
from radixkv.tree.history import Departure, PageHistory
from radixkv.tree.marks import Marks
from radixkv.tree.neighbours import Neighbour, Neighbours, find_neighbours
from radixkv.tree.node import TOKEN_BYTES, Namespace, Node, walk

Reason = Literal[
    "whole",
    "differs",
    "evicted",
    "never_seen",
    "evicted_or_never_seen",
    "other_namespace",
    "invocation",
    "no_state",
]

_MIN_SAME_TOKENS = 16
"""Consecutive tokens, at least a page, that a prompt has in common with a cached sequence behind a difference if it
comes back to it: more than the marks of a chat template."""
_MAX_COMPARED_TOKENS = 2048
"""Tokens behind a difference that are compared, on each side."""
_MAX_SAMPLES = 32
"""Most runs of ``_MIN_SAME_TOKENS`` of the prompt that are looked for."""


class Explanation(NamedTuple):
    """Why only ``n_tokens`` tokens of a prompt are cached."""

    reason: Reason
    """Why the match ended.

    - ``whole``: it did not; every whole page of the prompt is cached, and the state, if any is needed, at the last
      place from which it can go on.
    - ``evicted``: the next page was cached and has been evicted. Known by its digest, so almost certain.
    - ``other_namespace``: another namespace has more of the prompt cached.
    - ``differs``: the cached pages that continue the match have other tokens, and the next page was never cached.
    - ``never_seen``: no cached page continues the match, and the next page was never cached; or it was dropped on
      request, which ``PageHistory`` calls dropped.
    - ``evicted_or_never_seen``: ``PageHistory`` may have forgotten the next page.
    - ``invocation``: the cache goes on with the same token, but an activated LoRA acts from it on in one of both
      and not in the other: its invocation has moved, as in the next turn, or it is another adapter.
    - ``no_state``: the match goes on where a state of recurrent layers, or a window tail, could be, and is not. Up
      to a block is lost at the end of any match, because states are kept at multiples of a block.
    """
    n_tokens: int
    """Length of the match in tokens, in whole pages."""
    first_difference: int | None = None
    """Index of the first token that no cached sequence shares; None if no cached page continues the match, if one
    has all tokens of the prompt, or if only what computes them differs."""
    common_below: int | None = None
    """Leading tokens that the next page shares with its lower neighbour in byte order; None without a neighbour."""
    common_above: int | None = None
    """Leading tokens that the next page shares with its upper neighbour in byte order; None without a neighbour."""
    cached_tokens: bytes = b""
    """Tokens of the neighbour that shares more, from ``first_difference`` to the end of its page."""
    namespace: Namespace | None = None
    """With ``other_namespace``: the namespace that has the longest prefix of the prompt cached. Activated LoRAs
    count as namespaces of their own."""
    n_tokens_elsewhere: int | None = None
    """With ``other_namespace``: the length of that prefix in tokens. With ``invocation``: that of the longest
    prefix that is cached with an earlier invocation of the same adapter, if it is longer than the match."""
    adapter_elsewhere: str | None = None
    """With ``other_namespace``: digest of the adapter, empty for none, if that is all that differs. With
    ``invocation``: that of the cached page, if it is another one."""
    n_partial: int = 0
    """Leading tokens after the match that a computed page shares, whose KV a request can therefore copy."""
    comes_back: bool = False
    """Whether prompt and cache have the same text again after their first difference. If so, that difference alone
    prevents more hits. Found if a page of it or more is the same near the difference."""
    n_without_state: int = 0
    """With ``no_state`` and ``whole``: the tokens of the pages that match after ``n_tokens``."""

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
    history: PageHistory,
    marks: Marks,
    *,
    contents: bool,
    max_namespaces: int | None = None,
) -> Explanation:
    """Explains why the match of ``tokens`` in ``namespace`` ends where it does.

    O(edges + log children) and, once anything has left the tree, a digest of each page without one. Where the
    prompt may differ from the cache, a search in some thousand tokens, and O(edges) for each other namespace.

    Args:
        roots: the root of each namespace.
        namespace: the prompt's.
        tokens: the prompt's key, little-endian int32.
        page_bytes: bytes of one page's tokens.
        history: the pages that have left the tree.
        marks: those in keys. The keys that a prompt has with other adapters count as other namespaces.
        contents: False withholds other namespaces, and everything that would let a client guess a cached page token
            by token: ``n_partial``, ``first_difference``, ``cached_tokens`` and the common lengths; and
            ``comes_back``.
        max_namespaces: if there are more in all, other namespaces are ignored; None: no limit.
    """
    root = roots.get(namespace)
    path, end, partial, n_partial = ([], 0, None, 0) if root is None else walk(root, tokens, page_bytes)
    end += n_partial * page_bytes
    page = tokens[end : end + page_bytes]
    neighbours = Neighbours(None, None)
    departure: Departure | None = None
    if root is None:  # nothing cached, perhaps because all of it has left
        if not history.is_empty:
            departure = history.departure(chained_xxh3_64(namespace_digest(namespace), page))
    else:
        last = path[-1] if path else root
        node, n_pages = (last, len(last.pages)) if partial is None else (partial, n_partial)
        if not history.is_empty:
            departure = history.departure(chained_xxh3_64(digest_at(node, n_pages, page_bytes), page))
        if page:
            neighbours = find_neighbours(node, n_pages, page, page_bytes)

    below, above = neighbours
    nearest, source = neighbours.nearest, neighbours.nearest_computed
    differs = nearest is not None and nearest.n_common < len(page) // TOKEN_BYTES
    cached_tokens = b"" if nearest is None or not differs else nearest.tokens[TOKEN_BYTES * nearest.n_common :]
    reason: Reason
    if len(page) < page_bytes:
        reason = "whole"
    elif departure == "evicted":
        reason = "evicted"
    elif departure == "forgotten":
        reason = "evicted_or_never_seen"
    else:
        reason = "never_seen" if nearest is None or departure == "dropped" else "differs"
    if not contents:
        return Explanation(reason, end // TOKEN_BYTES)
    own = _with_adapter(namespace, tokens, marks)
    elsewhere, n_elsewhere, adapter_elsewhere = None, None, None
    n_common = 0 if nearest is None else nearest.n_common
    if differs and _are_same_tokens(page[TOKEN_BYTES * n_common :], cached_tokens, marks):
        differs = False
        if reason == "differs":
            reason = "invocation"
            adapter = _with_adapter(namespace, cached_tokens[:TOKEN_BYTES], marks).adapter
            adapter_elsewhere = None if adapter == own.adapter else adapter
    comes_back = reason in ("differs", "evicted_or_never_seen") and any(
        _comes_back(tokens[end:], neighbour, page_bytes) for neighbour in neighbours if neighbour is not None
    )
    n_others = len(roots) - (root is not None) + len(marks)
    searches_others = n_others > 0 and (max_namespaces is None or len(roots) + len(marks) <= max_namespaces)
    if searches_others and reason in ("differs", "never_seen", "evicted_or_never_seen", "invocation"):
        longest = _longest_elsewhere(roots, own, tokens, page_bytes, end, marks)
        if longest is not None:
            elsewhere, n_elsewhere = longest
            reason = "invocation" if elsewhere == own else "other_namespace"
            adapter_elsewhere = elsewhere.adapter if own.differs_in_adapter(elsewhere) else None
    return Explanation(
        reason,
        end // TOKEN_BYTES,
        first_difference=end // TOKEN_BYTES + n_common if differs else None,
        common_below=None if below is None else below.n_common,
        common_above=None if above is None else above.n_common,
        cached_tokens=marks.tokens(cached_tokens) if differs else b"",
        namespace=elsewhere,
        n_tokens_elsewhere=n_elsewhere,
        adapter_elsewhere=adapter_elsewhere,
        n_partial=0 if source is None else source.n_common,
        comes_back=comes_back,
    )


def explain_state(explanation: Explanation, n_tokens: int, n_prompt: int, block_tokens: int) -> Explanation:
    """Returns the explanation of a match that ends at a state, after ``n_tokens``. O(1).

    Args:
        explanation: of the match of pages.
        n_tokens: position of the state; 0 without one.
        n_prompt: tokens of the prompt, the last of which is always computed.
        block_tokens: positions of states are multiples of it. If at most so many tokens match after the state, what
            follows them is why the match ends, not the state; in a prompt of which all matches, if the next state
            would be behind it.
    """
    n_without = explanation.n_tokens - n_tokens
    explanation = explanation._replace(n_tokens=n_tokens, n_partial=0)
    is_whole = explanation.reason == "whole"
    lacks_state = n_tokens + block_tokens < n_prompt if is_whole else n_without > block_tokens
    if lacks_state:
        return explanation._replace(reason="no_state", n_without_state=n_without)
    return explanation._replace(n_without_state=n_without) if is_whole else explanation


def _comes_back(rest: bytes, neighbour: Neighbour, page_bytes: int) -> bool:
    """Returns whether a prompt has text behind its first difference that follows there in the cache, too.

    Args:
        rest: the prompt's tokens after the match.
        neighbour: the cached page after the match.
        page_bytes: bytes of one page's tokens.
    """
    first = neighbour.n_common * TOKEN_BYTES
    rest = rest[first : first + _MAX_COMPARED_TOKENS * TOKEN_BYTES]
    sample = max(page_bytes, _MIN_SAME_TOKENS * TOKEN_BYTES)
    if len(rest) < sample:
        return False
    cached = _following(neighbour, page_bytes)[first:]
    step = max(sample, len(rest) // _MAX_SAMPLES // TOKEN_BYTES * TOKEN_BYTES)
    return any(
        _has_tokens(cached, rest[start : start + sample]) for start in range(0, len(rest) - sample + 1, step)
    )


def _following(neighbour: Neighbour, page_bytes: int) -> bytes:
    """Returns a cached page and some of what follows it in the tree: of several children, the first one."""
    node, limit = neighbour.node, _MAX_COMPARED_TOKENS * TOKEN_BYTES
    start = neighbour.place * page_bytes
    text = bytes(node.key[start : start + limit])
    while len(text) < limit and node.children is not None:
        node = next(iter(node.children.values()))
        text += bytes(node.key[: limit - len(text)])
    return text


def _has_tokens(text: bytes, tokens: bytes) -> bool:
    """Returns whether some tokens are in a text, both little-endian int32."""
    start = text.find(tokens)
    while start > 0 and start % TOKEN_BYTES:
        start = text.find(tokens, start + 1)
    return start >= 0


def _with_adapter(namespace: Namespace, key: bytes, marks: Marks) -> Namespace:
    """Returns the namespace of a key with its adapter, also if that is an activated LoRA."""
    found = marks.find(key)
    return namespace._replace(adapter=found[0][1].adapter) if found else namespace


def _are_same_tokens(own: bytes, cached: bytes, marks: Marks) -> bool:
    """Returns whether two parts of keys begin with the same token, where one of them has a mark."""
    first = [part[:TOKEN_BYTES] for part in (own, cached)]
    return marks.tokens(first[0]) == marks.tokens(first[1])


def _longest_elsewhere(
    roots: Mapping[Namespace, Node], own: Namespace, key: bytes, page_bytes: int, longest: int, marks: Marks
) -> tuple[Namespace, int] | None:
    """Returns the namespace with the longest match and its tokens; None if no match exceeds ``longest`` bytes.

    Activated LoRAs count as namespaces. It is ``own`` for a match with another mark of the same adapter. Of equal
    matches it is one that differs from ``own`` in the adapter alone, if there is one.
    """
    match, tokens = None, marks.tokens(key)
    marked = list(marks.recent_keys(own.adapter, tokens))
    searched = [(namespace, root, tokens) for namespace, root in roots.items()]
    searched += [
        (namespace._replace(adapter=adapter), root, other)
        for namespace, root in roots.items()
        if not namespace.adapter
        for adapter, other in marked
    ]
    for namespace, root, searched_key in searched:
        _, end, _, n_partial = walk(root, searched_key, page_bytes)
        end += n_partial * page_bytes
        if end > longest or (match is not None and end == longest and own.differs_in_adapter(namespace)):
            longest = end
            match = namespace, longest // TOKEN_BYTES
    return match
