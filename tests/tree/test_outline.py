"""The outline of a tree against a naive one that sums up every subtree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.tree.node import Namespace, Node
from radixkv.tree.outline import outline
from support.cases import examples
from support.trees import ids, tree_of

PAGE_SIZE = 2
Sequences = list[tuple[str, list[int]]]
"""Salts and the numbers of pages, each of two equal tokens."""

SEQUENCES = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.integers(1, 3), min_size=1, max_size=6)), max_size=30
)


def naive_pages(sequences: Sequences) -> dict[tuple[str, ...], int]:
    """Returns, by prefix with its salt, how many pages begin with it; one entry for every page, and the roots."""
    prefixes = {(salt, *map(str, numbers[:n])) for salt, numbers in sequences for n in range(1, len(numbers) + 1)}
    found: dict[tuple[str, ...], int] = {}
    for prefix in prefixes:
        for n in range(1, len(prefix) + 1):
            found[prefix[:n]] = found.get(prefix[:n], 0) + 1
    return found


def path(node: Node) -> tuple[str, ...]:
    """Returns the salt and the page numbers from the root to the first page of a node."""
    numbers = [str(node.key[0])] if node.key else []
    above = node.parent
    while above is not None:
        numbers = [str(number) for number in above.key[:: 4 * PAGE_SIZE]] + numbers
        above = above.parent
    return node.namespace.salt, *numbers


@given(SEQUENCES, st.integers(1, 40))
def test_the_largest_nodes_are_found_and_the_others_summed_up(sequences: Sequences, max_nodes: int) -> None:
    naive = naive_pages(sequences)
    tree = tree_of(sequences, PAGE_SIZE)
    found = tree.outline(max_nodes=max_nodes, max_visited=10_000)
    n_pages = [each.n_pages for each in found.nodes]
    assert n_pages == [naive[path(each.node)] for each in found.nodes]
    assert found.n_pages == tree.n_pages_reachable
    everything = tree.outline(max_nodes=10_000, max_visited=10_000).nodes
    assert sorted(n_pages) == sorted(each.n_pages for each in everything)[-len(n_pages) or len(everything) :]
    assert len(n_pages) == min(max_nodes, len(everything))
    for index, each in enumerate(found.nodes):
        assert each.parent < index, "parents come first"
        assert each.node.parent is (found.nodes[each.parent].node if each.parent >= 0 else None)
        below = sum(other.n_pages for other in found.nodes if other.parent == index)
        assert each.n_pages == len(each.node.pages) + below + each.n_more_pages
    n_more = sum(each.n_more for each in found.nodes)
    hidden_roots = [
        each for each in everything if each.parent < 0 and all(each.node is not one.node for one in found.nodes)
    ]
    assert (found.n_more_roots, found.n_more_root_pages) == (
        len(hidden_roots),
        sum(each.n_pages for each in hidden_roots),
    )
    if not hidden_roots:
        assert len(found.nodes) + n_more == len(everything)


@examples(50)
@given(SEQUENCES, st.integers(1, 20))
def test_a_bounded_walk_counts_what_it_did_not_visit(sequences: Sequences, max_visited: int) -> None:
    tree = tree_of(sequences, PAGE_SIZE)
    found = tree.outline(max_nodes=10_000, max_visited=max_visited)
    everything = tree.outline(max_nodes=10_000, max_visited=10_000)
    assert len(found.nodes) == min(max_visited, len(everything.nodes))
    assert found.n_pages == sum(len(each.node.pages) for each in found.nodes)
    for each in found.nodes:
        children = each.node.children or {}
        assert each.n_more == len(children) - sum(one.node.parent is each.node for one in found.nodes)


def test_a_node_with_many_children_leaves_room_for_others() -> None:
    many = [("", [1, number]) for number in range(2, 250)]
    tree = tree_of([*many, ("a", [1, 1, 1]), ("a", [1, 2, 1])], PAGE_SIZE)
    found = tree.outline(max_nodes=1000, max_visited=100)
    assert sum(each.node.namespace.salt == "a" for each in found.nodes) == 4, "the root, a page and two ends"


def test_ages_are_uses_of_the_tree_and_demoted_nodes_have_none() -> None:
    tree = tree_of([("", [1]), ("", [2]), ("", [3]), ("", [2])], PAGE_SIZE)
    tree.demotions.add(Namespace(), ids(1, 1))
    ages = {path(each.node)[1:]: each.age for each in tree.outline(max_nodes=9, max_visited=9).nodes}
    assert ages == {(): 0, ("1",): None, ("2",): 0, ("3",): 1}


def test_an_empty_tree_has_an_empty_outline() -> None:
    found = outline([], lambda node: None, max_nodes=5, max_visited=5)
    assert (found.nodes, found.n_pages, found.n_more_roots) == ([], 0, 0)
