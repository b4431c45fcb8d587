"""The protocol of the branch ``tiers``: memory behind the device's pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from radixkv.runtime.cache.block_table import BlockTable
from radixkv.runtime.cache.cache import PageCache
from radixkv.runtime.protocols.returns import NeededPrompt
from radixkv.runtime.step.plan import StepPlan
from radixkv.tree.changes import Change, KeptState, StoredPages
from radixkv.tree.node import Namespace
from radixkv.tree.spared import WaitingPrompt
from radixkv.wire.cache_messages import Tier
from radixkv.wire.stats import DiskStats, HostStats
from radixkv.wire.table_messages import LoadStage

if TYPE_CHECKING:
    from radixkv.runtime.request import Request


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
    """Whether a request would fetch them, or some of them."""
    n_fetched: int = 0
    """How many of them it would fetch, without the prompt's last one."""
    n_from_shared: int | None = None
    """How many tokens it would fetch from a shared store beside the disk; None without both or without a fetch."""
    n_beyond_device: int = 0
    """Tokens that the host tier has beyond the device, with the last one."""
    n_beyond_host: int = 0
    """Tokens that the disk tier has beyond device and host tier, with the last one."""


class StoredPrefix(NamedTuple):
    """How much of a prompt has reached the tiers behind the device, in tokens of whole pages from its start."""

    n_in_host: int = 0
    n_on_disk: int = 0
    """On disk, or in the shared store if there is no disk tier."""
    is_storing: bool = False
    """Whether the next page of one of the tiers is offered or on its way."""
    n_in_shared: int | None = None
    """In the shared store beside the disk tier; None without both."""


class AwaitedPages(NamedTuple):
    """The pages that a loading request waits for."""

    stage: LoadStage
    tier: Tier | None
    """The tier that they come from; None once they have come."""
    first: int
    """Entry of the request's block table that the first of them has."""
    n_pages: int
    """How many they are; 0 if they have come, are not counted, or if the tier is only asked for them."""
    slots: Sequence[int] = ()
    """Their slots in the host tier, if they come from there."""
    blocks: BlockTable | None = None
    """The request's block table, which has the pages that are copied to; None if it has none yet."""


class TierChanges(NamedTuple):
    """What a tier gets and loses."""

    medium: Literal["GPU", "CPU", "STORAGE"]
    changes: ChangeSource
    stored_pages: Callable[[], Iterable[StoredPages]]
    """Yields all pages, each after the pages before it."""
    kept_states: Callable[[], Iterable[KeptState]] = tuple
    """Yields all states that prompts can go on from, as far as the tier tells them."""


class ChangeSource(Protocol):
    """Where the changes of one tier come from."""

    @property
    def n_pages(self) -> int:
        """Pages that were stored and not removed since."""

    def take(self) -> list[Change]:
        """Returns the changes since the last call."""


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

    def awaited(self, request: Request, *, are_counted: bool = True) -> AwaitedPages:
        """Returns what a loading request waits for.

        Args:
            request: the request.
            are_counted: whether pages of a copy that was begun for another request are counted, in O(tokens); they
                are 0 otherwise.
        """
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

    def stats(self) -> tuple[HostStats | None, DiskStats | None, DiskStats | None]:
        """Returns the counters and gauges of host tier, disk tier and shared store; None for what there is not."""
        return None, None, None

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
