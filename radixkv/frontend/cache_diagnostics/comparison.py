"""The comparison of a request with an earlier one, and what it says once the cache was read."""

from __future__ import annotations

from typing import Literal, NamedTuple

from radixkv.frontend.cache_diagnostics.fingerprint import Fingerprint

MESSAGES = "messages"
"""The name of the part that may grow."""
INVOCATION = "invocation"
"""What changed where no part did, but an activated LoRA acts from elsewhere on."""


class Verdict(NamedTuple):
    """What a client is told about a request and the earlier one that it names."""

    outcome: Literal["same", "changed", "not_found", "unavailable"]
    """Whether the request extends the earlier one and found its prefix in the cache, whether a part of it changed,
    whether the earlier one is not known, or whether the requests do not tell why the prefix was not found."""
    part: str = ""
    """The first part that changed, or ``invocation``; empty if neither did."""
    n_reusable: int = 0
    """Tokens of the earlier prompt that a later one can find, in whole pages: none with another adapter."""
    n_missed: int = 0
    """Tokens of the earlier prompt after the place where the prompts differ, in whole pages: with another adapter
    all of them."""


def compare(earlier: Fingerprint, later: Fingerprint, n_cached: int, state_block_tokens: int) -> Verdict:
    """Returns what is told of two requests of one client. O(pages).

    Args:
        earlier: the request that the client names.
        later: the client's new request.
        n_cached: tokens of the later prompt that were not computed.
        state_block_tokens: the distance of states, from which alone a match goes on; 0 if it needs none.
    """
    if earlier.parts.keys() != later.parts.keys():  # a request of another API
        return Verdict("not_found")
    if earlier.namespace != later.namespace:
        return Verdict("unavailable")
    n_left, n_common = earlier.n_in_pages, earlier.n_common(later)
    if part := _changed_part(earlier, later):
        n_reusable = n_left if earlier.adapter == later.adapter else 0
        return Verdict("changed", part, n_reusable, n_left - n_common)
    page_size = later.page_size
    n_found = min(n_common, (later.n_prompt - 1) // page_size * page_size)  # the last token is always computed
    # A state is at a multiple of a block, before what the template writes behind the last message.
    slack = state_block_tokens and state_block_tokens + page_size
    # By that, the prompts may differ: in most templates a message goes on otherwise than an answer begins.
    if n_left - n_common > page_size:
        mark = earlier.moved_mark(later)
        if mark is not None and n_common == mark // page_size * page_size:
            return Verdict("changed", INVOCATION, n_left, n_left - n_common)
        return Verdict("unavailable")
    if n_cached + slack < n_found:
        return Verdict("unavailable")
    return Verdict("same")


def _changed_part(earlier: Fingerprint, later: Fingerprint) -> str:
    """Returns the first part that changed; empty if none did but that the later request may have more messages."""
    for name, digest in earlier.parts.items():
        if later.parts[name] != digest:
            return name
    return "" if later.messages.startswith(earlier.messages) else MESSAGES
