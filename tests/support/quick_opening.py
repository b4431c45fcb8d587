"""Lets CPU devices open sooner, because tests open hundreds of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import pytest
import torch
from torch import Tensor

from radixkv.runtime.device import resolved_config
from radixkv.runtime.device.attention.cpu import paged
from radixkv.runtime.device.attention.cpu.block_softmax import BlockLayout
from radixkv.runtime.device.ops.cpu.layers import RowTiles


@pytest.fixture(autouse=True, scope="module")
def opens_quickly(tried_tiles: dict[Hashable, tuple[int, ...]]) -> Iterator[None]:
    """All devices share the tiles that one has tried, and keep 16 MiB of states by default, not 1 GiB."""
    tiles_for, token_tiles = RowTiles.tiles_for, paged._token_tiles

    def tiles_of_all(self: RowTiles, weight: Tensor) -> tuple[int, ...]:
        key = weight.shape, weight.dtype, torch.get_num_threads()
        if key not in tried_tiles:
            tried_tiles[key] = tiles_for(self, weight)
        return tried_tiles[key]

    def token_tiles_of_all(layout: BlockLayout) -> tuple[int, ...]:
        key = layout, torch.get_num_threads()
        if key not in tried_tiles:
            tried_tiles[key] = token_tiles(layout)
        return tried_tiles[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolved_config, "CPU_STATE_BYTES", 1 << 24)
        patch.setattr(RowTiles, "tiles_for", tiles_of_all)
        patch.setattr(paged, "_token_tiles", token_tiles_of_all)
        yield
