"""The kernel sequences that compute a planned layer's decode rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import LayerLaunch, LayerTensors
from radixkv.runtime.device.attention.cuda.decode_kernel import attend_decode
from radixkv.runtime.device.attention.cuda.decode_tiles import TileConfig
from radixkv.runtime.device.attention.cuda.flashinfer import FlashInferLaunch
from radixkv.runtime.device.attention.cuda.merge import PartialResults, merge_results
from radixkv.runtime.device.attention.cuda.query_order import copy_item_queries, gather_queries


@dataclass(frozen=True)
class DecodeLaunch:
    """Attention of a layer's decode rows."""

    tables: Tensor
    items: Tensor
    n_items: int
    tile: int
    tile_config: TileConfig
    order: Tensor
    is_merged: bool
    merge_indptr: Tensor
    merge_indices: Tensor
    results: PartialResults
    scale: float
    large: LayerLaunch | None
    """The launch of large items, over pages that many rows share."""

    def __call__(self, layer: LayerTensors) -> None:
        """Enqueues the layer's kernels."""
        if self.large is not None:
            self.large(layer)
        attend_decode(
            layer,
            self.tables,
            self.items,
            self.order,
            self.results,
            scale=self.scale,
            n_items=self.n_items,
            tile=self.tile,
            tile_config=self.tile_config,
        )
        if self.is_merged:
            merge_results(layer, self.results, self.merge_indptr, self.merge_indices, self.order)


@dataclass(frozen=True)
class Fa2SharedLaunch:
    """Large items by FA2, with the queries gathered into their planned order."""

    order: Tensor
    ordered_queries: Tensor
    launch: FlashInferLaunch

    def __call__(self, layer: LayerTensors) -> None:
        gather_queries(layer.q, self.order, self.ordered_queries)
        self.launch(self.ordered_queries, layer.k_cache, layer.v_cache, layer.out, layer.scales)


@dataclass(frozen=True)
class Fa3SharedLaunch:
    """Large items by FA3, with a copy of the queries for each item."""

    order: Tensor
    copies: Tensor
    n_items: int
    n_rows: int
    """Most rows of an item."""
    group: int
    queries: Tensor
    values: Tensor
    launch: FlashInferLaunch

    def __call__(self, layer: LayerTensors) -> None:
        copy_item_queries(
            layer.q,
            self.order,
            self.copies,
            self.queries,
            n_items=self.n_items,
            n_rows=self.n_rows,
            group=self.group,
        )
        queries = self.queries.view(self.values.shape)
        self.launch(queries, layer.k_cache, layer.v_cache, self.values, layer.scales)
