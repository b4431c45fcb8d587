"""``radixkv top``: the cache of a running server, live in the terminal."""

from __future__ import annotations

import argparse
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from radixkv.cli.doctor import DoctorResponse
from radixkv.errors import ConfigError
from radixkv.settings.arguments import Parser, number
from radixkv.settings.client_flags import add_client_flags, api_key

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

N_RUNS = 12
"""Most runs of pages in the table."""
MIN_RUNS = 3
"""Runs of pages in the table of a terminal with few lines."""
N_REASONS = 5
"""Reasons of misses shown."""
LONGEST_INTERVAL_S = 3600.0
BAR_WIDTH = 30
MIN_BAR_WIDTH = 8
TIER_WIDTH = len("Host tier ")
MARK = re.compile(r"(<\|?\w{1,24}\|?>)+")
"""The special tokens with which texts begin."""
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
"""Units of times since the last use, in seconds."""
DOCTOR_PERIOD_S = 5.0
"""Time between two questions for the reasons of misses."""


class Load(msgspec.Struct):
    """Requests of the runtime."""

    running: int
    waiting: int
    max_running: int


class Share(NamedTuple):
    """A number of tokens, and of those of which they are a part."""

    part: int
    whole: int


class Totals(msgspec.Struct):
    """Counters since the start; the first two and the last two in tokens."""

    prefix_queries: int
    prefix_hits: int
    generation_tokens: int
    pages_evicted: int
    preemptions: int
    draft_tokens: int | None = None
    """None without drafts."""
    accepted_tokens: int = 0

    @property
    def hits(self) -> Share:
        """Cached prompt tokens of all."""
        return Share(self.prefix_hits, self.prefix_queries)

    @property
    def drafts(self) -> Share | None:
        """Accepted drafts of all; None without drafts."""
        return None if self.draft_tokens is None else Share(self.accepted_tokens, self.draft_tokens)


class Node(msgspec.Struct):
    """A run of pages in a tier's tree, and what continues it."""

    parent: int
    own_pages: int
    pages: int
    idle_seconds: float | None = None
    """Seconds since its last use; None: it is next to be evicted."""
    tiers: list[str] = []
    """In the joint tree, the tiers that have it."""
    leases: int = 0
    is_pinned: bool = False
    namespace: str = ""
    replica: int | None = None
    """In a root: whose tree it is, if the server has several replicas."""
    starts_with: str | list[int] = ""


class Tier(msgspec.Struct):
    """A tier with a tree in memory."""

    capacity: int
    free: int
    pages: int
    nodes: list[Node]
    evictable: int = 0
    """Pages that no request uses; of the device only."""
    pinned: int = 0


class Storage(msgspec.Struct):
    """The disk tier."""

    pages: int
    bytes: int


class Tiers(msgspec.Struct):
    """All tiers of the server."""

    device: Tier
    host: Tier | None = None
    storage: Storage | None = None


class Joint(msgspec.Struct):
    """The trees of device and host tier as one."""

    pages: int
    nodes: list[Node]


class TreeResponse(msgspec.Struct):
    """The response of ``/cache/tree``."""

    model: str
    time: float
    page_size: int
    load: Load
    totals: Totals
    tiers: Tiers
    joint: Joint | None = None


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "top",
        help=summary,
        description="Show the cache of a running radixkv server, again and again until q or Ctrl-C: the hit rate, "
        "requests, how full each tier is, the runs of pages with the most pages, and why prompts missed. The page "
        "/ui shows the same in a browser.",
    )
    parser.add_argument(
        "--interval",
        type=number,
        default=1.0,
        metavar="SECONDS",
        help="time between two updates (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print the state once, without an update")
    add_client_flags(parser)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the server's state until ``q`` or Ctrl-C, or once. Returns the exit code."""
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
            console.print(picture(tree, None, doctor, width=console.width))
            return 0
        before: TreeResponse | None = None

        def shown() -> RenderableType:
            return picture(tree, before, doctor, width=console.width, height=console.height)

        with _keys() as next_key, Live(shown(), console=console, screen=True, auto_refresh=False) as live:
            while next_key(args.interval) not in ("q", "Q"):
                try:
                    latest = client.get("/cache/tree", TreeResponse)
                    if time.monotonic() - asked_at >= DOCTOR_PERIOD_S:
                        doctor, asked_at = client.get("/cache/doctor", DoctorResponse), time.monotonic()
                except ServerError as error:  # while the server starts its runtime again, say
                    live.update(Text(str(error)), refresh=True)
                    continue
                if latest.time != tree.time:  # the server looks once a second
                    before, tree = tree, latest
                live.update(shown(), refresh=True)
    return 0


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits some seconds for a key and returns it, or nothing.

    Without a terminal on standard input, the function only waits.
    """
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    terminal = sys.stdin.fileno()

    def next_key(seconds: float) -> str:
        if not select.select([terminal], [], [], seconds)[0]:
            return ""
        key = os.read(terminal, 1) or b"q"  # nothing to read: the terminal is gone
        return key.decode("ascii", "replace")

    settings = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)  # keys arrive without Enter; Ctrl-C still interrupts
    try:
        yield next_key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def picture(
    tree: TreeResponse,
    before: TreeResponse | None,
    doctor: DoctorResponse,
    *,
    width: int,
    height: int | None = None,
) -> RenderableType:
    """Returns what is shown, in the words of the page /ui.

    Args:
        tree: the state.
        before: the state that was shown last, from which rates are computed; None at first.
        doctor: the reasons of misses.
        width: columns of the terminal; longer lines are wrapped between words, but those of runs are cut.
        height: lines of the terminal, which is live; None: it is not.
    """
    from rich.console import Group
    from rich.text import Text

    above = [*load_lines(tree, before), *tier_lines(tree.tiers, width)]
    reasons = [f"  {misses.text}" for misses in doctor.misses[:N_REASONS]]
    below = [doctor.text, *reasons]
    n_runs = N_RUNS
    if height is not None:
        n_lines = sum(-(-len(line) // width) for line in (*above, *below)) + len(("title", "", "header", ""))
        n_runs = max(MIN_RUNS, min(N_RUNS, height - n_lines))
    title = tree.model if height is None else f"{tree.model} (q quits)"
    return Group(
        Text(title, style="bold"),
        *map(Text, above),
        Text(),
        *run_lines(tree, n_runs, width),
        Text(),
        Text(doctor.text, style="bold"),
        *(Text(line, overflow="fold") for line in reasons),
    )


def load_lines(tree: TreeResponse, before: TreeResponse | None) -> list[str]:
    """Returns hit rate, accepted drafts if there are any, and requests.

    Given an earlier state of the same server, they have the rates between the two.
    """
    load, totals = tree.load, tree.totals
    earlier = None if before is None or tree.time <= before.time else before.totals
    shares = [_share("Hit rate", totals.hits, None if earlier is None else earlier.hits)]
    if totals.drafts is not None:
        shares.append(_share("Drafts accepted", totals.drafts, None if earlier is None else earlier.drafts))
    requests = f"Running {load.running:,} of at most {load.max_running:,}, waiting {load.waiting:,}"
    if before is not None and earlier is not None:
        n_tokens = totals.generation_tokens - earlier.generation_tokens
        if n_tokens >= 0:
            requests += f", answers {n_tokens / (tree.time - before.time):,.0f} tokens/s"
    return [*shares, requests, f"{totals.pages_evicted:,} pages evicted, {totals.preemptions:,} preemptions"]


def _share(title: str, now: Share, before: Share | None) -> str:
    """Returns a line with a share since the start, and since an earlier state."""
    line = f"{title} {_percent(*now)} since start"
    if before is not None and (n_whole := now.whole - before.whole) > 0:
        line += f", {_percent(now.part - before.part, n_whole)} now"
    return line


def tier_lines(tiers: Tiers, width: int) -> list[str]:
    """Returns a line for each tier: a bar of its pages in use, cached and free, and their numbers."""
    device, host, storage = tiers.device, tiers.host, tiers.storage
    n_in_use = device.capacity - device.free - device.evictable
    shares = f"{_percent(n_in_use, device.capacity)} in use, {_percent(device.evictable, device.capacity)} cached"
    pinned = f", {device.pinned:,} pinned" if device.pinned else ""
    text = f" {shares}, {device.capacity:,} pages{pinned}"
    lines = ["Pool".ljust(TIER_WIDTH) + _bar(device.capacity, n_in_use, device.evictable, width - len(text)) + text]
    if host is not None:
        n_filled = host.capacity - host.free
        text = f" {_percent(n_filled, host.capacity)} filled, {host.capacity:,} pages"
        lines.append("Host tier".ljust(TIER_WIDTH) + _bar(host.capacity, 0, n_filled, width - len(text)) + text)
    if storage is not None:
        lines.append(f"Storage tier {storage.pages:,} pages, {storage.bytes / 2**30:,.1f} GiB")
    return lines


def _bar(capacity: int, n_in_use: int, n_cached: int, room: int) -> str:
    """Returns a bar of at most ``room`` columns with the tier's name: pages in use, cached ones, free ones."""
    width = max(MIN_BAR_WIDTH, min(BAR_WIDTH, room - TIER_WIDTH))
    in_use = round(width * n_in_use / max(capacity, 1))
    filled = round(width * (n_in_use + n_cached) / max(capacity, 1))
    return "█" * in_use + "▒" * (filled - in_use) + "░" * (width - filled)


def run_lines(tree: TreeResponse, most: int, width: int) -> list[Text]:
    """Returns a header and the runs with the most pages in and below them, each below the one that it continues.

    A line that is longer than ``width`` loses the end of the run's text. Its numbers are not cut.
    """
    from rich.text import Text

    found = tree.joint or tree.tiers.device
    rows = [("Pages", "Share", "Last use", "Tiers", "Run")]
    for depth, node in largest_runs(found.nodes, most):
        text = "  " * depth + _name(node) + (" (pinned)" if node.is_pinned else "")
        rows.append(
            (f"{node.pages:,}", _percent(node.pages, found.pages), _last_use(node), ", ".join(node.tiers), text)
        )
    pages, shares, uses, tiers = (max(len(row[column]) for row in rows) for column in range(4))
    lines = []
    for row in rows:
        where = f"  {row[3]:<{tiers}}" if tree.joint else ""
        lines.append(Text(f"{row[0]:>{pages}}  {row[1]:>{shares}}  {row[2]:<{uses}}{where}  {row[4]}"))
    n_numbers = pages + shares + uses + 4 + (tiers + 2 if tree.joint else 0)
    room = width if n_numbers < width else 2 * width  # a narrow terminal wraps between words
    for line in lines:
        line.truncate(room, overflow="ellipsis")
    return lines


def _last_use(node: Node) -> str:
    if node.leases:
        return f"in use by {node.leases:,}"
    if node.idle_seconds is None:
        return "next to be evicted"
    length, unit = next((one for one in UNITS if node.idle_seconds >= one[0]), (1, "s"))
    return f"{int(node.idle_seconds / length):,} {unit} ago"


def _name(node: Node) -> str:
    """Returns a root's replica and salt, or a run's text without the marks at its beginning, or its size."""
    if node.parent < 0:
        where = "" if node.replica is None else f"replica {node.replica}, "
        return where + (node.namespace or "no salt")
    if isinstance(node.starts_with, str) and node.starts_with:
        text = " ".join(node.starts_with.split())
        return repr(MARK.sub("", text, count=1) if MARK.match(text) else text)
    return f"{node.own_pages:,} pages"


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
