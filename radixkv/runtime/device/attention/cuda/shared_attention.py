"""Attention over pages that many rows share, by FlashInfer's kernels: what a planned layer enqueues."""

from __future__ import annotations

from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import LayerTensors
from radixkv.runtime.device.attention.cuda.flashinfer import FlashInferLaunch
from radixkv.runtime.device.attention.cuda.query_order import copy_item_queries, gather_queries


def attend_shared_by_fa2(
    layer: LayerTensors, *, order: Tensor, ordered_queries: Tensor, launch: FlashInferLaunch
) -> None:
    """Enqueues FA2's large items, with the queries gathered into their planned order."""
    gather_queries(layer.q, order, ordered_queries)
    launch(ordered_queries, layer.k_cache, layer.v_cache, layer.out, layer.scales)


def attend_shared_by_fa3(
    layer: LayerTensors,
    *,
    order: Tensor,
    copies: Tensor,
    n_items: int,
    n_rows: int,
    group: int,
    queries: Tensor,
    values: Tensor,
    launch: FlashInferLaunch,
) -> None:
    """Enqueues FA3's large items, with a copy of the queries for each item.

    Args:
        layer: of the decode rows.
        order, copies, n_items, n_rows, group: see ``copy_item_queries``, which writes ``queries``.
        queries: as many as there may be results, in the dtype of K and V.
        values: [results * group, kv_heads, head_dim]: partial results.
        launch: the planned kernel.
    """
    copy_item_queries(layer.q, order, copies, queries, n_items=n_items, n_rows=n_rows, group=group)
    launch(queries.view(values.shape), layer.k_cache, layer.v_cache, values, layer.scales)
