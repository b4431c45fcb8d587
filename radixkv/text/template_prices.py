"""What operations on values of chat templates cost, where it is not the product of their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

_FREE_CHARACTERS = 16
"""An argument of a cheap operation that is no longer costs nothing: the name of a field, a mark in a text."""
_SPLIT_FACTOR = 8
"""An item of a list takes as much memory as so many characters, or more."""
_SPLITS = frozenset("list rsplit split splitlines".split())


class Budget(Protocol):
    """What ``template_sandbox.OperationBudget`` offers."""

    def take(self, n_operations: int = 1) -> None:
        """Takes operations."""

    def pay_for(self, *sizes: int) -> None:
        """Takes the operations of making a value with the product of these sizes."""


def pay_for_length(budget: Budget, name: str, value: Any, arguments: Iterable[Any]) -> Any:
    """Pays for an operation that takes time linear in the lengths of a value and of each long argument. O(1).

    Args:
        budget: pays.
        name: of the filter or method.
        value: what the operation is applied to.
        arguments: its arguments, such as what ``strip`` removes or the path of an attribute: each part of the value
            may be compared with all of them.

    Returns:
        The value, or a list of what it yields: an iterator does not tell its length.
    """
    sizes = [len(argument) for argument in arguments if isinstance(argument, str | bytes | list | tuple | dict)]
    if any(size > _FREE_CHARACTERS for size in sizes) and isinstance(value, Iterator):
        value = list(value)
    n_items = len(value) if isinstance(value, str | bytes | list | tuple) else 1
    factor = _SPLIT_FACTOR if name in _SPLITS else 1
    budget.pay_for(n_items, factor, *(size for size in sizes if size > _FREE_CHARACTERS))
    return value


def depth(budget: Budget, value: object) -> int:
    """Returns how deep containers are nested in a value; takes an operation an item."""
    deepest, level = 0, [value]
    while level:
        deepest += 1
        budget.take(len(level))
        level = [
            item
            for one in level
            if isinstance(one, list | tuple | Mapping)
            for item in (one.values() if isinstance(one, Mapping) else one)
        ]
    return deepest


def n_parts(text: object, width: object) -> int:
    """Returns into how many lines of a width the longest word of a text is broken."""
    longest = max(map(len, str(text).split()), default=0)
    return longest // max(width if isinstance(width, int) else 1, 1) + 1
