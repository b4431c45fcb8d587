"""The matrices of adapters on the device, in slots of one memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.errors import CheckpointError
from radixkv.runtime.device.ops.cuda.lora import LoraMatrices, tile_columns
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices
from radixkv.runtime.device.weights.layer_weights import Part

_ALIGNED_VALUES = 64
_ALIGNED_ENTRIES = 4
"""Ranks and scales of a product are padded to a multiple of it: as many as 16 bytes have."""
_STAGING_VALUES = 2 << 20


class ProductSlots:
    """What the adapters of all slots add to a product.

    Args:
        parts: the matrices that it stacks.
        n_in: inputs.
    """

    def __init__(self, parts: Sequence[Part], n_in: int) -> None:
        self.parts = parts
        self.n_in = n_in
        self._matrices: LoraMatrices | None = None

    @property
    def n_out(self) -> int:
        """Outputs of all parts."""
        return sum(part.n_out for part in self.parts)

    @property
    def matrices(self) -> LoraMatrices:
        """As kernels take them."""
        assert self._matrices is not None, "AdapterMemory.allocate comes before the first step"
        return self._matrices

    def place(self, matrices: LoraMatrices) -> None:
        """Sets where they are."""
        self._matrices = matrices


@dataclass(frozen=True)
class SlotTables:
    """What kernels need of an adapter beside its matrices, on the host."""

    ranks: Tensor
    """[entries] int32."""
    scales: Tensor
    """[entries] float32."""


class AdapterMemory:
    """A and B of the adapters that a device has.

    Each slot has room for all products at ``max_rank``, in the order of ``add``. So the address of a matrix follows
    from its slot, and captured graphs go on when adapters come and go.

    Args:
        n_slots: adapters that have room.
        max_rank: most ranks of an adapter.
        dtype: of activations.
        device: where they are.
    """

    def __init__(self, n_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.n_slots = n_slots
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._products: list[ProductSlots] = []

    @property
    def n_products(self) -> int:
        """Products that adapters may change."""
        return len(self._products)

    def add(self, parts: Sequence[Part], n_in: int) -> ProductSlots:
        """Returns the slots of a further product."""
        product = ProductSlots(parts, n_in)
        self._products.append(product)
        return product

    def allocate(self) -> None:
        """Allocates the memory of all products, once all were added."""
        firsts, n_values, n_entries = list[tuple[int, int, int]](), 0, 0
        for product in self._products:
            first_b = n_values + _up(len(product.parts) * self._max_rank * product.n_in, _ALIGNED_VALUES)
            firsts.append((n_values, first_b, n_entries))
            n_values = first_b + _up(self._max_rank * product.n_out, _ALIGNED_VALUES)
            n_entries += _up(len(product.parts), _ALIGNED_ENTRIES)
        is_pinned = self._device.type == "cuda"
        self._values = torch.empty(self.n_slots, n_values, dtype=self._dtype, device=self._device)
        self._ranks = torch.zeros(self.n_slots, n_entries, dtype=torch.int32, device=self._device)
        self._scales = torch.zeros(self.n_slots, n_entries, dtype=torch.float32, device=self._device)
        self._staging = torch.empty(_STAGING_VALUES, dtype=self._dtype, pin_memory=is_pinned)
        self._stream = torch.cuda.Stream(self._device) if is_pinned else None
        tiles: dict[tuple[int, ...], Tensor] = {}
        for product, (first_a, first_b, entry) in zip(self._products, firsts, strict=True):
            sizes = tuple(part.n_out for part in product.parts)
            columns = tile_columns(product.n_out)
            if sizes not in tiles:
                rows = list(_tiles(sizes, columns))
                tiles[sizes] = torch.tensor(rows, dtype=torch.int32).to(self._device)
            product.place(
                LoraMatrices(
                    a=self._values[0, first_a:],
                    b=self._values[0, first_b:],
                    ranks=self._ranks[0, entry:],
                    scales=self._scales[0, entry:],
                    tiles=tiles[sizes],
                    n_parts=len(sizes),
                    n_in=product.n_in,
                    max_rank=self._max_rank,
                    columns=columns,
                    is_aligned=all(size % 16 == 0 for size in sizes),
                    slot_stride=n_values,
                    table_stride=n_entries,
                )
            )
        self._firsts = firsts

    def release(self) -> None:
        """Frees everything, once no step is launched any more."""
        self._products.clear()
        del self._values, self._ranks, self._scales, self._staging

    def check(self, adapter: AdapterMatrices) -> None:
        """Raises ``CheckpointError`` if no product has one of the adapter's modules."""
        known = {part.name for product in self._products for part in product.parts}
        if unused := adapter.modules.keys() - known:
            raise CheckpointError(f"adapter {adapter.digest[:12]}: nothing computes with its module {min(unused)}")

    def write(self, slot: int, adapter: AdapterMatrices) -> SlotTables:
        """Copies the matrices of an adapter into a slot that no step uses; returns the rest. Waits for the copies.

        One thread at a time may call it, beside steps: the copies have a stream of their own.
        """
        ranks = torch.zeros(self._ranks.shape[1], dtype=torch.int32)
        scales = torch.zeros(self._scales.shape[1], dtype=torch.float32)
        values = self._values[slot]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            copies = _StagedCopies(self._staging, self._stream)
            for product, (first_a, first_b, entry) in zip(self._products, self._firsts, strict=True):
                first_out = 0
                for index, part in enumerate(product.parts):
                    shape = adapter.modules.get(part.name)
                    if shape is not None:
                        ranks[entry + index], scales[entry + index] = shape.rank, shape.scale
                        a, b = adapter.pair(part.name)
                        b = b if part.rows is None else b[part.rows]
                        copies.add(a, values[first_a + index * self._max_rank * product.n_in :])
                        copies.add(b.t(), values[first_b + first_out * self._max_rank :])
                    first_out += part.n_out
            copies.wait()
        return SlotTables(ranks, scales)

    def publish(self, slot: int, tables: SlotTables) -> None:
        """Enqueues on the current stream that later steps compute with the matrices of a slot."""
        self._ranks[slot].copy_(tables.ranks, non_blocking=True)
        self._scales[slot].copy_(tables.scales, non_blocking=True)


class _StagedCopies:
    """Copies of matrices to the device through pinned memory, which is there from the start.

    To pin memory takes the driver tens of milliseconds, in which it launches no kernel.

    Args:
        staging: pinned.
        stream: the current stream; None on the CPU.
    """

    def __init__(self, staging: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._staging = staging
        self._stream = stream
        self._n_used = 0

    def add(self, matrix: Tensor, target: Tensor) -> None:
        """Copies a matrix to the beginning of ``target``, row after row, converted to its dtype."""
        flat, size = matrix.flatten(), len(self._staging)
        for first in range(0, len(flat), size):
            piece = flat[first : first + size]
            if self._n_used + len(piece) > size:
                self.wait()
            staged = self._staging[self._n_used : self._n_used + len(piece)]
            staged.copy_(piece)
            target[first : first + len(piece)].copy_(staged, non_blocking=True)
            self._n_used += len(piece)

    def wait(self) -> None:
        """Waits for all copies."""
        if self._stream is not None:
            self._stream.synchronize()
        self._n_used = 0


def _tiles(sizes: Sequence[int], columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the rows of ``LoraMatrices.tiles``."""
    part_first = 0
    for part, size in enumerate(sizes):
        for first in range(0, size, columns):
            yield part, part_first, size, first
        part_first += size


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
