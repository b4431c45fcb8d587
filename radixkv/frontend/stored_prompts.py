"""Waits until a prompt that was computed for the cache has reached all tiers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from radixkv.frontend.engine_client import EngineClient
from radixkv.wire.cache_messages import Stored
from radixkv.wire.messages import Ready, Submit

STALL_S = 10.0
"""How long to wait for a tier that gets none of the prompt's pages."""
_FIRST_PAUSE_S, _LAST_PAUSE_S, _PAUSE_GROWTH = 0.005, 0.1, 1.5
"""Between two questions: a question takes the runtime some microseconds for each page that is new to it."""


async def until_stored(client: EngineClient, prompt: Submit, tenant: str) -> Stored:
    """Waits until each tier has a prompt that was computed, or what it has room for; returns what they have.

    A tier that is full or away gets less. So does one that is slow: after ``STALL_S`` in which no tier has got more
    this returns what they have by then.

    Args:
        client: has computed the prompt.
        prompt: as it was submitted.
        tenant: who has sent it.

    Raises:
        RequestError: the runtime does not answer.
    """
    pause_s, best, grown_at = _FIRST_PAUSE_S, -1, time.monotonic()
    while True:
        stored = await client.stored(prompt.tokens, prompt.cache_salt, tenant=tenant)
        if (n_stored := stored.n_in_host + stored.n_on_disk) > best:
            best, grown_at = n_stored, time.monotonic()
        if not stored.is_storing or time.monotonic() - grown_at > STALL_S:
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
    return {"stored_tokens": tiers}
