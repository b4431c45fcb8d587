"""Messages about the cache between the two processes: questions, commands, and their answers.

``wire`` encodes them like all other messages.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from radixkv.wire.namespace import CacheNamespace

Tier = Literal["device", "host", "storage"]
"""The tiers of the cache, from the uppermost down."""


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Empties the cache: makes all cached pages unreachable. Answered by ``Flushed``."""

    id: str


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Asks how much of a prompt is cached, and why no more. Answered by ``Explained``; changes nothing."""

    id: str
    tokens: bytes
    """The prompt, as little-endian int32 ids."""
    namespace: CacheNamespace = CacheNamespace()
    contents: bool = True
    """False: the answer has page granularity only, and says nothing about other salts."""


class Match(msgspec.Struct, frozen=True, tag=True):
    """Asks how much of some prompts each tier has, and for the load. Answered by ``Matched``; changes nothing."""

    id: str
    prompts: tuple[bytes, ...]
    """The prompts, each as little-endian int32 ids."""
    namespace: CacheNamespace = CacheNamespace()
    """A tenant is told its own load, the operator that of all."""


class GetStored(msgspec.Struct, frozen=True, tag=True):
    """Asks how much of a prompt the tiers below the device have by now. Answered by ``Stored``; changes nothing."""

    id: str
    tokens: bytes
    """The prompt, as little-endian int32 ids."""
    namespace: CacheNamespace = CacheNamespace()


class Outline(msgspec.Struct, frozen=True, tag=True):
    """Asks for the largest nodes of each tier's tree. Answered by ``Outlined``; changes nothing."""

    id: str
    contents: bool = True
    """False: the answer has no tokens."""


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Pins what is cached of a prompt, so that it is evicted after everything else. Answered by ``Pinned``."""

    id: str
    tokens: bytes
    """The prompt, as little-endian int32 ids."""
    ttl_s: float
    """How long to pin it, in seconds; 0 ends the pin of exactly this prompt."""
    namespace: CacheNamespace = CacheNamespace()


class Invalidate(msgspec.Struct, frozen=True, tag=True):
    """Drops what is cached of all sequences that begin with some tokens. Answered by ``Invalidated``."""

    id: str
    tokens: bytes
    """The beginning, as little-endian int32 ids; at least one page. Empty: everything in the namespace."""
    namespace: CacheNamespace = CacheNamespace()
    lowest_tier: Tier = "storage"
    """The tiers below it keep what they have."""
    all_adapters: bool = False
    """Whether it means the model and all adapters; the namespace then has none."""


class CloseSession(msgspec.Struct, frozen=True, tag=True):
    """Ends a session: what only it has cached is evicted first. Answered by ``SessionClosed``.

    ``Failed`` with ``session_not_found`` if no request had this id, or the session was closed or forgotten.
    """

    id: str
    session_id: str
    namespace: CacheNamespace = CacheNamespace()
    """That of the session's requests."""


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Flush``."""

    id: str
    n_pages_freed: int
    n_pages_leased: int
    """Unreachable pages that running requests still lease; freed when those requests end."""


class Invalidated(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Invalidate``: pages that no request finds any more."""

    id: str
    n_on_device: int
    n_held: int
    """Pages of the device that are freed later, when requests and copies that hold them end."""
    n_in_host: int | None = None
    """None without a host tier."""
    n_on_disk: int | None = None
    """None without a disk tier."""


class SessionClosed(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``CloseSession``: pages that are the first to be evicted now."""

    id: str
    n_on_device: int
    n_in_host: int | None = None
    """None without a host tier."""


class Explained(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Explain``; lengths and positions are in tokens.

    The fields from ``first_difference`` on are None if ``Explain.contents`` is False.
    """

    id: str
    n_tokens: int
    """Length of the prompt."""
    n_cached: int
    """Prompt tokens that a request would not compute.

    At most ``n_tokens - 1``, because the last token of a prompt is always computed. Only whole pages if
    ``Explain.contents`` is False.
    """
    reason: str
    """``whole``, ``differs``, ``evicted``, ``never_seen``, ``evicted_or_never_seen``, ``other_namespace``,
    ``invocation`` or ``no_state``; see ``tree.explain``."""
    first_difference: int | None = None
    """Position of the first token that no cached sequence has, if other cached pages follow the match."""
    token: int | None = None
    """The prompt's token at ``first_difference``."""
    cached_token: int | None = None
    """The token at ``first_difference`` in the cached sequence with the longest match."""
    n_cached_elsewhere: int | None = None
    """For ``other_namespace``: the longest cached prefix in any other namespace. For ``invocation``: that
    with another place of the invocation, if it is longer than the match."""
    n_in_host: int = 0
    """Prompt tokens after those on the device that the host tier has. Part of ``n_cached`` if ``is_loaded``."""
    is_loaded: bool = False
    """Whether a request would load the tokens that the host tier has; else it would compute them."""
    min_loaded_tokens: float | None = None
    """Length above which a load is faster than computing, by measured rates; None without a host tier, if its
    setting decides, or for a tenant: all tenants' requests are measured. Infinite: computing is always faster."""
    n_on_disk: int = 0
    """Prompt tokens after those on device and host tier that the disk tier lists. A page may turn out to be damaged
    when it is read, so they are no part of ``n_cached``."""
    is_demoted: bool = False
    """Whether the cached tokens are the first to be evicted: their session is closed, or has gone another way."""
    is_fetched: bool = False
    """Whether a request would fetch the tokens on disk, and then load them; else it would compute them."""
    n_pinned: int = 0
    """Leading tokens of the prompt that are pinned, on the device or in the host tier, whichever has more."""
    pin_seconds_left: float = 0.0
    """How long all of them stay pinned; 0 if there are none."""
    has_own_pin: bool = False
    """Whether there are some and a pin was asked for exactly this prompt, or pins cover all its whole pages."""
    n_without_state: int = 0
    """For ``no_state`` and ``whole``: the tokens of the pages that match after ``n_cached``."""
    adapter_elsewhere: str | None = None
    """For ``other_namespace`` and ``invocation``: digest of the adapter under which the prompt is cached with the
    same salt, empty for the model alone; None if it is cached with another salt, or with the same adapter."""
    n_fetched: int = 0
    """How many of the tokens ``n_on_disk`` a request would fetch."""
    n_from_shared: int | None = None
    """How many tokens a request would fetch from a shared store beside the disk tier; None without both, if it
    fetches none, or for a tenant: all tenants' requests are measured."""


class TierMatch(msgspec.Struct, frozen=True, array_like=True):
    """How much of a prompt the tiers have, in tokens of whole pages."""

    n_tokens: int
    """Length of the prompt."""
    n_on_device: int
    n_in_host: int
    """Tokens after those on the device that the host tier has."""
    n_on_disk: int
    """Tokens after those on device and host tier that the disk tier lists."""


class Matched(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Match``: the prompts in their order, and the load."""

    id: str
    prompts: tuple[TierMatch, ...]
    n_running: int
    n_waiting: int
    n_pages_free: int | None
    """None for a tenant, as ``n_pages_evictable``: the lengths of others' prompts follow from it."""
    n_pages_evictable: int | None


class Stored(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``GetStored``: leading tokens of the prompt, in whole pages, with states up to one of them."""

    id: str
    n_in_host: int
    n_on_disk: int
    """What the disk tier is known to have, or the shared store if there is no disk tier."""
    is_storing: bool
    """Whether the next page of one of them is offered or on its way."""
    n_in_shared: int | None = None
    """What the shared store beside the disk tier is known to have; None without both."""


class TreeNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of a tier's tree: a run of pages that continues its parent's run."""

    serial: int
    """Names the node as long as it is in the tree; a split gives the upper part a new one."""
    parent: int
    """Index of the parent in ``TierOutline.nodes``; -1 for the root of a namespace, which has no pages itself."""
    n_own_pages: int
    n_pages: int
    """Pages of the node and of the nodes below it, as far as these were visited."""
    n_leases: int
    """Requests and copies that hold it."""
    n_hits: int
    """Requests that have found it, as far as the eviction policy counts them."""
    age: int | None
    """Uses of the tree since that of the node; None if it is demoted, or if ages do not count."""
    is_pinned: bool
    n_more: int = 0
    """Nodes below it that are below no other node of the outline, and not in it; at least so many."""
    n_more_pages: int = 0
    """Pages of those of them that were visited."""
    namespace: str = ""
    """In a root: a label of its salt that does not reveal it, the same in all tiers; empty without a salt."""
    tokens: bytes = b""
    """The first tokens of the run; none without ``Outline.contents``."""
    idle_s: float | None = None
    """Seconds since its last use; None if its age is None."""
    tiers: tuple[Tier, ...] = ()
    """In ``Outlined.joint``: the tiers that have the run."""
    replica: int | None = None
    """In a root: the number of the replica that has the tree, set by the frontend; None if there is one runtime."""
    has_state: bool = False
    """Whether a state of recurrent layers is kept after its last token: a prompt can go on from there."""


class TierOutline(msgspec.Struct, frozen=True):
    """The largest nodes of a tier's tree, parents first."""

    nodes: tuple[TreeNode, ...]
    n_pages: int
    """Pages of the tree."""
    n_not_visited: int
    """The part of them that was not visited, because the tree has too many nodes."""
    n_more_roots: int
    """Visited roots that are not among ``nodes``."""
    n_more_root_pages: int
    """Pages of those, with the nodes below them."""


class Outlined(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Outline``."""

    id: str
    device: TierOutline
    host: TierOutline | None = None
    """None without a host tier."""
    joint: TierOutline | None = None
    """Both trees as one: a run is in the same tiers as a whole, and counts once. None without a host tier."""


class Pinned(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Pin``: what is pinned of the prompt now."""

    id: str
    n_tokens: int
    """Length of the prompt."""
    n_pinned: int
    """Leading tokens of the prompt that are pinned, on the device or in the host tier, whichever has more."""
    seconds_left: float
    """How long all of them stay pinned; 0 if there are none."""


class BeginPause(msgspec.Struct, frozen=True, tag=True):
    """Says that a prompt can go on from an answer, with results of its tools or what its user says next.

    Answered by ``PauseBegun``.
    """

    id: str
    request_id: str
    """Id of the ``Submit``, which has ended."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the answer has called."""


class PauseBegun(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``BeginPause``."""

    id: str


class EndPause(msgspec.Struct, frozen=True, tag=True):
    """Says that a prompt has gone on from an answer elsewhere, so that nobody will come back for its pages.

    Answered by ``PauseEnded``.
    """

    id: str
    request_id: str
    """Id of the ``Submit`` that had the answer."""


class PauseEnded(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``EndPause``."""

    id: str


CacheCommand: TypeAlias = (
    Flush | Invalidate | CloseSession | Explain | Match | GetStored | Outline | Pin | BeginPause | EndPause
)
"""What the frontend asks of the cache."""
CacheReply: TypeAlias = (
    Flushed
    | Invalidated
    | SessionClosed
    | Explained
    | Matched
    | Stored
    | Outlined
    | Pinned
    | PauseBegun
    | PauseEnded
)
"""The answer to a ``CacheCommand``, unless it is ``Failed``."""
