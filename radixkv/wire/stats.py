"""Counters and gauges of the runtime, which it sends to the frontend and ``LLM`` returns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from radixkv.wire.cache_use import CacheUse


class HostStats(msgspec.Struct, frozen=True):
    """Counters and gauges of the host tier."""

    n_slots: int
    """Pages that the tier can hold by now; its memory is prepared in the background."""
    n_slots_free: int
    page_bytes: int
    """Size of a page."""
    n_loading: int
    """Requests that wait for pages from the tier."""
    pages_loaded_total: int
    pages_stored_total: int
    pages_evicted_total: int
    load_seconds: float
    """Time of the copies to the device, each alone: ``pages_loaded_total * page_bytes`` by it is the rate."""
    store_seconds: float
    copies_failed_total: int
    loads_declined_total: int
    """Times that a prompt was computed rather than loaded, because that takes less time, or by ``never``."""
    fetches_declined_total: int
    """Times that it was not fetched from disk or a shared store into the tier."""
    lookups_declined_total: int
    """Times that it was not looked up in a shared store."""
    load_seconds_per_token: float | None
    """Moving average; None before the first copy. As ``compute_seconds_per_token``."""
    compute_seconds_per_token: float | None
    n_slots_pinned: int = 0
    """Pages that a pin covers."""
    n_state_slots: int = 0
    """States of recurrent layers that the tier can hold."""
    n_state_slots_free: int = 0
    pages_loaded_ahead_total: int = 0
    """The part of ``pages_loaded_total`` that was loaded before it was the turn of the prompt that needed it."""
    pages_loaded_ahead_used_by_waiting_total: int = 0
    """Pages loaded ahead for a waiting request that were still on the device when its turn came.

    What was loaded for chats that are expected back counts in ``PauseStats.returns_on_device_total``."""


class DiskStats(msgspec.Struct, frozen=True):
    """Counters and gauges of the disk tier, or of a store that servers share."""

    n_pages: int
    """Pages in the folder, with those of other models; of a shared store, those that it is known to have."""
    n_bytes: int
    """Bytes that they occupy."""
    pages_fetched_total: int
    pages_written_total: int
    pages_lost_total: int
    """Pages that were damaged or had vanished when they were to be read."""
    fetch_seconds: float
    """Time of the reads, each prompt's alone."""
    write_seconds: float
    fetch_seconds_per_token: float | None
    """Moving average; None before the first read."""
    shared: SharedStoreStats | None = None
    """None for a disk tier."""


class SharedStoreStats(msgspec.Struct, frozen=True):
    """Counters and gauges that only a store has which servers share."""

    is_away: bool
    """Whether the last lookup, read or write has failed or taken too long."""
    failures_total: int
    """Lookups, reads, writes and removals that have."""
    lookups_total: int
    look_up_seconds: float


class DraftStats(msgspec.Struct, frozen=True):
    """Counters of drafts: guesses of tokens that steps check before they are sampled."""

    drafts_total: int
    """Rows with drafts."""
    draft_tokens_total: int
    accepted_tokens_total: int
    """Drafts that were what was sampled."""
    steps_without_overlap_total: int = 0
    """Steps that were planned when the results of all steps before them were known, as rows with drafts must be."""
    by_source: dict[str, SourceStats] = {}
    """By what guessed the drafts, once it has: ``tree``, ``prediction``, ``prompt``, ``answers`` or
    ``grammar``."""
    accepted_by_position: tuple[int, ...] = ()
    """Part of ``accepted_tokens_total`` by the place of the draft in its row, as many as a row has at most."""

    def rounded_down(self, unit: int) -> DraftStats:
        """Returns the same with all counts of rows and tokens rounded down to multiples of ``unit``."""
        by_source = {
            name: SourceStats(one.draft_tokens_total // unit * unit, one.accepted_tokens_total // unit * unit)
            for name, one in self.by_source.items()
        }
        return msgspec.structs.replace(
            self,
            drafts_total=self.drafts_total // unit * unit,
            draft_tokens_total=self.draft_tokens_total // unit * unit,
            accepted_tokens_total=self.accepted_tokens_total // unit * unit,
            by_source=by_source,
            accepted_by_position=tuple(count // unit * unit for count in self.accepted_by_position),
        )


class SourceStats(msgspec.Struct, frozen=True):
    """Counters of the drafts of one source."""

    draft_tokens_total: int
    accepted_tokens_total: int


MAX_SHOWN_KINDS = 16
"""Kinds of pauses in the statistics."""
N_LATEST_RETURNS = 64
"""Pauses of a kind of which the statistics have quantiles."""


def kind_key(tenant: str, tools: Sequence[str]) -> str:
    """Returns the key of a kind of pauses in ``PauseStats.kinds``.

    It is who asked, and each of the tools that were called after a zero character, which no name has; without tools
    a user is to go on.
    """
    return "\0".join((tenant, *tools))


class PauseKindStats(msgspec.Struct, frozen=True):
    """What is learnt of pauses of one kind, since it is known."""

    n_open: int
    """Pauses that are waited for."""
    returns_total: int
    returns_on_device_total: int
    given_up_total: int
    median_s: float | None = None
    """Half of the latest ``N_LATEST_RETURNS`` pauses that a prompt has ended took no longer; None: none has.

    Pauses that were given up do not count. With replicas, the mean of theirs, weighted by ``returns_total``."""
    p90_s: float | None = None
    """The same of nine tenths."""


class PauseStats(msgspec.Struct, frozen=True):
    """Counters and gauges of conversations that pause between two turns."""

    n_pauses: int
    n_spared_tokens: int
    """Tokens of those that evictions spare, shared ones counted for each."""
    returns_total: int
    """Pauses that a prompt has ended."""
    returns_on_device_total: int
    """The ended pauses whose conversation was on the device as a whole."""
    given_up_total: int
    """Pauses that took too long."""
    kinds: dict[str, PauseKindStats] = {}
    """Those with the most pauses, by ``kind_key``."""


class StateStats(msgspec.Struct, frozen=True):
    """Counters and gauges of the states of recurrent layers that the prefix cache keeps."""

    n_slots: int
    """States that it can have."""
    n_slots_free: int
    saved_total: int
    """States that have been computed for it."""
    hits_total: int
    """Times that a request, or what a preempted one begins again, went on from one of them."""
    evicted_total: int
    """States that gave their slots to others. Those that leave with their pages are not counted."""
    missed_tokens_total: int
    """Tokens of prompts whose pages were cached, and that were computed because no state was after them."""


class WindowStats(msgspec.Struct, frozen=True):
    """Counters and gauges of window pages, which have K and V of the layers with windows alone.

    A tail is the window pages before a position, with which the prefix cache lets a prompt go on there.
    """

    n_window_pages: int
    """Window pages that requests or tails hold."""
    n_window_pages_evictable: int
    """Those that tails alone hold."""
    n_slabs: int
    """Slabs of the pool that are either one window page or several pages of the other layers."""
    n_slabs_taken: int
    """Those that are a window page now."""
    n_tails: int
    tails_kept_total: int
    """Tails that have been computed for the prefix cache."""
    hits_total: int
    """Times that a request, or what a preempted one begins again, went on from one of them."""
    evicted_total: int
    """Tails that gave their pages to others. Those that leave with pages of the other layers are not counted."""
    missed_tokens_total: int
    """Tokens of prompts whose pages were cached, and that were computed because no tail was after them."""


class TenantStats(msgspec.Struct, frozen=True):
    """Counters and gauges of one tenant."""

    n_running: int
    """Rows that its requests have."""
    n_waiting: int
    """Its requests that wait for their grammar, their pages, or a step."""
    computed_tokens_total: int
    """Tokens that steps have computed for it, those of prompts and those of answers."""
    n_pages: int | None = None
    """Pages on the device that it has, cached or in use; None without a share of pages."""


class ReplicaStats(msgspec.Struct, frozen=True):
    """Counters and gauges of one replica."""

    is_up: bool
    """Whether it has answered; gauges are 0 if not."""
    n_restarts: int = 0
    """How often another runtime has taken its place."""
    n_running: int = 0
    n_waiting: int = 0
    n_pages: int = 0
    n_pages_free: int = 0
    n_pages_evictable: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    generation_tokens_total: int = 0
    placements_total: dict[str, int] = {}
    """Prompts that the frontend has sent to it, by why."""


class AdapterStats(msgspec.Struct, frozen=True):
    """Gauges of adapters, and a counter."""

    n_adapters: int = 0
    """Names that requests may ask for."""
    n_bytes: int = 0
    """Host memory of the weights, of equal adapters once; also of unloaded ones whose requests still run."""
    n_in_slots: int | None = None
    """Adapters that steps can have now, equal ones once; None: there are no slots, and steps can have all."""
    slot_loads_total: int = 0
    """How often an adapter got a slot."""
    n_waiting: int = 0
    """Requests that wait for a slot of their adapter."""
    n_unloaded: int = 0
    """Unloaded and replaced adapters whose weights are kept for requests, equal ones once."""


class KVEvictionStats(msgspec.Struct, frozen=True):
    """Counters of pages that answers went on without; those of a preempted one count again when they go again."""

    pages_skipped_total: int = 0
    """Pages that stayed, because the prefix cache has them."""
    pages_freed_total: int = 0


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Counters since the start (``*_total``, ``*_seconds``) and current gauges."""

    id: str
    n_running: int = 0
    n_waiting: int = 0
    n_pages: int = 0
    n_pages_free: int = 0
    n_pages_evictable: int = 0
    n_pages_pinned: int = 0
    """Pages that a pin covers, of which requests may hold some."""
    prefix_queries_total: int = 0
    """Prompt tokens of requests whose first prefill is done."""
    cache_use: CacheUse = CacheUse()
    """What the cache gave the prompts of ``prefix_queries_total`` and got of them."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    pages_evicted_total: int = 0
    steps_total: int = 0
    step_seconds: float = 0.0
    """Wall time of the loop's turns."""
    schedule_seconds: float = 0.0
    """The part of ``step_seconds`` for making plans and taking results, cache work included."""
    frames_dropped_total: int = 0
    n_running_slots: int = 0
    """Token slots of the pages that running requests hold, and those whose pages are about to be freed."""
    n_running_tokens: int = 0
    """The part of ``n_running_slots`` that holds KV: divided by it, the utilisation of memory."""
    n_duplicate_tokens: int = 0
    """The part of ``n_running_tokens`` whose KV another slot holds too, as ``count_slot_use`` finds it."""
    n_saved_tokens: int = 0
    """Slots that running requests would need in addition if they shared no pages."""
    device_busy_seconds: float = 0.0
    """Time of steps on the device that did not fail, with gaps within a step; in the rest of the wall time it was
    idle."""
    recomputed_tokens_total: int = 0
    """Tokens that were computed again for preempted choices. What these find in the cache again is not counted."""
    start_seconds: dict[str, float] = {}
    """Time of each stage of the start."""
    host: HostStats | None = None
    """None without a host tier."""
    disk: DiskStats | None = None
    """None without a disk tier."""
    shared_store: DiskStats | None = None
    """None without a store that servers share."""
    drafts: DraftStats | None = None
    """None without speculative decoding."""
    states: StateStats | None = None
    """None without recurrent layers."""
    windows: WindowStats | None = None
    """None where layers with windows have no pages of their own."""
    kv_eviction: KVEvictionStats = KVEvictionStats()
    """Of requests with a ``kv_budget``."""
    pauses: PauseStats | None = None
    """None where requests share no pages, or nothing is generated."""
    adapters: AdapterStats | None = None
    """None where requests have no adapters."""
    tenants: dict[str, TenantStats] = {}
    """By name, without the operator."""
    replicas: dict[str, ReplicaStats] = {}
    """By number, if the server has several runtimes: the other fields are then sums over those that are up."""

    @property
    def has_storage(self) -> bool:
        """Whether there is a disk tier or a shared store."""
        return not (self.disk is None and self.shared_store is None)

    @property
    def prefix_hits_total(self) -> int:
        """Prompt tokens that were not computed."""
        return self.cache_use.n_cached
