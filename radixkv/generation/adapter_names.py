"""Which adapter a name means, for a server and for ``LLM``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from radixkv.errors import InvalidRequest, ModelNotFound, shortened
from radixkv.wire.adapter_messages import ServedAdapter
from radixkv.wire.request_limits import check_lora_name


class Load(NamedTuple):
    """An adapter in the runtimes."""

    id: str
    """By which the runtimes know it; adapters of the start have their names for it."""
    adapter: ServedAdapter


class AdapterNames:
    """The loads that names mean. All operations are O(1), but for errors.

    Args:
        adapters: those of the start.
    """

    def __init__(self, adapters: Iterable[ServedAdapter]) -> None:
        self._loads = {adapter.name: Load(adapter.name, adapter) for adapter in adapters}

    def __iter__(self) -> Iterator[Load]:
        """Yields the loads that have names."""
        return iter(self._loads.values())

    def get(self, name: str) -> Load | None:
        """Returns what a name means; None for an unknown one."""
        return self._loads.get(name)

    def check(self, name: object, *, in_place: bool) -> Load | None:
        """Returns what a load of this name would replace; None if nothing.

        Raises:
            InvalidRequest: it is no name, or is taken and may not be replaced.
        """
        before = self._loads.get(text := check_lora_name(name))
        if before is not None and not in_place:
            raise InvalidRequest(
                f"the adapter {shortened(text)} is loaded already; unload it before, or replace it with "
                "load_inplace",
                param="lora_name",
            )
        return before

    def give(self, load: Load) -> None:
        """Lets the name of an adapter mean it."""
        self._loads[load.adapter.name] = load

    def take(self, name: str) -> Load:
        """Takes a name away, and returns what it meant. Raises ``ModelNotFound`` if it is unknown."""
        load = self._loads.pop(name, None)
        if load is None:
            raise ModelNotFound(
                f"no adapter {shortened(name)} is loaded; give the name of one that is (loaded: {self})",
                param="lora_name",
            )
        return load

    def __str__(self) -> str:
        """Returns the names, for errors."""
        return ", ".join(map(shortened, self._loads)) or "none"
