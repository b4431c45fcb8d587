"""Which adapters have names, and which are kept for their requests although they have none any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from radixkv.errors import InvalidRequest, shortened
from radixkv.wire.adapter_messages import ServedAdapter


class AdapterRegistry:
    """The names of adapters; several may have the same contents, and so the same digest.

    A digest without a name is retired: no new request gets it, and it is freed once nothing uses it.

    Args:
        adapters: those of the start.
        max_adapters: most names; None: any number.
        is_default: whether no setting gives ``max_adapters``, which errors then say.
    """

    def __init__(
        self, adapters: Iterable[ServedAdapter], max_adapters: int | None, *, is_default: bool = False
    ) -> None:
        self.named = {adapter.name: adapter for adapter in adapters}
        """The adapters that new requests may have, by name."""
        self.retired: set[str] = set()
        """Digests without a name, which have not been freed."""
        self._max_adapters = max_adapters
        self._is_default = is_default

    def has(self, digest: str) -> bool:
        """Returns whether new requests may have the adapter. O(names)."""
        return any(adapter.digest == digest for adapter in self.named.values())

    def check(self, name: str, coming: Iterable[str], *, in_place: bool) -> None:
        """Raises ``InvalidRequest`` if an adapter of this name cannot be loaded.

        Args:
            name: of the adapter.
            coming: the names that are being loaded.
            in_place: whether it may replace one of the same name.
        """
        names = [*self.named, *(one for one in coming if one not in self.named)]
        if name in self.named and not in_place:
            raise InvalidRequest(
                f"the adapter {shortened(name)} is loaded already; unload it before, or replace it with "
                "load_inplace",
                param="lora_name",
            )
        if name not in names and self._max_adapters is not None and len(names) >= self._max_adapters:
            limit = f"max_cpu_loras {self._max_adapters}"
            limit += ", the default on this device" if self._is_default else ""
            raise InvalidRequest(
                f"the adapter {shortened(name)} would be one more than {limit}; unload one of "
                f"{', '.join(map(shortened, names))}, or start with a higher --max-cpu-loras",
                param="lora_name",
            )

    def add(self, adapter: ServedAdapter) -> bool:
        """Gives an adapter its name, in place of one that has it; returns whether its weights must be put."""
        is_known = self.has(adapter.digest) or adapter.digest in self.retired
        before = self.named.get(adapter.name)
        self.named[adapter.name] = adapter
        self.retired.discard(adapter.digest)
        if before is not None:
            self._retire(before.digest)
        return not is_known

    def remove(self, name: str) -> None:
        """Takes a name away. Raises ``InvalidRequest`` if there is none such."""
        adapter = self.named.pop(name, None)
        if adapter is None:
            loaded = ", ".join(map(shortened, self.named)) or "none"
            raise InvalidRequest(
                f"no adapter {shortened(name)} is loaded; give the name of one that is (loaded: {loaded})",
                param="lora_name",
            )
        self._retire(adapter.digest)

    def free(self, is_used: Callable[[str], bool]) -> list[str]:
        """Forgets the retired digests that nothing uses, and returns them."""
        unused = [digest for digest in self.retired if not is_used(digest)]
        self.retired.difference_update(unused)
        return unused

    def _retire(self, digest: str) -> None:
        if not self.has(digest):
            self.retired.add(digest)
