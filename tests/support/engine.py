"""The real scheduler, cache and tree over a fake device, driven a half-step at a time."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from radixkv.config import SchedulerConfig
from radixkv.errors import DeviceError
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.request import GREEDY, Phase, Request, Update
from radixkv.runtime.scheduler.scheduler import Scheduler
from radixkv.runtime.scheduler.shared_prefixes import SharedPrefixes
from radixkv.runtime.step.plan import RowSampling, StepPlan
from radixkv.runtime.step.result import Pending
from radixkv.tree.node import Namespace
from radixkv.wire import TokenLogprobs
from support.fake_device import FakeDevice, answer, chain, prompt_scores, score, unpacked


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Little-endian int32."""
    return array("i", tokens).tobytes()


def name_of(request: Request) -> str:
    """Of one choice."""
    return f"{request.id}.{request.choice}" if request.choice else request.id


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


def prompt(n_tokens: int, first: int = 1) -> list[int]:
    """Token ids that depend on ``first``; one prompt is the beginning of a longer one."""
    return [(first * 7919 + i * 31) % 97 for i in range(n_tokens)]


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
        self.now = 0.0
        self.scheduler = Scheduler(self.cache, self.config, finds_shared_runs=True, clock=lambda: self.now)
        self.scheduler._shared = SharedPrefixes(self.cache, least_tokens=1)
        self.device = FakeDevice(self.n_pages, self.page_size)
        self.cache._free = PoisoningList(self.device, self.cache._free)
        self.requests: dict[str, Request] = {}
        """By name: the id, and of choices but the first their number."""
        self.siblings: dict[str, list[Request]] = {}
        """The choices of each id."""
        self.ended: dict[str, Ended] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}
        self.scored: set[str] = set()
        """Those whose prompts are to be scored."""
        self.begun: set[str] = set()
        """Those of which a token is out."""
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
        n: int = 1,
        sampling: RowSampling = GREEDY,
        min_tokens: int = 0,
        priority: int = 0,
        n_prompt_logprobs: int | None = None,
    ) -> Request:
        """The leader of the choices."""
        request_id = f"r{next(self._ids)}"
        choices = [
            Request(
                id=request_id,
                namespace=namespace,
                tokens=bytearray(token_bytes(prompt)),
                n_prompt=len(prompt),
                max_tokens=max_tokens,
                choice=choice,
                sampling=replace(sampling, seed=sampling.seed + choice, banned=tuple(stop)),
                min_tokens=min_tokens,
                stop_token_ids=frozenset(stop),
                reads_cache=reads_cache,
                priority=priority,
                received_at=self.now,
            )
            for choice in range(n)
        ]
        leader, *followers = choices
        if n_prompt_logprobs is not None:
            leader.n_prompt_logprobs, leader.reads_cache = n_prompt_logprobs, False
        self.scheduler.add(leader, followers)
        if n_prompt_logprobs is not None:
            self.scored.add(request_id)
        self.siblings[request_id] = choices
        self.requests |= {name_of(choice): choice for choice in choices}
        return leader

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            launched = self.scheduler._launched[-1]
            for row, request in zip(plan.rows, launched.requests, strict=True):
                self.device.namespaces[row.batch_slot] = request.namespace
                self.rows[plan.step, row.batch_slot] = request
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

    def expire(self) -> None:
        self.take(self.scheduler.expire())
        self.after()

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
        """One choice; the others go on."""
        self.scheduler.abort(request)
        self.ended[name_of(request)] = Ended("abort", self.output(request))
        self.after()

    def take(self, updates: Sequence[Update]) -> None:
        for update in updates:
            request, name = update.request, name_of(update.request)
            if name in self.ended:
                assert self.ended[name].reason == "abort", "an update after the terminal one"
                continue
            if update.logprobs is not None:
                self.logprobs.setdefault(name, []).append(update.logprobs)
            if update.scores is not None:
                scores = self.scores.setdefault(request.id, [])
                assert update.scores.start == len(scores) + 1, "scores come in order, each once"
                assert request.id not in self.begun, "and before the first token"
                scores += update.scores.items
            if update.token is not None:
                self.begun.add(request.id)
            if update.finish_reason is not None or update.error is not None:
                reason = update.finish_reason or (update.error.code if update.error else "")
                self.ended[name] = Ended(reason, self.output(request))
            if update.error is not None:
                for other in reversed(self.siblings[request.id]):
                    if name_of(other) not in self.ended:
                        if other.phase is not Phase.ENDED:  # by a failure of its own, in the same step
                            self.scheduler.abort(other)
                        self.ended[name_of(other)] = Ended("abort", self.output(other))

    def output(self, request: Request) -> list[int]:
        return unpacked(bytes(request.tokens))[request.n_prompt :]

    def after(self) -> None:
        """Every invariant."""
        self.scheduler.check()
        self.check_requests()
        self.device.free_pages = set(self.cache.free_pages())

    def check_requests(self) -> None:
        live = [r for name, r in self.requests.items() if name not in self.ended]
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        returning = [r for r in self.scheduler.running.releasing if r.phase is Phase.RETRACTED]
        following = [follower for r in live for follower in r.followers]
        placed = (*waiting, *running, *returning, *following)
        assert sorted(r.serial for r in live) == sorted(r.serial for r in placed)
        assert all(r.phase is Phase.FOLLOWING for r in following)
        assert [r.order for r in waiting] == sorted(r.order for r in waiting)
        releasing = self.scheduler.running.releasing
        for leader in {r.leader for r in (*running, *releasing) if r.leader is not None}:
            assert leader in (*running, *releasing), "a fork copies from pages that were given back"
        for request in running:
            blocks = request.block_table
            assert blocks is not None
            n_committed = blocks.n_leased * self.page_size
            assert n_committed <= request.n_known, "committed KV leads the known tokens"
            assert request.n_scheduled <= len(blocks.pages) * self.page_size, "scheduled KV has no page"
            free = set(self.cache.free_pages())
            assert not free & set(blocks.pages), "a live table points at a free page"

    def check_answers(self) -> None:
        """Everything that ended well has exactly the naive answer, also to what it asked beside the tokens."""
        for name, ended in self.ended.items():
            request, how = self.requests[name], self.requests[name].sampling
            prompt = unpacked(bytes(request.tokens))[: request.n_prompt]
            expected = answer(
                request.namespace,
                prompt,
                request.max_tokens,
                sorted(request.stop_token_ids),
                seed=how.seed if how.temperature else 0,
                min_tokens=request.min_tokens,
                banned=how.banned,
            )
            if ended.reason in ("stop", "length"):
                assert ended.tokens == expected
            else:
                assert ended.tokens == expected[: len(ended.tokens)]
            if how.n_logprobs is not None:
                places = range(len(ended.tokens))
                ends = [chain(request.namespace, prompt + ended.tokens[:place]) for place in places]
                logprobs = [score(end, token) for end, token in zip(ends, ended.tokens, strict=True)]
                given = self.logprobs.get(name, [])
                assert given == (logprobs if ended.reason in ("stop", "length") else logprobs[: len(given)])
        for request_id, (first, *_) in self.siblings.items():
            prompt = unpacked(bytes(first.tokens))[: first.n_prompt]
            scores = prompt_scores(first.namespace, prompt) if request_id in self.scored else []
            given = self.scores.get(request_id, [])
            assert given == (scores if request_id in self.begun else scores[: len(given)])

    def check_quarantine(self) -> None:
        """Only a request with a broken row of its own is kept from the tree; its readers are not."""
        broken = {self.rows[row] for row in self.device.broken}
        assert {request for request in self.requests.values() if request.bypasses_tree} <= broken

    def check_idle(self) -> None:
        """Nothing is left behind."""
        assert self.scheduler.is_idle
        assert self.cache.n_available == self.n_pages
        assert self.cache.tree.n_pages_leased == 0
        assert self.cache.tree.n_pages_detached == 0
