"""The real scheduler, cache and tree with a fake device; tests drive launches and results separately."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from msgspec.structs import replace

from radixkv.errors import DeviceError
from radixkv.runtime.alarms import Alarms
from radixkv.runtime.assemble import page_quotas
from radixkv.runtime.beams.group import BeamGroup
from radixkv.runtime.beams.search import BeamSearch
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.cache.free_pages import FreeList, FreePages, Slabs
from radixkv.runtime.cache.window_pages import WindowPages
from radixkv.runtime.lifetimes.pins import Pins
from radixkv.runtime.lifetimes.sessions import Sessions
from radixkv.runtime.paged_eviction.eviction import PagedEviction
from radixkv.runtime.pauses.pauses import Pauses
from radixkv.runtime.protocols.states import States
from radixkv.runtime.request import GREEDY, NO_ADAPTER, ActiveAdapter, Phase, PromptScoring, Request, Update
from radixkv.runtime.states.recurrent_states import RecurrentStates
from radixkv.runtime.states.window_tails import WindowTails
from radixkv.runtime.step.plan import RowSampling, StepPlan
from radixkv.runtime.step.window_pool import max_window_pages
from radixkv.runtime.structured.masks import fill_masks
from radixkv.runtime.tiers.host_tier import HostTier
from radixkv.runtime.tiers.load_choice import LoadChoice
from radixkv.runtime.tiers.load_cost import LoadCost
from radixkv.runtime.tiers.storage_tier import StorageTier
from radixkv.runtime.tiers.stores.page_keys import chain as chain_keys
from radixkv.runtime.tiers.stores.page_keys import namespace_key
from radixkv.settings.config import EvictionPolicyName, LoadPolicy, WritePolicy
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.eviction_policies import open_eviction_policy
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.messages import TokenLogprobs
from support.engine_invariants import check_links, check_pins, check_requests, check_slot_use, check_tables
from support.fake_copier import STATE_PARTS, FakeCopier
from support.fake_device import (
    ACTIVATED,
    INVOCATION,
    FakeDevice,
    FakeStep,
    KVValue,
    SkippedPages,
    chain,
    expected_beams,
    expected_output,
    expected_prompt_logprobs,
    logprobs_of,
    mark_of,
    unpack,
)
from support.fake_drafts import FakeDrafts
from support.fake_grammars import FakeCompiler, FakeGrammar
from support.fake_store import N_MAPPED_SLOTS, FakeStore
from support.scheduler import make_scheduler


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Packs token ids as little-endian int32."""
    return array("i", tokens).tobytes()


def name_of(request: Request) -> str:
    """Returns the name of one choice: the request's id, with the choice's number after the first."""
    return f"{request.id}.{request.choice}" if request.choice else request.id


MESSAGE_ENDS = frozenset({3})
"""Tokens that end a message of a prompt."""
GHOST_CAPACITY = 2.0
"""Evicted pages that the policy ``adaptive`` remembers, as a multiple of the pages cached."""


PIN_BUDGET = 0.25
"""Fraction of each tier that the pins of a namespace cover."""
ROOT_KEY = bytes(64)
"""The disk tier's key that those of all namespaces continue."""


@dataclass
class Ended:
    """How a request ended."""

    reason: str
    tokens: list[int]


class PoisoningList(FreeList):
    """A free list with all pages of a device. Poisons pages as soon as they become free: the same plan may use them
    again."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(reversed(range(device.n_pages)))
        self.device = device

    def __iadd__(self, pages: Iterable[int]) -> PoisoningList:
        pages = list(pages)
        self.device.poison(pages)
        self.extend(pages)
        return self


class PoisoningSlabs(Slabs):
    """Slabs that poison pages and window pages of a device as soon as they become free."""

    def __init__(self, device: FakeDevice, pages_per_slab: int, n_slabs: int, n_window_slabs: int) -> None:
        super().__init__(pages_per_slab, n_slabs, n_window_slabs)
        self.device = device

    def __iadd__(self, pages: Iterable[int]) -> PoisoningSlabs:
        pages = list(pages)
        self.device.poison(pages)
        super().__iadd__(pages)
        return self

    def give_window_back(self, page: int) -> None:
        self.device.poison_windows([page])
        super().give_window_back(page)


def prompt(n_tokens: int, first: int = 1) -> list[int]:
    """Returns token ids that depend on ``first``; shorter prompts are prefixes of longer ones."""
    return [(first * 7919 + i * 31) % 97 for i in range(n_tokens)]


class Invalidated(NamedTuple):
    """Pages that an invalidation has made unreachable, by tier."""

    n_on_device: int
    n_held: int
    n_in_host: int
    n_on_disk: int


class Engine:
    """Runs steps by hand: ``launch`` and ``collect`` are separate, and every invariant is checked after each.

    Args:
        n_pages: pages of the pool.
        page_size: tokens of a page.
        shares: whether requests share pages.
        window: positions that a token reads in each layer; None for all.
        n_states: states of recurrent layers that the tree can have; None: there are no such layers. A message ends
            with one of ``MESSAGE_ENDS``.
        mixed_window: positions that a token reads in some layers, which have window pages, and others read all;
            None: there are no such layers. Then ``n_pages`` are those of slabs of ``pages_per_slab`` pages.
        state_block_tokens: states are kept at multiples of it and of a page.
        n_slots: slots of the host tier; 0: no host tier.
        has_disk: whether the host tier has a disk tier behind it.
        n_more_stores: stores beside its first one.
        lends: whether the device copies pages of the last one in place.
        write_policy: the host tier's, as ``load_policy``.
        eviction_policy: that of both tiers.
        min_copied_tokens: fewest tokens for which a part of a page is copied.
        tenants: who may send requests; none: all are of one.
        finishes_copies: whether each turn finishes all copies and transfers in flight; else the test does.
        settings: those of ``Scheduler``.
    """

    def __init__(
        self,
        n_pages: int = 64,
        page_size: int = 4,
        *,
        shares: bool = True,
        window: int | None = None,
        n_states: int | None = None,
        mixed_window: int | None = None,
        pages_per_slab: int = 2,
        state_block_tokens: int = 1,
        n_slots: int = 0,
        has_disk: bool = False,
        n_more_stores: int = 0,
        lends: bool = False,
        write_policy: WritePolicy = "through",
        load_policy: LoadPolicy = "always",
        eviction_policy: EvictionPolicyName = "lru",
        min_copied_tokens: int = 1,
        tenants: Sequence[TenantConfig] = (),
        finishes_copies: bool = True,
        **settings: Any,
    ) -> None:
        n_pages -= n_pages % (1 if mixed_window is None else pages_per_slab)
        self.n_pages = n_pages
        self.page_size = page_size
        self.device = FakeDevice(n_pages, page_size, window=window, n_states=n_states, mixed_window=mixed_window)
        self.device.pages_per_slab = pages_per_slab
        self.free_pages: FreePages = PoisoningList(self.device)
        window_pages = host_windows = None
        n_host_states = n_states
        if mixed_window is not None:
            n_more = max_window_pages(mixed_window, settings.get("max_num_batched_tokens", 64), page_size)
            slabs = PoisoningSlabs(self.device, pages_per_slab, n_pages // pages_per_slab, n_more)
            self.free_pages = slabs
            window_pages = WindowPages(slabs, mixed_window, page_size)
            n_states = slabs.n_slabs + n_more
            host_slabs = Slabs(pages_per_slab, n_slots // pages_per_slab, 0, are_free=False)
            host_windows, n_host_states = WindowPages(host_slabs, mixed_window, page_size), host_slabs.n_slabs
        self.cache = PageCache(
            n_pages,
            page_size,
            is_sharing=shares,
            window=window,
            policy=open_eviction_policy(eviction_policy, GHOST_CAPACITY),
            page_quotas=page_quotas(tenants),
            min_copied_tokens=min_copied_tokens,
            n_states=n_states,
            state_block_tokens=state_block_tokens,
            window_pages=window_pages,
            free_pages=self.free_pages,
            clock=lambda: self.now,
        )
        self.copier = FakeCopier(self.device, n_slots, n_states or 0)
        host_policy = open_eviction_policy(eviction_policy, GHOST_CAPACITY)
        self.host = PageCache(
            0,
            page_size,
            policy=host_policy,
            page_quotas=page_quotas(tenants),
            n_states=n_host_states,
            state_block_tokens=state_block_tokens,
            window_pages=host_windows,
        )
        for digest in ACTIVATED:
            self.cache.tree.marks.add(digest, [INVOCATION])
        self.host.tree.marks = self.cache.tree.marks
        self.store = FakeStore(self.copier)
        self.stores = [self.store, *(FakeStore(self.copier) for _ in range(n_more_stores))]
        self.lender = self.stores[-1]
        """The store that lends, if one does: the last one, as in a server."""
        cost = LoadCost()
        buffers = None if n_states is None or mixed_window is not None else self.copier.state_buffers
        disk = None
        if has_disk:
            lender = self.lender if lends else None
            disk = StorageTier(self.host, self.stores, ROOT_KEY, self.copier.buffer, cost, buffers, lender)
            self.copier.n_mapped_slots = N_MAPPED_SLOTS if lends else 0
        self.host_tier = HostTier(
            self.cache,
            self.host,
            self.copier,
            disk,
            LoadChoice(load_policy, cost),
            write_policy=write_policy,
            n_state_pages=STATE_PARTS if n_states is not None else 0,
            max_row_tokens=settings.get("max_num_batched_tokens", 64),
        )
        self.finishes_copies = finishes_copies
        self.now = 0.0
        host_tier = self.host_tier if n_slots else None
        caches = [self.cache] if host_tier is None else [self.cache, self.host]
        self.sessions = Sessions(caches)
        self.pins = Pins(caches, Alarms(), offer=self.host_tier.offer, budget=PIN_BUDGET, clock=lambda: self.now)
        self.pauses = Pauses(self.cache, lambda: self.now)
        self.drafts = FakeDrafts()
        states: States | None = None
        if window_pages is not None:
            states = WindowTails(self.cache, window_pages, MESSAGE_ENDS)
        elif n_states is not None:
            states = RecurrentStates.at_likely_places(self.cache, MESSAGE_ENDS)
        defaults = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "host_tier": host_tier,
            "tenants": tenants,
            "finds_shared_runs": True,
            "min_shared_tokens": 1,
            "drafts": self.drafts,
            "states": states,
            "returns": self.pauses,
        }
        self.scheduler = make_scheduler(
            self.cache, **(defaults | settings), loads_ahead=True, clock=lambda: self.now
        )
        if self.scheduler.limits.splits_drafts:
            self.device.max_split_rows = self.scheduler.limits.max_num_seqs
        self.requests: dict[str, Request] = {}
        """Every choice, by ``name_of``."""
        self.siblings: dict[str, list[Request]] = {}
        """All choices of a request, by its id."""
        self.prompts: dict[str, list[int]] = {}
        """By the id of the request."""
        self.ended: dict[str, Ended] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.wants_prompt_logprobs: set[str] = set()
        """Ids of requests with prompt logprobs."""
        self.started: set[str] = set()
        """Ids of requests with at least one output token."""
        self.length_penalties: dict[str, float] = {}
        """Of requests with beam search, by their ids."""
        self.beam_logprobs: dict[str, float] = {}
        self.failing_ids: set[str] = set()
        """Ids of requests whose rows make a step fail."""
        self.rows: dict[tuple[int, int], Request] = {}
        """The request of each row, by (step, batch slot)."""
        self.pending: deque[tuple[StepPlan, FakeStep]] = deque()
        self._ids = count()
        self.check_invariants()

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        namespace: Namespace = Namespace(),
        tenant: str = "",
        reads_cache: bool = True,
        uses_tiers: bool = True,
        stop: Sequence[int] = (),
        n: int = 1,
        sampling: RowSampling = GREEDY,
        min_tokens: int = 0,
        priority: int = 0,
        n_prompt_logprobs: int | None = None,
        session_id: str = "",
        grammar: FakeGrammar | None = None,
        is_beam_search: bool = False,
        length_penalty: float = 1.0,
        kv_budget: int = 0,
    ) -> Request:
        """Adds a request; returns its leading choice. With a ``kv_budget`` its answer drops pages."""
        request_id = f"r{next(self._ids)}"
        search = None
        if is_beam_search:
            search = BeamSearch(n, max_tokens, length_penalty=length_penalty, eos_token_ids=frozenset(stop))
            sampling = replace(GREEDY, n_logprobs=search.n_candidates)
        choices = [
            Request(
                id=request_id,
                namespace=namespace,
                known_key=bytearray() if choice else bytearray(token_bytes(prompt)),
                n_prompt=len(prompt),
                max_tokens=max_tokens,
                sender=tenant,
                choice=choice,
                sampling=replace(
                    sampling, seed=sampling.seed + choice, banned=tuple(stop), is_masked=grammar is not None
                ),
                constraint=None if grammar is None else grammar.new_matcher(),
                min_tokens=min_tokens,
                stop_token_ids=frozenset(stop),
                reads_cache=reads_cache,
                uses_tiers=uses_tiers and reads_cache,
                order=(priority, 0),
                received_at=self.now,
                adapter=_adapter_of(prompt),
            )
            for choice in range(n)
        ]
        if search is not None:
            group = BeamGroup(search, choices[0], self.scheduler.running, self.scheduler.waiting)
            for choice in choices:
                choice.continuation = group
        if session_id:
            turn = self.sessions.begin(namespace, session_id)
            for choice in choices:
                choice.observers = (turn,)
        leader, *followers = choices
        if kv_budget:
            leader.kv_eviction = PagedEviction(self.cache, kv_budget)
        if n_prompt_logprobs is not None:
            leader.prompt_scoring, leader.reads_cache = PromptScoring(n_prompt_logprobs), False
            leader.uses_tiers = False
        self.scheduler.add(leader, followers)
        if search is not None:
            self.length_penalties[request_id] = length_penalty
        if n_prompt_logprobs is not None:
            self.wants_prompt_logprobs.add(request_id)
        self.siblings[request_id] = choices
        self.prompts[request_id] = list(prompt)
        self.requests |= {name_of(choice): choice for choice in choices}
        return leader

    def serve(self, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> Request:
        """Adds a request and runs until the scheduler is idle; returns its leading choice."""
        leader = self.add(prompt, max_tokens, **options)
        self.run()
        return leader

    def launch(self) -> StepPlan | None:
        """Launches the next step; before it, takes the results that the masks of an unfinished one depend on."""
        while not self.sample_step():
            self.collect()
        while self.pending and self.scheduler.wants_results:
            self.collect()
        plan = self.scheduler.schedule()
        if plan is not None:
            launched = self.scheduler.launched_plans[-1]
            requests = {row.batch_slot: one for row, one in zip(launched.plan.rows, launched.requests, strict=True)}
            if any(request.recovery.is_retried for request in launched.requests):
                assert len(plan.rows) == 1, "a retried request is not alone in its step"
            before = [one for earlier in self.scheduler.launched_plans[:-1] for one in earlier.requests]
            beside = [*before, *(launched.requests if before else ())]
            # An aborted request is no longer retried: if its step fails, it is not blamed.
            assert not any(
                request.recovery.is_retried and request.phase is not Phase.FINISHED for request in beside
            ), "a step is in flight beside that of a retried request"
            for row in plan.rows:
                request = requests[row.batch_slot]
                self.device.namespaces[row.batch_slot] = request.namespace
                blocks, place = request.blocks, (plan.step, row.batch_slot)
                self.device.planned_tables[place] = [
                    page for entry, page in enumerate(blocks.pages) if entry not in blocks.skipped
                ]
                if blocks.skipped:
                    self.device.planned_skips[place] = self._skipped_pages(request)
                if (window := request.blocks.window).pages:
                    self.device.planned_windows[plan.step, row.batch_slot] = window.first, list(window.pages)
                self.rows[plan.step, row.batch_slot] = request
                assert request.continuation is None or row.tokens is not None, (
                    "a beam goes on before its group has chosen"
                )
                if request.id in self.failing_ids:
                    self.device.fail_steps.add(plan.step)
            try:
                self.pending.append((plan, self.device.launch(plan)))
                if not plan.is_masked:
                    self.pending[-1][1].sample(None)
            except DeviceError:
                while self.pending:
                    self.collect()
                self.take(self.scheduler.fail())
        self.check_invariants()
        live = {request.id for name, request in self.requests.items() if name not in self.ended}
        check_tables(self.scheduler, [choices for name, choices in self.siblings.items() if name in live])
        return plan

    def _skipped_pages(self, request: Request) -> SkippedPages:
        tokens = unpack(bytes(request.known_key))
        ends = [
            chain(request.namespace, tokens[: (entry + 1) * self.page_size]) for entry in request.blocks.skipped
        ]
        return SkippedPages(tuple(request.blocks.skipped), tuple(ends), name_of(request))

    def sample_step(self) -> bool:
        """Samples the newest step if all tokens before it are known; False if they are not."""
        if not self.pending or self.pending[-1][1].is_sampled:
            return True
        if len(self.pending) > 1:
            return False
        masks = fill_masks(self.scheduler.launched_plans[-1].rows(), FakeCompiler(), self.device.vocab_size)
        self.pending[-1][1].sample(masks)
        return True

    def invalidate(self, namespace: Namespace, tokens: bytes) -> Invalidated:
        """Drops a prefix from all tiers."""
        n_on_device, n_held = self.cache.invalidate(namespace, tokens)
        return Invalidated(n_on_device, n_held, *self.host_tier.invalidate(namespace, tokens))

    def expire(self) -> None:
        self.take(self.scheduler.expire())
        self.check_invariants()

    def collect(self) -> list[Update]:
        """Takes the oldest step's result, after filling its masks if that was not done."""
        self.sample_step()
        plan, pending = self.pending.popleft()
        try:
            result = pending.result()
        except DeviceError:
            self.pending.clear()
            updates = self.scheduler.fail()
            assert not updates or len(plan.rows) == 1, "a request is blamed for a step in which it was not alone"
        else:
            updates = self.scheduler.complete(plan, result)
        self.take(updates)
        self.check_invariants()
        return updates

    def turn(self, n_turns: int = 1) -> None:
        """Launches the next step, then takes the previous one's result, as the loop does."""
        for _ in range(n_turns):
            plan = self.launch()
            if self.finishes_copies:
                self.finish_copies()
            if len(self.pending) > 1 or (plan is None and self.pending):
                self.collect()
            elif plan is None:
                assert self.scheduler.is_idle or self.scheduler.tiers.is_busy, "nothing to plan or copy"

    def step(self) -> None:
        """Runs one step, with none beside it."""
        self.launch()
        self.collect()

    def finish_copies(self) -> None:
        """Finishes all copies and transfers between tiers."""
        self.copier.finish_all()
        for store in self.stores:
            store.finish_all()

    def store_all(self) -> None:
        """Stores and writes everything that was offered to the tiers below the device."""
        tier = self.host_tier
        while tier.is_busy or tier.n_offers or (tier.disk is not None and tier.disk.n_offers):
            self.finish_copies()
            self.scheduler.schedule()

    def run(self, n_turns: int = 10_000) -> None:
        """Runs until the scheduler is idle."""
        for _ in range(n_turns):
            if self.scheduler.is_idle:
                return
            self.turn()
        raise AssertionError("the engine does not come to an end")

    def run_to_the_end(self, *reasons: str) -> None:
        """Runs until the scheduler is idle; then every answer is complete and right, and no page is held.

        Args:
            reasons: why the requests have ended, all together; none: for any reasons.
        """
        self.run()
        self.check_outputs()
        self.check_idle()
        assert not reasons or {ended.reason for ended in self.ended.values()} == set(reasons)

    def turns_until_started(self, request: Request) -> int:
        """Runs until a request has its first row; returns the number of turns."""
        for n_turns in range(1000):
            if request.first_row is not None:
                return n_turns
            self.turn()
        raise AssertionError("it is not started")

    def abort(self, request: Request) -> None:
        """Aborts one choice; the others continue."""
        self.scheduler.abort(request)
        self.ended[name_of(request)] = Ended("abort", self.output(request))
        self.check_invariants()

    def take(self, updates: Sequence[Update]) -> None:
        for update in updates:
            request, name = update.request, name_of(update.request)
            if name in self.ended:
                assert self.ended[name].reason == "abort", "an update after the terminal one"
                continue
            if update.logprobs is not None:
                self.logprobs.setdefault(name, []).extend(update.logprobs)
            if update.prompt_logprobs is not None:
                scores = self.prompt_logprobs.setdefault(request.id, [])
                assert update.prompt_logprobs.start == len(scores) + 1, (
                    "prompt logprobs come in order, each position once"
                )
                assert request.id not in self.started, "prompt logprobs come before the first token"
                scores += update.prompt_logprobs.items
            if update.tokens or update.output is not None:
                self.started.add(request.id)
            if update.output is not None:
                self.beam_logprobs[name] = update.output.cumulative_logprob
            if request.cache_use.counted is not None:
                assert (
                    0
                    <= request.cache_use.counted.n_fetched
                    <= request.cache_use.counted.n_loaded
                    <= request.cache_use.counted.n_cached
                ), "tokens count twice"
                assert (
                    0
                    <= request.cache_use.counted.n_added
                    <= request.n_prompt - request.n_prompt % self.cache.page_size
                )
            if update.finish_reason is not None or update.error is not None:
                reason = update.finish_reason or (update.error.code if update.error else "")
                self.ended[name] = Ended(reason, self.output(request))
            if update.error is not None:
                for other in reversed(self.siblings[request.id]):
                    if name_of(other) not in self.ended:
                        if other.phase is not Phase.FINISHED:  # by a failure of its own, in the same step
                            self.scheduler.abort(other)
                        self.ended[name_of(other)] = Ended("abort", self.output(other))

    @property
    def n_computed(self) -> int:
        """Number of tokens that the device has computed."""
        return sum(n_tokens for _, _, n_tokens in self.device.computed)

    def n_cached(self, tokens: Sequence[int], namespace: Namespace = Namespace()) -> int:
        """Returns how many leading tokens of a sequence the device has in whole pages."""
        return self.cache.tree.match(namespace, token_bytes(tokens))

    def n_in_host(self, tokens: Sequence[int], namespace: Namespace = Namespace()) -> int:
        """Returns how many leading tokens of a sequence the host tier has in whole pages."""
        return self.host.tree.match(namespace, token_bytes(tokens))

    def output(self, request: Request) -> list[int]:
        return unpack(bytes(request.known_key))[request.n_prompt :]

    def store_keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the keys under which the disk tier has the whole pages of a sequence."""
        return chain_keys(namespace_key(ROOT_KEY, Namespace()), token_bytes(tokens), self.page_size * TOKEN_BYTES)

    def cached_values(self, namespace: Namespace, tokens: bytes) -> dict[str, list[list[KVValue | str | None]]]:
        """Returns what each tier has in the pages of the cached prefix of the tokens; O(pages). Changes nothing."""
        offsets = range(self.page_size)
        kv, slots = self.device.kv, self.copier.slots
        root, marks = namespace_key(ROOT_KEY, namespace), self.cache.tree.marks
        keys = chain_keys(root, tokens, self.page_size * TOKEN_BYTES, marks)
        in_stores = {
            f"store {number}": [list(store.pages[key].values) for key in keys[: store.run(keys)]]
            for number, store in enumerate(self.stores)
        }
        return in_stores | {
            "device": [[kv.get((page, at)) for at in offsets] for page in _pages(self.cache, namespace, tokens)],
            "host": [list(slots[slot]) for slot in _pages(self.host, namespace, tokens)],
        }

    def check_invariants(self) -> None:
        """Checks every invariant of scheduler and cache; tells the device which pages are free."""
        self.scheduler.check()
        live = [request for name, request in self.requests.items() if name not in self.ended]
        check_requests(self.scheduler, live, self.free_pages)
        self.pins.expire()
        check_pins((self.cache, self.host), PIN_BUDGET)
        check_slot_use(self.scheduler.running, self.page_size)
        check_links(self.host_tier, *(() if self.host_tier.disk is None else (self.host_tier.disk,)))
        if self.device.has_readers:
            for page in {*self.cache.tree.reachable_pages(), *self.cache.tree.detached_pages()}:
                values = [self.device.kv.get((page, offset)) for offset in range(self.page_size)]
                assert not any(isinstance(value, KVValue) and value.reader is not None for value in values), (
                    "the tree has KV of an answer that has skipped pages"
                )
        are_lent = any(load.lent is not None for load in self.host_tier._loads.values())
        assert (self.lender.lent.total() > 0) == are_lent, "pages are lent as long as they are copied"
        self.device.free_pages = set(self.free_pages)
        if isinstance(self.free_pages, Slabs):
            self.device.free_windows = set(self.free_pages.free_windows())

    def check_outputs(self) -> None:
        """Checks that tokens, logprobs and prompt logprobs of all ended requests are those of the naive model.

        Aborted and failed requests have a prefix of them.
        """
        for name, ended in self.ended.items():
            request, sampling = self.requests[name], self.requests[name].sampling
            if request.continuation is not None:
                continue
            prompt = self.prompts[request.id]
            expected = expected_output(
                request.namespace,
                prompt,
                request.max_tokens,
                sorted(request.stop_token_ids),
                seed=sampling.seed if sampling.temperature else 0,
                min_tokens=request.min_tokens,
                banned=sampling.banned,
                grammar=None if request.constraint is None else request.constraint.grammar,
            )
            assert ended.reason != "grammar_error", "a token was sampled that the mask forbids"
            if ended.reason in ("stop", "length"):
                assert ended.tokens == expected
            else:
                assert ended.tokens == expected[: len(ended.tokens)]
            if sampling.n_logprobs is not None:
                positions = range(len(ended.tokens))
                ends = [chain(request.namespace, prompt + ended.tokens[:position]) for position in positions]
                logprobs = [logprobs_of(end, token) for end, token in zip(ends, ended.tokens, strict=True)]
                reported = self.logprobs.get(name, [])
                assert reported == (logprobs if ended.reason in ("stop", "length") else logprobs[: len(reported)])
        for request_id in self.length_penalties:
            self._check_beams(request_id)
        for request_id, (first, *_) in self.siblings.items():
            prompt = self.prompts[request_id]
            prompt_logprobs = (
                expected_prompt_logprobs(first.namespace, prompt)
                if request_id in self.wants_prompt_logprobs
                else []
            )
            reported = self.prompt_logprobs.get(request_id, [])
            assert reported == (prompt_logprobs if request_id in self.started else prompt_logprobs[: len(reported)])

    def _check_beams(self, request_id: str) -> None:
        choices = self.siblings[request_id]
        first, ended = choices[0], [self.ended[name_of(choice)] for choice in choices]
        if not any(one.reason in ("stop", "length") for one in ended):
            return
        expected = expected_beams(
            first.namespace,
            self.prompts[request_id],
            len(choices),
            first.max_tokens,
            sorted(first.stop_token_ids),
            self.length_penalties[request_id],
        )
        assert [(one.tokens, one.reason) for one in ended] == [(one.tokens, one.reason) for one in expected]
        assert [self.beam_logprobs[name_of(choice)] for choice in choices] == [one.logprob for one in expected]

    def check_bypasses(self) -> None:
        """Checks that only requests with a non-finite row of their own bypass the tree, not those that read it.

        One that lacks room for window pages may begin again without the tree.
        """
        if self.device.mixed_window is not None:
            return
        non_finite = {self.rows[row] for row in self.device.non_finite_rows}
        assert {request for request in self.requests.values() if request.recovery.bypasses_tree} <= non_finite

    def check_idle(self) -> None:
        """Checks that no request and no lease is left, and that all pages are available."""
        assert self.scheduler.is_idle
        while self.scheduler.tiers.is_busy:
            self.finish_copies()
            self.scheduler.schedule()
        assert self.scheduler.tiers.n_promised == 0
        assert self.host.n_available == self.host.n_pages
        assert self.cache.n_available == self.n_pages
        assert self.cache.tree.n_pages_leased == 0
        assert self.cache.tree.n_pages_detached == 0
        states = self.cache.tree.states
        assert states is None or len(list(states)) + states.n_free == states.n_slots, "a slot is still reserved"


def _adapter_of(key: Sequence[int]) -> ActiveAdapter:
    """Returns the activated LoRA whose mark a key has."""
    for position, number in enumerate(key):
        if number < 0:
            digest = next(one for one in ACTIVATED if mark_of(one) == number)
            return ActiveAdapter(digest, position, token_bytes([INVOCATION]))
    return NO_ADAPTER


def _pages(cache: PageCache, namespace: Namespace, tokens: bytes) -> list[int]:
    """Returns the pages of the cached prefix of the tokens."""
    lease = cache.tree.lease(namespace, tokens, is_use=False)
    pages = cache.tree.pages(lease)
    assert not cache.tree.release(lease)
    return pages
