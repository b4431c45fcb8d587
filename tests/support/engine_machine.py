"""Random histories of an engine, as a Hypothesis state machine."""

from __future__ import annotations

import dataclasses
import sys

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixkv.runtime.request import GREEDY
from radixkv.settings.config import EvictionPolicyName, WritePolicy
from radixkv.settings.tenants import CacheIsolation, TenantConfig
from support.actions import PENALISED, PLAIN, Actions, RequestOptions
from support.fake_grammars import FakeGrammar

small = st.integers(0, 40)
request_options = st.builds(
    RequestOptions,
    max_tokens=st.integers(1, 12),
    namespace=st.sampled_from((0, 0, 1, 2)),
    reads_cache=st.sampled_from((True, True, True, False)),
    n=st.sampled_from((1, 1, 2, 3)),
    min_tokens=st.sampled_from((0, 0, 3, 6)),
    sampling=st.sampled_from((GREEDY, PLAIN, PENALISED)),
    priority=st.sampled_from((0, 0, -1, 1)),
    prompt_logprobs=st.sampled_from((False, False, True)),
    session_id=st.sampled_from(("", "", "a", "b")),
    grammar=st.sampled_from((None, None, None, FakeGrammar(), FakeGrammar(7, 9))),
    beam_width=st.sampled_from((0, 0, 0, 0, 2, 3, 6)),
    length_penalty=st.sampled_from((1.0, 0.0, -1.0)),
    activated=st.sampled_from((0, 0, 0, 1, 2)),
    budget_pages=st.sampled_from((0, 0, 0, 2, 3, 5)),
)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.caught_before = sys.exc_info()[1]

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        n_pages=st.sampled_from((40, 80)),
        policy=st.sampled_from(("lpm", "fcfs")),
        shares=st.sampled_from((True, True, True, False)),
        n_slots=st.sampled_from((0, 0, 30, 150)),
        write_policy=st.sampled_from(("through", "through", "selective")),
        eviction_policy=st.sampled_from(("lru", "lfuda", "adaptive")),
        splits_drafts=st.booleans(),
        has_drafts=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        n_pages: int,
        policy: str,
        shares: bool,
        n_slots: int,
        write_policy: WritePolicy,
        eviction_policy: EvictionPolicyName,
        splits_drafts: bool,
        has_drafts: bool,
    ) -> None:
        self.actions = Actions(
            n_pages,
            page_size,
            policy=policy,
            shares=shares,
            n_slots=n_slots,
            write_policy=write_policy,
            eviction_policy=eviction_policy,
            splits_drafts=splits_drafts,
        )
        self.actions.engine.drafts.is_on = has_drafts

    @rule(
        base=small,
        cut=small,
        suffix=st.lists(st.integers(1, 4), max_size=6),
        options=request_options,
        twice=st.booleans(),
    )
    def add(self, base: int, cut: int, suffix: list[int], options: RequestOptions, twice: bool) -> None:
        self.actions.add(base, cut, suffix, options, twice=twice)

    @rule()
    def launch(self) -> None:
        self.actions.launch()

    @rule(n_turns=st.integers(1, 2))
    def turn(self, n_turns: int) -> None:
        for _ in range(n_turns):
            self.actions.launch()
            self.actions.collect()

    @rule()
    def collect(self) -> None:
        self.actions.collect()

    @rule()
    def sample_step(self) -> None:
        self.actions.sample_step()

    @rule(which=small, whole=st.booleans())
    def abort(self, which: int, whole: bool) -> None:
        self.actions.abort(which, whole=whole)

    @rule()
    def wait(self) -> None:
        self.actions.wait()

    @rule()
    def fail(self) -> None:
        self.actions.fail()

    @rule()
    def refuse(self) -> None:
        self.actions.refuse()

    @rule(which=small, kv=st.booleans())
    def make_nan(self, which: int, kv: bool) -> None:
        self.actions.make_nan(which, kv=kv)

    @rule(which=small)
    def read_a_nan_row(self, which: int) -> None:
        """Adds a new prompt twice, so that one request reads what a row of the other computes, maybe as NaN."""
        self.actions.make_nan(which, kv=True)
        self.actions.add(0, 0, [self.actions.new_token()] * 9, RequestOptions(), twice=True)
        self.actions.launch()

    @rule(n_copies=st.integers(1, 4), which=small)
    def finish_copies(self, n_copies: int, which: int) -> None:
        for _ in range(n_copies):
            self.actions.finish_copy(which)

    @rule(which=small)
    def fail_copy(self, which: int) -> None:
        self.actions.finish_copy(which, fails=True)

    @rule(n_slots=st.integers(1, 12))
    def evict_slots(self, n_slots: int) -> None:
        self.actions.evict_slots(n_slots)

    @rule(n_pages=st.integers(1, 6))
    def evict(self, n_pages: int) -> None:
        self.actions.evict(n_pages)

    @rule(which=small, expected_s=st.sampled_from((1.0, 5.0, 50.0)))
    def pause(self, which: int, expected_s: float) -> None:
        self.actions.pause(which, expected_s)

    @rule(which=small, suffix=st.lists(st.integers(1, 4), min_size=1, max_size=6), options=request_options)
    def go_on(self, which: int, suffix: list[int], options: RequestOptions) -> None:
        self.actions.go_on(which, suffix, options)

    @rule(session_id=st.sampled_from(("a", "b")))
    def close_session(self, session_id: str) -> None:
        self.actions.close_session(session_id)

    @rule()
    def flush(self) -> None:
        self.actions.flush()

    @rule(base=small, cut=small, namespace=st.integers(0, 2))
    def detach(self, base: int, cut: int, namespace: int) -> None:
        self.actions.detach(base, cut, namespace)

    @rule(base=small, cut=small, namespace=st.sampled_from((0, 0, 1, 2)), ttl_s=st.sampled_from((0, 5, 50, 500)))
    def pin(self, base: int, cut: int, namespace: int, ttl_s: int) -> None:
        self.actions.pin(base, cut, namespace, ttl_s)

    @rule(base=small, cut=small, namespace=st.sampled_from((0, 0, 1, 2)), is_live=st.booleans())
    def invalidate(self, base: int, cut: int, namespace: int, is_live: bool) -> None:
        self.actions.invalidate(base, cut, namespace, is_live=is_live)

    @invariant()
    def nothing_invalidated_is_found(self) -> None:
        if hasattr(self, "actions"):
            self.actions.check_invalidations()

    @rule(n_tokens=st.sampled_from((8, 12, 24)))
    def set_budget(self, n_tokens: int) -> None:
        self.actions.set_budget(n_tokens)

    @rule()
    def switch_drafts(self) -> None:
        self.actions.switch_drafts()

    @rule(which=small)
    def preempt(self, which: int) -> None:
        self.actions.preempt(which)

    def teardown(self) -> None:
        # Not after a failed rule: another error of the broken engine would hide the failure.
        if hasattr(self, "actions") and sys.exc_info()[1] is self.caught_before:
            self.actions.finish()


class CopyingEngineMachine(EngineMachine):
    """An engine whose prompts often diverge within a computed page, for mutants of the copies of such pages."""

    @initialize(page_size=st.sampled_from((2, 4, 8)), n_slots=st.sampled_from((0, 0, 150)))
    def start(self, page_size: int, n_slots: int) -> None:  # type: ignore[override]
        self.actions = Actions(160 // page_size, page_size, n_slots=n_slots)

    @rule(base=small, cut=small, options=request_options, twice=st.booleans())
    def branch(self, base: int, cut: int, options: RequestOptions, twice: bool) -> None:
        """Takes results until all known prompts are computed, and plans one that leaves one of them anywhere."""
        for _ in range(200):
            self.actions.collect()
            if len(self.actions.live) < 2:
                break
            self.actions.launch()
        self.actions.add(base, cut, [self.actions.new_token()], options, twice=twice)
        self.actions.launch()


class DroppingEngineMachine(EngineMachine):
    """An engine whose answers mostly drop pages, as their ``kv_budget`` asks."""

    @initialize(page_size=st.sampled_from((1, 2, 4)), n_slots=st.sampled_from((0, 0, 150)))
    def start(self, page_size: int, n_slots: int) -> None:  # type: ignore[override]
        self.actions = Actions(120 // page_size, page_size, n_slots=n_slots)

    @rule(
        base=small,
        cut=small,
        n_more=st.integers(0, 12),
        max_tokens=st.integers(4, 20) | st.just(150),
        budget_pages=st.sampled_from((2, 3, 5)),
        twice=st.booleans(),
    )
    def drop(self, base: int, cut: int, n_more: int, max_tokens: int, budget_pages: int, twice: bool) -> None:
        """Adds a request whose answer drops pages. The pool does not hold the longest answers."""
        suffix = [self.actions.new_token() + number for number in range(n_more)]
        options = RequestOptions(max_tokens=max_tokens, budget_pages=budget_pages)
        self.actions.add(base, cut, suffix, options, twice=twice)

    @rule(base=small, cut=small, budget_pages=st.sampled_from((2, 3, 5)), n_steps=st.integers(3, 40))
    def preempt_beside_a_twin(self, base: int, cut: int, budget_pages: int, n_steps: int) -> None:
        """Preempts a request that drops pages, while one without a budget goes on with the same answer."""
        twin = RequestOptions(max_tokens=40, min_tokens=40)
        self.actions.add(base, cut, [self.actions.new_token()], twin, twice=False)
        self.actions.launch()
        options = dataclasses.replace(twin, max_tokens=80, min_tokens=80, budget_pages=budget_pages)
        self.actions.add(len(self.actions.known) - 1, -1, [], options, twice=False)
        for _ in range(n_steps):
            self.actions.launch()
            self.actions.collect()
        self.actions.preempt(-1)


class WindowedEngineMachine(EngineMachine):
    """An engine of layers with windows, whose requests free pages while they run, in a small pool.

    Most engines have no tree; then requests can be longer than the pool. Windows have at least two tokens, because
    the fake device checks the token before each row.
    """

    @initialize(
        page_size=st.sampled_from((1, 2, 4, 16)),
        window=st.sampled_from((2, 3, 5, 8)),
        n_more=st.sampled_from((0, 0, 5, 20)),
        shares=st.sampled_from((False, False, True)),
    )
    def start(self, page_size: int, window: int, n_more: int, shares: bool) -> None:  # type: ignore[override]
        n_tokens = 40 if shares else window + 24
        self.actions = Actions(-(-n_tokens // page_size) + 1 + n_more, page_size, shares=shares, window=window)

    @rule(n_tokens=st.integers(40, 120), options=request_options)
    def add_long(self, n_tokens: int, options: RequestOptions) -> None:
        """Adds a prompt that may be longer than the pool."""
        self.actions.add(0, 0, [token % 7 for token in range(n_tokens)], options, twice=False)


of_recurrent_layers = st.builds(
    RequestOptions,
    max_tokens=st.integers(1, 6),
    namespace=st.sampled_from((0, 0, 1)),
    reads_cache=st.sampled_from((True, True, True, False)),
    n=st.sampled_from((1, 1, 2, 3)),
    min_tokens=st.sampled_from((0, 3)),
    sampling=st.sampled_from((GREEDY, PLAIN, PENALISED)),
    priority=st.sampled_from((0, 0, -1)),
    session_id=st.sampled_from(("", "a")),
    grammar=st.sampled_from((None, None, FakeGrammar())),
    beam_width=st.sampled_from((0, 0, 0, 2, 3)),
    activated=st.sampled_from((0, 0, 0, 1, 2)),
)


STORAGES = ("", "disk", "shared store", "both", "lent", "lent and shared store")
"""What is behind the host tier, if there is one; the device copies the pages of ``lent`` in place."""

TWO_STORES = ("both", "lent and shared store")


class StatesEngineMachine(EngineMachine):
    """What happens to engines whose tree has states, which the tiers behind it copy with their pages."""

    @rule(n_transfers=st.integers(1, 4), which=small)
    def finish_transfers(self, n_transfers: int, which: int) -> None:
        for _ in range(n_transfers):
            self.actions.finish_transfer(which)

    @rule(which=small, n_pages=st.integers(0, 4))
    def fail_transfer(self, which: int, n_pages: int) -> None:
        self.actions.finish_transfer(which, n_pages)

    @rule(which=small)
    def lose(self, which: int) -> None:
        self.actions.lose(which)

    @rule(base=small, n_turns=st.integers(1, 6), n_copies=st.integers(0, 3), evicts_slots=st.booleans())
    def return_in_a_queue(self, base: int, n_turns: int, n_copies: int, evicts_slots: bool) -> None:
        self.actions.return_in_a_queue(base, n_turns, n_copies, evicts_slots=evicts_slots)

    @rule(which=small)
    def make_unknown(self, which: int) -> None:
        self.actions.make_unknown(which)

    @rule(base=small, evicts_slots=st.booleans())
    def return_after_an_eviction(self, base: int, evicts_slots: bool) -> None:
        """Serves all requests, evicts the pages of one tier or two, and adds a known prompt."""
        self.actions.serve_all()
        self.actions.evict(self.actions.engine.n_pages)
        if evicts_slots:
            self.actions.evict_slots(self.actions.engine.host.n_pages)
        self.actions.add(base, 40, [1], RequestOptions(), twice=False)
        self.actions.launch()


OF_STATES = (
    TenantConfig("a", min_page_share=0.3, max_page_share=0.6),
    TenantConfig("b", min_page_share=0.2),
    TenantConfig("c", cache_salt="shared"),
)
"""Tenants with shares of pages, and so of slots of states."""


class RecurrentEngineMachine(StatesEngineMachine):
    """An engine of a model with recurrent layers, whose requests have no drafts."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        n_pages=st.sampled_from((40, 80)),
        n_states=st.sampled_from((1, 2, 5, 20)),
        policy=st.sampled_from(("lpm", "fcfs")),
        n_slots=st.sampled_from((0, 30, 150)),
        storage=st.sampled_from(STORAGES),
        tenants=st.sampled_from(((), (), OF_STATES)),
    )
    def start(  # type: ignore[override]
        self,
        page_size: int,
        n_pages: int,
        n_states: int,
        policy: str,
        n_slots: int,
        storage: str,
        tenants: tuple[TenantConfig, ...],
    ) -> None:
        self.actions = Actions(
            n_pages,
            page_size,
            n_states=n_states,
            policy=policy,
            n_slots=n_slots,
            has_disk=n_slots > 0 and storage != "",
            n_more_stores=storage in TWO_STORES,
            lends=storage.startswith("lent"),
            tenants=tenants,
        )
        self.actions.engine.stores[-1].is_shared = storage.endswith("shared store") or storage == "both"
        self.actions.engine.drafts.is_on = False

    def switch_drafts(self) -> None:
        """Is no rule here."""

    @rule(base=small, suffix=st.lists(st.integers(1, 4), min_size=1, max_size=6), options=of_recurrent_layers)
    def chat(self, base: int, suffix: list[int], options: RequestOptions) -> None:
        """Serves all requests, and a prompt, and adds the next turn, which repeats the answer."""
        self.actions.serve_all()
        self.actions.add(base, 12, suffix, options, twice=False)
        self.actions.serve_all(overlaps=True)
        self.actions.repeat_answer(suffix, options)
        self.actions.launch()

    @rule(
        base=small,
        cut=small,
        suffix=st.lists(st.integers(1, 4), max_size=6),
        options=of_recurrent_layers,
        twice=st.booleans(),
    )
    def add(self, base: int, cut: int, suffix: list[int], options: RequestOptions, twice: bool) -> None:
        self.actions.add(base, cut, suffix, options, twice=twice)


WITHOUT_PAGE_SHARES = (
    TenantConfig("a", 0.2, None, "tenant", 0.25, 0.5),
    TenantConfig("b"),
    TenantConfig("c", cache_salt="shared"),
)
"""Tenants with shares of rows alone."""


class MixedEngineMachine(StatesEngineMachine):
    """An engine of a model of which some layers have windows, and pages of their own in the same memory."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        window=st.sampled_from((2, 3, 5, 8)),
        n_pages=st.sampled_from((18, 24, 40, 60)),
        pages_per_slab=st.sampled_from((1, 2, 3)),
        shares=st.sampled_from((True, True, True, False)),
        policy=st.sampled_from(("lpm", "fcfs")),
        tenants=st.sampled_from(((), (), WITHOUT_PAGE_SHARES)),
        n_slots=st.sampled_from((0, 0, 30, 150)),
        storage=st.sampled_from(STORAGES),
    )
    def start(  # type: ignore[override]
        self,
        page_size: int,
        window: int,
        n_pages: int,
        pages_per_slab: int,
        shares: bool,
        policy: str,
        tenants: tuple[TenantConfig, ...],
        n_slots: int,
        storage: str,
    ) -> None:
        self.actions = Actions(
            n_pages,
            page_size,
            shares=shares,
            mixed_window=window,
            pages_per_slab=pages_per_slab,
            policy=policy,
            tenants=tenants,
            n_slots=n_slots,
            has_disk=n_slots > 0 and storage != "",
            n_more_stores=storage in TWO_STORES,
            lends=storage.startswith("lent"),
        )
        self.actions.engine.stores[-1].is_shared = storage.endswith("shared store") or storage == "both"


SHARES = ((0.0, 1.0), (0.0, 0.4), (0.25, 0.5), (0.3, 1.0))
"""Floors and caps."""


class TenantEngineMachine(EngineMachine):
    """An engine whose requests are those of three tenants, two of them with shares of rows and pages."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        n_pages=st.sampled_from((40, 60, 100)),
        policy=st.sampled_from(("lpm", "fcfs")),
        n_slots=st.sampled_from((0, 0, 40)),
        page_quotas=st.tuples(st.sampled_from(SHARES), st.sampled_from(SHARES)),
        row_shares=st.tuples(st.sampled_from(SHARES), st.sampled_from(SHARES)),
        weight=st.sampled_from((1.0, 0.2)),
        third=st.sampled_from(("tenant", "shared")),
    )
    def start(  # type: ignore[override]
        self,
        page_size: int,
        n_pages: int,
        policy: str,
        n_slots: int,
        page_quotas: tuple[tuple[float, float], ...],
        row_shares: tuple[tuple[float, float], ...],
        weight: float,
        third: CacheIsolation,
    ) -> None:
        (rows_a, pages_a), (rows_b, pages_b) = zip(row_shares, page_quotas, strict=True)
        tenants = (
            TenantConfig("a", weight, None, "tenant", *rows_a, *pages_a),
            TenantConfig("b", 1.0, None, "tenant", *rows_b, *pages_b),
            TenantConfig("c", cache_salt=third),
        )
        self.actions = Actions(n_pages, page_size, policy=policy, n_slots=n_slots, tenants=tenants)


class TieredEngineMachine(EngineMachine):
    """An engine that always has a host tier, for mutants of the tier."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        n_pages=st.sampled_from((40, 60)),
        write_policy=st.sampled_from(("through", "through", "selective")),
    )
    def start(self, page_size: int, n_pages: int, write_policy: WritePolicy) -> None:  # type: ignore[override]
        self.actions = Actions(n_pages, page_size, n_slots=150, write_policy=write_policy)

    @rule(base=small)
    def return_together(self, base: int) -> None:
        """Serves all requests, evicts the device, and adds twice a prompt whose pages are in the host tier."""
        self.actions.serve_all()
        self.actions.evict(self.actions.engine.n_pages)
        self.actions.add(base, 40, [1], RequestOptions(), twice=True)
        self.actions.launch()

    @rule(base=small, n_turns=st.integers(1, 6), n_copies=st.integers(0, 3), evicts_slots=st.booleans())
    def return_in_a_queue(self, base: int, n_turns: int, n_copies: int, evicts_slots: bool) -> None:
        """Serves all requests, evicts the device, and adds known prompts that wait for rows: copies begin before it
        is their turn."""
        self.actions.return_in_a_queue(base, n_turns, n_copies, evicts_slots=evicts_slots)


class DiskEngineMachine(TieredEngineMachine):
    """An engine with a disk tier, or a store that servers share, behind a host tier that is small enough for pages
    to come back from there."""

    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        n_slots=st.sampled_from((12, 30, 60)),
        write_policy=st.sampled_from(("through", "through", "selective")),
        storage=st.sampled_from((*STORAGES[1:], "lent")),
    )
    def start(  # type: ignore[override]
        self, page_size: int, n_slots: int, write_policy: WritePolicy, storage: str
    ) -> None:
        self.actions = Actions(
            40,
            page_size,
            n_slots=n_slots,
            has_disk=True,
            n_more_stores=storage in TWO_STORES,
            lends=storage.startswith("lent"),
            write_policy=write_policy,
        )
        self.actions.engine.stores[-1].is_shared = storage.endswith("shared store") or storage == "both"

    @rule(n_transfers=st.integers(1, 4), which=small)
    def finish_transfers(self, n_transfers: int, which: int) -> None:
        for _ in range(n_transfers):
            self.actions.finish_transfer(which)

    @rule(which=small, n_pages=st.integers(0, 4))
    def fail_transfer(self, which: int, n_pages: int) -> None:
        self.actions.finish_transfer(which, n_pages)

    @rule(which=small)
    def lose(self, which: int) -> None:
        self.actions.lose(which)

    @rule(which=small)
    def make_unknown(self, which: int) -> None:
        self.actions.make_unknown(which)

    @rule(which=small)
    def invalidate_what_was_read(self, which: int) -> None:
        self.actions.invalidate_what_was_read(which)

    @rule(base=small)
    def return_after_an_eviction(self, base: int) -> None:
        """Serves all requests, evicts everything, and adds a known prompt, whose pages are on disk then."""
        self.actions.serve_all()
        self.actions.evict(self.actions.engine.n_pages)
        self.actions.evict_slots(self.actions.engine.host.n_pages)
        self.actions.add(base, 40, [1], RequestOptions(), twice=False)
        self.actions.launch()

    @rule(base=small, n_prompts=st.integers(1, 3), n_kept=st.integers(0, 12))
    def return_in_place(self, base: int, n_prompts: int, n_kept: int) -> None:
        """The same with all that was offered on disk, some pages left on the device, and several prompts."""
        self.actions.serve_all()
        self.actions.engine.store_all()
        self.actions.evict(max(0, self.actions.engine.n_pages - n_kept))
        self.actions.evict_slots(self.actions.engine.host.n_pages)
        for number in range(n_prompts):
            self.actions.add(base + number, 40, [1], RequestOptions(), twice=False)
            self.actions.launch()
