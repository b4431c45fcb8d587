"""Waits until a prompt that was computed for the cache has reached all tiers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from radixkv.errors import RequestError
from radixkv.frontend.request_group import RequestGroup
from radixkv.wire.cache_messages import Stored
from radixkv.wire.messages import Ready

STALL_S = 10.0
"""How long to wait for a tier that gets none of the prompt's pages."""
LIMIT_S = 60.0
"""How long all prompts of a request wait for the tiers, beside a last question that is not answered."""
_FIRST_PAUSE_S, _LAST_PAUSE_S, _PAUSE_GROWTH = 0.005, 0.1, 1.5
"""Between two questions: a question takes the runtime some microseconds for each page that is new to it."""


async def until_stored(group: RequestGroup, index: int, started_at: float) -> Stored:
    """Waits until each tier has a prompt that was computed, or what it has room for; returns what they have.

    A tier that is full or away gets less. So does one that is slow: after ``STALL_S`` in which no tier has got
    more, or ``LIMIT_S`` in all, this returns what they have by then. If the runtime fails or does not answer, it
    returns what they were last known to have, because the prompt is computed all the same.

    Args:
        group: has computed the prompt, and is open.
        index: the prompt's.
        started_at: when the request began to wait for tiers, in monotonic seconds.
    """
    pause_s, best, grown_at = _FIRST_PAUSE_S, -1, time.monotonic()
    stored = Stored("", 0, 0, is_storing=True)
    while True:
        try:
            stored = await group.stored(index)
        except RequestError:
            return stored
        now_s = time.monotonic()
        if (n_stored := stored.n_in_host + stored.n_on_disk + (stored.n_in_shared or 0)) > best:
            best, grown_at = n_stored, now_s
        if not stored.is_storing or now_s - grown_at > STALL_S or now_s - started_at > LIMIT_S:
            return stored
        await asyncio.sleep(pause_s)
        pause_s = min(_LAST_PAUSE_S, pause_s * _PAUSE_GROWTH)


def stored_fields(prompts: Iterable[Stored | None], ready: Ready) -> dict[str, dict[str, int]]:
    """Returns what responses say of where their prompts are stored; nothing if that was not waited for.

    Args:
        prompts: what the tiers have of each prompt of a response; None if it was not waited for.
        ready: says which tiers the server has.
    """
    stored = [one for one in prompts if one is not None]
    if not stored:
        return {}
    tiers = {"host": sum(one.n_in_host for one in stored)}
    if ready.has_disk:
        tiers["storage"] = sum(one.n_on_disk for one in stored)
    if all(one.n_in_shared is not None for one in stored):  # what other servers find is the storage
        tiers["disk"], tiers["storage"] = tiers["storage"], sum(one.n_in_shared or 0 for one in stored)
    return {"stored_tokens": tiers}
