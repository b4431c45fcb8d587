"""When each page of a prompt is used next: what an eviction policy could only know after the end."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.simulator.traffic import Traffic
from radixkv.tree.node import TOKEN_BYTES, Lease, Namespace
from radixkv.tree.radix_tree import RadixTree


class NextUse(NamedTuple):
    """A run of a prompt's pages that the same later prompt uses next."""

    n_pages: int
    """Where the run ends, counted from the prompt's start."""
    prompt: int
    """Which; the number of prompts if none does."""


def next_uses(traffic: Traffic, most_pages: int) -> list[list[NextUse]]:
    """The runs of each prompt, in order; the later a run, the later its next use. O(edges + pages) a prompt.

    The first has no page: it is the tree's root, through which every prompt leads.

    The trace is read backwards into a tree that evicts nothing: when a page was last used is then when it will be
    used next.

    Args:
        traffic: the prompts.
        most_pages: of a prompt; larger ones are left out, as they use nothing.
    """
    width = traffic.symbols_a_page * TOKEN_BYTES
    namespace, n_prompts = Namespace(), len(traffic.n_tokens)
    at = n_prompts
    tree = RadixTree(traffic.symbols_a_page, clock=lambda: at)
    found: list[list[NextUse]] = []
    for index in reversed(range(n_prompts)):
        if traffic.n_tokens[index] > most_pages * traffic.page_size:
            found.append([])
            continue
        tokens = traffic.symbols(index)
        n_pages = len(tokens) // width
        lease = tree.lease(namespace, b"")
        tree.extend(lease, tokens)  # which, unlike ``lease``, leaves the ticks as they are
        runs = _runs(lease, traffic.symbols_a_page, n_pages, n_prompts)
        found.append([NextUse(0, index + 1), *runs])
        first = lease.n_tokens // traffic.symbols_a_page
        tree.commit(lease, tokens[first * width : n_pages * width], range(first, n_pages))
        tree.mark_computed(lease, lease.n_tokens)
        at = index
        tree.release(lease)
    tree.detach(namespace)  # frees its links, which hold each other
    found.reverse()
    return found


def _runs(lease: Lease, symbols_a_page: int, n_pages: int, never: int) -> list[NextUse]:
    node, end = lease.node, lease.n_tokens // symbols_a_page
    runs = [NextUse(n_pages, never)] if end < n_pages else []
    while node.parent is not None:
        if not runs or runs[-1].prompt != node.tick:
            runs.append(NextUse(end, node.tick))
        end -= len(node.pages)
        node = node.parent
    runs.reverse()
    return runs
