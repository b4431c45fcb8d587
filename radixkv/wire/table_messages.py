"""Messages about the block tables of running requests: the question, and its answer."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from radixkv.wire.cache_messages import Tier

PageKind: TypeAlias = Literal["tree", "skipped", "own", "freed", "loading"]
"""What an entry of a block table is.

``skipped`` is a page of the tree that the request's ``kv_budget`` keeps it from reading, ``own`` one of the
request alone, ``freed`` one behind all windows or that the ``kv_budget`` gave up, and ``loading`` one that awaits
its copy from a lower tier."""

LoadStage: TypeAlias = Literal["lookup", "fetch", "copy", "copied"]
"""What a loading request waits for: that a shared store says which pages it has, that pages are read into the host
tier, that they are copied to the device, or, once they are there, its turn."""


class GetTables(msgspec.Struct, frozen=True, tag=True):
    """Asks for the block tables of running requests. Answered by ``Tabled``; changes nothing."""

    id: str
    requests: tuple[str, ...] = ()
    """Ids of ``Submit`` whose tables to tell page by page; empty: the counts of all requests."""
    first: int = 0
    """The first entry of each table to tell."""


class TablePage(msgspec.Struct, frozen=True, array_like=True):
    """An entry of a block table: a logical page, and the physical page that has it."""

    entry: int
    """Its index in the table: the logical page."""
    page: int | None
    """The physical page on the device; None for one that was freed or is not there yet."""
    n_filled: int
    """Its tokens whose KV it has, or will have once launched steps and copies are done."""
    kind: PageKind
    n_refs: int
    """Block tables of running requests that have the page."""
    tier: Tier | None
    """Where its KV is: for a loading page where it comes from, None for a freed one."""
    slot: int | None = None
    """The slot of a loading page in the host tier."""
    window_page: int | None = None
    """The page of the layers with windows, where these have pages of their own; None outside the window."""
    state_slot: int | None = None
    """The slot of the state of recurrent layers that the tree has after the page; None without one."""


class ChoiceTable(msgspec.Struct, frozen=True):
    """The block table of one choice of a request."""

    choice: int
    phase: str
    """The value of its ``runtime.request.Phase``."""
    n_prompt: int
    n_known: int
    """Tokens of prompt and output that are known."""
    n_stored: int
    """Leading tokens whose KV is in its pages, or will be once the launched steps are done."""
    n_in_tree: int = 0
    """Entries that are pages of the tree."""
    n_shared: int = 0
    """How many of these other block tables have, too."""
    n_own: int = 0
    """Entries that are its own pages, which it writes."""
    n_freed: int = 0
    """Entries whose pages were freed: behind the windows, or for its ``kv_budget``."""
    n_skipped: int = 0
    """The part of ``n_in_tree`` that its answer goes on without, as its ``kv_budget`` asks."""
    n_loading: int = 0
    """Entries that wait for their copy from ``loading_from``."""
    loading_from: Tier | None = None
    """The tier that a copy is under way from, or that is asked for pages; None without one."""
    load_stage: LoadStage | None = None
    """What the request waits for while it loads; None if it does not."""
    n_window_pages: int = 0
    """Pages of the layers with windows, where these have pages of their own."""
    n_replaced: int = 0
    """Further own pages, which are freed soon: the tree had others with the same tokens."""
    batch_slot: int | None = None
    """The slot of the batch that it has. In a model with recurrent layers its present state is there."""
    pages: tuple[TablePage, ...] = ()
    """The entries from ``GetTables.first`` on, as far as the answer has room."""

    @property
    def n_pages(self) -> int:
        """Entries of the table."""
        return self.n_in_tree + self.n_own + self.n_freed + self.n_loading


class RequestTables(msgspec.Struct, frozen=True):
    """The block tables of a request's choices."""

    id: str
    """Id of its ``Submit``."""
    tenant: str
    choices: tuple[ChoiceTable, ...]
    request_id: str = ""
    """The ``X-Request-Id`` of the HTTP request that it belongs to, set by the frontend; empty if it has left."""
    replica: int | None = None
    """The number of the replica that has it, set by the frontend; None if there is one runtime."""


class PoolUse(msgspec.Struct, frozen=True):
    """Where all pages of the device's pool are; the other counts add up to ``n_pages``."""

    n_pages: int
    n_free: int
    n_leased: int
    """Pages of the tree in block tables of running requests, each once."""
    n_own: int
    """Pages of one request alone, those included that wait for their copy."""
    n_cached: int
    """Pages of the tree in no block table."""
    n_copied: int
    """Pages to which copies are under way that belong to no running request."""
    n_replaced: int
    """Pages in whose place are pages of layers with windows."""


class Tabled(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``GetTables``. Requests that have ended are not in it."""

    id: str
    pool: PoolUse
    requests: tuple[RequestTables, ...]
    """In the order of arrival."""
    n_more: int = 0
    """Further requests, for which the answer has no room."""
