"""Lets CPU devices open sooner, because tests open hundreds of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from radixkv.runtime.device import resolved_config
from radixkv.runtime.device.ops.cpu.layers import RowTiles


@contextmanager
def quick_opening() -> Iterator[None]:
    """All devices share the row tiles that one has tried, and keep 16 MiB of states by default, not 1 GiB."""
    tried: dict[tuple[torch.Size, torch.dtype, int], tuple[int, ...]] = {}
    tiles_for = RowTiles.tiles_for

    def tiles_of_all(self: RowTiles, weight: Tensor) -> tuple[int, ...]:
        key = weight.shape, weight.dtype, torch.get_num_threads()
        if key not in tried:
            tried[key] = tiles_for(self, weight)
        return tried[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolved_config, "CPU_STATE_BYTES", 1 << 24)
        patch.setattr(RowTiles, "tiles_for", tiles_of_all)
        yield
