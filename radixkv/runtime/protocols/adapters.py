"""The protocol of the branch ``adapters``: which adapters requests may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from radixkv.errors import UnsupportedFeature
from radixkv.wire.adapter_messages import AdapterCommand, ServedAdapter, UnloadAdapter
from radixkv.wire.messages import Failed, FromRuntime
from radixkv.wire.stats import AdapterStats


class Adapters:
    """The adapters that requests may ask for by their digests. These are none, and none can be loaded.

    ``adapters.loading.LoadableAdapters`` has some.
    """

    served: tuple[ServedAdapter, ...] = ()
    """Those of the start."""
    names: Mapping[str, str] = MappingProxyType({})
    """The name that each adapter had last, by its digest; also of those that are unloaded, whose pages stay."""

    def __init__(self) -> None:
        self.on_freed: Callable[[str], None] = lambda digest: None
        """Is called with the digest of an adapter that is freed."""

    @property
    def is_busy(self) -> bool:
        """Whether ``advance`` has something to do, now or once a descriptor is readable."""
        return False

    def has(self, digest: str) -> bool:
        """Returns whether new requests may have an adapter."""
        return False

    def receive(self, message: AdapterCommand) -> list[FromRuntime]:
        """Begins to load an adapter, or unloads one; returns the answer if there is one already."""
        if isinstance(message, UnloadAdapter):
            return []
        text = "this engine has no adapters; start it with enable_lora (--enable-lora)"
        return [Failed(message.id, UnsupportedFeature.code, text)]

    def n_waiting(self, sender: str | None = None) -> int:
        """Returns how many requests wait until their adapter is where steps can have it; None: of all senders."""
        return 0

    def advance(self, is_used: Callable[[str], bool]) -> list[FromRuntime]:
        """Lets requests ask for the adapters that have been read, gives slots to those that requests wait for, and
        frees those that are unloaded and that nothing uses.

        Called between turns. Returns the answers.

        Args:
            is_used: whether a request without its terminal message, or a launched step, has an adapter.

        Raises:
            DeviceLost: an adapter could not be copied to the device.
        """
        return []

    def descriptors(self) -> list[int]:
        """Returns descriptors, one of which is readable when an adapter has been read, or copied to the device."""
        return []

    def stats(self) -> AdapterStats | None:
        """Returns gauges; None where requests have no adapters."""
        return None

    def close(self) -> None:
        """Waits for threads that read."""
