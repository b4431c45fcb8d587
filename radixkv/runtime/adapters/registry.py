"""Which adapters requests may ask for, and which are kept for their requests although none may any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from radixkv.errors import InvalidRequest, shortened
from radixkv.wire.adapter_messages import ServedAdapter


class AdapterRegistry:
    """The loads of adapters; several may have the same name, or the same contents, and so the same digest.

    A load is first unnamed, then released. A digest without a load is retired: no new request gets it, and it is
    freed once nothing uses it.

    Args:
        adapters: those of the start.
        max_adapters: most names; None: any number.
        is_default: whether no setting gives ``max_adapters``, which errors then say.
    """

    def __init__(
        self, adapters: Iterable[ServedAdapter], max_adapters: int | None, *, is_default: bool = False
    ) -> None:
        self.retired: set[str] = set()
        """Digests without a load, which have not been freed."""
        self._loads = {adapter.name: adapter for adapter in adapters}
        """The adapters that new requests may have, by their loads."""
        self._unnamed: set[str] = set()
        """Loads whose names do not count: only requests that were on their way come for them."""
        self._max_adapters = max_adapters
        self._is_default = is_default

    @property
    def names(self) -> tuple[str, ...]:
        """The names that count, each once. O(loads)."""
        named = [adapter.name for load, adapter in self._loads.items() if load not in self._unnamed]
        return tuple(dict.fromkeys(named))

    @property
    def named_digests(self) -> set[str]:
        """The digests of the loads whose names count. O(loads)."""
        return {adapter.digest for load, adapter in self._loads.items() if load not in self._unnamed}

    def has(self, digest: str) -> bool:
        """Returns whether new requests may have the adapter. O(loads)."""
        return any(adapter.digest == digest for adapter in self._loads.values())

    def check(self, load: str, name: str, coming: Iterable[str]) -> None:
        """Raises ``InvalidRequest`` if an adapter of this name cannot be loaded.

        Args:
            load: of the adapter.
            name: of the adapter.
            coming: the names that are being loaded.
        """
        if load in self._loads:
            raise InvalidRequest(f"there is a load {shortened(load)} already; give each its own id")
        names = tuple(dict.fromkeys((*self.names, *coming)))
        if name not in names and self._max_adapters is not None and len(names) >= self._max_adapters:
            limit = f"max_cpu_loras {self._max_adapters}"
            limit += ", the default on this device" if self._is_default else ""
            raise InvalidRequest(
                f"the adapter {shortened(name)} would be one more than {limit}; unload one of "
                f"{', '.join(map(shortened, names))}, or start with a higher --max-cpu-loras",
                param="lora_name",
            )

    def add(self, load: str, adapter: ServedAdapter) -> bool:
        """Adds a load; returns whether the adapter's weights must be put."""
        is_known = self.has(adapter.digest) or adapter.digest in self.retired
        self._loads[load] = adapter
        self.retired.discard(adapter.digest)
        return not is_known

    def drop_name(self, load: str) -> None:
        """Lets the name of a load count no more. Does nothing if there is none such."""
        if load in self._loads:
            self._unnamed.add(load)

    def release(self, load: str) -> None:
        """Takes a load away. Does nothing if there is none such."""
        adapter = self._loads.pop(load, None)
        self._unnamed.discard(load)
        if adapter is not None and not self.has(adapter.digest):
            self.retired.add(adapter.digest)

    def free(self, is_used: Callable[[str], bool]) -> list[str]:
        """Forgets the retired digests that nothing uses, and returns them."""
        unused = [digest for digest in self.retired if not is_used(digest)]
        self.retired.difference_update(unused)
        return unused
