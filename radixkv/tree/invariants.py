"""Consistency checks of the radix tree."""

from __future__ import annotations

from collections.abc import Collection

from radixkv.errors import InvariantError
from radixkv.tree.digest import chained_xxh3_64, digest_at
from radixkv.tree.forest import Forest
from radixkv.tree.node import TOKEN_BYTES, Lease, Namespace, Node, upwards


def check_counts(forest: Forest) -> None:
    """Checks the page counts against each other. O(1).

    Raises:
        InvariantError: a count is negative or contradicts another.
    """
    if min(forest.n_leased, forest.n_evictable, forest.n_detached) < 0:
        raise InvariantError(
            f"{forest.n_leased} pages leased, {forest.n_evictable} evictable, {forest.n_detached} detached: "
            "a page left one of them twice"
        )
    if bool(forest.n_evictable) != bool(forest.evictable):
        raise InvariantError(f"{forest.n_evictable} pages are evictable in {len(forest.evictable)} leaves")


def check_forest(forest: Forest, leases: Collection[Lease]) -> None:
    """Recounts everything from the open leases and compares. O(pages + edges of the leases), and a sort of the
    evictable leaves.

    Raises:
        InvariantError: names the node and what is wrong with it.
    """
    check_counts(forest)
    n_leases = _lease_counts(leases, forest.page_bytes)
    reachable = set(forest.reachable())
    for namespace, root in forest.roots.items():
        _expect(
            root.parent is None and not root.pages and not root.key, root, "it is a root, and has a parent or pages"
        )
        if root.namespace != namespace:
            raise _broken(root, f"the root of {namespace} belongs to {root.namespace}")
        _expect(bool(root.n_leases or root.children), root, "it is an empty root without leases, and still there")

    pages: set[int] = set()
    detached = [node for node in n_leases if node.detached]
    for node in (*reachable, *detached):
        _expect(node.n_leases == n_leases.get(node, 0), node, f"{n_leases.get(node, 0)} open leases contain it")
        _expect(len(node.key) == forest.page_bytes * len(node.pages), node, f"its key has {len(node.key)} bytes")
        _expect(bool(node.pages) or node.parent is None, node, "it has no pages")
        _expect(pages.isdisjoint(node.pages), node, "one of its pages is in the tree twice")
        pages.update(node.pages)
        _expect(0 <= node.n_computed <= len(node.pages), node, f"{node.n_computed} of its pages are computed")
        _check_parent(node, forest.page_bytes)
    _expect(len(pages) == sum(len(node.pages) for node in (*reachable, *detached)), None, "a page is in two nodes")

    for node in reachable:
        _expect(not node.detached, node, "it is detached, but reachable")
        _expect(
            bool(node.n_leases) or node.n_computed == len(node.pages),
            node,
            "it has no lease, and pages that are not computed",
        )
        _check_children(node, forest.page_bytes)
        _check_digests(node, forest.page_bytes)
    for node in detached:
        _expect(
            node not in reachable and node.children is None, node, "it is detached, but reachable or has children"
        )

    leaves = [node for node in reachable if node.children is None and not node.n_leases and node.parent is not None]
    leaves.sort(key=lambda node: (node.n_retentions > 0, node.rank, node.serial))
    _expect(
        list(forest.evictable) == leaves,
        None,
        "the evictable leaves are not those without a lease, in order of their ranks and the retained ones last",
    )
    _check_retentions(forest, reachable, detached)
    for group, count in forest.n_evictable_of.items():
        counted = sum(len(one.pages) for one in reachable if one.namespace.group == group and not one.n_leases)
        _expect(count == counted, None, f"{count} pages of {group!r} are counted as evictable, but {counted} are")
    for name, count, counted in (
        ("leased", forest.n_leased, sum(len(node.pages) for node in reachable if node.n_leases)),
        ("evictable", forest.n_evictable, sum(len(node.pages) for node in reachable if not node.n_leases)),
        ("detached", forest.n_detached, sum(len(node.pages) for node in detached)),
    ):
        _expect(count == counted, None, f"{count} pages are counted as {name}, but {counted} are")


def _lease_counts(leases: Collection[Lease], page_bytes: int) -> dict[Node, int]:
    """Returns how many leases contain each node."""
    n_leases: dict[Node, int] = {}
    for lease in leases:
        _expect(not lease.released, lease.node, "a released lease that ends here is still counted as open")
        length = 0
        for node in upwards(lease.node):
            n_leases[node] = n_leases.get(node, 0) + 1
            length += len(node.key)
            if node.namespace != lease.namespace:
                raise _broken(node, f"a lease in {lease.namespace} contains it")
        _expect(length == TOKEN_BYTES * lease.n_tokens, lease.node, f"a lease of {lease.n_tokens} tokens ends here")
        _expect(length % page_bytes == 0, lease.node, "a lease ends within a page")
    return n_leases


def _check_retentions(forest: Forest, reachable: Collection[Node], detached: Collection[Node]) -> None:
    n_retentions: dict[Node, int] = {}
    for end in reachable:
        for retention in end.retentions or ():
            _expect(retention.node is end, end, "a retention is listed here, but ends elsewhere")
            node = end
            while node.parent is not None:
                n_retentions[node] = n_retentions.get(node, 0) + 1
                node = node.parent
    n_pages: dict[Namespace, int] = {}
    for node in (*reachable, *detached):
        n_expected = n_retentions.get(node, 0)
        _expect(node.n_retentions == n_expected, node, f"{n_expected} retentions cover it, not {node.n_retentions}")
        if n_expected:
            n_pages[node.namespace] = n_pages.get(node.namespace, 0) + len(node.pages)
    if forest.retained_pages != n_pages:
        raise InvariantError(f"{forest.retained_pages} retained pages, but {n_pages} are")
    _expect(forest.n_retained == sum(n_pages.values()), None, f"{forest.n_retained} pages are counted as retained")


def _check_parent(node: Node, page_bytes: int) -> None:
    parent = node.parent
    if parent is None:
        return
    _expect(parent.n_leases >= node.n_leases, node, f"its parent has {parent.n_leases} leases")
    if parent.namespace != node.namespace:
        raise _broken(node, f"its parent is in {parent.namespace}")
    _expect(node.detached or not parent.detached, node, "it is reachable, but its parent is detached")
    if node.n_computed:
        _expect(
            parent.n_computed == len(parent.pages),
            node,
            "it has computed pages, but its parent has pages that are not",
        )
    if not node.detached:
        children = parent.children
        child = None if children is None else children.get(bytes(node.key[:page_bytes]))
        _expect(child is node, node, "its parent has no entry of its first page for it")


def _check_children(node: Node, page_bytes: int) -> None:
    if node.children is None:
        return
    _expect(
        len(node.children) > 0 and node.children.is_ordered(), node, "its map of children is empty or out of order"
    )
    for first_page, child in node.children.items():
        _expect(child.parent is node, child, "its parent is another node")
        _expect(child.key[:page_bytes] == first_page, child, "its parent has it under another first page")


def _check_digests(node: Node, page_bytes: int) -> None:
    if node.digests is None or node.parent is None:
        return
    _expect(len(node.digests) <= len(node.pages), node, "it has more digests than pages")
    value = digest_at(node.parent, len(node.parent.pages), page_bytes)
    for index, known in enumerate(node.digests):
        value = chained_xxh3_64(value, bytes(node.key[index * page_bytes : (index + 1) * page_bytes]))
        _expect(value == known, node, f"the digest of its page {index} is wrong")


def _expect(condition: bool, node: Node | None, problem: str) -> None:
    if not condition:
        raise InvariantError(problem) if node is None else _broken(node, problem)


def _broken(node: Node, problem: str) -> InvariantError:
    """Returns the error of a node. A text with a namespace is made only for it, as it takes longer than a check."""
    return InvariantError(
        f"node {node.serial} of {node.namespace} with {len(node.pages)} pages, {node.n_leases} leases, "
        f"rank {node.rank}: {problem}"
    )
