"""The next use of each page of a prompt, and the eviction policy ``oracle``, which knows it."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.lab.simulator.traffic import Traffic
from radixkv.tree.eviction_policies import EvictionPolicy
from radixkv.tree.node import TOKEN_BYTES, Lease, Namespace, Node
from radixkv.tree.radix_tree import RadixTree


class NextUse(NamedTuple):
    """A span of consecutive pages of a prompt whose next use is in the same later prompt."""

    n_pages: int
    """Pages from the start of the prompt to the end of the span."""
    prompt: int
    """Index of that later prompt, or the number of prompts if the pages are never used again."""


class OracleEviction(EvictionPolicy):
    """Evicts the page whose next use is latest.

    Every use of a page also uses its prefix, so parents rank at least as high as their children.

    Args:
        n_prompts: prompts of the replay.
    """

    def __init__(self, n_prompts: int) -> None:
        self.next_use = n_prompts
        """Index of the prompt that uses next the paths whose use ends from now on; ``n_prompts``: none does."""
        self._n_prompts = n_prompts

    def use(self, end: Node) -> None:
        """Ranks the nodes of the path by ``next_use``, the latest first."""
        node: Node | None = end
        while node is not None:
            node.rank = self._n_prompts - self.next_use
            node = node.parent


def next_uses(traffic: Traffic, max_pages: int) -> list[list[NextUse]]:
    """Returns the spans of each prompt, from start to end. O(edges + pages) per prompt.

    Spans further back in a prompt have a later next use. The first span has no page: it stands for the tree's root,
    which every prompt uses.

    The prompts are inserted in reverse order into a tree that evicts nothing, so the last use of a page in that
    tree, which its node's rank tells, is its next use in the trace.

    Args:
        traffic: the prompts.
        max_pages: prompts with more pages are refused by the pool, use no page and get no span.
    """
    page_bytes = traffic.symbols_per_page * TOKEN_BYTES
    namespace, n_prompts = Namespace(), len(traffic.n_tokens)
    policy = OracleEviction(n_prompts)
    tree = RadixTree(traffic.symbols_per_page, policy=policy)
    spans_by_prompt: list[list[NextUse]] = []
    for index in reversed(range(n_prompts)):
        if traffic.n_tokens[index] > max_pages * traffic.page_size:
            spans_by_prompt.append([])
            continue
        tokens = traffic.symbols(index)
        n_pages = len(tokens) // page_bytes
        lease = tree.lease(namespace, tokens)
        spans = _spans(lease, traffic.symbols_per_page, n_pages, n_prompts)
        spans_by_prompt.append([NextUse(0, index + 1), *spans])
        n_matched = lease.n_tokens // traffic.symbols_per_page
        tree.commit(lease, tokens[n_matched * page_bytes : n_pages * page_bytes], range(n_matched, n_pages))
        tree.mark_computed(lease, lease.n_tokens)
        policy.next_use = index
        tree.release(lease)
    tree.detach(namespace)  # breaks the reference cycles between nodes
    spans_by_prompt.reverse()
    return spans_by_prompt


def _spans(lease: Lease, symbols_per_page: int, n_pages: int, never: int) -> list[NextUse]:
    node, end = lease.node, lease.n_tokens // symbols_per_page
    spans = [NextUse(n_pages, never)] if end < n_pages else []
    while node.parent is not None:
        prompt = never - node.rank
        if not spans or spans[-1].prompt != prompt:
            spans.append(NextUse(end, prompt))
        end -= len(node.pages)
        node = node.parent
    spans.reverse()
    return spans
