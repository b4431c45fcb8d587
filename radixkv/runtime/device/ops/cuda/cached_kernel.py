"""A Triton kernel whose launches find the compiled kernel without Triton's own search."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from torch import Tensor

_INT32 = range(-(2**31), 2**31)


class CachedKernel:
    """Launches a Triton kernel as ``kernel[grid](*arguments, **constants)`` does, in less of the host's time.

    To find what it has compiled, Triton binds the arguments of each launch to the kernel's signature, asks of each
    what it may compile specially for it, and writes all options as a text. This takes longer than the launch, of
    which a step without a CUDA graph has some 200. A key of the same properties takes less. See
    docs/decisions/0056-launches-of-kernels.md.

    The kernel's first parameters are given by position: a tensor first, then tensors, plain integers below 2**63,
    floats and bools. The ``tl.constexpr`` parameters, which come last, are all given by name, and so are options of
    the compiler; the values of each have one type.

    Args:
        function: what ``triton.jit`` returns. In Triton's interpreter nothing is compiled, and Triton launches.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        """The kernel, for Triton's compiler."""
        self._compiled: dict[Hashable, tuple[Any, tuple[object, ...]]] = {}
        """By key: what Triton compiled, and the values of the constants in the order of the parameters."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        key = (arguments[0].get_device(), *map(_properties, arguments), *named, *named.values())
        found = self._compiled.get(key)
        if found is not None:
            compiled, constants = found
            compiled[(*grid, 1, 1)](*arguments, *constants)
            return
        compiled = self.function[grid](*arguments, **named)
        if compiled is not None:
            names = self.function.arg_names[len(arguments) :]
            self._compiled[key] = compiled, tuple(named[name] for name in names)


def _properties(argument: Tensor | float) -> object:
    """Returns all of an argument on which the compiled kernel depends.

    Triton compiles for a tensor's dtype and alignment and for an integer's width, and specially for the integer 1
    and for multiples of 16.
    """
    if isinstance(argument, Tensor):
        return argument.dtype if argument.data_ptr() % 16 == 0 else (argument.dtype,)
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, argument in _INT32
    return type(argument)
