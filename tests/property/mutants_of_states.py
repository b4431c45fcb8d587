"""Mutants of the states of recurrent layers in the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import Request
from radixkv.runtime.scheduler.running import RunningRequests
from radixkv.runtime.states.answer_ends import AnswerEnds
from radixkv.runtime.states.kept_states import KeptStates
from radixkv.runtime.states.recurrent_states import RecurrentStates
from radixkv.runtime.step.plan import StateSave, StepPlan
from radixkv.runtime.tiers.stores.page_keys import KEY_BYTES, StateKeys
from radixkv.runtime.tiers.stores.page_store import FinishedTransfer
from radixkv.runtime.tiers.tier_link import TierLink
from radixkv.tree import forest
from radixkv.tree.forest import Forest
from radixkv.tree.node import Lease, Namespace, Node, State, walk
from radixkv.tree.states import NodeStates

Patch = pytest.MonkeyPatch


def find_a_state_while_it_is_computed(patch: Patch) -> None:
    put = NodeStates.put

    def mutant(self: NodeStates, lease: Lease, n_tokens: int, **options: Any) -> State | None:
        state = put(self, lease, n_tokens, **options)
        if state is not None:
            state.is_computed = True
        return state

    patch.setattr(NodeStates, "put", mutant)
    patch.setattr(NodeStates, "check", lambda self: None)


def go_on_from_the_state_of_a_whole_prompt(patch: Patch) -> None:
    deepest = NodeStates.deepest
    patch.setattr(NodeStates, "deepest", lambda self, node, tokens: deepest(self, node, tokens + bytes(4)))


def go_on_from_the_state_of_another_namespace(patch: Patch) -> None:
    plan_row = RecurrentStates.plan_row

    def mutant(self: RecurrentStates, request: Request, start: int, end: int, n_in_tree: int) -> None:
        if request.blocks.state is not None and request.namespace != Namespace():
            request.blocks.state = State(0, start, None)
        plan_row(self, request, start, end, n_in_tree)

    patch.setattr(RecurrentStates, "plan_row", mutant)


def go_on_from_a_state_that_has_no_node(patch: Patch) -> None:
    deepest = NodeStates.deepest

    def mutant(self: NodeStates, node: Node, tokens: bytes) -> int:
        found = deepest(self, node, tokens)
        _, end, _, n_partial = walk(node, tokens, self._forest.page_bytes)
        longest = min(end + n_partial * self._forest.page_bytes, len(tokens) - 4)
        return found and longest - longest % self._forest.page_bytes

    patch.setattr(NodeStates, "deepest", mutant)


def keep_the_states_of_rows_that_went_wrong(patch: Patch) -> None:
    step_done = KeptStates.step_done

    def mutant(self: KeptStates, plan: StepPlan, are_right: Sequence[bool]) -> None:
        step_done(self, plan, [True] * len(are_right))

    patch.setattr(KeptStates, "step_done", mutant)


def keep_the_states_of_failed_steps(patch: Patch) -> None:
    undo = KeptStates.undo

    def mutant(self: KeptStates) -> None:
        for states in self._launched.values():
            for _, state in states:
                self._states.computed(state)
        self._launched.clear()
        undo(self)

    patch.setattr(KeptStates, "undo", mutant)


def save_a_state_one_token_early(patch: Patch) -> None:
    take = RecurrentStates.take

    def mutant(self: RecurrentStates, step: int) -> Any:
        loads, saves, forks = take(self, step)
        return loads, tuple(StateSave(one.batch_slot, one.position - 1, one.slot) for one in saves), forks

    patch.setattr(RecurrentStates, "take", mutant)


def keep_the_state_of_evicted_pages(patch: Patch) -> None:
    truncate = Forest.truncate

    def mutant(self: Forest, leaf: Node, n_kept: int) -> tuple[bytes, list[int]]:
        state, leaf.state = leaf.state, None
        result = truncate(self, leaf, n_kept)
        if n_kept:
            leaf.state = state
        return result

    patch.setattr(Forest, "truncate", mutant)


def grow_a_node_with_a_state(patch: Patch) -> None:
    grows = forest._grows

    def mutant(node: Node, n_hits: int) -> bool:
        state, node.state = node.state, None
        result = grows(node, n_hits)
        node.state = state
        return result

    patch.setattr(forest, "_grows", mutant)


def move_the_state_at_a_split(patch: Patch) -> None:
    split = Forest.split

    def mutant(self: Forest, node: Node, n_pages: int) -> Node:
        upper = split(self, node, n_pages)
        if node.state is not None:
            upper.state, node.state.node, node.state = node.state, upper, None
        return upper

    patch.setattr(Forest, "split", mutant)


def replace_a_state_while_it_is_computed(patch: Patch) -> None:
    def mutant(
        self: NodeStates, *, spares_proven: bool = False, may_evict: Callable[[State], bool] = lambda state: True
    ) -> bool:
        victim = next((state for state in [*self._by_use, *self._coming] if may_evict(state)), None)
        if victim is not None:
            self.drop(victim)
        return victim is not None

    patch.setattr(NodeStates, "evict", mutant)


def load_a_state_again(patch: Patch) -> None:
    plan_row = RecurrentStates.plan_row

    def mutant(self: RecurrentStates, request: Request, start: int, end: int, n_in_tree: int) -> None:
        state = request.blocks.state
        plan_row(self, request, start, end, n_in_tree)
        request.blocks.state = state

    patch.setattr(RecurrentStates, "plan_row", mutant)


def copy_parts_of_pages(patch: Patch) -> None:
    init = PageCache.__init__

    def mutant(self: PageCache, *args: Any, **settings: Any) -> None:
        init(self, *args, **settings)
        self.min_copied_tokens = 1

    patch.setattr(PageCache, "__init__", mutant)


def evict_a_state_while_it_is_copied(patch: Patch) -> None:
    patch.setattr(NodeStates, "hold", lambda self, state: None)
    patch.setattr(NodeStates, "let_go", lambda self, state: None)


def attach_the_state_of_a_failed_copy(patch: Patch) -> None:
    end_load = TierLink._end_load

    def mutant(self: TierLink[Any, Any], load: Any, finished: FinishedTransfer) -> None:
        end_load(self, load, finished._replace(n_pages=load.n_pages))

    patch.setattr(TierLink, "_end_load", mutant)


def lose_the_slot_of_a_copy(patch: Patch) -> None:
    patch.setattr(NodeStates, "give_back", lambda self, slot: self._reserved.remove(slot))


def attach_a_state_a_page_early(patch: Patch) -> None:
    attach = NodeStates.attach

    def mutant(self: NodeStates, lease: Lease, n_tokens: int, slot: int, **options: Any) -> State | None:
        page = self._forest.page_bytes // 4
        return attach(self, lease, n_tokens - page if n_tokens > page else n_tokens, slot, **options)

    patch.setattr(NodeStates, "attach", mutant)


def leave_the_prefix_out_of_the_keys_of_states(patch: Patch) -> None:
    first, all_keys = StateKeys.first, StateKeys.all
    patch.setattr(StateKeys, "first", lambda self, key: first(self, bytes(KEY_BYTES)))
    patch.setattr(StateKeys, "all", lambda self, key: all_keys(self, bytes(KEY_BYTES)))


def forget_the_states_of_forks(patch: Patch) -> None:
    patch.setattr(RecurrentStates, "forked", lambda self, parent, fork: None)


def copy_the_states_of_forks_a_step_late(patch: Patch) -> None:
    take = RecurrentStates.take
    late: WeakKeyDictionary[RecurrentStates, list[Any]] = WeakKeyDictionary()

    def mutant(self: RecurrentStates, step: int) -> Any:
        self._forks, late[self] = late.get(self, []), self._forks
        return take(self, step)

    patch.setattr(RecurrentStates, "take", mutant)


def fork_from_a_state_that_has_moved_on(patch: Patch) -> None:
    can_fork = RunningRequests._can_fork

    def mutant(self: RunningRequests, leader: Request, follower: Request, n_needed_ahead: int) -> bool:
        n_scheduled, leader.n_scheduled = leader.n_scheduled, follower.n_known - 1
        found = can_fork(self, leader, follower, n_needed_ahead)
        leader.n_scheduled = n_scheduled
        return found

    patch.setattr(RunningRequests, "_can_fork", mutant)


def save_the_state_of_an_answer_one_token_early(patch: Patch) -> None:
    plan_decode = AnswerEnds.plan_decode

    def mutant(self: AnswerEnds, requests: Sequence[Request]) -> list[StateSave]:
        return [one._replace(position=one.position - 1) for one in plan_decode(self, requests)]

    patch.setattr(AnswerEnds, "plan_decode", mutant)


def keep_the_state_beyond_the_end_of_an_answer(patch: Patch) -> None:
    """That of a row that was launched before the end was known."""
    ended = AnswerEnds.ended

    def mutant(self: AnswerEnds, request: Request) -> None:
        states = self._saved.get(request, [])
        if len(states) > 1:
            states[0].slot, states[-1].slot = states[-1].slot, states[0].slot
        ended(self, request)

    patch.setattr(AnswerEnds, "ended", mutant)


def keep_the_older_one_of_two_states_of_an_answer(patch: Patch) -> None:
    step_done = AnswerEnds.step_done

    def mutant(self: AnswerEnds, step: int) -> None:
        for request, saved in self._launched.get(step, ()):
            first = self._saved[request][0]
            first.slot, saved.slot = saved.slot, first.slot
        step_done(self, step)

    patch.setattr(AnswerEnds, "step_done", mutant)


def lose_the_slots_of_aborted_answers(patch: Patch) -> None:
    patch.setattr(AnswerEnds, "freed", lambda self, request: None)


OF_STATES: tuple[Callable[[Patch], None], ...] = (
    find_a_state_while_it_is_computed,
    go_on_from_the_state_of_a_whole_prompt,
    go_on_from_the_state_of_another_namespace,
    go_on_from_a_state_that_has_no_node,
    keep_the_states_of_rows_that_went_wrong,
    keep_the_states_of_failed_steps,
    save_a_state_one_token_early,
    keep_the_state_of_evicted_pages,
    grow_a_node_with_a_state,
    move_the_state_at_a_split,
    replace_a_state_while_it_is_computed,
    load_a_state_again,
    copy_parts_of_pages,
    evict_a_state_while_it_is_copied,
    attach_the_state_of_a_failed_copy,
    lose_the_slot_of_a_copy,
    attach_a_state_a_page_early,
    leave_the_prefix_out_of_the_keys_of_states,
    forget_the_states_of_forks,
    copy_the_states_of_forks_a_step_late,
    fork_from_a_state_that_has_moved_on,
    save_the_state_of_an_answer_one_token_early,
    keep_the_state_beyond_the_end_of_an_answer,
    keep_the_older_one_of_two_states_of_an_answer,
    lose_the_slots_of_aborted_answers,
)
