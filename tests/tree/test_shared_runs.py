"""Runs of pages that leases share, after the end of a lease has moved."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack

import pytest

from radixkv.tree.node import Lease, Namespace
from radixkv.tree.radix_tree import RadixTree
from radixkv.tree.shared_runs import SharedLeases

TOKENS = pack("<2i", 1, 2)


@pytest.mark.parametrize(
    "move",
    [
        lambda tree, lease: tree.extend(lease, TOKENS),
        lambda tree, lease: tree.commit(lease, TOKENS, [9]),
    ],
    ids=["extend", "commit"],
)
def test_a_lease_that_moves_onto_pages_of_two_others_shares_them(
    move: Callable[[RadixTree, Lease], object],
) -> None:
    tree = RadixTree(2)
    first = tree.lease(Namespace(), TOKENS)
    third = tree.lease(Namespace(), TOKENS)
    tree.commit(first, TOKENS, [0])
    second = tree.fork(first)
    leases = [first, second, third]
    assert tree.shared_runs(leases) == [SharedLeases((0, 1), 0, 1)]
    move(tree, third)
    assert tree.pages(third) == [0]
    assert tree.shared_runs(leases) == [SharedLeases((0, 1, 2), 0, 1)]
