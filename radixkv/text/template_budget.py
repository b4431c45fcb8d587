"""The operations and the time that a rendering of a chat template may take, and what operations cost."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Self

from radixkv.errors import ContextLengthExceeded, context_length_exceeded

MAX_OPERATIONS = 1 << 22
"""Most operations of a rendering: enough for work linear in the number of messages, not quadratic."""
MAX_RENDER_S = 5.0
"""Most seconds of a rendering."""
SIZE_PER_OPERATION = 32
"""Characters, items or bytes of a long value that count as one operation."""
_OPERATIONS_PER_CHECK = 16
"""The clock is read once in so many operations."""
_FREE_CHARACTERS = 16
"""An argument of a cheap operation that is no longer costs nothing: the name of a field, a mark in a text."""
_SPLIT_FACTOR = 8
"""An item of a list takes as much memory as so many characters, or more."""
_SPLITS = frozenset("list rsplit split splitlines".split())


class BudgetExceeded(ContextLengthExceeded):
    """A rendering took more operations or more time than it may."""

    @classmethod
    def of(cls, max_operations: int, max_s: float) -> Self:
        """Returns the error of a budget."""
        found = f"the chat template takes more than {max_operations} operations or {max_s:g} s to render it"
        return cls(str(context_length_exceeded(found, None, param="messages")), param="messages")


class OperationBudget:
    """The operations and the time that a rendering may still take, from now on.

    Args:
        max_operations: most operations.
        max_s: most seconds.
    """

    def __init__(self, max_operations: int, max_s: float) -> None:
        self._max_operations = self._n_left = max_operations
        self._max_s = max_s
        self._deadline = time.monotonic() + max_s
        self._next_check = max(max_operations - _OPERATIONS_PER_CHECK, -1)

    def take(self, n_operations: int = 1) -> None:
        """Takes operations. Raises ``BudgetExceeded`` if too few are left, or the time is over."""
        self._n_left -= n_operations
        if self._n_left > self._next_check:
            return
        self._next_check = max(self._n_left - _OPERATIONS_PER_CHECK, -1)
        if self._n_left < 0 or time.monotonic() > self._deadline:
            raise BudgetExceeded.of(self._max_operations, self._max_s)

    def pay_for(self, *sizes: int) -> None:
        """Takes the operations of making a value with the product of these sizes."""
        self.take(1 + math.prod(max(size, 1) for size in sizes) // SIZE_PER_OPERATION)

    def size(self, value: object, *, counts_numbers: bool = False) -> int:
        """Returns the characters of a text, or those in a container with its items. Takes an operation an item.

        Args:
            value: anything.
            counts_numbers: whether an integer's size is its value; otherwise it is its length in bytes.
        """
        match value:
            case str() | bytes():
                return len(value)
            case int():
                return abs(value) if counts_numbers else value.bit_length() // 8
            case list() | tuple():
                self.take(len(value))
                return sum([self.size(item, counts_numbers=counts_numbers) + 1 for item in value]) + 1
            case range():
                return len(value)
            case Mapping():
                self.take(len(value))
                return sum([self.size(key) + self.size(item) for key, item in value.items()]) + 1
            case Collection():
                self.take(len(value))
                return sum([self.size(item) + 1 for item in value]) + 1
            case _:
                return 1


def pay_for_length(budget: OperationBudget, name: str, value: Any, arguments: Iterable[Any]) -> Any:
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


def depth(budget: OperationBudget, value: object) -> int:
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
