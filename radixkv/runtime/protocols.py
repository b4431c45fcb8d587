"""Protocols of the branches, and null objects that stand where a branch is off (docs/decisions/0060).

A branch is a feature in a folder of its own: ``tenants`` has a ``Queue``, ``Shares`` and ``PageQuotas`` (which is
in ``cache/page_quotas.py``), ``beams`` a ``Continuation``, ``structured`` a ``Gate`` with its ``Constraint``,
``tiers`` has ``Tiers``, ``drafts`` has ``Drafts``, ``headroom`` has ``Headroom``, ``pauses`` has ``Returns``,
``lifetimes`` has ``Observer``, ``adapters`` has ``Adapters``; ``events`` and ``reporting`` look on. Three modules
hand the branches in: ``assemble``, ``open_loop``, and ``process``, which publishes the events. The device is behind
``step/executor.py``. All other modules of the runtime are the trunk: they import no branch, and no branch another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from radixkv.errors import RequestError, UnsupportedFeature
from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.step.plan import Row, StateFork, StateLoad, StateSave, StepPlan
from radixkv.runtime.step.result import TokenMasks
from radixkv.tree.changes import Change, StoredPages
from radixkv.tree.node import Namespace
from radixkv.tree.spared import WaitingPrompt
from radixkv.wire.adapter_messages import AdapterCommand, ServedAdapter
from radixkv.wire.cache_messages import Tier
from radixkv.wire.messages import DraftUse, Failed, FromRuntime, Submit, TokenLogprobs
from radixkv.wire.stats import (
    AdapterStats,
    DiskStats,
    DraftStats,
    HostStats,
    PauseStats,
    StateStats,
    TenantStats,
    WindowStats,
)

if TYPE_CHECKING:
    from radixkv.runtime.request import Request, Update


class Observer:
    """Follows the choices of a request that has chosen a branch. A request that has chosen none calls no branch.

    The moments, none of which may raise:

    * ``prompt_counted`` comes first, when a step's result is taken, mostly after the turn's launch.
    * ``released`` comes for a finished choice that had pages and whose prompt was computed, once no launched step
      uses them: mostly when a result is taken, also before a launch that preempts, and with an abort between turns.
    * ``ended`` comes when the last result of a request that has not failed is taken, or with its abort: before the
      terminal message and the next plan, before or after the releases.
    """

    __slots__ = ()

    def prompt_counted(self, request: Request) -> None:
        """Takes note that a choice's prompt is computed, and how much of it was cached."""

    def released(self, request: Request) -> None:
        """Takes note that a finished choice, whose prompt was computed, has released its pages."""

    def ended(self, choices: Sequence[Request], *, is_prompt_computed: bool) -> None:
        """Takes note that all choices have ended, unless the request has failed. Some may still hold pages."""


class RequestBranch(NamedTuple):
    """A branch that a request chooses by its message."""

    is_chosen: Callable[[Submit], bool]
    follow: Callable[[Submit, Sequence[Request]], Observer | None]
    """Begins to follow the choices of a new request; returns what the branch wants to be told of it.

    Raises ``RequestError`` if the request cannot have the branch."""


class Constraint(Protocol):
    """What the tokens of one choice must obey."""

    @property
    def has_ended(self) -> bool:
        """Whether the output is complete, so that no token may follow."""

    @property
    def end_tokens(self) -> Collection[int]:
        """The tokens that end the output, where they are allowed."""

    def accept(self, token: int) -> bool:
        """Appends a token to the output; False, without any change, if it is not allowed. O(1) mostly."""

    def forced(self, n_tokens: int) -> bytes:
        """Returns up to ``n_tokens`` tokens, little-endian int32, whose text must come next; none if nothing must
        or that is not known. Others may write the same text. Changes nothing."""

    def n_allowed(self, tokens: bytes) -> int:
        """Returns how many of these tokens may come next, one after another, without those that end the output.
        Changes nothing. O(tokens)."""

    def rejection(self, token: int) -> RequestError:
        """Returns the error that ends a choice when ``accept`` has refused its sampled token."""


class Continuation(Protocol):
    """Decides how the choices of a request go on, in place of one sampled token after another.

    A choice with a continuation is planned until its known tokens are computed. The continuation takes the logprobs
    of its last row, and then the choice pauses.
    """

    def take(self, request: Request, logprobs: TokenLogprobs | None) -> None:
        """Takes the likeliest next tokens of a choice, and pauses it. O(1)."""

    def advance(self) -> list[Update]:
        """Lets the choices go on if all pause, after the results of a step in which some of them had rows."""


class Gate(Protocol):
    """Holds new requests back until their constraints can be checked.

    The loop asks ``hold`` and ``masks`` only for requests that need them, and ``take`` and ``descriptors`` only
    while it holds some.
    """

    def hold(self, message: Submit, choices: Sequence[Request]) -> bool:
        """Gives the choices of a request their constraints; returns whether they must wait for that.

        Raises ``RequestError`` if the request cannot have them, or if too many wait.
        """

    def __len__(self) -> int:
        """Returns how many requests wait."""

    def n_waiting(self, sender: str) -> int:
        """Returns how many requests of a sender wait."""

    def take(self) -> list[tuple[list[Request], RequestError | None]]:
        """Returns the requests that wait no longer: the choices of each, and the error if it cannot have its
        constraints."""

    def leave(self, choices: Sequence[Request]) -> None:
        """Forgets a request that has ended while it waited."""

    def descriptors(self) -> list[int]:
        """Returns descriptors, one of which is readable when ``take`` has something to return."""

    def masks(self, rows: Sequence[tuple[Row, Request]], vocab_size: int) -> TokenMasks | None:
        """Returns which tokens may be sampled at positions of a step's masked rows; None if no row needs a mask any
        more."""

    def close(self) -> None:
        """Frees what it has opened."""


class Adapters:
    """The adapters that requests may ask for by their digests. These are none, and none can be loaded.

    ``adapters.loading.LoadableAdapters`` has some.
    """

    served: tuple[ServedAdapter, ...] = ()
    """Those of the start."""
    names: Mapping[str, str] = MappingProxyType({})
    """The name that each adapter had last, by its digest."""

    @property
    def is_busy(self) -> bool:
        """Whether ``advance`` has something to do, now or once a descriptor is readable."""
        return False

    def has(self, digest: str) -> bool:
        """Returns whether new requests may have an adapter."""
        return False

    def receive(self, message: AdapterCommand) -> list[FromRuntime]:
        """Begins to load an adapter, or unloads one; returns the answer if there is one already."""
        text = "this engine has no adapters; start it with enable_lora (--enable-lora), on the CPU"
        return [Failed(message.id, UnsupportedFeature.code, text)]

    def advance(self, is_used: Callable[[str], bool]) -> list[FromRuntime]:
        """Lets requests ask for the adapters that have been read, and frees those without a name that nothing uses.

        Called between turns. Returns the answers.

        Args:
            is_used: whether a request without its terminal message, or a launched step, has an adapter.
        """
        return []

    def descriptors(self) -> list[int]:
        """Returns descriptors, one of which is readable when an adapter has been read."""
        return []

    def stats(self) -> AdapterStats | None:
        """Returns gauges; None where requests have no adapters."""
        return None

    def close(self) -> None:
        """Waits for threads that read."""


class Queue(Protocol):
    """The waiting requests: which of them are admitted next. ``WaitingQueue`` has one order for all senders."""

    is_common: bool
    """Whether all requests are in one order, so that one that must start first holds back all others."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    @property
    def version(self) -> int:
        """Changes whenever a request is added or removed."""

    def n_unstarted_beside(self, request: Request) -> int:
        """Returns how many requests wait for their first step, of those that share a limit with ``request``."""

    def take_received_before(self, time_s: float) -> list[Request]:
        """Removes and returns the requests that have not started and were received before that time."""

    def add(self, request: Request) -> None:
        """Queues a request by its priority and age, in phase ``WAITING``."""

    def remove(self, request: Request) -> None:
        """Removes a request."""

    def candidates(self) -> Iterable[Request]:
        """Returns requests in the order in which to try to admit them, without those that are retried alone."""

    def next_requests(self) -> Iterator[Request]:
        """Yields requests that will read the cache, those first that are admitted first."""

    def short(self, n_tokens: int, unfinished: Sequence[Request]) -> Iterable[Request]:
        """Returns requests with at most ``n_tokens`` to compute, which may overtake ``unfinished`` prompts."""

    def count_passes(self, admitted: Sequence[Request]) -> None:
        """Counts that a step admits these requests before others that are earlier in order."""

    def charge(self, requests: Sequence[Request], n_tokens: int) -> None:
        """Counts that a step computes ``n_tokens`` tokens for each of these requests."""


class Shares:
    """Divides the batch slots and pages of the device among senders.

    This class is the protocol and its default, which divides nothing. O(1) each.
    """

    def may_take_batch_slot(self, request: Request) -> bool:
        """Returns whether the request's sender may have one batch slot more, if there is a free one."""
        return True

    def take_batch_slot(self, request: Request) -> None:
        """Counts a batch slot that a request gets."""

    def give_batch_slot_back(self, request: Request) -> None:
        """Counts a batch slot that a request no longer has."""

    def is_of_same(self, one: Request, other: Request) -> bool:
        """Returns whether two requests are of one sender."""
        return True

    def is_ahead(self, one: Request, other: Request) -> bool:
        """Returns whether ``other`` must leave free the pages that ``one``, which is being prefilled, still
        needs."""
        return one.order < other.order

    def n_reserved(self, request: Request) -> int:
        """Returns how many pages are reserved for the request's sender."""
        return 0

    def n_reserved_beside(self, request: Request) -> int:
        """Returns how many pages are reserved for all others."""
        return 0

    def is_capped(self, request: Request) -> bool:
        """Returns whether a cap of the request's sender, and not what others hold, limits the pages it can get."""
        return False

    def may_give(self, request: Request) -> Callable[[Request], bool]:
        """Returns a function that says whether ``request`` could use the pages of another request."""
        return lambda other: True

    def victims(self, candidates: Sequence[Request]) -> Sequence[Request]:
        """Returns the requests among which the victim is chosen: the last of them in order is preempted."""
        return candidates

    def count(self, sender: str) -> tuple[int, int]:
        """Returns how many batch slots a sender has, and how many of its requests are in the queue."""
        raise KeyError(sender)

    def stats(self, count_of: Callable[[str], tuple[int, int]]) -> dict[str, TenantStats]:
        """Returns counters and gauges of each sender.

        Args:
            count_of: returns how many requests of a sender run, and how many wait.
        """
        return {}

    def stuck(self, running: Iterable[Request]) -> Iterable[Sequence[Request]]:
        """Yields the paused requests of each sender that has no other batch slots, while more of its requests
        wait."""
        return ()


class Headroom:
    """Foresees which pages running answers will need, so that new requests are not admitted into them.

    This class is the protocol and its default, which foresees nothing. O(1) each.
    """

    def step(self) -> None:
        """Takes note that a step is planned, in which each running answer gets a token."""

    def started(self, request: Request) -> None:
        """Takes note that a request runs, and has a block table."""

    def stopped(self, request: Request) -> None:
        """Takes note that a request does not run any more, if it did: it has ended or was preempted."""

    def ended(self, request: Request) -> None:
        """Takes note that an answer has ended that has run."""

    def n_expected(self, request: Request) -> int:
        """Returns how many pages running requests will need beyond those that they have, if ``request`` is admitted
        now."""
        return 0


class TierHits(NamedTuple):
    """What the tiers behind the device have of a prompt."""

    n_in_host: int = 0
    """Tokens that the host tier has beyond the device, without the prompt's last one."""
    is_loaded: bool = False
    """Whether a request would load them."""
    min_loaded_tokens: float | None = None
    """Length above which loading is faster than computing; None if that does not decide."""
    n_on_disk: int = 0
    """Tokens that the disk tier has beyond device and host tier, without the prompt's last one."""
    is_fetched: bool = False
    """Whether a request would fetch them."""
    n_beyond_device: int = 0
    """Tokens that the host tier has beyond the device, with the last one."""
    n_beyond_host: int = 0
    """Tokens that the disk tier has beyond device and host tier, with the last one."""


class StoredPrefix(NamedTuple):
    """How much of a prompt has reached the tiers behind the device, in tokens of whole pages from its start."""

    n_in_host: int = 0
    n_on_disk: int = 0
    is_storing: bool = False
    """Whether the next page of either tier is offered or on its way."""


class TierChanges(NamedTuple):
    """What a tier gets and loses."""

    medium: Literal["GPU", "CPU", "STORAGE"]
    changes: ChangeSource
    stored_pages: Callable[[], Iterable[StoredPages]]
    """Yields all pages, each after the pages before it."""


class ChangeSource(Protocol):
    """Where the changes of one tier come from."""

    @property
    def n_pages(self) -> int:
        """Pages that were stored and not removed since."""

    def take(self) -> list[Change]:
        """Returns the changes since the last call."""


class Drafts:
    """Guesses how answers go on; steps check the guesses, and sample the same tokens as without them.

    This class is the protocol and its default, which guesses nothing. O(1) each.
    """

    def wants_results(self, *, has_prompts: bool) -> bool:
        """Returns whether the next plan is to wait for the results of all launched steps: only then can its rows
        have drafts.

        Args:
            has_prompts: whether the plan is expected to compute prompts.
        """
        return False

    def draft(self, requests: Sequence[Request], max_drafts: Sequence[int], n_most: int) -> list[bytes]:
        """Returns for each request what may follow its tokens, little-endian int32.

        Args:
            requests: all those that decode in the next step; their last tokens are known.
            max_drafts: [requests], most tokens of each; 0 or less: none.
            n_most: most tokens of all, at least 1.
        """
        return [b""] * len(requests)

    def verified(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        """Takes note of how many of a row's drafts were right, the first ones."""

    def step_done(
        self,
        plan: StepPlan,
        requests: Sequence[Request],
        n_most: int,
        *,
        has_waited: bool,
        is_last: bool,
        device_seconds: float,
    ) -> None:
        """Takes note of a step whose tokens are appended.

        Args:
            plan: of the step.
            requests: [rows].
            n_most: most drafts that a plan with these decode rows has room for; 0 or less: none.
            has_waited: whether its plan was made when the results of all steps before it were known.
            is_last: whether no plan after it is launched yet, so that the next one may have drafts.
            device_seconds: its time on the device.
        """

    def ended(self, choices: Sequence[Request]) -> DraftUse | None:
        """Takes note that a request has ended, also one that has failed; returns what became of its drafts, or None
        if there are none in any request."""
        return None

    def stats(self) -> DraftStats | None:
        """Returns counters; None if there are no drafts."""
        return None


class States:
    """The states in the tree, of recurrent layers or of windows: which of them are kept, and what rows go on from.

    This class is the protocol and its default, for a model that needs none. O(1) each.
    """

    block_tokens = 1
    """Chunks of prompts end at multiples of it, where a step has room for so many tokens."""

    def arrived(self, request: Request) -> None:
        """Takes note of a new request in the waiting queue."""

    def left(self, request: Request) -> None:
        """Takes note that a request has ended, mostly before it had a row."""

    def is_awaited(self, request: Request) -> bool:
        """Returns whether a waiting request is to be admitted later, because the next plan or a launched one
        computes a state that it could go on from, or a request that runs is about to."""
        return False

    def plan_row(self, request: Request, start: int, end: int, n_in_tree: int) -> None:
        """Takes note of a row of a prompt in the next plan. Its pages are committed.

        Args:
            request: the row's.
            start: its first position.
            end: the position after its last one.
            n_in_tree: leading tokens whose pages the tree had before.
        """

    def plan_decode(self, requests: Sequence[Request]) -> None:
        """Takes note of requests that have a decode row in the next plan, which is counted as scheduled."""

    def forked(self, parent: Request, fork: Request) -> None:
        """Takes note that a fork, which has a batch slot now, goes on from all that its parent has computed."""

    def take(self, step: int) -> tuple[tuple[StateLoad, ...], tuple[StateSave, ...], tuple[StateFork, ...]]:
        """Returns what the plan of a step, which will be launched, must carry for the rows and forks since the last
        call."""
        return (), (), ()

    def step_done(self, plan: StepPlan, are_right: Sequence[bool]) -> None:
        """Takes note of the results of a step.

        Args:
            plan: of the step.
            are_right: [rows], whether what a row has computed can be used.
        """

    def ended(self, request: Request) -> None:
        """Takes note that a request ends with the result that was taken last. Its computed pages are committed, and
        it still has all of them."""

    def freed(self, request: Request) -> None:
        """Takes note that a request has lost its batch slot and pages, which no launched step uses."""

    def undo(self) -> list[Request]:
        """Takes note that all launched steps have failed; returns forks that have no state because of that."""
        return []

    def stats(self) -> StateStats | None:
        """Returns counters and gauges of recurrent layers; None if there are no such layers."""
        return None

    def window_stats(self) -> WindowStats | None:
        """Returns counters and gauges of window pages; None if there are none."""
        return None


class NeededPrompt(Protocol):
    """A prompt that will be looked up, whether a request with it waits already or not."""

    @property
    def namespace(self) -> Namespace:
        """Its namespace."""

    @property
    def key(self) -> bytes:
        """Its tokens, little-endian int32: one object as long as it is needed, none once it is not."""


class Returns:
    """The conversations that are expected back, though no request of theirs waits.

    This class is the protocol and its default, which expects none. O(1) each.
    """

    def expected(self) -> Iterable[NeededPrompt]:
        """Yields what their next prompts begin with, those first whose pages are worth most."""
        return ()

    def close_session(self, namespace: Namespace, session_id: str) -> None:
        """Takes note that nobody goes on with the conversations of a session."""

    def stats(self) -> PauseStats | None:
        """Returns counters and gauges of pauses between turns; None if nobody looks for them."""
        return None


class Tiers:
    """The memory tiers behind the device's pool.

    A request may *load*: it leaves the waiting queue until pages of its prompt have been copied to the device. Then
    it has a block table with these pages, and is admitted before all waiting requests. This class is the protocol
    and its default, which has no tiers. O(1) each.
    """

    host: PageCache | None = None
    """The page cache of the host tier."""
    n_host_slots: int | None = None
    """Pages that the host tier will hold once its memory is prepared."""
    has_disk = False
    """Whether there is a disk tier behind the host tier."""
    n_promised = 0
    """Pages that the loading requests need beside the loaded ones: nobody else is admitted into them."""

    def __len__(self) -> int:
        """Returns how many requests load."""
        return 0

    @property
    def is_busy(self) -> bool:
        """Whether pages are being copied between tiers: there may be more to schedule when they are."""
        return False

    @property
    def delays_requests(self) -> bool:
        """Whether pages are being copied for which requests may wait."""
        return False

    def watch(
        self,
        waiting: Callable[[], Iterable[WaitingPrompt]],
        expected: Callable[[], Iterable[NeededPrompt]],
        n_unclaimed: Callable[[Namespace], int],
    ) -> None:
        """Takes what tells of the needs of others. Call it once.

        Args:
            waiting: yields the prompts that will be looked up soon, the first one first.
            expected: yields those of conversations that are expected back, the first one first.
            n_unclaimed: returns how many pages of the device a namespace's owner can have beside what running and
                loading requests need.
        """

    def offer(self, namespace: Namespace, tokens: bytes, on_stored: Callable[[Namespace, bytes], None]) -> None:
        """Offers a sequence to the host tier, whatever its policy; calls ``on_stored`` once it is there."""

    def begin(self, request: Request, n_available: int) -> bool:
        """Begins to load what a waiting request needs, if that is faster than to compute it.

        Args:
            request: a waiting request.
            n_available: pages that the request may take.

        Returns:
            Whether the request has left the waiting queue.
        """
        return False

    def advance(self) -> bool:
        """Takes finished copies and begins others; returns whether a request may fit that did not before."""
        return False

    def loaded(self) -> list[Request]:
        """Returns the requests whose pages have come, the first to be admitted first."""
        return []

    def is_loaded(self, request: Request) -> bool:
        """Returns whether the pages of a request have come."""
        return False

    def blocks(self, request: Request) -> BlockTable:
        """Returns the block table of a loaded request."""
        raise KeyError(request.id)

    def take(self, request: Request) -> None:
        """Forgets a loaded request, which is admitted with its block table."""

    def leave(self, request: Request) -> None:
        """Forgets a loading request, which is aborted or has waited too long."""

    def retract_last(self, may_give: Callable[[Request], bool]) -> bool:
        """Returns the last loaded request whose pages are of use to the waiting queue; False if there is none."""
        return False

    def n_promised_to_others(self, request: Request) -> int:
        """Returns how many pages are promised to other requests."""
        return 0

    def take_received_before(self, time_s: float) -> list[Request]:
        """Removes and returns the loading requests that have not started and were received before that time."""
        return []

    def next_prompts(self) -> Iterable[WaitingPrompt]:
        """Yields namespace and tokens of the loading requests that will look up their prompts again."""
        return ()

    def block_tables(self) -> list[BlockTable]:
        """Returns the device's block tables of loading requests and of copies in flight."""
        return []

    def used(self, request: Request) -> None:
        """Takes note that a request is admitted on a cached prefix, before it commits pages of its own."""

    def computed(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Takes note of the results of a step, whose rows belong to these requests."""

    def forked(self, parent: Request, fork: Request) -> None:
        """Takes note that a request begins with the tokens of another."""

    def freeing(self, request: Request) -> None:
        """Takes note that a request's pages are about to be freed."""

    def ended(self, choices: Sequence[Request]) -> tuple[float, float] | None:
        """Takes note that a request has ended; returns from when to when, on the loop's clock, it has waited for
        pages, or None if it did not."""
        return None

    def step_done(self, plan: StepPlan, device_seconds: float) -> None:
        """Takes note of how long a step took."""

    def requests(self) -> list[Request]:
        """Returns all requests that load."""
        return []

    def find(self, namespace: Namespace, tokens: bytes) -> TierHits:
        """Returns what the tiers have of a prompt beyond the device. Changes nothing. O(tokens)."""
        return TierHits()

    def stored(self, namespace: Namespace, tokens: bytes) -> StoredPrefix:
        """Returns how much of a prompt has reached each tier. Changes nothing. O(tokens)."""
        return StoredPrefix()

    def flush(self) -> None:
        """Empties the tiers."""

    def invalidate(self, namespace: Namespace, tokens: bytes, lowest: Tier) -> tuple[int | None, int | None]:
        """Drops every sequence that begins with ``tokens``, once the device has none of them.

        Args:
            namespace: namespace of the sequences.
            tokens: whole pages; none for the whole namespace.
            lowest: the tiers below it keep what they have.

        Returns:
            How many pages host tier and disk tier have dropped; None for a tier that there is not.
        """
        return None, None

    def stats(self) -> tuple[HostStats | None, DiskStats | None]:
        """Returns the counters and gauges of host tier and disk tier; None for a tier that there is not."""
        return None, None

    def changes(self) -> list[TierChanges]:
        """Returns the sources of what each tier gets and loses from now on, the tier below the device first."""
        return []

    def check(self) -> None:
        """Checks that every page of the tiers is in exactly one place. Raises ``InvariantError``."""

    def descriptors(self) -> list[int]:
        """Returns descriptors, one of which is readable when a copy has finished."""
        return []

    def close(self, timeout_s: float) -> None:
        """Ends the copies, and frees the memory."""
