"""Room that tenants share: where it is full, the one who has most of it gives up what it has had longest."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class SharedRoom(Generic[KeyT, ValueT]):
    """Values by key, of which each belongs to a tenant.

    A tenant that has no more than its part of the room, were it divided among all who have something in it, loses
    nothing to others, however much they put in.

    Args:
        max_values: most values of all tenants.
        max_bytes: most bytes of them; None: these do not count.
    """

    def __init__(self, max_values: int, max_bytes: int | None = None) -> None:
        self._max_values = max_values
        self._max_bytes = max_bytes
        self._values: dict[str, OrderedDict[KeyT, tuple[ValueT, int]]] = {}
        """Value and bytes by tenant and key, those first that were put in first, or moved last."""
        self._tenants: dict[KeyT, str] = {}
        self._n_bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._tenants

    def items(self) -> Iterator[tuple[KeyT, ValueT]]:
        """Yields keys and values, tenant by tenant."""
        for values in self._values.values():
            for key, (value, _) in values.items():
                yield key, value

    def in_any_order(self) -> Iterator[tuple[KeyT, ValueT]]:
        """Yields what ``items`` does, three times as fast: an ``OrderedDict`` hashes each key, a ``dict`` none."""
        for values in self._values.values():
            for key, (value, _) in dict.items(values):
                yield key, value

    def get(self, key: KeyT) -> ValueT | None:
        """Returns a value; None if there is none. O(1)."""
        tenant = self._tenants.get(key)
        return None if tenant is None else self._values[tenant][key][0]

    def renew(self, key: KeyT) -> None:
        """Makes a value the one that its tenant gives up last. O(1)."""
        self._values[self._tenants[key]].move_to_end(key)

    def put(self, tenant: str, key: KeyT, value: ValueT, n_bytes: int = 0) -> list[ValueT]:
        """Puts a value in, in place of one with the same key. O(tenants) for each that is given up.

        Returns:
            The values that have given up their room, which may include it.
        """
        self.pop(key)
        self._values.setdefault(tenant, OrderedDict())[key] = value, n_bytes
        self._tenants[key] = tenant
        self._n_bytes[tenant] += n_bytes
        given_up: list[ValueT] = []
        while len(self._tenants) > self._max_values:
            given_up.append(self._pop_first(max(self._values, key=lambda one: len(self._values[one]))))
        while self._max_bytes is not None and self._n_bytes.total() > self._max_bytes:
            given_up.append(self._pop_first(max(self._values, key=self._n_bytes.__getitem__)))
        return given_up

    def pop(self, key: KeyT) -> ValueT | None:
        """Takes a value out and returns it; None if there is none. O(1)."""
        tenant = self._tenants.pop(key, None)
        if tenant is None:
            return None
        value, n_bytes = self._values[tenant].pop(key)
        self._n_bytes[tenant] -= n_bytes
        if not self._values[tenant]:
            del self._values[tenant], self._n_bytes[tenant]
        return value

    def _pop_first(self, tenant: str) -> ValueT:
        value = self.pop(next(iter(self._values[tenant])))
        assert value is not None, "a tenant without a value is not among them"
        return value
