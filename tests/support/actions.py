"""The actions on an engine that the state machine combines at random."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from radixkv.errors import QueueFull
from radixkv.runtime.assemble import holds_any_length
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.pauses.pauses import Turn
from radixkv.runtime.request import GREEDY, Phase, Request
from radixkv.runtime.step.plan import RowSampling
from radixkv.settings.config import EvictionPolicyName, WritePolicy
from radixkv.settings.tenants import TenantConfig
from radixkv.tree.node import TOKEN_BYTES, Namespace
from radixkv.wire.cache_messages import BeginPause
from radixkv.wire.kv_budget import most_pages
from radixkv.wire.messages import Submit
from radixkv.wire.sampling import SamplingParams
from support.engine import Engine, name_of, token_bytes
from support.fake_device import ACTIVATED, KVValue, mark_of, unpack
from support.fake_grammars import FakeGrammar

PLAIN = replace(GREEDY, temperature=1.0, seed=3)
PENALISED = replace(PLAIN, frequency_penalty=0.5, n_logprobs=1)
QUEUE_TIMEOUT_S = 10.0
STOP = tuple(range(107, 1000, 30))
"""Every 30th token ends an output, and is banned before ``min_tokens``."""
MANY_STOPS = tuple(range(107, 1000, 3))
"""Every third token ends an output with ``min_tokens``, so that most would end at that border."""
BEAM_STOP = STOP[:2]
"""Two of the tokens with which beams continue."""
NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(adapter="a"))


@dataclass(frozen=True)
class RequestOptions:
    """The options of a request."""

    max_tokens: int = 4
    namespace: int = 0
    reads_cache: bool = True
    n: int = 1
    min_tokens: int = 0
    sampling: RowSampling = GREEDY
    priority: int = 0
    prompt_logprobs: bool = False
    session_id: str = ""
    grammar: FakeGrammar | None = None
    beam_width: int = 0
    """0: no beam search. With it, what it does not take is ignored."""
    length_penalty: float = 1.0
    activated: int = 0
    """Which activated LoRA acts from the end of the known sequence on, from 1; 0: none, unless that has a mark."""
    budget_pages: int = 0
    """Pages that the answer reads at most; 0: all. With it, what excludes it is ignored."""


@dataclass(frozen=True)
class Invalidation:
    """A prefix that was invalidated, in whole pages."""

    namespace: Namespace
    tokens: bytes
    n_executed: int
    """Steps that the device had executed by then."""


class Actions:
    """An engine with a small pool, and the token sequences that it has seen."""

    def __init__(
        self,
        n_pages: int = 24,
        page_size: int = 4,
        *,
        policy: str = "lpm",
        shares: bool = True,
        window: int | None = None,
        n_states: int | None = None,
        mixed_window: int | None = None,
        pages_per_slab: int = 2,
        n_slots: int = 0,
        has_disk: bool = False,
        n_more_stores: int = 0,
        lends: bool = False,
        write_policy: WritePolicy = "through",
        eviction_policy: EvictionPolicyName = "lru",
        tenants: Sequence[TenantConfig] = (),
        splits_drafts: bool = False,
    ) -> None:
        self.tenants = tenants
        self.namespaces = NAMESPACES
        if tenants:
            self.namespaces = tuple(Namespace(one.name if one.cache_salt == "tenant" else "") for one in tenants)
        self.engine = Engine(
            n_pages,
            page_size,
            shares=shares,
            window=window,
            n_states=n_states,
            mixed_window=mixed_window,
            pages_per_slab=pages_per_slab,
            n_slots=n_slots if shares else 0,
            has_disk=has_disk,
            n_more_stores=n_more_stores,
            lends=lends,
            write_policy=write_policy,
            eviction_policy=eviction_policy,
            tenants=tenants,
            finishes_copies=False,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            schedule_policy=policy,
            max_queued_requests=16,
            lpm_max_passes=3,
            queue_timeout_s=QUEUE_TIMEOUT_S,
            splits_drafts=splits_drafts,
        )
        self.known: list[list[int]] = [list(range(1, 30))]
        self.invalidations: list[Invalidation] = []
        self.paused: list[Request] = []
        """Those from which conversations go on, as far as the pauses have not been given up."""

    @property
    def live(self) -> list[Request]:
        return [request for name, request in self.engine.requests.items() if name not in self.engine.ended]

    def add(self, base: int, cut: int, suffix: Sequence[int], options: RequestOptions, *, twice: bool) -> None:
        """Adds a request whose prompt starts with a known sequence: random prompts would never hit the cache."""
        sequence = self.known[base % len(self.known)]
        namespace = self.namespaces[options.namespace % len(self.namespaces)]
        tenant = self.tenants[options.namespace % len(self.tenants)].name if self.tenants else ""
        max_prompt = min(40, self.n_pages_of_a_request * self.engine.page_size - options.max_tokens)
        if holds_any_length(self.engine.cache, self.engine.scheduler.limits.max_num_batched_tokens):
            max_prompt = 120
        may_drop = self.engine.device.window is None and self.engine.cache.tree.states is None
        n_budget = options.budget_pages * self.engine.page_size if may_drop else 0
        if n_budget and most_pages(40, n_budget, self.engine.page_size) <= self.n_pages_of_a_request:
            max_prompt = 40
        beginning = sequence[: cut % (len(sequence) + 1)]
        if options.activated and not any(number < 0 for number in beginning):
            beginning = [*beginning, mark_of(ACTIVATED[options.activated - 1])]
        prompt = (beginning + list(suffix))[:max_prompt] or [1]
        for _ in range(2 if twice else 1):
            try:
                if options.beam_width:
                    self.engine.add(
                        prompt,
                        options.max_tokens,
                        namespace=namespace,
                        tenant=tenant,
                        reads_cache=options.reads_cache,
                        stop=BEAM_STOP,
                        n=options.beam_width,
                        priority=options.priority,
                        session_id=options.session_id,
                        is_beam_search=True,
                        length_penalty=options.length_penalty,
                    )
                    continue
                self.engine.add(
                    prompt,
                    options.max_tokens,
                    namespace=namespace,
                    tenant=tenant,
                    reads_cache=options.reads_cache,
                    stop=MANY_STOPS if options.min_tokens else STOP,
                    n=1 if n_budget else options.n,
                    sampling=options.sampling,
                    min_tokens=min(options.min_tokens, options.max_tokens),
                    priority=options.priority,
                    n_prompt_logprobs=0 if options.prompt_logprobs and not n_budget else None,
                    session_id=options.session_id,
                    grammar=options.grammar,
                    kv_budget=n_budget,
                )
            except QueueFull:
                return
            self.known = [*self.known, prompt][-12:]

    def repeat_answer(self, suffix: Sequence[int], options: RequestOptions) -> None:
        """Adds the next turn of the request that has ended last: its prompt and answer, and more."""
        requests = [self.engine.requests[name] for name, ended in self.engine.ended.items() if ended.tokens]
        answered = [request for request in requests if request.continuation is None]
        if answered:
            request = answered[-1]
            sequence = unpack(bytes(request.known_key))
            self.known = [*self.known, sequence][-12:]
            options = dataclasses.replace(options, namespace=self.namespaces.index(request.namespace))
            self.add(len(self.known) - 1, len(sequence), suffix, options, twice=False)

    @property
    def n_pages_of_a_request(self) -> int:
        """The most pages of which every tenant can be sure."""
        n_pages = self.engine.n_pages
        floors = [one.min_pages(n_pages) for one in self.tenants]
        caps = [one.max_pages(n_pages) for one in self.tenants]
        return min([n_pages, *(n_pages - sum(floors) + floor for floor in floors), *caps])

    def new_token(self) -> int:
        """Returns a token that no prompt has."""
        return 10_000 + len(self.engine.requests)

    def launch(self) -> None:
        if len(self.engine.pending) < 2:
            self.engine.launch()

    def collect(self) -> None:
        if self.engine.pending:
            for update in self.engine.collect():
                if update.finish_reason is not None:
                    self.known = [*self.known, unpack(bytes(update.request.known_key))][-12:]

    def sample_step(self) -> None:
        """Fills the masks of the newest step, if all tokens before it are known."""
        self.engine.sample_step()

    def abort(self, which: int, *, whole: bool) -> None:
        """Aborts one choice, or all choices of its request, the last first."""
        live = self.live
        if live:
            request = live[which % len(live)]
            is_whole = whole or request.continuation is not None
            for choice in reversed(self.engine.siblings[request.id]) if is_whole else (request,):
                if name_of(choice) not in self.engine.ended:
                    self.engine.abort(choice)

    def wait(self) -> None:
        """Advances the clock by more than half of the queue timeout, and checks which requests time out."""
        self.engine.now += 0.6 * QUEUE_TIMEOUT_S
        self.engine.expire()
        scheduler = self.engine.scheduler
        for request in (*scheduler.waiting, *scheduler.tiers.loaded()):
            assert request.first_row is not None or self.engine.now - request.received_at <= QUEUE_TIMEOUT_S
        for name, ended in self.engine.ended.items():
            if ended.reason == "queue_timeout":
                assert self.engine.requests[name].first_row is None

    def fail(self) -> None:
        """Makes the oldest launched step fail."""
        if self.engine.pending:
            self.engine.device.fail_steps.add(self.engine.pending[0][0].step)

    def refuse(self) -> None:
        """Makes the next launch raise."""
        self.engine.device.refuse_launches = 1

    def make_nan(self, which: int, *, kv: bool) -> None:
        """Makes the next row of a batch slot non-finite, with or without its KV; it may be a prompt's first row."""
        batch_slot = which % self.engine.scheduler.limits.max_num_seqs
        (self.engine.device.nan_slots if kv else self.engine.device.nan_logits_slots).add(batch_slot)

    def evict(self, n_pages: int) -> None:
        """Takes all free pages and evicts up to ``n_pages`` more, then gives them back."""
        self._evict(self.engine.cache, n_pages)

    def evict_slots(self, n_slots: int) -> None:
        """Does the same in the host tier."""
        self._evict(self.engine.host, n_slots)

    def _evict(self, cache: PageCache, n_pages: int) -> None:
        n_pages = max(0, min(cache.n_free + n_pages, cache.n_available_to(Namespace())))
        blocks = cache.open(Namespace(), b"", bypasses_tree=True)
        cache._take(blocks, n_pages)  # without window pages
        cache.close(blocks)
        self.engine.check_invariants()

    def finish_copy(self, which: int, *, fails: bool = False) -> None:
        """Finishes one of the copies in flight."""
        self.engine.copier.finish(which, fails=fails)

    def finish_transfer(self, which: int, n_pages: int | None = None) -> None:
        """Finishes one of the transfers to and from a store; pages after the first ``n_pages`` fail."""
        stores = self.engine.stores
        stores[which % len(stores)].finish(which // len(stores), n_pages=n_pages)

    def lose(self, which: int) -> None:
        """Loses a page of a store."""
        stores = self.engine.stores
        stores[which % len(stores)].lose(which // len(stores))

    def make_unknown(self, which: int) -> None:
        """Has some pages of a store that servers share be another server's, which this one never saw."""
        self.engine.stores[-1].make_unknown(which)

    def pin(self, base: int, cut: int, namespace: int, ttl_s: float) -> None:
        """Pins the start of a known sequence, or ends its pin."""
        sequence = self.known[base % len(self.known)]
        tokens = token_bytes(sequence[: cut % (len(sequence) + 1)])
        if ttl_s:
            self.engine.pins.pin(self.namespaces[namespace], tokens, ttl_s)
        else:
            self.engine.pins.unpin(self.namespaces[namespace], tokens)

    def pause(self, which: int, expected_s: float) -> None:
        """Lets the conversation of a request that has ended pause; it is expected back."""
        requests = [self.engine.requests[name] for name, ended in self.engine.ended.items() if ended.tokens]
        if requests:
            request = requests[which % len(requests)]
            self.engine.pauses.end_turn(request, Turn(self.engine.pauses, True, "a", expected_s))
            self.engine.pauses.begin(BeginPause("", request.id))
            self.paused.append(request)

    def go_on(self, which: int, suffix: Sequence[int], options: RequestOptions) -> None:
        """Adds a request that goes on from where a conversation pauses."""
        if self.paused:
            request = self.paused.pop(which % len(self.paused))
            turn = self.engine.pauses.follow(Submit("", b"", SamplingParams(), resumes=request.id), [request])
            turn.prompt_counted(request)
            sequence = unpack(bytes(request.known_key))
            self.known = [*self.known, sequence][-12:]
            options = dataclasses.replace(options, namespace=self.namespaces.index(request.namespace))
            self.add(len(self.known) - 1, len(sequence), suffix, options, twice=False)

    def close_session(self, session_id: str) -> None:
        for namespace in self.namespaces:
            self.engine.sessions.close(namespace, session_id)
            self.engine.pauses.close_session(namespace, session_id)
        self.engine.check_invariants()

    def flush(self) -> None:
        self.engine.cache.flush()
        self.engine.host_tier.flush()
        self.engine.check_invariants()

    def detach(self, base: int, cut: int, namespace: int) -> None:
        """Detaches a prefix on the device only, as a step does that has failed."""
        space = self.namespaces[namespace]
        freed = self.engine.cache.tree.detach(space, self._prefix(base, cut))
        self.engine.free_pages += freed
        self.engine.cache.page_quotas.add(space, -len(freed))
        self.engine.check_invariants()

    def invalidate(self, base: int, cut: int, namespace: int, *, is_live: bool) -> None:
        """Invalidates the beginning of a known sequence, or of a live request, or a whole namespace."""
        space, prefix = self.namespaces[namespace], self._prefix(base, cut)
        if is_live and (live := self.live):
            request = live[base % len(live)]
            n_pages = request.n_known // self.engine.page_size
            space = request.namespace
            prefix = bytes(request.known_key[: cut % (n_pages + 1) * self.engine.page_size * TOKEN_BYTES])
        self._invalidate(space, prefix)

    def invalidate_what_was_read(self, which: int) -> None:
        """Finishes all transfers, then invalidates the first page of a prompt that waits for pages."""
        for store in self.engine.stores:
            store.finish_all()
        if loading := [request for request in self.live if request.phase is Phase.LOADING]:
            request = loading[which % len(loading)]
            self._invalidate(request.namespace, bytes(request.known_key[: self.engine.page_size * TOKEN_BYTES]))

    def _invalidate(self, namespace: Namespace, prefix: bytes) -> None:
        self.engine.invalidate(namespace, prefix)
        self.invalidations.append(Invalidation(namespace, prefix, len(self.engine.device.executed)))
        self.engine.check_invariants()

    def check_invalidations(self) -> None:
        """Checks that no tier has a page of an invalidated prefix, or one after it, that was computed before."""
        page_size = self.engine.page_size
        for gone in self.invalidations:
            first = max(0, len(gone.tokens) // (TOKEN_BYTES * page_size) - 1)
            for tokens in (gone.tokens, *map(token_bytes, self.known)):
                if tokens.startswith(gone.tokens):
                    for tier, pages in self.engine.cached_values(gone.namespace, tokens).items():
                        for values in pages[first:]:
                            computed = [value.n_executed for value in values if isinstance(value, KVValue)]
                            assert max(computed, default=gone.n_executed) >= gone.n_executed, (
                                f"the {tier} has a page that was invalidated"
                            )

    def _prefix(self, base: int, cut: int) -> bytes:
        """Returns the beginning of a known sequence, in whole pages."""
        sequence = self.known[base % len(self.known)]
        n_tokens = cut % (len(sequence) + 1)
        return token_bytes(sequence[: n_tokens - n_tokens % self.engine.page_size])

    def set_budget(self, n_tokens: int) -> None:
        """Sets the maximum tokens of a step, which is at least a page."""
        scheduler = self.engine.scheduler
        budget = max(n_tokens, self.engine.page_size)
        scheduler.limits = dataclasses.replace(scheduler.limits, max_num_batched_tokens=budget)

    def switch_drafts(self) -> None:
        """Lets rows have drafts, or no more."""
        self.engine.drafts.is_on = not self.engine.drafts.is_on

    def preempt(self, which: int) -> None:
        """Preempts a running request, as for lack of pages."""
        scheduler = self.engine.scheduler
        if len(scheduler.running) > 1:
            victim = list(scheduler.running)[which % len(scheduler.running)]
            if victim.phase is Phase.RUNNING:
                scheduler.running.preempt(victim, discards_results=False)
                scheduler.running.release()
                self.engine.check_invariants()

    def return_in_a_queue(self, base: int, n_turns: int, n_copies: int, *, evicts_slots: bool) -> None:
        """Serves all requests, evicts the device and maybe the host tier, and adds more known prompts than there
        are rows; then takes turns in which some of the copies finish."""
        self.serve_all()
        self.evict(self.engine.n_pages)
        if evicts_slots:
            self.evict_slots(self.engine.host.n_pages)
        for _ in range(self.engine.scheduler.limits.max_num_seqs):
            self.add(0, 0, [self.new_token()], RequestOptions(max_tokens=6), twice=False)
            self.launch()
        for number in range(4):
            self.add(base + number, 40, [1], RequestOptions(), twice=False)
        for _ in range(n_turns):
            self.launch()
            for which in range(n_copies):
                self.finish_copy(which)
                self.finish_transfer(which)
            self.collect()

    def serve_all(self, *, overlaps: bool = False) -> None:
        """Takes turns until all requests are served, in most histories; each step is launched before the result of
        the one before is taken if it ``overlaps``."""
        if overlaps:
            self.launch()
        for _ in range(200):
            self.launch()
            self.engine.finish_copies()
            self.collect()

    def finish(self) -> None:
        """Runs to the end, then checks everything."""
        self.engine.device.fail_steps.clear()
        self.engine.finishes_copies = True
        self.engine.run()
        self.engine.check_outputs()
        self.engine.check_bypasses()
        self.engine.check_idle()
