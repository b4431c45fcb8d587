"""States at the ends of answers. See docs/decisions/0066-states-of-delta-nets.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.runtime.request import Request
from radixkv.runtime.states.repeated_answers import RepeatedAnswers
from radixkv.runtime.step.plan import StateSave
from radixkv.tree.states import NodeStates

_SLOTS_A_REQUEST = 2
"""For so many slots of the tree, the answer of one running request may have its states saved."""


@dataclass(slots=True, eq=False)
class _Saved:
    """A state of an answer, in a slot that is reserved until the answer ends."""

    position: int
    slot: int
    is_computed: bool = False
    """Whether the step that computes it is done."""


class AnswerEnds:
    """Keeps the state at the last multiple of a block of an answer, where the next turn goes on if it repeats it.

    Nobody knows where an answer will end. So a state is saved whenever a decode row comes to a multiple, in a slot
    that no prompt can find, and the one before is given up once that row is done. The last one enters the tree when
    the answer ends. A request that ends otherwise, as by a stop string, gives its slots back.

    The next turn goes on either from this state or from that of the message before the answer. The one that is less
    likely is the next to be evicted. Until a prompt has repeated an answer, these states take free slots only.

    Args:
        states: those of the tree.
    """

    def __init__(self, states: NodeStates) -> None:
        self._states = states
        self._repeated = RepeatedAnswers(states.block_tokens)
        self._max_requests = states.n_slots // _SLOTS_A_REQUEST
        self._saved: dict[Request, list[_Saved]] = {}
        """The states of each answer that has some, by position. All but the last two are given up."""
        self._coming: list[tuple[Request, _Saved]] = []
        """The states that rows of the next plan compute."""
        self._launched: dict[int, list[tuple[Request, _Saved]]] = {}
        """The same of each launched step, by its number."""

    @property
    def repeated(self) -> RepeatedAnswers:
        """What is known of the prompts that follow answers."""
        return self._repeated

    def plan_decode(self, requests: Sequence[Request]) -> list[StateSave]:
        """Returns the states that decode rows of the next plan save.

        O(requests), and O(1 + retained and held states) for each that comes to a multiple of a block.
        """
        if not self._repeated.are_expected:
            return []
        block, saves = self._states.block_tokens, list[StateSave]()
        for request in requests:
            if request.n_scheduled % block or not self._may_save(request):
                continue
            slot = self._reserve(request)
            if slot is None:
                continue
            saved = _Saved(request.n_scheduled, slot)
            self._saved.setdefault(request, []).append(saved)
            self._coming.append((request, saved))
            saves.append(StateSave(request.batch_slot, saved.position, slot))
        return saves

    def launched(self, step: int) -> None:
        """Takes note that a step will be launched with the rows that were planned. O(1)."""
        if self._coming:
            self._launched[step], self._coming = self._coming, []

    def step_done(self, step: int) -> None:
        """Takes note that a step is done, and gives up the states before those that it has computed. O(states).

        A request whose row went wrong loses its pages, and so its slots: no answer ends with its state.
        """
        for request, saved in self._launched.pop(step, ()):
            saved.is_computed = True
            states = self._saved[request]
            n_before = states.index(saved)
            self._give_back(states[:n_before])
            del states[:n_before]

    def ended(self, request: Request) -> None:
        """See ``States.ended``. O(edges + pages of a split node)."""
        lease = request.blocks.lease
        if lease is None or not request.blocks.can_commit or not request.blocks.is_computed or request.is_canary:
            return
        turn = next((state for state in self._states.on_path(lease) if state.is_turn), None)
        last = lease.n_tokens - lease.n_tokens % self._states.block_tokens
        if turn is not None and last > turn.n_tokens:
            turn.answer_end = last
        saved = next((one for one in self._saved.get(request, ()) if one.is_computed), None)
        if saved is None:
            return
        self._saved[request].remove(saved)
        state = self._states.attach(lease, saved.position, saved.slot, is_turn=True)
        if state is None or state is turn:
            return
        state.answer_end = state.n_tokens
        if not self._repeated.are_usual:
            self._states.demote(state, spares_proven=True)
        elif turn is not None:
            self._states.demote(turn, spares_proven=True)

    def freed(self, request: Request) -> None:
        """See ``States.freed``. O(1)."""
        self._give_back(self._saved.pop(request, ()))

    def undo(self) -> None:
        """Takes note that all launched steps have failed. O(states)."""
        for saves in self._launched.values():
            for request, saved in saves:
                self._forget(request, saved)
        self._launched.clear()

    def _may_save(self, request: Request) -> bool:
        """Whether a request's answer may be repeated, and few enough others have their states saved."""
        lease = request.blocks.lease
        if lease is None or lease.detached or request.is_canary or request.continuation is not None:
            return False
        return request in self._saved or len(self._saved) < self._max_requests

    def _reserve(self, request: Request) -> int | None:
        """Takes a slot: a free one, or of a state that nobody has gone on from once a prompt has repeated an
        answer."""
        if not (self._repeated.are_seen or self._states.n_free):
            return None
        return self._states.reserve(request.namespace, spares_proven=True)

    def _forget(self, request: Request, saved: _Saved) -> None:
        self._saved[request].remove(saved)
        self._give_back([saved])

    def _give_back(self, states: Sequence[_Saved]) -> None:
        for saved in states:
            self._states.give_back(saved.slot)
