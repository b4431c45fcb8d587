"""States of recurrent layers at the ends of nodes, in a pool of slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from radixkv.errors import InvariantError
from radixkv.tree.forest import Forest
from radixkv.tree.node import TOKEN_BYTES, Lease, Node, State, require_open, upwards, walk


class States:
    """The states of a tree whose model has recurrent layers: a match ends where there is one.

    Such a model cannot use K and V of a prefix without the state after the prefix's last token, and a state cannot
    be cut shorter. A slot is either free or at the end of one node. A state can be found once it is *computed*.
    From then on it can be evicted, the least recently used first and those of retained prefixes last, while the
    node's pages stay. It leaves the tree with the last of these pages.

    Args:
        forest: the nodes of the tree.
        n_slots: how many states there can be.
    """

    def __init__(self, forest: Forest, n_slots: int) -> None:
        self._forest = forest
        self.n_slots = n_slots
        """How many states there can be."""
        self._free = list(range(n_slots - 1, -1, -1))
        self._by_use: OrderedDict[State, None] = OrderedDict()
        """The computed states, the least recently used first."""
        self._coming: set[State] = set()
        """Those that a launched step computes."""
        self.on_left: Callable[[State], None] = lambda state: None
        """Is called with each state that leaves the tree, once its slot is free."""

    def __iter__(self) -> Iterator[State]:
        """Yields all states, computed or not."""
        yield from self._by_use
        yield from self._coming

    def deepest(self, node: Node, tokens: bytes) -> int:
        """Returns how many bytes of the tokens after a node are cached up to the deepest computed state, 0 without
        one.

        At least one token is left over, which has to be computed on the state. O(edges).
        """
        path, _, _, _ = walk(node, tokens, self._forest.page_bytes)
        end = length = 0
        for one in path:
            length += len(one.key)
            if one.state is not None and one.state.is_computed and length < len(tokens):
                end = length
        return end

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
        require_open(lease)
        node, n_beyond = lease.node, (lease.n_tokens - n_tokens) * TOKEN_BYTES
        while n_beyond >= len(node.key):
            n_beyond -= len(node.key)
            assert node.parent is not None, "a root has no state"
            node = node.parent
        if node.state is not None and not n_beyond:
            return None
        self.take_left()
        if not self._free and not self.evict():
            return None
        if n_beyond:
            node = self._forest.split(node, (len(node.key) - n_beyond) // self._forest.page_bytes)
        node.state = State(self._free.pop(), n_tokens, node, is_turn)
        self._coming.add(node.state)
        return node.state

    def computed(self, state: State) -> None:
        """Lets matches find a state from now on. Does nothing if it has left the tree. O(1)."""
        if state in self._coming:
            self._coming.remove(state)
            state.is_computed = True
            self._by_use[state] = None
            self._forest.version += 1

    def use(self, state: State) -> None:
        """Notes that a request goes on from a state. O(1)."""
        if state in self._by_use:
            self._by_use.move_to_end(state)

    def demote(self, state: State) -> None:
        """Makes a computed state the next to be evicted. O(1)."""
        if state in self._by_use:
            self._by_use.move_to_end(state, last=False)

    def drop(self, state: State) -> None:
        """Frees the slot of a state. Does nothing if it has left the tree. O(1)."""
        if state.node is not None:
            self._forest.lose_state(state.node)
            self.take_left()

    def check(self) -> None:
        """Checks that each slot is in one place, and each state at its node. O(nodes).

        Raises:
            InvariantError: a bug in radixkv.
        """
        self.take_left()
        states = list(self)
        slots = sorted([*self._free, *(state.slot for state in states)])
        if slots != list(range(self.n_slots)):
            raise InvariantError(
                f"the slots of states are {slots}, free or used, and should be 0 to {self.n_slots}"
            )
        reachable = {node.state for node in self._forest.reachable() if node.state is not None}
        if reachable != set(states):
            raise InvariantError(f"{len(reachable)} nodes have a state, and {len(states)} slots are used")
        for state in states:
            if state.node is None or state.node.state is not state or state.is_computed != (state in self._by_use):
                raise InvariantError(f"the state in slot {state.slot} is not that of its node")
            length = sum(len(node.key) for node in upwards(state.node))
            if length != state.n_tokens * TOKEN_BYTES:
                raise InvariantError(
                    f"the state in slot {state.slot} is of {state.n_tokens} tokens, at a node that ends after "
                    f"{length // TOKEN_BYTES}"
                )

    def evict(self) -> bool:
        """Frees the slot of the least recently used state, of retained prefixes last; False if there is none that
        can be evicted. O(1 + retained states)."""
        states = (state for state in self._by_use if state.node is None or not state.node.n_retentions)
        victim = next(states, None) or next(iter(self._by_use), None)
        if victim is None:
            return False
        self._forest.version += 1
        self.drop(victim)
        return True

    def take_left(self) -> None:
        """Frees the slots of states that have left the tree with their nodes' pages. O(states that have left)."""
        for state in self._forest.left_states:
            self._by_use.pop(state, None)
            self._coming.discard(state)
            self._free.append(state.slot)
            self.on_left(state)
        self._forest.left_states.clear()
