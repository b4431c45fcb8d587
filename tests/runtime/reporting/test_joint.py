"""The trees of two tiers as one, against the sets of their prefixes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.reporting.joint import JointRun, joint_roots
from radixkv.tree.outline import Outline, outline
from support.engine import token_bytes
from support.trees import tree_of

PAGE_SIZE = 2
PAGE_BYTES = 4 * PAGE_SIZE
Sequences = list[tuple[str, list[int]]]
"""Salts and the numbers of pages, each of two equal tokens."""

SEQUENCES = st.lists(
    st.tuples(st.sampled_from(["", "a"]), st.lists(st.integers(1, 2), min_size=1, max_size=7)), max_size=12
)


def joint(upper: Sequences, lower: Sequences, max_visited: int) -> Outline[JointRun]:
    roots = joint_roots(tree_of(upper, PAGE_SIZE).roots, tree_of(lower, PAGE_SIZE).roots, PAGE_BYTES)
    return outline(roots, lambda run: None, max_nodes=10_000, max_visited=max_visited)


def prefixes(sequences: Sequences) -> set[tuple[str, bytes]]:
    ends = [(salt, numbers[:n]) for salt, numbers in sequences for n in range(1, len(numbers) + 1)]
    return {(salt, token_bytes([number for number in some for _ in range(PAGE_SIZE)])) for salt, some in ends}


@given(SEQUENCES, SEQUENCES, st.integers(1, 30))
def test_each_page_is_in_one_run_which_says_which_tiers_have_it(
    upper: Sequences, lower: Sequences, max_visited: int
) -> None:
    expected = {
        prefix: (prefix in prefixes(upper), prefix in prefixes(lower))
        for prefix in prefixes(upper) | prefixes(lower)
    }
    for limit in (10_000, max_visited):
        found = joint(upper, lower, limit)
        seen: dict[tuple[str, bytes], tuple[bool, bool]] = {}
        texts: list[bytes] = []
        for run, parent, *_ in found.nodes:
            text = (texts[parent] if parent >= 0 else b"") + run.key
            texts.append(text)
            assert len(run.key) == len(run.pages) * PAGE_BYTES
            for end in range(len(text) - len(run.key) + PAGE_BYTES, len(text) + 1, PAGE_BYTES):
                prefix = run.nodes[0].namespace.salt, text[:end]
                assert prefix not in seen, "once"
                seen[prefix] = run.upper is not None, run.lower is not None
        assert len({run.serial for run, *_ in found.nodes}) == len(found.nodes)
        assert found.n_pages == len(seen)
        assert all(expected[prefix] == tiers for prefix, tiers in seen.items())
        if limit == 10_000:
            assert seen == expected
            assert all(each.n_more == 0 for each in found.nodes)
