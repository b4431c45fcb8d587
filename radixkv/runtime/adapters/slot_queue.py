"""The waiting queue of an engine whose steps can have only some of the adapters: whose turn it is for a slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from sortedcontainers import SortedDict

from radixkv.runtime.adapters.slot_times import SlotTimes
from radixkv.runtime.protocols.queue import Queue
from radixkv.runtime.request import Phase, Request

TURN_S = 1.0
"""How long an adapter keeps its slot, and another one waits, before the slot takes no new requests."""
_MAX_RANKED = 256
"""Most requests in line that are ranked by prefix, and most whose pages are spared. The adapters in line have equal
parts of either."""


@dataclass(slots=True)
class _Slot:
    """An adapter that steps can have."""

    since: float
    """When it got the slot."""
    is_closed: bool = False
    """Whether its new requests wait, so that the slot becomes free."""
    queued: Counter[str] = field(default_factory=Counter)
    """How many requests of it each sender has in the queue behind; nobody has none."""
    senders: Collection[str] = ()
    """Whose requests use it, or did so last."""


@dataclass(slots=True)
class _Line:
    """The requests that wait for the slot of one adapter."""

    since: float
    """When the first of them came, or when the slot was closed."""
    requests: SortedDict[tuple[int, int], Request] = field(default_factory=SortedDict)
    """By their order."""
    senders: Counter[str] = field(default_factory=Counter)
    """How many of them each sender has; nobody has none."""


class SlotQueue:
    """A waiting queue with a line in front of it for each adapter without a slot.

    The queue behind has the requests that can be admitted, in its own order: those without an adapter, and those
    whose adapter has a slot. Requests of other adapters are in line, so they hold nobody back.

    A slot is *in use* while a request of its adapter runs, loads pages, or is in the queue behind. One that is not
    goes to the next adapter, that of least recent use first. If all are in use, slots *close*: the one that its
    adapter has had longest, but at least for ``TURN_S``, for each adapter that has waited for ``TURN_S``. New
    requests for a closed slot's adapter are in line again. Those that have begun go on, also after a preemption, so
    it is free once these have ended. Next is the adapter that has waited longest; as long as none has waited for
    ``TURN_S``, the one whose request the queue behind would admit first, as that with the longest cached prefix.

    So an adapter is next after at most one turn of a slot for each adapter that has waited longer, and gets one in
    a turn: ``TURN_S``, the time of the longest request, and that of a copy.

    Senders have turns in proportion to their weights: first comes the adapter of the sender with the least
    ``SlotTimes``, and a slot closes only for one of its own senders, or one that has had less. See
    docs/decisions/0083-adapters-take-turns.md.

    Args:
        queue: the queue behind.
        n_slots: adapters that steps can have.
        clock: seconds, monotonic.
        weights: of all senders; none: all requests are of one.
    """

    def __init__(
        self, queue: Queue, n_slots: int, clock: Callable[[], float], weights: Mapping[str, float] | None = None
    ) -> None:
        self.is_common = queue.is_common
        self._queue = queue
        self._n_slots = n_slots
        self._clock = clock
        self._times = SlotTimes(weights or {})
        self._charged_at = 0.0
        """Until when ``_times`` have been charged; counts while requests are in line."""
        self._slots: dict[str, _Slot] = {}
        """By digest of the adapter, that of least recent use first."""
        self._lines: dict[str, _Line] = {}
        """By digest of the adapter. None is empty."""
        self._chosen: str | None = None
        """The adapter that was chosen last for a slot."""
        self._unstarted: SortedDict[tuple[float, int], Request] = SortedDict()
        """All requests in line, by time of arrival."""
        self._n_unstarted: Counter[str] = Counter()
        """Their number, by sender."""

    def __len__(self) -> int:
        """Returns how many requests are in the queue behind."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    @property
    def version(self) -> int:
        """See ``Queue.version``."""
        return self._queue.version

    @property
    def n_adapters(self) -> int:
        """Adapters that have slots."""
        return len(self._slots)

    @property
    def has_lines(self) -> bool:
        """Whether a request waits for a slot."""
        return bool(self._lines)

    def n_in_line(self, sender: str | None = None) -> int:
        """Returns how many requests wait for a slot, of all senders or of one. O(adapters in line)."""
        lines = self._lines.values()
        return sum(len(line.requests) if sender is None else line.senders[sender] for line in lines)

    def n_unstarted_beside(self, request: Request) -> int:
        """See ``Queue.n_unstarted_beside``. O(senders)."""
        n_in_line = self._n_unstarted.total() if self.is_common else self._n_unstarted[request.sender]
        return self._queue.n_unstarted_beside(request) + n_in_line

    def take_received_before(self, time_s: float) -> list[Request]:
        """See ``Queue.take_received_before``."""
        taken = self._queue.take_received_before(time_s)
        for request in taken:
            self._left_queue(request)
        while self._unstarted and self._unstarted.peekitem(0)[1].received_at < time_s:
            taken.append(self._unstarted.peekitem(0)[1])
            self._leave_line(taken[-1])
        return sorted(taken, key=lambda request: request.received_at)

    def add(self, request: Request) -> None:
        """See ``Queue.add``. O(1) more than the queue behind."""
        slot = self._slots.get(request.adapter.digest)
        if not request.adapter.digest or (slot is not None and (not slot.is_closed or _has_begun(request))):
            self._enter_queue(request)
        else:
            self._enter_line(request)

    def remove(self, request: Request) -> None:
        """See ``Queue.remove``."""
        if self._is_in_line(request):
            self._leave_line(request)
        else:
            self._queue.remove(request)
            self._left_queue(request)

    def candidates(self) -> Iterable[Request]:
        """See ``Queue.candidates``."""
        return self._queue.candidates()

    def next_requests(self) -> Iterator[Request]:
        """Yields what the queue behind does, then requests in line, in the order in which their adapters get slots.

        No adapter has more than its part of what is yielded of these, so that a long line hides no other. The order
        is as of now: it depends on no cached prefix but that for which the next adapter was chosen.
        O(adapters in line · log adapters in line) with one sender, and O(1) a request.
        """
        yield from self._queue.next_requests()
        in_turn = sorted(self._lines, key=self._turn_of)
        n_each = max(1, _MAX_RANKED // max(1, len(in_turn)))
        in_line = chain.from_iterable(islice(self._lines[one].requests.values(), n_each) for one in in_turn)
        for request in islice(in_line, _MAX_RANKED):
            if request.reads_cache and not request.recovery.bypasses_tree:
                yield request

    def short(self, n_tokens: int, unfinished: Sequence[Request]) -> Iterable[Request]:
        """See ``Queue.short``."""
        return self._queue.short(n_tokens, unfinished)

    def first(self, requests: Iterable[Request]) -> Request:
        """See ``Queue.first``."""
        return self._queue.first(requests)

    def count_passes(self, admitted: Sequence[Request]) -> None:
        """See ``Queue.count_passes``."""
        self._queue.count_passes(admitted)

    def charge(self, requests: Sequence[Request], n_tokens: int) -> None:
        """See ``Queue.charge``."""
        self._queue.charge(requests, n_tokens)

    def has_line(self, digest: str) -> bool:
        """Returns whether a request waits for the slot of an adapter. O(1)."""
        return digest in self._lines

    def next_adapter(self) -> str | None:
        """Chooses the adapter that is to get the next slot, and returns it; None if none waits for one.

        O(adapters in line), and the ranks of some of their requests; with senders O(requests in line).
        """
        self._chosen = self._choose()
        return self._chosen

    def _choose(self) -> str | None:
        coming = self._times.copy()
        for slot in self._slots.values():
            coming.charge(slot.senders, max(0.0, slot.since + TURN_S - self._clock()))
        times = {digest: coming.least(self._lines[digest].senders) for digest in self._waiting()}
        least = min(times.values(), default=0.0)
        first = [digest for digest, time in times.items() if time == least]
        due = [digest for digest in first if self._is_over(self._lines[digest].since)]
        if due or not first:
            return min(due, key=lambda digest: self._lines[digest].since, default=None)
        # Priorities and prefixes count within a sender only: of several, the one that has waited longest is next.
        in_line = (request for request in self._unstarted.values() if request.adapter.digest in first)
        sender = next(request.sender for request in in_line if coming.least([request.sender]) == least)
        lines = [self._lines[digest] for digest in first if sender in self._lines[digest].senders]
        n_each = max(1, _MAX_RANKED // len(lines))
        own = ((one for one in line.requests.values() if one.sender == sender) for line in lines)
        return self._queue.first(chain.from_iterable(islice(each, n_each) for each in own)).adapter.digest

    def find_slot(self, users: Iterable[Request]) -> tuple[bool, str | None]:
        """Returns whether another adapter can get a slot, and the adapter that loses its own for that, if any.

        O(slots + users) if none is empty.

        Args:
            users: the requests that hold or load pages.
        """
        if len(self._slots) < self._n_slots:
            return True, None
        used = {request.adapter.digest for request in users}
        unused = (digest for digest, slot in self._slots.items() if not slot.queued and digest not in used)
        digest = next(unused, None)
        return digest is not None, digest

    def put(self, digest: str) -> None:
        """Gives an adapter a slot, of which one is empty; its requests leave the line. O(requests in line)."""
        assert len(self._slots) < self._n_slots, "find_slot has found one"
        self._slots[digest] = _Slot(self._clock())
        self._dissolve_line(digest)

    def withdraw(self, digest: str) -> bool:
        """Takes the slot of an adapter that is not in use; returns whether it had one. O(1)."""
        slot = self._slots.pop(digest, None)
        assert slot is None or not slot.queued, "a slot in use is never taken"
        return slot is not None

    def take_turns(self, users: Iterable[Request]) -> None:
        """Closes the slots that others are due to get, and opens those that nobody waits for any more.

        O(slots · adapters in line), with senders O(users + senders), and O(waiting) where a slot closes.

        Args:
            users: the requests that hold or load pages.
        """
        if self._lines and not self._times.has_one_sender:
            self._charge(users)
        n_empty = self._n_slots - len(self._slots)
        closing: set[str] = set()
        for line in [self._lines[digest] for digest in self._due()[n_empty:]]:
            may_close = [one for one in self._slots if one not in closing and self._may_close(one, line)]
            if may_close:
                closing.add(min(may_close, key=self._closes_at))
        for digest, slot in self._slots.items():
            if slot.is_closed and digest not in closing:
                slot.is_closed = False
                self._dissolve_line(digest)
            elif not slot.is_closed and digest in closing:
                slot.is_closed = True
                self._return_to_line(digest)

    def _charge(self, users: Iterable[Request]) -> None:
        """Adds the time of all slots since the last call to the times of their senders."""
        now = self._clock()
        senders: dict[str, set[str]] = {digest: {*slot.queued} for digest, slot in self._slots.items()}
        for request in users:
            if request.adapter.digest in senders:
                senders[request.adapter.digest].add(request.sender)
        for digest, slot in self._slots.items():
            slot.senders = senders[digest] or slot.senders
            self._times.charge(slot.senders, now - self._charged_at)
        turns = [slot for slot in self._slots.values() if slot.is_closed or not self._is_over(slot.since)]
        self._times.raise_others(
            waiting={sender for digest in self._waiting() for sender in self._lines[digest].senders},
            served={sender for slot in turns for sender in slot.senders},
        )
        self._charged_at = now

    def _due(self) -> list[str]:
        """Returns the adapters in line that are due, in the order of their turns."""
        due = [digest for digest in self._waiting() if self._is_over(self._lines[digest].since)]
        return sorted(due, key=lambda digest: (self._time_of(self._lines[digest]), self._lines[digest].since))

    def _may_close(self, digest: str, line: _Line) -> bool:
        """Returns whether a slot may close for a line, or remain closed."""
        slot = self._slots[digest]
        if slot.is_closed or not self._is_over(slot.since):
            return slot.is_closed
        is_own = self._times.has_one_sender or not line.senders.keys().isdisjoint(slot.senders)
        return is_own or self._time_of(line) < self._times.most(slot.senders)

    def _closes_at(self, digest: str) -> tuple[bool, float, float]:
        """Returns the place of a slot in the order in which slots close."""
        slot = self._slots[digest]
        return not slot.is_closed, -self._times.most(slot.senders), slot.since

    def _time_of(self, line: _Line) -> float:
        """Returns the least slot time of those who wait in a line: it is their turn that it takes."""
        return self._times.least(line.senders)

    def _waiting(self) -> list[str]:
        """Returns the adapters in line that have no slot, the first of which began to wait first."""
        return [digest for digest in self._lines if digest not in self._slots]

    def _turn_of(self, digest: str) -> tuple[bool, float, float]:
        """Returns the place of a line among the others."""
        line = self._lines[digest]
        return digest != self._chosen, self._time_of(line), line.since

    def _is_over(self, since: float) -> bool:
        return self._clock() - since >= TURN_S

    def _enter_queue(self, request: Request) -> None:
        if request.adapter.digest:
            self._slots[request.adapter.digest].queued[request.sender] += 1
        self._queue.add(request)

    def _left_queue(self, request: Request) -> None:
        """Counts that a request has left the queue behind; its adapter is that of most recent use."""
        if request.adapter.digest:
            slot = self._slots.pop(request.adapter.digest)
            _subtract(slot.queued, request.sender)
            self._slots[request.adapter.digest] = slot

    def _is_in_line(self, request: Request) -> bool:
        line = self._lines.get(request.adapter.digest)
        return line is not None and line.requests.get(request.order) is request

    def _enter_line(self, request: Request) -> None:
        assert not _has_begun(request), "a request that has begun is in a slot that is in use, which is never taken"
        request.phase = Phase.WAITING
        request.key = bytes(request.lookup_key)
        if not self._lines:
            self._times.forget()
            self._charged_at = self._clock()
        line = self._lines.setdefault(request.adapter.digest, _Line(self._clock()))
        line.requests[request.order] = request
        line.senders[request.sender] += 1
        self._unstarted[request.received_at, request.serial] = request
        self._n_unstarted[request.sender] += 1

    def _leave_line(self, request: Request) -> None:
        request.key = b""
        digest = request.adapter.digest
        line = self._lines[digest]
        del line.requests[request.order]
        _subtract(line.senders, request.sender)
        if not line.requests:
            del self._lines[digest]
        del self._unstarted[request.received_at, request.serial]
        self._n_unstarted[request.sender] -= 1

    def _dissolve_line(self, digest: str) -> None:
        """Puts the requests of an adapter into the queue behind."""
        line = self._lines.get(digest)
        for request in () if line is None else tuple(line.requests.values()):
            self._leave_line(request)
            self._enter_queue(request)

    def _return_to_line(self, digest: str) -> None:
        """Puts the requests of an adapter that have not begun into line. O(waiting)."""
        for request in tuple(self._queue):
            if request.adapter.digest == digest and not _has_begun(request):
                self._queue.remove(request)
                _subtract(self._slots[digest].queued, request.sender)
                self._enter_line(request)


def _has_begun(request: Request) -> bool:
    return request.first_row is not None


def _subtract(counts: Counter[str], sender: str) -> None:
    counts[sender] -= 1
    if not counts[sender]:
        del counts[sender]
