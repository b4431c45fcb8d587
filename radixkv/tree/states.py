"""States at the ends of nodes, from which prompts go on: of recurrent layers in slots, or of windows in pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from math import lcm

from radixkv.errors import InvariantError
from radixkv.tree.forest import Forest
from radixkv.tree.node import TOKEN_BYTES, Lease, Namespace, Node, State, require_open, upwards, walk
from radixkv.tree.slot_quotas import SlotQuotas

BLOCK_TOKENS = 64
"""Positions of states are multiples of it, because kernels compute so many tokens of a recurrent layer together."""
_PROVEN_SHARE = 0.8
"""Share of the slots that states from which prompts have gone on may keep from those that are new."""


class NodeStates:
    """The states of a tree whose model has recurrent layers, or window pages: a match ends where there is one.

    Such a model cannot use K and V of a prefix without the state after the prefix's last token, and a state cannot
    be cut shorter. A slot is either free or at the end of one node. A state can be found once it is *computed*.
    From then on it can be evicted while the node's pages stay: first those that nobody has gone on from, then the
    least recently used, those of retained prefixes last. It leaves the tree with the last of these pages.

    A state that is copied from another tier, or is that of a running answer, has a *reserved* slot before it is at
    a node.

    Args:
        forest: the nodes of the tree.
        n_slots: how many states there can be.
        block_tokens: positions of states are multiples of it and of a page.
    """

    def __init__(self, forest: Forest, n_slots: int, block_tokens: int) -> None:
        self._forest = forest
        self.block_tokens = lcm(forest.page_bytes // TOKEN_BYTES, block_tokens)
        """Positions of states are multiples of it."""
        self.n_slots = n_slots
        """How many states there can be."""
        self.version = 0
        """Changes whenever a state comes to a node, is computed or leaves."""
        self.n_saved = 0
        """States that have been computed for this tree, and not copied from another tier."""
        self.n_evicted = 0
        """States that gave their slots to others."""
        self._free = list(range(n_slots - 1, -1, -1))
        self._by_use: OrderedDict[State, None] = OrderedDict()
        """The computed states that are evicted first: in the order in which they came, or were used last."""
        self._proven: OrderedDict[State, None] = OrderedDict()
        """Those that prompts have gone on from and that were used last, the least recently used first."""
        self._coming: set[State] = set()
        """Those that a launched step computes."""
        self._reserved: set[int] = set()
        """The slots of states that are at no node yet."""
        self._held: set[State] = set()
        """Those that have left the tree and are held."""
        self._quotas = SlotQuotas()
        self.on_left: Callable[[State], None] = lambda state: None
        """Is called with each state that leaves the tree, once its slot is free."""

    def __iter__(self) -> Iterator[State]:
        """Yields all states, computed or not."""
        yield from self._by_use
        yield from self._proven
        yield from self._coming

    def divide(self, floors: Mapping[str, int], caps: Mapping[str, int]) -> None:
        """Sets how many slots of groups others leave, and how many a group has at most. O(1).

        Only a group's own states are evicted while it has no more slots than its floor, and for a group that has as
        many as its cap. The sum of the floors must be at most ``n_slots``. Groups that are not named have neither.
        """
        self._quotas.divide(floors, caps)

    def n_slots_of(self, group: str) -> int:
        """Returns how many slots the namespaces of a group have. O(states that have left)."""
        self.take_left()
        return self._quotas.n_of(group)

    @property
    def n_free(self) -> int:
        """Slots without a state. O(states that have left)."""
        self.take_left()
        return len(self._free)

    def deepest(self, node: Node, tokens: bytes) -> int:
        """Returns how many bytes of the tokens after a node are cached up to the deepest computed state, 0 without
        one.

        At least one token is left over, which has to be computed on the state. O(edges).
        """
        return max((end for end, state in self._states_on(node, tokens) if state.is_computed), default=0)

    def n_found(self, namespace: Namespace, tokens: bytes) -> int:
        """Returns how many of the tokens a match finds. O(edges)."""
        root = self._forest.roots.get(namespace)
        return 0 if root is None else self.deepest(root, tokens) // TOKEN_BYTES

    def n_coming(self, namespace: Namespace, tokens: bytes) -> int:
        """Returns by how many tokens a match will grow with the states that launched steps compute.

        O(edges), and O(1) if they compute none.
        """
        root = self._forest.roots.get(namespace)
        if root is None or not self._coming:
            return 0
        n_computed = n_all = 0
        for n_all, state in self._states_on(root, tokens):
            if state.is_computed:
                n_computed = n_all
        return (n_all - n_computed) // TOKEN_BYTES

    def put(self, lease: Lease, n_tokens: int, *, is_turn: bool = False) -> State | None:
        """Gives a slot to the state after the first tokens of a lease, which a step computes that will be launched.

        O(edges + pages of a split node), and O(1) for a slot.

        Args:
            lease: an open lease, which is not detached and has these tokens.
            n_tokens: position of the state, in whole pages.
            is_turn: see ``State``.

        Returns:
            The state, until ``computed`` or ``drop``; None if the node has one, or if no slot is free and no state
            can be evicted.
        """
        node, n_beyond = self._find(lease, n_tokens)
        if node.state is not None and not n_beyond:
            return None
        slot = self._take_slot(lease.namespace, spares_proven=is_turn)
        if slot is None:
            return None
        state = self._place(node, n_beyond, n_tokens, slot, is_turn=is_turn)
        self._coming.add(state)
        return state

    def reserve(
        self,
        namespace: Namespace,
        *,
        spares_proven: bool = False,
        may_evict: Callable[[State], bool] = lambda state: True,
    ) -> int | None:
        """Takes a slot for a state that is at no node yet; None if none is free and no state can be evicted.

        Costs what ``evict`` does if it evicts.

        Args:
            namespace: whose prompt the state is of.
            spares_proven: whether states that prompts have gone on from stay.
            may_evict: whether a state may be evicted at all.
        """
        slot = self._take_slot(namespace, spares_proven=spares_proven, may_evict=may_evict)
        if slot is not None:
            self._reserved.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Frees a reserved slot, whose state is of no use. O(1)."""
        self._reserved.remove(slot)
        self._free_slot(slot)

    def attach(
        self, lease: Lease, n_tokens: int, slot: int, *, is_turn: bool = False, is_copy: bool = False
    ) -> State | None:
        """Puts the state in a reserved slot at its place in the tree, as ``put`` does; matches find it at once.

        Frees the slot if the lease is detached or does not have the tokens, or if there is a state.

        Args:
            lease: an open lease.
            n_tokens: position of the state, in whole pages.
            slot: has the state.
            is_turn: see ``State``.
            is_copy: whether another tier has computed the state, so that it does not count in ``n_saved``.

        Returns:
            The computed state that is there now; None without one.
        """
        if lease.detached or lease.n_tokens < n_tokens:
            self.give_back(slot)
            return None
        node, n_beyond = self._find(lease, n_tokens)
        if node.state is not None and not n_beyond:
            self.give_back(slot)
            return node.state if node.state.is_computed else None
        self._reserved.remove(slot)
        state = self._place(node, n_beyond, n_tokens, slot, is_turn=is_turn)
        self._enter(state)
        self.n_saved += not is_copy
        return state

    def on_path(self, lease: Lease) -> list[State]:
        """Returns the computed states of a lease's path, the deepest first. O(edges)."""
        require_open(lease)
        return [node.state for node in upwards(lease.node) if node.state is not None and node.state.is_computed]

    def hold(self, state: State) -> None:
        """Keeps a state from eviction until ``let_go``. It leaves the tree with its pages, and keeps its slot."""
        state.n_holds += 1

    def let_go(self, state: State) -> None:
        """Ends a ``hold``. O(1)."""
        state.n_holds -= 1
        if not state.n_holds and state in self._held:
            self._held.remove(state)
            self._free_slot(state.slot)

    def computed(self, state: State) -> None:
        """Lets matches find a state from now on. Does nothing if it has left the tree. O(1)."""
        if state in self._coming:
            self._coming.remove(state)
            self._enter(state)
            self.n_saved += 1

    def use(self, state: State) -> None:
        """Notes that a request goes on from a state. O(1)."""
        if state.node is None or not state.is_computed:
            return
        self._by_use.pop(state, None)
        self._proven[state] = None
        self._proven.move_to_end(state)
        if len(self._proven) > self.n_slots * _PROVEN_SHARE:
            oldest, _ = self._proven.popitem(last=False)
            self._by_use[oldest] = None

    def expect(self, namespace: Namespace, tokens: bytes) -> None:
        """Notes that a prompt waits which will go on from the state that a match finds now. O(edges)."""
        root = self._forest.roots.get(namespace)
        if root is None:
            return
        last = None
        for _, state in self._states_on(root, tokens):
            last = state if state.is_computed else last
        if last is not None:
            (self._proven if last in self._proven else self._by_use).move_to_end(last)

    def demote(self, state: State, *, spares_proven: bool = False) -> None:
        """Makes a computed state the next to be evicted. O(1).

        Args:
            state: which one.
            spares_proven: whether nothing changes if prompts have gone on from it.
        """
        if state.node is not None and state.is_computed and not (spares_proven and state in self._proven):
            self._proven.pop(state, None)
            self._by_use[state] = None
            self._by_use.move_to_end(state, last=False)

    def drop(self, state: State) -> None:
        """Frees the slot of a state. Does nothing if it has left the tree. O(1)."""
        if state.node is not None:
            self._forest.lose_state(state.node)
            self.take_left()

    def evict(
        self, *, spares_proven: bool = False, may_evict: Callable[[State], bool] = lambda state: True
    ) -> bool:
        """Frees the slot of the next state to be evicted; False if there is none.

        O(1 + retained, held and refused states).

        Args:
            spares_proven: whether those that prompts have gone on from stay.
            may_evict: whether a state may be evicted at all.
        """
        first: State | None = None
        victim: State | None = None
        for state in self._by_use if spares_proven else chain(self._by_use, self._proven):
            if not state.n_holds and may_evict(state):
                first = first or state
                if state.node is None or not state.node.n_retentions:
                    victim = state
                    break
        victim = victim or first
        if victim is None:
            return False
        self._forest.version += 1
        self.n_evicted += 1
        self.drop(victim)
        return True

    def take_left(self) -> None:
        """Frees the slots of states that have left the tree with their nodes' pages. O(states that have left)."""
        for state in self._forest.left_states:
            self.version += 1
            self._by_use.pop(state, None)
            self._proven.pop(state, None)
            self._coming.discard(state)
            if state.n_holds:
                self._held.add(state)
            else:
                self._free_slot(state.slot)
            self.on_left(state)
        self._forest.left_states.clear()

    def check(self) -> None:
        """Checks that each slot is in one place, and each state at its node. O(nodes).

        Raises:
            InvariantError: a bug in radixkv.
        """
        self.take_left()
        computed = self._by_use.keys() | self._proven.keys()
        states = list(self)
        self._quotas.check(self.n_slots - len(self._free), states)
        slots = sorted([*self._free, *self._reserved, *(state.slot for state in (*states, *self._held))])
        if slots != list(range(self.n_slots)):
            raise InvariantError(
                f"the slots of states are {slots}, free or used, and should be 0 to {self.n_slots}"
            )
        reachable = {node.state for node in self._forest.reachable() if node.state is not None}
        if reachable != set(states):
            raise InvariantError(f"{len(reachable)} nodes have a state, and {len(states)} slots are used")
        for state in states:
            if state.node is None or state.node.state is not state or state.is_computed != (state in computed):
                raise InvariantError(f"the state in slot {state.slot} is not that of its node")
            length = sum(len(node.key) for node in upwards(state.node))
            if length != state.n_tokens * TOKEN_BYTES:
                raise InvariantError(
                    f"the state in slot {state.slot} is of {state.n_tokens} tokens, at a node that ends after "
                    f"{length // TOKEN_BYTES}"
                )

    def _states_on(self, node: Node, tokens: bytes) -> Iterator[tuple[int, State]]:
        """Yields the states on the path of tokens after a node, each with the bytes before it, fewer than all."""
        end = 0
        for one in walk(node, tokens, self._forest.page_bytes)[0]:
            end += len(one.key)
            if one.state is not None and end < len(tokens):
                yield end, one.state

    def _enter(self, state: State) -> None:
        state.is_computed = True
        self._by_use[state] = None
        self.version += 1
        self._forest.version += 1
        self._forest.changes.add_kept(state)

    def _find(self, lease: Lease, n_tokens: int) -> tuple[Node, int]:
        """Returns the node of a lease's path with a position, and the bytes of it that lie beyond. O(edges)."""
        require_open(lease)
        node, n_beyond = lease.node, (lease.n_tokens - n_tokens) * TOKEN_BYTES
        while n_beyond >= len(node.key):
            n_beyond -= len(node.key)
            assert node.parent is not None, "a root has no state"
            node = node.parent
        return node, n_beyond

    def _place(self, node: Node, n_beyond: int, n_tokens: int, slot: int, *, is_turn: bool) -> State:
        """Puts a state ``n_beyond`` bytes before the end of a node. O(pages of a split node)."""
        if n_beyond:
            node = self._forest.split(node, (len(node.key) - n_beyond) // self._forest.page_bytes)
        node.state = State(slot, n_tokens, node, is_turn)
        self.version += 1
        return node.state

    def _take_slot(
        self,
        namespace: Namespace,
        *,
        spares_proven: bool = False,
        may_evict: Callable[[State], bool] = lambda state: True,
    ) -> int | None:
        """Takes a slot, of another state if none is free or the group is at its cap."""
        self.take_left()
        group = namespace.group
        quotas = self._quotas
        if not self._free or quotas.is_at_cap(group):
            self.evict(
                spares_proven=spares_proven,
                may_evict=lambda state: quotas.may_take(group, state.slot) and may_evict(state),
            )
            if not self._free or quotas.is_at_cap(group):
                return None
        slot = self._free.pop()
        quotas.take(slot, group)
        return slot

    def _free_slot(self, slot: int) -> None:
        self._free.append(slot)
        self._quotas.give_back(slot)
