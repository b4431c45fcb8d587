"""Messages about adapters between the two processes.

``wire`` encodes them like all other messages.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class ServedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that the runtime has loaded."""

    name: str
    """By which clients ask for it."""
    path: str
    """Of its folder."""
    digest: str
    """By which messages ask for it."""
    invocation_tokens: tuple[int, ...] | None = None
    """Of an activated LoRA, which acts from their last occurrence in a prompt on; None: it acts everywhere."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Loads an adapter beside steps. Answered by ``AdapterLoaded`` once requests may ask for it.

    Which adapter a name means, the sender decides: a load replaces none, also of the same name.
    """

    id: str
    """By which the adapter is unloaded; adapters of the start have their names for it."""
    name: str
    path: str
    """Of its folder."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Takes an adapter away, also one that is still being loaded. Not answered; an unknown load is ignored."""

    load: str
    """The id of the load."""
    is_released: bool = True
    """Whether no new request comes for it: it is freed when its requests have ended. If not, its name alone counts
    no more, and another such message follows."""


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``LoadAdapter``."""

    id: str
    adapter: ServedAdapter


AdapterCommand: TypeAlias = LoadAdapter | UnloadAdapter
"""What the frontend asks of the adapters."""
