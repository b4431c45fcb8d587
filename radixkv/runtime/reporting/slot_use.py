"""Count of the token slots that block tables use: filled, holding copies, and saved by sharing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.request import Request
from radixkv.tree.neighbours import n_common_tokens
from radixkv.tree.node import TOKEN_BYTES, Node


class TableUse(NamedTuple):
    """A block table and what it stores."""

    blocks: BlockTable
    tokens: bytearray
    """Known tokens of the request, little-endian int32."""
    n_stored: int
    """Leading tokens whose KV is in the pages, or will be once the launched steps are done."""


class SlotUse(NamedTuple):
    """Token slots of all pages that some block tables hold."""

    n_slots: int
    """Slots of the pages, each page once."""
    n_filled: int
    """Slots that hold KV."""
    n_duplicate: int
    """Filled slots whose contents another filled slot has too, as ``count_slot_use`` finds them."""
    n_saved: int
    """Slots that the tables would need in addition if each had its leased pages for itself."""


def tables_of(requests: Iterable[Request]) -> Iterator[TableUse]:
    """Yields the block table of each running or releasing request, and what it stores. O(requests)."""
    for request in requests:
        yield TableUse(request.blocks, request.known_key, request.n_scheduled)


def count_slot_use(tables: Iterable[TableUse], page_size: int) -> SlotUse:
    """Counts the slots that the block tables use.

    A slot is a duplicate if another one holds the same token after the same tokens in the same namespace; of equal
    slots, all but one are duplicates. Two places are searched: duplicates of committed pages that wait to be freed,
    and what follows one path of the tree, where the first page of each branch that a table leases and the known
    tokens of each tail are compared. Detached paths, tables without a lease, tails of tables that skip pages, and
    what launched steps sample are not compared.

    O(tables + leased nodes), with a page's tokens read of each, and sorting them.

    Args:
        tables: block tables of one cache.
        page_size: tokens per page.
    """
    page_bytes = page_size * TOKEN_BYTES
    n_own_pages = n_own_filled = n_leaving = n_replaced = n_leased = 0
    leased: set[Node] = set()
    after: defaultdict[Node, list[bytes]] = defaultdict(list)
    """What follows the end of a node: the first page of a leased child, or the tail of a table."""
    for blocks, tokens, n_stored in tables:
        first = max(blocks.n_leased, blocks.n_freed)
        n_dropped = blocks.n_dropped
        n_own_pages += len(blocks.pages) - first - n_dropped
        n_own_filled += max(0, n_stored - (first + n_dropped) * page_size)
        n_leaving += len(blocks.replaced)
        n_replaced += sum(one.is_duplicate for one in blocks.replaced)
        n_leased += blocks.n_leased
        if blocks.lease is None:
            continue
        node = blocks.lease.node
        if not blocks.skipped:
            after[node].append(bytes(memoryview(tokens)[first * page_bytes : n_stored * TOKEN_BYTES]))
        while node.parent is not None and node not in leased:
            leased.add(node)
            after[node.parent].append(bytes(memoryview(node.key)[:page_bytes]))
            node = node.parent
    n_distinct = sum(len(node.pages) for node in leased)
    return SlotUse(
        n_slots=(n_own_pages + n_leaving + n_distinct) * page_size,
        n_filled=n_own_filled + (n_leaving + n_distinct) * page_size,
        n_duplicate=n_replaced * page_size + sum(map(_n_repeated, after.values())),
        n_saved=(n_leased - n_distinct) * page_size,
    )


def _n_repeated(texts: list[bytes]) -> int:
    """Returns how many tokens of the texts repeat another text's token after the same tokens.

    Among sorted texts, a token repeats exactly if it is in the prefix common with the text before.
    """
    texts.sort()
    return sum(n_common_tokens(one, other) for one, other in pairwise(texts))
