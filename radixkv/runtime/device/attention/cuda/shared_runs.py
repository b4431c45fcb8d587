"""Which runs of shared pages are worth reading once for all their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from radixkv.runtime.device.attention.cuda.work_items import Ints
from radixkv.runtime.step.plan import SharedRun

SharedKernel = Literal["fa2", "fa3"]
"""FlashInfer's kernel for pages that many rows share."""


@dataclass(frozen=True)
class SharingCosts:
    """What reading shared pages costs, in nanoseconds, fitted to one H200 with 32 heads, 8 KV heads of 128, bf16.

    Measured: 64 to 512 rows that share 256 to 8,064 tokens in 1 to 64 groups. Flat or in small tiles, pages that
    many read come from the L2 cache after the first; the large tiles' kernel reads them from memory, or is bound by
    its products.
    """

    token_ns: float = 1.0
    """4 KiB of memory."""
    cached_token_ns: float = 0.5
    """A token that another row reads too."""
    cached_tile_token_ns: float = 0.65
    """A token that another small tile reads too."""
    large_tile_token_ns: float = 0.85
    """A token of one large tile, of 128 (row, head) pairs."""
    launches_ns: float = 12_000.0
    """What a layer pays for any sharing: rows are cut where the shared pages end, and results merged."""
    large_ns: float = 8_000.0
    """What it pays for any large tiles: queries are copied, and one more kernel begins and ends."""
    run_ns: float = 100.0
    """What a run must save: its results are merged."""

    @classmethod
    def of(cls, kernel: SharedKernel) -> SharingCosts:
        """With that kernel for large tiles."""
        return cls() if kernel == "fa3" else cls(large_tile_token_ns=1.7, large_ns=16_000.0)

    def saved_ns(self, n_rows: int, n_tokens: float, n_tiles: int, is_large: bool) -> float:
        """What one run saves that is read in so many tiles; without ``launches_ns`` and ``large_ns``."""
        flat = self.token_ns + (n_rows - 1) * self.cached_token_ns
        if is_large:
            tiled = max(self.token_ns, n_tiles * self.large_tile_token_ns)
        else:
            tiled = self.token_ns + (n_tiles - 1) * self.cached_tile_token_ns
        return n_tokens * (flat - tiled) - self.run_ns


@dataclass(frozen=True)
class UsedRun:
    """A run that is read once a tile of rows."""

    first_row: int
    """Place in the order of ``Sharing``."""
    n_rows: int
    first_page: int
    n_pages: int
    is_large: bool
    """In large tiles."""


@dataclass(frozen=True)
class Sharing:
    """A step's decode rows in an order in which each used run's rows are neighbours."""

    order: Ints
    """[rows]: place in the batch."""
    covered_pages: Ints
    """[rows], in that order: pages from the first on that the used runs read for the row."""
    runs: tuple[UsedRun, ...]


class SharingChoice:
    """Chooses runs.

    Args:
        page_size: tokens a page.
        token_bytes: K and V of one token in one layer; ``costs`` are for 4 KiB.
        group: heads that share a KV head.
        small_tile, large_tile: (row, head) pairs that a tile holds.
    """

    def __init__(
        self,
        costs: SharingCosts,
        *,
        page_size: int,
        token_bytes: int,
        group: int,
        small_tile: int,
        large_tile: int,
    ) -> None:
        self._costs = costs
        self._page_tokens = page_size * token_bytes / 4096
        self._small_rows = small_tile // group
        self._large_rows = large_tile // group
        self._asked: tuple[Sequence[SharedRun], int] = (), 0
        self._chosen: Sharing | None = None

    def choose(
        self, shared: Sequence[SharedRun], n_rows: int, max_small_tiles: int, max_large_tiles: int
    ) -> Sharing | None:
        """The runs to use; None if none pays. O(rows of all runs), and O(1) for the very object of the last call
        that had any.

        A run that is not used leaves its pages to the runs behind it, so that the used ones of a row read its pages
        from the first on without a gap.

        Args:
            n_rows: decode rows, which are the first of the plan.
            max_small_tiles, max_large_tiles: how many tiles the used runs may fill; they follow from ``n_rows``.
        """
        if not shared:  # steps with prompts, among others: what is remembered stays
            return None
        if self._asked[0] is not shared or self._asked[1] != n_rows:
            self._asked = shared, n_rows
            self._chosen = self._choose(shared, n_rows, max_small_tiles, max_large_tiles)
        return self._chosen

    def _choose(
        self, shared: Sequence[SharedRun], n_rows: int, max_small_tiles: int, max_large_tiles: int
    ) -> Sharing | None:
        nodes, owners = _forest(shared, n_rows)
        saved_ns = {n_large: self._use(nodes, max_small_tiles, n_large) for n_large in (max_large_tiles, 0)}
        best = max(saved_ns, key=lambda n_large: saved_ns[n_large])
        if saved_ns[best] <= 0:
            return None
        self._use(nodes, max_small_tiles, best)
        return _in_order(nodes, owners)

    def _use(self, nodes: list[_Node], n_small: int, n_large: int) -> float:
        """Decides for each run, with so many tiles at most; what that saves in all."""
        for node in nodes:
            node.absorb()
            node.ways = self._ways(node, has_large=n_large > 0)
            node.is_used = node.ways[0].saved_ns > 0
        saved_ns, left = -self._costs.launches_ns, {False: n_small, True: n_large}
        for node in sorted(nodes, key=lambda node: -node.ways[0].saved_ns):
            way = next((way for way in node.ways if way.saved_ns > 0 and way.n_tiles <= left[way.is_large]), None)
            node.is_used = way is not None
            if way is not None:
                node.is_large = way.is_large
                left[way.is_large] -= way.n_tiles
                saved_ns += way.saved_ns
        return saved_ns - (self._costs.large_ns if left[True] < n_large else 0.0)

    def _ways(self, node: _Node, *, has_large: bool) -> list[_Way]:
        """Small tiles and large ones, the better first."""
        n_tokens = (node.end - node.first_page) * self._page_tokens
        ways = []
        for is_large, n_rows in ((False, self._small_rows), (True, self._large_rows)):
            n_tiles = -(-node.n_rows // n_rows)
            if has_large or not is_large:
                ways.append(_Way(self._costs.saved_ns(node.n_rows, n_tokens, n_tiles, is_large), n_tiles, is_large))
        return sorted(ways, key=lambda way: -way.saved_ns)


class _Way(NamedTuple):
    saved_ns: float
    n_tiles: int
    is_large: bool


class _Node:
    """A run with its place among the others."""

    def __init__(self, run: SharedRun, parent: _Node | None) -> None:
        self.n_rows = len(run.rows)
        self.first_page = run.first_page
        self.end = run.first_page + run.n_pages
        self.parent = parent
        self.children: list[_Node] = []
        self.n_own_rows = 0
        """Rows that are in no run behind it."""
        self.is_used = False
        self.is_large = False
        self.ways: list[_Way] = []
        self.place = 0
        """In the order in which each run comes before those behind it, and they before its neighbours."""
        self.covered = 0
        """Pages from the first on that used runs read for its rows."""

    def absorb(self) -> None:
        """Takes over the pages of runs before it that are not used."""
        if self.parent is not None:
            self.first_page = self.parent.end if self.parent.is_used else self.parent.first_page


def _forest(shared: Sequence[SharedRun], n_rows: int) -> tuple[list[_Node], list[_Node | None]]:
    """Runs that begin at the first page, or where the run of more rows before them ends; and each row's last one.

    Others are left out, as are those with rows behind the ``n_rows`` first.
    """
    nodes: list[_Node] = []
    owners: list[_Node | None] = [None] * n_rows
    for run in shared:
        if len(run.rows) < 2 or run.rows[-1] >= n_rows:
            continue
        parent = owners[run.rows[0]]
        begin = 0 if parent is None else parent.end
        if run.first_page != begin or any(owners[row] is not parent for row in run.rows):
            continue
        node = _Node(run, parent)
        nodes.append(node)
        if parent is not None:
            parent.children.append(node)
        for row in run.rows:
            owners[row] = node
    return nodes, owners


def _in_order(nodes: list[_Node], owners: list[_Node | None]) -> Sharing:
    for owner in owners:
        if owner is not None:
            owner.n_own_rows += 1
    runs: list[UsedRun] = []
    first_row = sum(1 for owner in owners if owner is None)
    pending = [node for node in reversed(nodes) if node.parent is None]
    place = 0
    while pending:
        node = pending.pop()
        place += 1
        node.place = place
        node.absorb()
        node.covered = node.end if node.is_used else 0 if node.parent is None else node.parent.covered
        if node.is_used:
            runs.append(UsedRun(first_row, node.n_rows, node.first_page, node.end - node.first_page, node.is_large))
        first_row += node.n_own_rows
        pending.extend(reversed(node.children))
    places = np.array([0 if owner is None else owner.place for owner in owners])
    covered = np.array([0 if owner is None else owner.covered for owner in owners], dtype=np.int32)
    order = np.argsort(places, kind="stable").astype(np.int32)
    return Sharing(order, covered[order], tuple(runs))
