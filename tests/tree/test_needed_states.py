"""States that prompts would go on from are evicted after those that nobody needs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.tree.node import TOKEN_BYTES, Namespace, State, upwards
from radixkv.tree.radix_tree import RadixTree
from radixkv.tree.spared import WaitingPrompt
from radixkv.tree.states import NodeStates
from support.cases import examples
from support.trees import ids, insert

NAMESPACES = Namespace(), Namespace("other")


class World:
    """A tree with pages and states of one token, and prompts."""

    def __init__(self, n_states: int = 4) -> None:
        self.now = 0.0
        self.tree = RadixTree(1, n_states=n_states, state_block_tokens=1, clock=lambda: self.now)
        self.waiting: list[WaitingPrompt] = []
        self.expected: list[WaitingPrompt] = []
        self.states.needed.waiting = lambda: self.waiting
        self.states.needed.expected = lambda: self.expected
        self._pages = count()

    @property
    def states(self) -> NodeStates:
        assert self.tree.states is not None
        return self.tree.states

    def cache(self, *tokens: int, namespace: Namespace = NAMESPACES[0]) -> State | None:
        """Caches tokens, with a state after the last one unless there is no slot for it."""
        lease = insert(self.tree, ids(*tokens), [next(self._pages) for _ in tokens], namespace=namespace)
        state = self.states.put(lease, len(tokens))
        if state is not None:
            self.states.computed(state)
        self.tree.release(lease)
        return state

    def path(self, state: State) -> bytes:
        assert state.node is not None
        return b"".join(bytes(node.key) for node in reversed(list(upwards(state.node))))

    def needed(self, prompt: WaitingPrompt, *, is_waiting: bool) -> State | None:
        """The oracle: looks at all states."""
        namespace, tokens = prompt
        fitting = [
            state
            for state in self.states
            if state.is_computed and (is_waiting or not state.is_demoted) and state.node is not None
            if state.node.namespace == namespace and state.n_tokens * TOKEN_BYTES < len(tokens)
            if tokens.startswith(self.path(state))
        ]
        return max(fitting, key=lambda state: state.n_tokens, default=None)

    def order(self) -> list[State]:
        """The states that prompts need, the one first that is needed first, by the oracle."""
        found = [self.needed(prompt, is_waiting=True) for prompt in self.waiting]
        found += [self.needed(prompt, is_waiting=False) for prompt in self.expected]
        return list(dict.fromkeys(state for state in found if state is not None))

    def victim(self) -> State | None:
        """Evicts a state and returns it."""
        before = list(self.states)
        self.states.evict()
        return next((state for state in before if state.node is None), None)


def prompt(*tokens: int) -> WaitingPrompt:
    return NAMESPACES[0], ids(*tokens)


def test_states_of_expected_prompts_go_after_others_and_those_of_waiting_ones_last() -> None:
    world = World()
    one, two, three, other = [world.cache(token) for token in (1, 2, 3, 4)]
    world.waiting, world.expected = [prompt(1, 9)], [prompt(2, 9), prompt(3, 9)]
    assert [world.victim() for _ in range(4)] == [other, three, two, one]


def test_states_of_retained_prefixes_go_after_those_that_are_needed() -> None:
    world = World()
    one, two, three = [world.cache(token) for token in (1, 2, 3)]
    world.tree.retentions.add(NAMESPACES[0], ids(1), until=1.0)
    world.tree.retentions.add(NAMESPACES[0], ids(2), until=1.0)
    world.waiting, world.expected = [prompt(3, 9)], [prompt(1, 9)]
    assert [world.victim() for _ in range(3)] == [three, two, one]


def test_only_the_deepest_state_of_a_prompt_is_needed() -> None:
    world = World()
    deep, shallow, other = world.cache(1, 2, 3), world.cache(1), world.cache(4)
    world.expected = [prompt(1, 2, 3, 9)]
    assert [world.victim() for _ in range(3)] == [shallow, other, deep]


def test_a_demoted_state_is_needed_by_prompts_that_wait_and_by_no_others() -> None:
    """Which state a next turn will go on from is learnt; the less likely one is demoted."""
    for waits in (False, True):
        world = World()
        deep, likely, other = world.cache(1, 2, 3), world.cache(1), world.cache(4)
        assert deep is not None
        world.states.demote(deep)
        needed = [prompt(1, 2, 3, 9)]
        world.waiting, world.expected = (needed, []) if waits else ([], needed)
        order = [likely, other, deep] if waits else [deep, other, likely]
        assert [world.victim() for _ in range(3)] == order


def test_a_state_that_is_copied_ahead_takes_the_slot_of_none_that_is_needed_before() -> None:
    world = World(n_states=3)
    world.waiting, world.expected = [prompt(1, 9)], [prompt(2, 9), prompt(5, 9), prompt(3, 9)]
    for token in (1, 2, 3):
        world.cache(token)
    namespace, key = world.expected[1]
    assert world.states.reserve(namespace, ahead_of=key) is not None
    assert [world.tree.match(namespace, ids(token, 9)) for token in (1, 2, 3)] == [1, 1, 0]
    assert world.states.reserve(namespace, ahead_of=key) is None
    assert world.states.reserve(namespace, ahead_of=world.waiting[0][1]) is not None
    assert [world.tree.match(namespace, ids(token, 9)) for token in (1, 2)] == [1, 0]


def test_what_an_eviction_takes_is_worth_as_long_as_it_was_not_used() -> None:
    """A pause is spared if it is worth more than what is evicted: pages, or states where these are scarcer."""
    world = World()
    for token in (1, 2, 3):
        world.cache(token)
    world.now = 10.0
    world.expected = [prompt(2, 9)]
    world.states.evict()
    assert world.tree.evicted_age_s == 10.0
    world.now = 30.0
    world.tree.evict(1)
    assert world.tree.evicted_age_s == 10.0
    world.now = 35.0
    demoted = world.cache(5)
    assert demoted is not None
    world.states.demote(demoted)
    world.states.evict()
    assert world.tree.evicted_age_s == 10.0, "of what nobody is likely to use the age says nothing"


def come_deeper(world: World) -> None:
    world.cache(1, 2, 3)


def come_deeper_behind_a_demoted_one(world: World) -> None:
    demoted = world.cache(1, 2)
    assert demoted is not None
    world.states.demote(demoted)
    world.states.needed.find()
    world.cache(1, 2, 3)


def become_unlikely(world: World) -> None:
    (state,) = world.states
    world.states.demote(state)


def be_used_again(world: World) -> None:
    become_unlikely(world)
    world.states.needed.find()
    (state,) = world.states
    world.states.use(state)


def leave(world: World) -> None:
    (state,) = world.states
    world.states.drop(state)


def leave_and_return(world: World) -> None:
    """The namespace is empty meanwhile, and gets another root."""
    world.tree.detach(NAMESPACES[0])
    world.states.take_left()
    world.cache(1, 2, 3)


def return_to_an_empty_namespace(world: World) -> None:
    world.tree.detach(NAMESPACES[0])
    world.states.take_left()
    world.tree.release(insert(world.tree, ids(7), [7]))
    world.states.needed.find()
    world.tree.detach(NAMESPACES[0])
    world.cache(1)


@pytest.mark.parametrize(
    "change",
    [
        come_deeper,
        come_deeper_behind_a_demoted_one,
        become_unlikely,
        be_used_again,
        leave,
        leave_and_return,
        return_to_an_empty_namespace,
    ],
)
def test_what_was_found_is_not_used_again_after_a_change(change: Callable[[World], None]) -> None:
    world = World(8)
    world.cache(1)
    world.expected = [prompt(1, 2, 3, 9)]
    assert list(world.states.needed.find()) == world.order()
    change(world)
    assert list(world.states.needed.find()) == world.order()


tokens = st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple)
change = st.one_of(
    st.tuples(st.sampled_from(("cache", "waiting", "expected", "detach")), tokens, st.integers(0, 1)),
    st.tuples(st.sampled_from(("use", "demote", "drop", "pages", "end", "victim")), st.just(()), st.integers(0, 7)),
)


@examples(150)
@given(changes=st.lists(change, max_size=40), n_states=st.integers(1, 6))
def test_any_changes_leave_the_states_that_are_needed(
    changes: list[tuple[str, tuple[int, ...], int]], n_states: int
) -> None:
    world = World(n_states)
    for verb, sequence, number in changes:
        namespace = NAMESPACES[number % 2]
        states = list(world.states)
        state = states[number % len(states)] if states else None
        if verb == "cache":
            world.cache(*sequence, namespace=namespace)
        elif verb in ("waiting", "expected"):
            (world.waiting if verb == "waiting" else world.expected).append((namespace, ids(*sequence)))
        elif verb == "detach":
            world.tree.detach(namespace, ids(*sequence))
        elif verb == "pages":
            world.tree.evict(number, waiting=world.waiting, expected=world.expected)
        elif verb == "end":
            for prompts in (world.waiting, world.expected):
                del prompts[number : number + 1]
        elif verb == "victim":
            world.states.take_left()
            order = world.order()
            unneeded = set(world.states) - set(order)
            victim = world.victim()
            assert victim in unneeded if unneeded else victim is (order[-1] if order else None)
        elif state is not None:
            {"use": world.states.use, "demote": world.states.demote, "drop": world.states.drop}[verb](state)
        world.states.take_left()
        if number % 3 == 0:
            found = world.states.needed.find()
            assert sorted(found, key=found.__getitem__) == world.order()
    world.tree.check()
