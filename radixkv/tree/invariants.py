"""Everything that must hold between nodes, counts and leases."""

from __future__ import annotations

from collections.abc import Collection

from radixkv.errors import InvariantError
from radixkv.tree.digest import Digest, digest_at
from radixkv.tree.forest import Forest
from radixkv.tree.node import Lease, Node


def check_counts(forest: Forest) -> None:
    """What can be checked in O(1). Raises ``InvariantError``."""
    if min(forest.n_leased, forest.n_evictable, forest.n_detached) < 0:
        raise InvariantError(
            f"{forest.n_leased} pages leased, {forest.n_evictable} evictable, {forest.n_detached} detached: "
            "some were counted out twice"
        )
    if bool(forest.n_evictable) != bool(forest.evictable):
        raise InvariantError(f"{forest.n_evictable} pages are evictable, in {len(forest.evictable)} leaves")


def check_forest(forest: Forest, leases: Collection[Lease], digest: Digest) -> None:
    """Every invariant, recounted from the open leases. Raises ``InvariantError``. O(pages + edges of the leases),
    and a sort of the evictable leaves."""
    check_counts(forest)
    held = _held_nodes(leases, forest.width)
    reachable = set(forest.reachable())
    for namespace, root in forest.roots.items():
        _expect(root.parent is None and not root.pages and not root.key, root, "a root has a parent or pages")
        _expect(root.namespace == namespace, root, f"the root of {namespace} belongs to {root.namespace}")
        _expect(bool(root.n_leases or root.children), root, "an empty root without leases was kept")

    pages: set[int] = set()
    detached = [node for node in held if node.detached]
    for node in (*reachable, *detached):
        _expect(node.n_leases == held.get(node, 0), node, f"{held.get(node, 0)} open leases hold it")
        _expect(len(node.key) == forest.width * len(node.pages), node, f"its key has {len(node.key)} bytes")
        _expect(bool(node.pages) or node.parent is None, node, "it has no pages")
        _expect(pages.isdisjoint(node.pages), node, "one of its pages has a second place in the tree")
        pages.update(node.pages)
        _expect(0 <= node.n_computed <= len(node.pages), node, f"{node.n_computed} of its pages are settled")
        _check_parent(node, forest.width)
    _expect(len(pages) == sum(len(node.pages) for node in (*reachable, *detached)), None, "a page is held twice")

    for node in reachable:
        _expect(not node.detached, node, "it is detached, and reachable")
        _expect(bool(node.n_leases) or node.n_computed == len(node.pages), node, "it has unsettled pages, unleased")
        _check_children(node, forest.width)
        _check_digests(node, forest.width, digest)
    for node in detached:
        _expect(node not in reachable and node.children is None, node, "it is detached, and has children")

    leaves = [node for node in reachable if node.children is None and not node.n_leases and node.parent is not None]
    leaves.sort(key=lambda node: (node.tick, node.serial))
    _expect(
        list(forest.evictable) == leaves, None, "the evictable leaves are not the unleased ones in order of use"
    )
    for name, count, counted in (
        ("leased", forest.n_leased, sum(len(node.pages) for node in reachable if node.n_leases)),
        ("evictable", forest.n_evictable, sum(len(node.pages) for node in reachable if not node.n_leases)),
        ("detached", forest.n_detached, sum(len(node.pages) for node in detached)),
    ):
        _expect(count == counted, None, f"{count} pages are counted as {name}, {counted} are")


def _held_nodes(leases: Collection[Lease], width: int) -> dict[Node, int]:
    """How many leases hold each node."""
    held: dict[Node, int] = {}
    for lease in leases:
        _expect(not lease.released, lease.node, "a released lease is counted as open")
        length = 0
        node: Node | None = lease.node
        while node is not None:
            held[node] = held.get(node, 0) + 1
            length += len(node.key)
            _expect(node.namespace == lease.namespace, node, f"a lease in {lease.namespace} holds it")
            node = node.parent
        _expect(length == 4 * lease.n_tokens, lease.node, f"a lease over {lease.n_tokens} tokens ends there")
        _expect(length % width == 0, lease.node, "a lease ends inside a page")
    return held


def _check_parent(node: Node, width: int) -> None:
    parent = node.parent
    if parent is None:
        return
    _expect(parent.n_leases >= node.n_leases, node, f"its parent has {parent.n_leases} leases")
    _expect(parent.tick >= node.tick, node, f"its parent was used last at {parent.tick}")
    _expect(parent.namespace == node.namespace, node, f"its parent is in {parent.namespace}")
    _expect(node.detached or not parent.detached, node, "it is reachable, its parent detached")
    if node.n_computed:
        _expect(parent.n_computed == len(parent.pages), node, "it is settled, its parent is not")
    if not node.detached:
        children = parent.children
        found = None if children is None else children.get(bytes(node.key[:width]))
        _expect(found is node, node, "its parent does not find it under its first page")


def _check_children(node: Node, width: int) -> None:
    if node.children is None:
        return
    _expect(len(node.children) > 0 and node.children.is_ordered(), node, "its children are empty or out of order")
    for first_page, child in node.children.items():
        _expect(child.parent is node, child, "its parent is another node")
        _expect(child.key[:width] == first_page, child, "it is found under another first page")


def _check_digests(node: Node, width: int, digest: Digest) -> None:
    if node.digests is None or node.parent is None:
        return
    _expect(len(node.digests) <= len(node.pages), node, "it has more digests than pages")
    value = digest_at(digest, node.parent, len(node.parent.pages), width)
    for index, known in enumerate(node.digests):
        value = digest(value, bytes(node.key[index * width : (index + 1) * width]))
        _expect(value == known, node, f"the digest of its page {index} is wrong")


def _expect(holds: bool, node: Node | None, broken: str) -> None:
    if holds:
        return
    if node is None:
        raise InvariantError(broken)
    raise InvariantError(
        f"node {node.serial} of {node.namespace} with {len(node.pages)} pages, {node.n_leases} leases, "
        f"tick {node.tick}: {broken}"
    )
