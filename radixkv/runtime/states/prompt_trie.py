"""A trie of prompts: which of them begin alike, and where they leave each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from radixkv.runtime.request import Request
from radixkv.tree.neighbours import n_common_tokens
from radixkv.tree.node import TOKEN_BYTES, Namespace


class _Node:
    """A beginning of prompts, at whose end one of them ends or several leave each other."""

    __slots__ = ("children", "computed", "edge", "n_ending", "n_ending_waiting", "n_tokens", "n_waiting", "parent")

    def __init__(self, parent: _Node | None, edge: bytes, n_tokens: int) -> None:
        self.parent = parent
        self.edge = edge
        """Its tokens after those of the parent."""
        self.n_tokens = n_tokens
        """All its tokens."""
        self.children: dict[bytes, _Node] = {}
        """By the token that follows."""
        self.n_ending = 0
        """Prompts that end here."""
        self.n_ending_waiting = 0
        """Those of them that wait."""
        self.n_waiting = 0
        """Waiting prompts that begin so."""
        self.computed: dict[Request, None] = {}
        """Prompts that begin so and are being computed, the first one first."""


class PromptTrie:
    """Prompts that wait, and prompts that are being computed, by what they begin with.

    A prompt is compared with others once, when it is added. All that is asked then is counted along its path, whose
    *edges* are the places where others end or leave it.
    """

    def __init__(self) -> None:
        self._roots: dict[Namespace, _Node] = {}
        self._ends: dict[Request, _Node] = {}
        self._computed: set[Request] = set()

    def __contains__(self, request: Request) -> bool:
        return request in self._ends

    def add(self, request: Request, tokens: bytes) -> None:
        """Adds a waiting prompt. O(tokens + edges)."""
        assert request not in self._ends, "a prompt is added once"
        node = self._roots.setdefault(request.namespace, _Node(None, b"", 0))
        start = 0
        while start < len(tokens):
            child = node.children.get(tokens[start : start + TOKEN_BYTES])
            if child is None:
                child = _Node(node, tokens[start:], len(tokens) // TOKEN_BYTES)
                node.children[tokens[start : start + TOKEN_BYTES]] = child
            elif not tokens.startswith(child.edge, start):
                child = _split(child, n_common_tokens(child.edge, tokens[start : start + len(child.edge)]))
            node = child
            start += len(child.edge)
        self._ends[request] = node
        node.n_ending += 1
        _count_waiting(node, 1)

    def compute(self, request: Request) -> None:
        """Takes note that a waiting prompt is being computed. O(edges)."""
        self._computed.add(request)
        _count_waiting(self._ends[request], -1)
        for node in _upwards(self._ends[request]):
            node.computed[request] = None

    def is_computed(self, request: Request) -> bool:
        """Returns whether a prompt is being computed. O(1)."""
        return request in self._computed

    def remove(self, request: Request) -> None:
        """Removes a prompt, if it is there. O(edges), and O(tokens) where two edges become one."""
        end = self._ends.pop(request, None)
        if end is None:
            return
        if request in self._computed:
            self._computed.remove(request)
            for node in _upwards(end):
                del node.computed[request]
        else:
            _count_waiting(end, -1)
        end.n_ending -= 1
        _prune(end)
        root = self._roots[request.namespace]
        if not (root.children or root.n_ending):
            del self._roots[request.namespace]

    def partings(self, request: Request) -> Iterator[int]:
        """Yields where waiting prompts leave a prompt that is being computed, the last place first: how many of its
        tokens they have in common, less one where this would be all of either prompt. O(edges)."""
        end = self._ends[request]
        n_longer = 0
        for node in _upwards(end):
            if node.n_waiting > n_longer + node.n_ending_waiting:
                yield node.n_tokens - (node is end)
            if node.n_ending_waiting:
                yield node.n_tokens - 1
            n_longer = node.n_waiting

    def nearest_computed(self, request: Request) -> tuple[Iterable[Request], int]:
        """Returns those prompts that are being computed and have most tokens in common with one, the first one
        first, and the number of these tokens; ((), 0) if no prompt is being computed. O(edges)."""
        for node in _upwards(self._ends[request]):
            if node.computed:
                return node.computed.keys(), node.n_tokens
        return (), 0


def _upwards(end: _Node) -> Iterator[_Node]:
    node: _Node | None = end
    while node is not None:
        yield node
        node = node.parent


def _count_waiting(end: _Node, n_more: int) -> None:
    end.n_ending_waiting += n_more
    for node in _upwards(end):
        node.n_waiting += n_more


def _split(node: _Node, n_tokens: int) -> _Node:
    """Puts a node before another one, after the first tokens of its edge; returns it. O(tokens of the edge)."""
    parent, n_bytes = node.parent, n_tokens * TOKEN_BYTES
    assert parent is not None, "a root has no tokens"
    above = _Node(parent, node.edge[:n_bytes], parent.n_tokens + n_tokens)
    above.n_waiting = node.n_waiting
    above.computed = dict(node.computed)
    parent.children[node.edge[:TOKEN_BYTES]] = above
    node.parent, node.edge = above, node.edge[n_bytes:]
    above.children[node.edge[:TOKEN_BYTES]] = node
    return above


def _prune(node: _Node) -> None:
    """Removes a node, and then its parents, where no prompts end nor leave each other."""
    while node.parent is not None and not node.n_ending and len(node.children) < 2:
        parent = node.parent
        if node.children:
            (child,) = node.children.values()
            parent.children[node.edge[:TOKEN_BYTES]] = child
            child.parent, child.edge = parent, node.edge + child.edge
            return
        del parent.children[node.edge[:TOKEN_BYTES]]
        node = parent
