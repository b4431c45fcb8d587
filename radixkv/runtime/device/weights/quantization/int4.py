"""Matrices of 4-bit integers in groups with a scale, as AWQ, GPTQ and compressed-tensors pack them.

Eight integers are packed into one of 32 bits, the first in its lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from radixkv.runtime.device.weights.int4_matrix import PER_WORD, Int4Groups, Int4Matrix
from radixkv.runtime.device.weights.quantization.scheme import WeightScheme
from radixkv.runtime.device.weights.safetensors import Header

_INTS = ("I32",)
_SIGN = 8
"""What is added to signed values, so that they are packed as unsigned ones."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ packs each of eight columns."""


def int4_groups(scheme: WeightScheme | None) -> Int4Groups | None:
    """Returns the groups of a format that 4-bit products take; None if there is no such product."""
    if not isinstance(scheme, Int4Scheme) or (isinstance(scheme, Gptq) and scheme.has_order):
        return None
    groups = Int4Groups(scheme.group_size)
    return groups if groups.are_supported else None


@runtime_checkable
class Int4Scheme(WeightScheme, Protocol):
    """A format of 4-bit integers in groups."""

    @property
    def group_size(self) -> int | None:
        """Inputs of a group; None: all."""
        ...

    def copy_int4(self, read: Callable[[str], Tensor], out: Int4Matrix) -> None:
        """Copies a matrix whose inputs are in order, on the device of its tensors.

        Args:
            read: returns a tensor of the matrix by suffix.
            out: where to; of these groups.
        """
        ...


@dataclass(frozen=True)
class Awq:
    """AWQ's ``gemm`` format: packed along the output channels, with zero points."""

    group_size: int
    name = "awq"
    mark = "qweight"
    scales = "scales"

    @property
    def unit(self) -> tuple[int, int]:
        """See ``WeightScheme.unit``."""
        return PER_WORD, self.group_size

    def headers(self, shape: tuple[int, ...]) -> Mapping[str, Header]:
        """See ``WeightScheme.headers``."""
        n_out, n_in = shape
        n_groups, n_words = _n_groups(n_in, self.group_size), _n_words(n_out)
        return {
            "qweight": Header((n_in, n_words), _INTS),
            "qzeros": Header((n_groups, n_words), _INTS),
            "scales": Header((n_groups, n_out)),
        }

    def optional(self) -> frozenset[str]:
        """See ``WeightScheme.optional``."""
        return frozenset()

    def dequantize(self, read: Callable[[str], Tensor]) -> Tensor:
        """See ``WeightScheme.dequantize``."""
        values, zeros = (_in_awq_order(unpack(read(suffix))) for suffix in ("qweight", "qzeros"))
        groups = torch.arange(len(values), device=values.device) // self.group_size
        matrix: Tensor = (values - zeros[groups]) * read("scales").float()[groups]
        return matrix.t()

    def copy_int4(self, read: Callable[[str], Tensor], out: Int4Matrix) -> None:
        """See ``Int4Scheme.copy_int4``."""
        values, zeros = (_in_awq_order(unpack_bytes(read(suffix))).t() for suffix in ("qweight", "qzeros"))
        out.store(values, read("scales").t(), zeros)


@dataclass(frozen=True)
class Gptq:
    """GPTQ's format: packed along the inputs, with zero points. The last group may be cut."""

    group_size: int | None
    """None: one group for each output channel."""
    zero_offset: int
    """What is added to stored zero points: 1 in ``checkpoint_format`` ``gptq``, 0 in ``gptq_v2``."""
    has_order: bool
    """Whether inputs are in groups in another order (``desc_act``), which ``g_idx`` says."""
    has_head: bool = False
    """Whether the output head is quantized too."""
    name = "gptq"
    mark = "qweight"
    scales = "scales"

    @property
    def unit(self) -> tuple[int, int | None]:
        """See ``WeightScheme.unit``. In another order, some inputs may be in any groups."""
        return PER_WORD, None if self.has_order else self.group_size or PER_WORD

    def headers(self, shape: tuple[int, ...]) -> Mapping[str, Header]:
        """See ``WeightScheme.headers``."""
        n_out, n_in = shape
        n_groups = 1 if self.group_size is None else -(-n_in // self.group_size)
        headers = {
            "qweight": Header((_n_words(n_in), n_out), _INTS),
            "qzeros": Header((n_groups, _n_words(n_out)), _INTS),
            "scales": Header((n_groups, n_out)),
        }
        return headers | {"g_idx": Header((n_in,), _INTS)} if self.has_order else headers

    def optional(self) -> frozenset[str]:
        """See ``WeightScheme.optional``. AutoGPTQ writes a bias of zeros beside every matrix that has none."""
        return frozenset({"bias"} if self.has_order else {"bias", "g_idx"})

    def dequantize(self, read: Callable[[str], Tensor]) -> Tensor:
        """See ``WeightScheme.dequantize``."""
        values = unpack(read("qweight").t())  # [out, in]
        zeros = unpack(read("qzeros")).add_(self.zero_offset)
        if self.has_order:
            groups = read("g_idx").long()
        else:
            groups = torch.arange(values.shape[1], device=values.device) // (self.group_size or values.shape[1])
        if groups.min() < 0 or groups.max() >= len(zeros):
            raise ValueError(f"g_idx has groups from {int(groups.min())} to {int(groups.max())} of {len(zeros)}")
        return (values - zeros[groups].t()) * read("scales").float()[groups].t()

    def copy_int4(self, read: Callable[[str], Tensor], out: Int4Matrix) -> None:
        """See ``Int4Scheme.copy_int4``."""
        zeros = unpack_bytes(read("qzeros")).add_(self.zero_offset)
        out.store(unpack_bytes(read("qweight").t()), read("scales").t(), zeros.t())


@dataclass(frozen=True)
class PackedInt4:
    """The symmetric ``pack-quantized`` format of compressed-tensors: packed along the inputs."""

    group_size: int | None
    """None: one group for each output channel."""
    name = "compressed-tensors int4"
    mark = "weight_packed"
    scales = "weight_scale"

    @property
    def unit(self) -> tuple[int, int]:
        """See ``WeightScheme.unit``."""
        return 1, self.group_size or PER_WORD

    def headers(self, shape: tuple[int, ...]) -> Mapping[str, Header]:
        """See ``WeightScheme.headers``."""
        n_out, n_in = shape
        n_groups = 1 if self.group_size is None else _n_groups(n_in, self.group_size)
        return {
            "weight_packed": Header((n_out, _n_words(n_in)), _INTS),
            "weight_scale": Header((n_out, n_groups)),
        }

    def optional(self) -> frozenset[str]:
        """See ``WeightScheme.optional``."""
        return frozenset({"weight_shape"})

    def dequantize(self, read: Callable[[str], Tensor]) -> Tensor:
        """See ``WeightScheme.dequantize``."""
        values = unpack(read("weight_packed")).sub_(_SIGN)
        scales = read("weight_scale").float()
        columns = values.shape[1] // scales.shape[1]
        return values.mul_(scales.repeat_interleave(columns, 1))

    def copy_int4(self, read: Callable[[str], Tensor], out: Int4Matrix) -> None:
        """See ``Int4Scheme.copy_int4``."""
        scales = read("weight_scale")
        out.store(unpack_bytes(read("weight_packed")), scales, torch.full_like(scales, _SIGN))


def unpack(words: Tensor) -> Tensor:
    """Returns the unsigned 4-bit integers of [rows, words] int32: [rows, 8 * words] float32."""
    return unpack_bytes(words).float()


def unpack_bytes(words: Tensor) -> Tensor:
    """Returns the unsigned 4-bit integers of [rows, words] int32: [rows, 8 * words] uint8."""
    pairs: Tensor = words.contiguous().view(torch.uint8)  # of which the first is in the lower bits
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)


def _in_awq_order(values: Tensor) -> Tensor:
    """Returns columns in their order, given as AWQ packs them."""
    order = torch.tensor(_AWQ_ORDER, device=values.device)
    words: Tensor = values.unflatten(1, (-1, PER_WORD))
    return words[..., order].flatten(1)


def _n_groups(n_in: int, group_size: int) -> int:
    if n_in % group_size:
        raise ValueError(f"{n_in} inputs are not whole groups of {group_size}")
    return n_in // group_size


def _n_words(n: int) -> int:
    if n % PER_WORD:
        raise ValueError(f"{n} values are not whole words of {PER_WORD}")
    return n // PER_WORD
