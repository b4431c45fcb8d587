"""States that are evicted late, because waiting or expected prompts would go on from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from radixkv.tree.forest import Forest
from radixkv.tree.node import Node, State, upwards, walk
from radixkv.tree.spared import WaitingPrompt


class NeededStates:
    """Finds the state that each waiting or expected prompt would go on from: the deepest one of its cached prefix.

    What an expected prompt will be is not known for certain, so it needs no demoted state: nobody is likely to go
    on from that. A prompt that waits needs the one that it will find.

    The state of a prompt is kept until it leaves the tree, or a state comes below it. So nothing has to be kept
    right while prompts come and go, and between evictions a new state costs as many steps as there are edges up to
    the state before it.

    Args:
        forest: the nodes of the tree.
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self.waiting: Callable[[], Iterable[WaitingPrompt]] = tuple
        """Returns the prompts that will be looked up soon, the first one first."""
        self.expected: Callable[[], Iterable[WaitingPrompt]] = tuple
        """Returns the prompts that may be looked up some time, the first one first."""
        self._found: tuple[dict[WaitingPrompt, State | Node], ...] = {}, {}
        """The state of each expected prompt, or the root without one; the same of each that waits."""
        self._places: set[State | Node] = set()
        """What was found."""
        self._outdated: set[State | Node] = set()
        """Those of them in whose place other states may be found now."""

    def find(self, ahead_of: bytes | None = None) -> dict[State, int]:
        """Returns the order in which states are needed: 0 for the one that is needed first. Changes nothing else.

        O(prompts), and a match for each whose state may be another than at the last call.

        Args:
            ahead_of: the tokens of a prompt. If it is an expected one, those from it on need nothing; if not, no
                expected one does. None: all are counted.
        """
        waiting, expected = list(self.waiting()), list(self.expected())
        if not (waiting or expected or self._places):
            return {}
        self._found = (
            self._find(expected, self._found[False], is_waiting=False),
            self._find(waiting, self._found[True], is_waiting=True),
        )
        self._places = set(chain.from_iterable(found.values() for found in self._found))
        self._outdated.clear()
        if ahead_of is not None:
            n_before = next((n for n, (_, tokens) in enumerate(expected) if tokens is ahead_of), 0)
            del expected[n_before:]
        places = chain(map(self._found[True].get, waiting), map(self._found[False].get, expected))
        states = dict.fromkeys(place for place in places if isinstance(place, State))
        return {state: order for order, state in enumerate(states)}

    def changed(self, state: State) -> None:
        """Notes that a state has come, or is demoted or not any more. O(edges up to the state before it)."""
        if not self._places or state.node is None:
            return
        for node in upwards(state.node):
            place = node if node.parent is None else node.state
            if place in self._places:
                assert place is not None
                self._outdated.add(place)
            if node.state is not None and node.state is not state and _is_likely(node.state):
                break

    def _find(
        self, prompts: Iterable[WaitingPrompt], known: Mapping[WaitingPrompt, State | Node], *, is_waiting: bool
    ) -> dict[WaitingPrompt, State | Node]:
        """Returns the state of each prompt, or the root. O(1) for each where it is as it was known to be."""
        roots, outdated = self._forest.roots, self._outdated
        found: dict[WaitingPrompt, State | Node] = {}
        for prompt in prompts:
            root, place = roots.get(prompt[0]), known.get(prompt)
            if root is None:
                continue
            is_there = place.node is not None if isinstance(place, State) else place is root
            if place is None or not is_there or place in outdated:
                place = self._deepest(root, prompt[1], is_waiting=is_waiting)
            found[prompt] = place
        return found

    def _deepest(self, root: Node, tokens: bytes, *, is_waiting: bool) -> State | Node:
        """Returns the state that a prompt needs, or the root. O(edges)."""
        end, deepest = 0, None
        for node in walk(root, tokens, self._forest.page_bytes)[0]:
            end += len(node.key)
            state = node.state
            if state is not None and end < len(tokens) and (state.is_computed if is_waiting else _is_likely(state)):
                deepest = state
        return root if deepest is None else deepest


def _is_likely(state: State) -> bool:
    """Whether a prompt that is not known yet may go on from a state."""
    return state.is_computed and not state.is_demoted
