"""A planned layer's kernels, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from radixkv.runtime.device.attention.cuda.decode_kernel import attend
from radixkv.runtime.device.attention.cuda.decode_tiles import Block
from radixkv.runtime.device.attention.cuda.flashinfer import Launch, Results
from radixkv.runtime.device.attention.cuda.merge import merge
from radixkv.runtime.device.attention.cuda.query_order import gather, spread


class Enqueue(Protocol):
    """Enqueues one layer; q and out are [queries, heads, head_dim]."""

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None: ...


@dataclass(frozen=True)
class DecodeLaunch:
    """A layer's decode rows."""

    tables: Tensor
    items: Tensor
    n_items: int
    tile: int
    block: Block
    order: Tensor
    is_merged: bool
    merge_indptr: Tensor
    merge_listed: Tensor
    results: Results
    group: int
    large: Enqueue | None
    """Of pages that many rows share."""

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        results = self.results
        if self.large is not None:
            self.large(q, k_cache, v_cache, out)
        attend(
            q,
            k_cache,
            v_cache,
            self.tables,
            self.items,
            self.order,
            out,
            results.values,
            results.lse,
            n_items=self.n_items,
            tile=self.tile,
            block=self.block,
            head_steps=results.head_steps,
        )
        if self.is_merged:
            merge(
                results.values,
                results.lse,
                self.merge_indptr,
                self.merge_listed,
                self.order,
                out,
                group=self.group,
                head_steps=results.head_steps,
            )


@dataclass(frozen=True)
class RequestsLaunch:
    """Large items by FA2, whose queries are in order."""

    order: Tensor
    ordered: Tensor
    launch: Launch

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        gather(q, self.order, self.ordered)
        self.launch(self.ordered, k_cache, v_cache, out)


@dataclass(frozen=True)
class TilesLaunch:
    """Large items by FA3, whose queries are copied for each of them."""

    order: Tensor
    copies: Tensor
    n_items: int
    n_rows: int
    """Of an item, at most."""
    group: int
    queries: Tensor
    values: Tensor
    launch: Launch

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        spread(q, self.order, self.copies, self.queries, n_items=self.n_items, n_rows=self.n_rows, group=self.group)
        self.launch(self.queries.view(self.values.shape), k_cache, v_cache, self.values)
