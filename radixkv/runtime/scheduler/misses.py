"""Where the match of a prompt with the cache ends when the prompt is admitted, and why."""

from __future__ import annotations

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.tree.digest import chained_xxh3_64
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import CacheMiss

_MAX_NAMESPACES = 16
"""If there are more namespaces than this, the others are not searched, because the search runs for each prompt with
a miss."""
_N_COMMON, _N_DIFFERENT = 8, 4
"""Tokens shown before the end of a match, and after it on each side."""


def find_miss(cache: PageCache, request: Request, n_found: int) -> CacheMiss | None:
    """Returns why a prompt is not cached further.

    None if it lacks less than a page, shares nothing by design, or is a canary.

    O(tokens that match) and ``RadixTree.explain``.

    Args:
        cache: the page cache of the device, before the request has committed anything.
        request: a request that has just been admitted for the first time.
        n_found: leading tokens of its prompt that need not be computed.
    """
    n_missing = request.n_prompt - 1 - n_found  # the last token is always computed
    if n_missing < cache.page_size or request.recovery.bypasses_tree or request.is_canary or not cache.is_sharing:
        return None
    if not request.reads_cache:
        return CacheMiss("not_read", 0)
    key = bytes(memoryview(request.known_key)[: request.n_prompt * TOKEN_BYTES])
    explanation = cache.tree.explain(request.namespace, key, max_namespaces=_MAX_NAMESPACES)
    if explanation.reason == "whole":
        return None  # a state of recurrent layers lacks less than its block
    first_difference = explanation.first_difference
    end = explanation.n_tokens if first_difference is None else first_difference
    return CacheMiss(
        reason=explanation.reason,
        n_matched=explanation.n_tokens,
        place=chained_xxh3_64(0, key[: explanation.n_tokens * TOKEN_BYTES]),
        first_difference=first_difference,
        common=request.tokens(max(0, end - _N_COMMON), end),
        prompt=request.tokens(end, min(end + _N_DIFFERENT, request.n_prompt)),
        cached=explanation.cached_tokens[: _N_DIFFERENT * TOKEN_BYTES],
        n_elsewhere=explanation.n_tokens_elsewhere,
        is_other_adapter=explanation.adapter_elsewhere is not None,
        is_new=explanation.reason in ("differs", "evicted_or_never_seen") and not explanation.comes_back,
    )
