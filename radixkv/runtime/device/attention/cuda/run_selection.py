"""Selection of the runs of shared pages that are worth reading once for all their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from radixkv.runtime.device.attention.cuda.base import Geometry
from radixkv.runtime.device.attention.cuda.work_items import Ints
from radixkv.runtime.step.plan import SharedRun

SharedKernel = Literal["fa2", "fa3"]
"""FlashInfer's kernel for pages that many rows share."""


@dataclass(frozen=True)
class SharingCosts:
    """Nanoseconds that reading shared pages costs, fitted to an H200 with 32 heads, 8 KV heads of 128, and bf16.

    Measured: 64 to 512 rows that share 256 to 8,064 tokens in 1 to 64 groups. Without sharing, and with small
    tiles, shared pages come from the L2 cache after the first read. The kernel of large tiles reads them from
    memory, or is compute-bound.
    """

    token_ns: float = 1.0
    """Reading a token of 4 KiB from memory."""
    cached_token_ns: float = 0.5
    """Reading a token that another row has read."""
    cached_tile_token_ns: float = 0.65
    """Reading a token that another small tile has read."""
    large_tile_token_ns: float = 0.85
    """Reading a token in a large tile of 128 (row, head) pairs."""
    launches_ns: float = 12_000.0
    """Fixed cost of sharing per layer: rows are split where shared pages end, and results merged."""
    large_ns: float = 8_000.0
    """Fixed cost of large tiles per layer: queries are copied, and one more kernel is launched."""
    run_ns: float = 100.0
    """Fixed cost of a run, whose results are merged."""

    @classmethod
    def for_kernel(cls, kernel: SharedKernel | None) -> SharingCosts:
        """Returns the costs with ``kernel`` for large tiles; None: there are none."""
        return cls() if kernel != "fa2" else cls(large_tile_token_ns=1.7, large_ns=16_000.0)

    def saved_ns(self, n_readers: int, n_tokens: float, n_tiles: int, is_large: bool) -> float:
        """Returns the nanoseconds that reading a run in ``n_tiles`` tiles saves, without ``launches_ns`` and
        ``large_ns``. Otherwise ``n_readers`` items of the rows read it."""
        unshared_ns = self.token_ns + (n_readers - 1) * self.cached_token_ns
        if is_large:
            tiled_ns = max(self.token_ns, n_tiles * self.large_tile_token_ns)
        else:
            tiled_ns = self.token_ns + (n_tiles - 1) * self.cached_tile_token_ns
        return n_tokens * (unshared_ns - tiled_ns) - self.run_ns


@dataclass(frozen=True)
class UsedRun:
    """A run of shared pages that is read once per tile of rows."""

    first_row: int
    """Index of the run's first row in ``SharingPlan.order``."""
    n_rows: int
    first_page: int
    n_pages: int
    is_large: bool
    """Whether large tiles read it."""


@dataclass(frozen=True)
class SharingPlan:
    """The used runs of a step, and an order of its decode rows in which each run's rows are consecutive."""

    order: Ints
    """[rows]: indices of the rows in the step."""
    covered_pages: Ints
    """[rows], in the order of ``order``: leading pages of each row that used runs read."""
    runs: tuple[UsedRun, ...]

    def expanded(self, counts: Ints) -> SharingPlan:
        """Returns the plan of a step with ``counts[row]`` consecutive rows for each row of this one. O(rows)."""
        ordered = counts[self.order]
        ends = np.concatenate([[0], np.cumsum(ordered)])
        row = np.repeat(np.arange(len(ordered)), ordered)
        order = (np.cumsum(counts) - counts)[self.order][row] + np.arange(len(row)) - ends[row]
        runs = []
        for run in self.runs:
            first, end = int(ends[run.first_row]), int(ends[run.first_row + run.n_rows])
            runs.append(replace(run, first_row=first, n_rows=end - first))
        return SharingPlan(order.astype(np.int32), self.covered_pages[row], tuple(runs))


class SharedRunSelector:
    """Selects the runs that are read once per tile.

    Args:
        costs: measured costs of reading, for tokens of 4 KiB.
        geometry: sizes of model and GPU.
    """

    def __init__(self, costs: SharingCosts, geometry: Geometry) -> None:
        self._costs = costs
        self._geometry = geometry
        self._page_tokens = geometry.shape.page_size * geometry.shape.token_bytes / 4096
        self._last_call: tuple[int, int] | None = None
        self._last_plan: SharingPlan | None = None

    def select(
        self,
        shared: Sequence[SharedRun],
        runs_id: int | None,
        n_rows: int,
        max_small_tiles: int,
        max_large_tiles: int,
        counts: Ints | None = None,
    ) -> SharingPlan | None:
        """Returns the runs to use; None if no run saves time.

        The pages of an unused run go to the runs nested in it, so that the used runs of a row cover its leading
        pages without a gap. O(rows of all runs), or O(1) for the same ``runs_id`` as in the last call, if there are
        no ``counts``.

        Args:
            shared: the step's runs, see ``StepPlan.shared_runs``.
            runs_id: their number, see ``StepPlan.runs_id``; None: they have none.
            n_rows: decode rows, which come first in the plan.
            max_small_tiles, max_large_tiles: most tiles that used runs may fill; functions of ``n_rows``.
            counts: [rows], queries of each row; None: one each.
        """
        if not shared:  # as in the plan of the last layer; the plan of the step's decode rows stays cached
            return None
        call = None if runs_id is None or counts is not None else (runs_id, n_rows)
        if call is None or call != self._last_call:
            self._last_call = call
            self._last_plan = self._select(shared, n_rows, max_small_tiles, max_large_tiles, counts)
        return self._last_plan

    def _select(
        self,
        shared: Sequence[SharedRun],
        n_rows: int,
        max_small_tiles: int,
        max_large_tiles: int,
        counts: Ints | None,
    ) -> SharingPlan | None:
        nodes, owners = _forest(shared, n_rows)
        if counts is not None:
            n_items = -(-counts // self._geometry.small_rows)
            for node in nodes:
                node.n_queries, node.n_readers = (int(of_rows[node.rows].sum()) for of_rows in (counts, n_items))
        saved_ns = saved_by_small_ns = self._use(nodes, max_small_tiles, 0)
        if max_large_tiles:
            saved_ns = self._use(nodes, max_small_tiles, max_large_tiles)
        if max(saved_ns, saved_by_small_ns) <= 0:
            return None
        if saved_by_small_ns > saved_ns:
            self._use(nodes, max_small_tiles, 0)
        return _sharing_plan(nodes, owners)

    def _use(self, nodes: list[_Node], n_small: int, n_large: int) -> float:
        """Decides for each run whether it is used, with at most this many tiles. Returns the nanoseconds saved."""
        for node in nodes:
            node.extend_over_unused()
            node.options = self._tile_options(node, has_large=n_large > 0)
            node.is_used = node.options[0].saved_ns > 0
        saved_ns, tiles_left = -self._costs.launches_ns, {False: n_small, True: n_large}
        for node in sorted(nodes, key=lambda node: -node.options[0].saved_ns):
            option = next(
                (
                    option
                    for option in node.options
                    if option.saved_ns > 0 and option.n_tiles <= tiles_left[option.is_large]
                ),
                None,
            )
            node.is_used = option is not None
            if option is not None:
                node.is_large = option.is_large
                tiles_left[option.is_large] -= option.n_tiles
                saved_ns += option.saved_ns
        return saved_ns - (self._costs.large_ns if tiles_left[True] < n_large else 0.0)

    def _tile_options(self, node: _Node, *, has_large: bool) -> list[_TileOption]:
        """Returns small and large tiles as options for reading a run, the better first."""
        n_tokens = (node.end - node.first_page) * self._page_tokens
        options = []
        for is_large in (False, True) if has_large else (False,):
            n_tiles = -(-node.n_queries // (self._geometry.large_rows if is_large else self._geometry.small_rows))
            saved_ns = self._costs.saved_ns(node.n_readers, n_tokens, n_tiles, is_large)
            options.append(_TileOption(saved_ns, n_tiles, is_large))
        return sorted(options, key=lambda option: -option.saved_ns)


class _TileOption(NamedTuple):
    """Reading a run in small or in large tiles."""

    saved_ns: float
    n_tiles: int
    is_large: bool


class _Node:
    """A run in the forest of nested runs."""

    def __init__(self, run: SharedRun, parent: _Node | None) -> None:
        self.rows = list(run.rows)
        self.n_rows = self.n_queries = self.n_readers = len(run.rows)
        self.first_page = run.first_page
        self.end = run.first_page + run.n_pages
        self.parent = parent
        self.children: list[_Node] = []
        self.n_own_rows = 0
        """Rows that are in no run nested in this one."""
        self.is_used = False
        self.is_large = False
        self.options: list[_TileOption] = []
        self.preorder = 0
        """Position in the forest's preorder, from 1."""
        self.covered = 0
        """Leading pages of its rows that used runs read."""

    def extend_over_unused(self) -> None:
        """Extends the run by the pages of unused runs around it."""
        if self.parent is not None:
            self.first_page = self.parent.end if self.parent.is_used else self.parent.first_page


def _forest(shared: Sequence[SharedRun], n_rows: int) -> tuple[list[_Node], list[_Node | None]]:
    """Builds the forest of nested runs. Returns its nodes, and the innermost run of each row.

    A run must begin at the first page, or where the enclosing run ends. Other runs are left out, as are runs with
    rows that are not among the first ``n_rows``.
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


def _sharing_plan(nodes: list[_Node], owners: list[_Node | None]) -> SharingPlan:
    """Orders the rows so that each used run's rows are consecutive."""
    for owner in owners:
        if owner is not None:
            owner.n_own_rows += 1
    runs: list[UsedRun] = []
    first_row = sum(1 for owner in owners if owner is None)
    pending = [node for node in reversed(nodes) if node.parent is None]
    n_visited = 0
    while pending:
        node = pending.pop()
        n_visited += 1
        node.preorder = n_visited
        node.extend_over_unused()
        node.covered = node.end if node.is_used else 0 if node.parent is None else node.parent.covered
        if node.is_used:
            runs.append(UsedRun(first_row, node.n_rows, node.first_page, node.end - node.first_page, node.is_large))
        first_row += node.n_own_rows
        pending.extend(reversed(node.children))
    preorder = np.array([0 if owner is None else owner.preorder for owner in owners])
    covered = np.array([0 if owner is None else owner.covered for owner in owners], dtype=np.int32)
    order = np.argsort(preorder, kind="stable").astype(np.int32)
    return SharingPlan(order, covered[order], tuple(runs))
