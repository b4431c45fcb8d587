"""Which adapter a name means, for a server and for ``LLM``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from radixkv.errors import InvalidRequest, ModelNotFound, enumerated, shortened
from radixkv.wire.adapter_messages import ServedAdapter
from radixkv.wire.request_limits import check_lora_name


class LoadedAdapter(NamedTuple):
    """An adapter in the runtimes."""

    load: str
    """The id of its load, by which the runtimes know it; adapters of the start have their names for it."""
    adapter: ServedAdapter


class AdapterNames:
    """The adapters that names mean. All operations are O(1), but for errors.

    Args:
        adapters: those of the start.
    """

    def __init__(self, adapters: Iterable[ServedAdapter]) -> None:
        self._adapters = {adapter.name: LoadedAdapter(adapter.name, adapter) for adapter in adapters}

    def __iter__(self) -> Iterator[LoadedAdapter]:
        """Yields the adapters that have names."""
        return iter(self._adapters.values())

    def get(self, name: str) -> LoadedAdapter | None:
        """Returns what a name means; None for an unknown one."""
        return self._adapters.get(name)

    def check(self, name: object, *, in_place: bool) -> LoadedAdapter | None:
        """Returns what a load of this name would replace; None if nothing.

        Raises:
            InvalidRequest: it is no name, or is taken and may not be replaced.
        """
        before = self._adapters.get(text := check_lora_name(name))
        if before is not None and not in_place:
            raise InvalidRequest(
                f"the adapter {shortened(text)} is loaded already; unload it before, or replace it with "
                "load_inplace",
                param="lora_name",
            )
        return before

    def set(self, loaded: LoadedAdapter) -> None:
        """Lets the name of an adapter mean it."""
        self._adapters[loaded.adapter.name] = loaded

    def find(self, name: str) -> LoadedAdapter:
        """Returns what a name means. Raises ``ModelNotFound`` if it is unknown."""
        loaded = self._adapters.get(name)
        if loaded is None:
            raise ModelNotFound(
                f"no adapter {shortened(name)} is loaded; give the name of one that is (loaded: {self})",
                param="lora_name",
            )
        return loaded

    def remove(self, name: str) -> LoadedAdapter:
        """Removes a name, and returns what it meant. Raises ``ModelNotFound`` if it is unknown."""
        loaded = self.find(name)
        del self._adapters[name]
        return loaded

    def __str__(self) -> str:
        """Returns the names, for errors."""
        return enumerated(self._adapters) or "none"
