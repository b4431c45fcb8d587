"""``radixkv top``: the cache of a running server, live in the terminal."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import msgspec

from radixkv.arguments import Parser, number
from radixkv.cli.doctor import DoctorResponse
from radixkv.errors import ConfigError
from radixkv.server_flags import add_server_flags, api_key

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

N_RUNS = 12
"""Runs of pages in the table."""
N_REASONS = 5
"""Reasons of misses shown."""
LONGEST_INTERVAL_S = 3600.0
BAR_WIDTH = 30
TEXT_WIDTH = 48
DOCTOR_PERIOD_S = 5.0
"""Time between two questions for the reasons of misses."""


class Load(msgspec.Struct):
    """Requests of the runtime."""

    running: int
    waiting: int
    max_running: int


class Totals(msgspec.Struct):
    """Counters since the start; the first two in tokens."""

    prefix_queries: int
    prefix_hits: int
    generation_tokens: int
    pages_evicted: int
    preemptions: int


class Node(msgspec.Struct):
    """A run of pages in a tier's tree, and what continues it."""

    parent: int
    own_pages: int
    pages: int
    age: int | None = None
    leases: int = 0
    is_pinned: bool = False
    namespace: str = ""
    starts_with: str | list[int] = ""


class Tier(msgspec.Struct):
    """A tier with a tree in memory."""

    capacity: int
    free: int
    pages: int
    nodes: list[Node]


class Storage(msgspec.Struct):
    """The disk tier."""

    pages: int
    bytes: int


class Tiers(msgspec.Struct):
    """All tiers of the server."""

    device: Tier
    host: Tier | None = None
    storage: Storage | None = None


class TreeResponse(msgspec.Struct):
    """The response of ``/cache/tree``."""

    model: str
    time: float
    page_size: int
    load: Load
    totals: Totals
    tiers: Tiers


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "top",
        help="show a server's cache live: tiers, hit rate, the largest prefixes, why prompts missed",
        description="Show the cache of a running radixkv server, again and again until Ctrl-C: requests, how full "
        "each tier is, the hit rate, the prefixes with the most pages, and why prompts missed. The page /ui shows "
        "the same in a browser.",
    )
    parser.add_argument(
        "--interval",
        type=number,
        default=1.0,
        metavar="SECONDS",
        help="time between two updates (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print the state once, without an update")
    add_server_flags(parser)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the server's state until Ctrl-C, or once. Returns the exit code."""
    parser: Parser = args.parser
    if not 0 < args.interval <= LONGEST_INTERVAL_S:
        parser.error(f"--interval {args.interval:g} must be above 0 and at most {LONGEST_INTERVAL_S:g}")
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from radixkv.cli.server_client import ServerClient, ServerError

    console = Console()
    if not args.once and not console.is_terminal:
        raise ConfigError("standard output is no terminal; give --once to print the state once")
    with ServerClient(args.base_url, api_key(args)) as client:
        tree = client.get("/cache/tree", TreeResponse)
        doctor, asked_at = client.get("/cache/doctor", DoctorResponse), time.monotonic()
        if args.once:
            console.print(picture(tree, None, doctor))
            return 0
        before: TreeResponse | None = None
        with Live(picture(tree, before, doctor), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(args.interval)
                try:
                    latest = client.get("/cache/tree", TreeResponse)
                    if time.monotonic() - asked_at >= DOCTOR_PERIOD_S:
                        doctor, asked_at = client.get("/cache/doctor", DoctorResponse), time.monotonic()
                except ServerError as error:  # while the server starts its runtime again, say
                    live.update(Text(str(error)), refresh=True)
                    continue
                if latest.time != tree.time:  # the server looks once a second
                    before, tree = tree, latest
                live.update(picture(tree, before, doctor), refresh=True)


def picture(tree: TreeResponse, before: TreeResponse | None, doctor: DoctorResponse) -> RenderableType:
    """Returns what is shown.

    Args:
        tree: the state.
        before: the state that was shown last, from which rates are computed; None at first.
        doctor: the reasons of misses.
    """
    from rich.console import Group
    from rich.text import Text

    reasons = [Text(f"  {misses.text}", overflow="fold") for misses in doctor.misses[:N_REASONS]]
    return Group(
        Text(f"{tree.model}: {load_text(tree, before)}", style="bold"),
        *(Text(line) for line in tier_lines(tree.tiers)),
        Text(),
        runs_table(tree),
        Text(),
        Text(doctor.text, style="bold"),
        *reasons,
    )


def load_text(tree: TreeResponse, before: TreeResponse | None) -> str:
    """Returns requests, hit rate and, given an earlier state of the same server, the rate of output tokens."""
    load, totals = tree.load, tree.totals
    parts = [
        f"{load.running} of {load.max_running} running",
        f"{load.waiting} waiting",
        f"{_percent(totals.prefix_hits, totals.prefix_queries)} of prompt tokens cached",
    ]
    if before is not None and tree.time > before.time:
        n_queries = totals.prefix_queries - before.totals.prefix_queries
        if n_queries > 0:
            parts[-1] += f" ({_percent(totals.prefix_hits - before.totals.prefix_hits, n_queries)} now)"
        n_tokens = totals.generation_tokens - before.totals.generation_tokens
        if n_tokens >= 0:
            parts.append(f"{n_tokens / (tree.time - before.time):,.0f} tokens/s")
    parts += [f"{totals.pages_evicted:,} pages evicted", f"{totals.preemptions:,} preemptions"]
    return ", ".join(parts)


def tier_lines(tiers: Tiers) -> list[str]:
    """Returns a line for each tier: a bar of its used pages, and their number."""
    lines = []
    for name, tier in (("device", tiers.device), ("host", tiers.host)):
        if tier is not None:
            n_used = tier.capacity - tier.free
            filled = round(BAR_WIDTH * n_used / max(tier.capacity, 1))
            bar = "█" * filled + "░" * (BAR_WIDTH - filled)
            lines.append(
                f"{name:<8} {bar} {_percent(n_used, tier.capacity):>6} of {tier.capacity:,} pages used, "
                f"{tier.pages:,} cached"
            )
    if tiers.storage is not None:
        lines.append(f"storage  {tiers.storage.pages:,} pages, {tiers.storage.bytes / 1e9:.2f} GB")
    return lines


def runs_table(tree: TreeResponse) -> Table:
    """Returns the cached prefixes with the most pages in and below them, each below the one that it continues."""
    from rich.table import Table
    from rich.text import Text

    table = Table("pages", "share", "last use", "requests", "prefix", box=None, pad_edge=False)
    for column in table.columns[:4]:
        column.justify = "right"
        column.no_wrap = True
    table.columns[4].no_wrap = True
    device = tree.tiers.device
    for depth, node in largest_runs(device.nodes, N_RUNS):
        text = node.starts_with if isinstance(node.starts_with, str) else str(node.starts_with)
        label = repr(text[:TEXT_WIDTH]) if text else node.namespace or "(no salt)" if node.parent < 0 else "…"
        last_use = "next to go" if node.age is None else f"{node.age:,} uses ago"
        table.add_row(
            f"{node.pages:,}",
            _percent(node.pages, device.pages),
            "in use" if node.leases else last_use,
            str(node.leases) if node.leases else "",
            Text("  " * depth + label + (" (pinned)" if node.is_pinned else "")),
        )
    return table


def largest_runs(nodes: list[Node], most: int) -> list[tuple[int, Node]]:
    """Returns the ``most`` nodes with the most pages in and below them, with their depth, in the order of the tree.

    A node has no more pages than its parent, so the parent of each is among them.
    """
    ranked = sorted(range(len(nodes)), key=lambda index: (-nodes[index].pages, index))[:most]
    below: dict[int, list[int]] = {}
    for index in ranked:
        below.setdefault(nodes[index].parent, []).append(index)
    lines: list[tuple[int, Node]] = []
    left = [(0, index) for index in reversed(below.get(-1, []))]
    while left:
        depth, index = left.pop()
        lines.append((depth, nodes[index]))
        left += [(depth + 1, child) for child in reversed(below.get(index, []))]
    return lines


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
