"""What a tensor in a safetensors file is expected to be."""

from __future__ import annotations

from typing import NamedTuple

FLOATS = ("F32", "F16", "BF16")
"""Names that safetensors has for floats of 16 and 32 bits."""


class Header(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    """The dtypes that it may have, as safetensors names them."""
    may_be_scalar: bool = False
    """Whether it may also have no dimension."""
