"""The real scheduler, cache and tree over a fake device, driven a half-step at a time."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from radixkv.config import SchedulerConfig
from radixkv.errors import DeviceError
from radixkv.runtime.cache import PageCache
from radixkv.runtime.plan import Pending, StepPlan
from radixkv.runtime.request import Phase, Request
from radixkv.runtime.scheduler import Scheduler, Update
from radixkv.tree.node import Namespace
from support.fake_device import FakeDevice, answer


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Little-endian int32."""
    return array("i", tokens).tobytes()


@dataclass
class Ended:
    """How a request ended."""

    reason: str
    tokens: list[int]


class PoisoningList(list[int]):
    """Free pages; what becomes free is poisoned at once, for the same plan may use it again."""

    def __init__(self, device: FakeDevice, pages: Iterable[int]) -> None:
        super().__init__(pages)
        self.device = device

    def __iadd__(self, pages: Iterable[int]) -> PoisoningList:
        pages = list(pages)
        self.device.poison(pages)
        self.extend(pages)
        return self


@dataclass
class Engine:
    """Steps by hand: ``launch`` and ``collect`` are separate, and every check runs after each."""

    n_pages: int = 64
    page_size: int = 4
    config: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    )
    shares: bool = True

    def __post_init__(self) -> None:
        self.cache = PageCache(self.n_pages, self.page_size, shares=self.shares)
        self.scheduler = Scheduler(self.cache, self.config, clock=lambda: 0.0)
        self.device = FakeDevice(self.n_pages, self.page_size)
        self.cache._free = PoisoningList(self.device, self.cache._free)
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, Ended] = {}
        self.breaking: set[str] = set()
        """Requests whose rows make a step fail."""
        self.rows: dict[tuple[int, int], Request] = {}
        """Whose row stood in (step, slot)."""
        self.pending: deque[tuple[StepPlan, Pending]] = deque()
        self._ids = count()
        self.after()

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        namespace: Namespace = Namespace(),
        reads_cache: bool = True,
        stop: Sequence[int] = (),
    ) -> Request:
        request = Request(
            id=f"r{next(self._ids)}",
            namespace=namespace,
            tokens=bytearray(token_bytes(prompt)),
            n_prompt=len(prompt),
            max_tokens=max_tokens,
            stop_token_ids=frozenset(stop),
            reads_cache=reads_cache,
        )
        self.scheduler.add(request)
        self.requests[request.id] = request
        return request

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            launched = self.scheduler._launched[-1]
            for row, request in zip(plan.rows, launched.requests, strict=True):
                self.device.namespaces[row.slot] = request.namespace
                self.rows[plan.step, row.slot] = request
                if request.id in self.breaking:
                    self.device.fail_steps.add(plan.step)
            try:
                self.pending.append((plan, self.device.launch(plan)))
            except DeviceError:
                while self.pending:
                    self.collect()
                self.take(self.scheduler.fail())
        self.after()
        return plan

    def collect(self) -> list[Update]:
        plan, pending = self.pending.popleft()
        try:
            result = pending.result()
        except DeviceError:
            self.pending.clear()
            updates = self.scheduler.fail()
        else:
            updates = self.scheduler.complete(plan, result)
        self.take(updates)
        self.after()
        return updates

    def turn(self) -> None:
        """As the loop does it: launch the next step, then take the one before."""
        plan = self.launch()
        if len(self.pending) > 1 or (plan is None and self.pending):
            self.collect()

    def run(self, n_turns: int = 10_000) -> None:
        """To the end."""
        for _ in range(n_turns):
            if self.scheduler.is_idle:
                return
            self.turn()
        raise AssertionError("the engine does not come to an end")

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        self.ended[request.id] = Ended("abort", self.output(request))
        self.after()

    def take(self, updates: Sequence[Update]) -> None:
        for request, _, reason, error in updates:
            if reason is not None or error is not None:
                assert request.id not in self.ended, "a second terminal update"
                self.ended[request.id] = Ended(reason or (error.code if error else ""), self.output(request))

    def output(self, request: Request) -> list[int]:
        ids = array("i", bytes(request.tokens)).tolist()
        return ids[request.n_prompt :]

    def after(self) -> None:
        """Every invariant."""
        self.scheduler.check()
        self.check_requests()
        self.device.free_pages = set(self.cache.free_pages())

    def check_requests(self) -> None:
        live = [r for r in self.requests.values() if r.id not in self.ended]
        waiting, running = list(self.scheduler.waiting), self.scheduler._running
        returning = [r for r in self.scheduler._draining if r.phase is Phase.RETURNING]
        assert sorted(r.serial for r in live) == sorted(r.serial for r in (*waiting, *running, *returning))
        for request in running:
            holding = request.holding
            assert holding is not None
            n_committed = holding.n_leased * self.page_size
            assert n_committed <= request.n_known, "committed KV leads the known tokens"
            assert request.n_scheduled <= len(holding.table) * self.page_size, "scheduled KV has no page"
            free = set(self.cache.free_pages())
            assert not free & set(holding.table), "a live table points at a free page"

    def check_answers(self) -> None:
        """Everything that ended well has exactly the naive answer."""
        for request_id, ended in self.ended.items():
            request = self.requests[request_id]
            prompt = array("i", bytes(request.tokens)).tolist()[: request.n_prompt]
            expected = answer(request.namespace, prompt, request.max_tokens, sorted(request.stop_token_ids))
            if ended.reason in ("stop", "length"):
                assert ended.tokens == expected
            else:
                assert ended.tokens == expected[: len(ended.tokens)]

    def check_quarantine(self) -> None:
        """Only a request with a broken row of its own is kept from the tree; its readers are not."""
        broken = {self.rows[row] for row in self.device.broken}
        assert {request for request in self.requests.values() if request.private} <= broken

    def check_idle(self) -> None:
        """Nothing is left behind."""
        assert self.scheduler.is_idle
        assert self.cache.n_available == self.n_pages
        assert self.cache.tree.n_pages_leased == 0
        assert self.cache.tree.n_pages_detached == 0
