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
    """Loads an adapter beside steps. Answered by ``AdapterLoaded`` once requests may ask for it."""

    id: str
    name: str
    path: str
    """Of its folder."""
    in_place: bool = False
    """Whether it may replace the adapter of this name; without it such a name is refused."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Takes the name of an adapter away, and frees it when its requests have ended. Answered by ``AdapterUnloaded``
    at once."""

    id: str
    name: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``LoadAdapter``."""

    id: str
    adapter: ServedAdapter


class AdapterUnloaded(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``UnloadAdapter``."""

    id: str


AdapterCommand: TypeAlias = LoadAdapter | UnloadAdapter
"""What the frontend asks of the adapters."""
AdapterReply: TypeAlias = AdapterLoaded | AdapterUnloaded
"""The answer to an ``AdapterCommand``, unless it is ``Failed``."""
