"""Launches of kernels: they use what Triton has compiled for arguments of the same kind, and for no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel

BUFFER = torch.zeros(64, dtype=torch.bfloat16)


class Compiled:
    """What a launch returns; notes the launches that it gets itself."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[object, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((grid[:3], arguments))


class Kernel:
    """A kernel of three arguments and two constants; compiles for each launch, as Triton never does."""

    arg_names = ("x", "stride", "scale", "SIZE", "GATED")

    def __init__(self, *, interprets: bool = False) -> None:
        self.interprets = interprets
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def launch(x: Tensor, stride: int, scale: float, **named: object) -> Compiled | None:
            self.compiled.append(Compiled())
            return None if self.interprets else self.compiled[-1]

        return launch


def test_launches_of_one_kind_use_what_the_first_compiled() -> None:
    kernel = Kernel()
    cached = CachedKernel(kernel)
    cached[(7,)](BUFFER, 32, 0.5, GATED=True, SIZE=64, num_warps=4)
    assert len(kernel.compiled) == 1
    assert not kernel.compiled[0].launches  # Triton has launched it
    other = torch.ones_like(BUFFER)
    cached[8, 3](other, 48, 2.0, GATED=True, SIZE=64, num_warps=4)
    assert len(kernel.compiled) == 1
    ((grid, arguments),) = kernel.compiled[0].launches
    assert grid == (8, 3, 1)
    assert arguments[0] is other
    assert arguments[1:] == (48, 2.0, 64, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((BUFFER[1:], 32, 0.5), {}),  # not aligned
        ((BUFFER.float(), 32, 0.5), {}),
        ((BUFFER, 33, 0.5), {}),  # not a multiple of 16
        ((BUFFER, 1, 0.5), {}),
        ((BUFFER, 2**31, 0.5), {}),
        ((BUFFER, True, 0.5), {}),
        ((BUFFER, 32, 1), {}),
        ((BUFFER, 32, 0.5), {"SIZE": 128}),
        ((BUFFER, 32, 0.5), {"GATED": False}),
        ((BUFFER, 32, 0.5), {"num_warps": 8}),
    ],
)
def test_launches_of_another_kind_are_tritons(arguments: Sequence[object], named: dict[str, Any]) -> None:
    kernel = Kernel()
    cached = CachedKernel(kernel)
    constants = {"SIZE": 64, "GATED": True, "num_warps": 4}
    cached[(1,)](BUFFER, 32, 0.5, **constants)
    cached[(1,)](*arguments, **constants | named)
    assert len(kernel.compiled) == 2
    cached[(1,)](BUFFER, 32, 0.5, **constants)
    cached[(1,)](*arguments, **constants | named)
    assert [len(compiled.launches) for compiled in kernel.compiled] == [1, 1]


def test_the_names_of_options_count() -> None:
    kernel = Kernel()
    cached = CachedKernel(kernel)
    cached[(1,)](BUFFER, 32, 0.5, SIZE=64, GATED=True, num_warps=4)
    cached[(1,)](BUFFER, 32, 0.5, SIZE=64, GATED=True, num_stages=4)
    assert len(kernel.compiled) == 2


def test_the_interpreter_launches_itself() -> None:
    kernel = Kernel(interprets=True)
    cached = CachedKernel(kernel)
    for _ in range(3):
        cached[(1,)](BUFFER, 32, 0.5, SIZE=64, GATED=True)
    assert len(kernel.compiled) == 3


ARGUMENTS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([-(2**31) - 1, -(2**31), 2**31 - 1, 2**31, -16, 0, 1, 2, 16, 48]),
    st.floats(),
    st.booleans(),
    st.builds(
        lambda dtype, first: torch.zeros(64, dtype=dtype)[first:],
        st.sampled_from([torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn]),
        st.integers(0, 16),
    ),
)


@example(first=1, second=True)
@example(first=BUFFER, second=BUFFER[1:])
@given(first=ARGUMENTS, second=ARGUMENTS)
def test_arguments_that_triton_tells_apart_are_told_apart(first: Any, second: Any) -> None:
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    backend = pytest.importorskip("triton.backends.compiler").BaseBackend
    kernel = Kernel()
    cached = CachedKernel(kernel)
    for argument in (first, second):
        cached[(1,)](BUFFER, argument, 0.5, SIZE=64, GATED=True)
    if len(kernel.compiled) == 1:
        assert specialize(backend, first, False, True, True) == specialize(backend, second, False, True, True)
