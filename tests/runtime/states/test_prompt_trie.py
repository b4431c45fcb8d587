"""The trie of prompts beside an oracle that compares each prompt with all others."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from radixkv.runtime.request import Request
from radixkv.runtime.states.prompt_trie import PromptTrie
from radixkv.tree.node import Namespace
from support.cases import examples
from support.engine import token_bytes

PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=9)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "add", "compute", "remove"]), st.integers(0, 30), PROMPTS, st.booleans()),
    max_size=40,
)


class Oracle:
    """Prompts in the order in which their computation began, or in any order."""

    def __init__(self) -> None:
        self.prompts: dict[Request, list[int]] = {}
        self.computed: list[Request] = []

    def n_common(self, one: Request, other: Request) -> int:
        if one.namespace != other.namespace:
            return 0
        pairs = zip(self.prompts[one], self.prompts[other], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def others(self, request: Request, *, computed: bool) -> list[Request]:
        return [
            other
            for other in (self.computed if computed else self.prompts)
            if other is not request
            and other.namespace == request.namespace
            and (other in self.computed) == computed
        ]

    def partings(self, request: Request) -> set[int]:
        n_own = len(self.prompts[request])
        return {
            min(self.n_common(request, other), n_own - 1, len(self.prompts[other]) - 1)
            for other in self.others(request, computed=False)
        }

    def nearest(self, request: Request) -> tuple[list[Request], int]:
        others = self.others(request, computed=True)
        n_most = max((self.n_common(request, other) for other in others), default=0)
        return [other for other in others if self.n_common(request, other) == n_most], n_most


def make_request(tokens: list[int], group: str) -> Request:
    return Request("r", Namespace(group), bytearray(token_bytes(tokens)), n_prompt=len(tokens), max_tokens=1)


@given(changes=CHANGES)
@examples(300)
def test_partings_and_nearest_prompts_are_those_of_comparing_all(
    changes: list[tuple[str, int, list[int], bool]],
) -> None:
    trie, oracle = PromptTrie(), Oracle()
    for change, place, tokens, is_other_group in changes:
        if change == "add":
            request = make_request(tokens, "a" if is_other_group else "")
            oracle.prompts[request] = tokens
            trie.add(request, bytes(request.known_key))
        elif oracle.prompts:
            request = list(oracle.prompts)[place % len(oracle.prompts)]
            if change == "remove":
                del oracle.prompts[request]
                oracle.computed = [one for one in oracle.computed if one is not request]
                trie.remove(request)
            elif request not in oracle.computed:
                oracle.computed.append(request)
                trie.compute(request)
        for one in oracle.prompts:
            assert one in trie
            assert trie.is_computed(one) == (one in oracle.computed)
            if one in oracle.computed:
                partings = list(trie.partings(one))
                assert partings == sorted(partings, reverse=True)
                assert set(partings) == oracle.partings(one)
            else:
                nearest, n_common = trie.nearest_computed(one)
                assert (list(nearest), n_common) == oracle.nearest(one)
    for request in oracle.prompts:
        trie.remove(request)
        trie.remove(request)
        assert request not in trie
    assert not trie._roots


def test_what_has_left_makes_no_path_longer() -> None:
    """Two prompts that are alike stay, and others leave them at all other tokens."""
    trie = PromptTrie()
    stay = [make_request([*range(200), last], "") for last in (1, 2)]
    for request in stay:
        trie.add(request, bytes(request.known_key))
    for n in range(2, 200):
        short = make_request([*range(n), 999], "")
        trie.add(short, bytes(short.known_key))
        trie.remove(short)
    trie.compute(stay[0])
    assert list(trie.partings(stay[0])) == [200]
    (child,) = trie._roots[Namespace()].children.values()
    assert len(child.edge) == 4 * 200
