"""Tests of ``radixkv top`` with a fake server, and of its numbers."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cli import main, top
from radixkv.cli.top import Node, TreeResponse, largest_runs, load_lines, tier_lines
from support.cases import rest_nightly
from support.fake_openai import FakeServer
from support.live import LIMIT_S

TREE: dict[str, Any] = {
    "model": "llama",
    "time": 100.0,
    "page_size": 16,
    "load": {"running": 3, "waiting": 12, "max_running": 256},
    "totals": {
        "prefix_queries": 1000,
        "prefix_hits": 870,
        "generation_tokens": 5000,
        "pages_evicted": 40,
        "preemptions": 2,
    },
    "tiers": {
        "device": {
            "capacity": 400,
            "free": 100,
            "evictable": 200,
            "pages": 200,
            "nodes": [
                {"id": 0, "parent": -1, "own_pages": 0, "pages": 200, "idle_seconds": 0.4, "namespace": "salt 1"},
                {
                    "id": 1,
                    "parent": 0,
                    "own_pages": 200,
                    "pages": 200,
                    "idle_seconds": 130,
                    "starts_with": "You are",
                },
                {"id": 2, "parent": 1, "own_pages": 50, "pages": 50, "age": 9, "leases": 2, "is_pinned": True},
            ],
        },
        "host": {"capacity": 1000, "free": 1000, "pages": 0, "nodes": []},
        "storage": {"pages": 12, "bytes": 3_000_000_000},
    },
}
DOCTOR = {"text": "87% of 1,000 tokens were cached", "misses": [{"text": f"reason {i}"} for i in range(9)]}


@pytest.fixture
def server(fake: FakeServer) -> FakeServer:
    fake.responses = {"/cache/tree": lambda _: TREE, "/cache/doctor": lambda _: DOCTOR}
    return fake


def test_once(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--base-url", server.address, "--api-key", "secret"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "llama",
        "Hit rate 87.0% since start",
        "Running 3 of at most 256, waiting 12",
        "40 pages evicted, 2 preemptions",
    ]
    assert [line.split()[0] for line in lines if "▒" in line or "░" in line] == ["Pool", "Host"]
    assert any(line.split() == ["200", "100.0%", "2", "min", "ago", "'You", "are'"] for line in lines)
    assert any(line.split() == ["50", "25.0%", "in", "use", "by", "2", "50", "pages", "(pinned)"] for line in lines)
    assert [line.strip() for line in lines if "reason" in line] == [f"reason {i}" for i in range(5)]
    assert {key for _, _, key in server.requests} == {"Bearer secret"}


def test_the_trees_of_replicas_are_told_apart(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    root = {"parent": -1, "own_pages": 0, "idle_seconds": 1}
    nodes = [root | {"pages": 120, "replica": 0, "namespace": "5eed"}, root | {"pages": 80, "replica": 1}]
    device = TREE["tiers"]["device"] | {"nodes": nodes}
    server.responses["/cache/tree"] = lambda _: TREE | {"tiers": {"device": device}}
    assert main(["top", "--once", "--base-url", server.address]) == 0
    shown = capsys.readouterr().out
    assert "replica 0, 5eed" in shown
    assert "replica 1, no salt" in shown


def test_a_pipe_is_refused(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--base-url", server.address]) == 1
    assert "give --once" in capsys.readouterr().err


def test_the_picture_survives_a_restart_of_the_runtime(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what the server says, goes on, and ends at Ctrl-C. The doctor may be the one that is refused."""
    answers = iter([TREE, {"error": "restarting"}, TREE | {"time": 101.0}])

    def next_tree(_: object) -> dict[str, Any]:
        if (answer := next(answers, None)) is None:
            raise AssertionError("asked again after Ctrl-C")
        return answer

    naps = iter([None, None, KeyboardInterrupt])

    def sleep(_: float) -> None:
        if (end := next(naps)) is not None:
            raise end

    server.responses["/cache/tree"] = next_tree
    monkeypatch.setattr(top.time, "sleep", sleep)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    assert main(["top", "--base-url", server.address]) == 130
    shown = capsys.readouterr().out
    assert "restarting" in shown
    assert shown.rindex("Running 3 of at most 256") > shown.index("restarting")


@pytest.mark.parametrize("interval", ["0", "-1", "inf", "soon"])
def test_intervals_that_are_none(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", f"--interval={interval}"])
    assert "--interval" in capsys.readouterr().err


def test_a_server_without_a_tree(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--base-url", fake.address]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_rates_are_those_since_the_state_before() -> None:
    totals = TREE["totals"] | {"prefix_queries": 1200, "prefix_hits": 970, "generation_tokens": 5600}
    before = msgspec.convert(TREE, TreeResponse)
    rate, requests, _ = load_lines(msgspec.convert(TREE | {"time": 102.0, "totals": totals}, TreeResponse), before)
    assert rate == "Hit rate 80.8% since start, 50.0% now"
    assert requests.endswith(", answers 300 tokens/s")


def test_accepted_drafts_are_beside_the_hit_rate_of_a_server_with_drafts() -> None:
    drafted = TREE | {"totals": TREE["totals"] | {"draft_tokens": 60, "accepted_tokens": 24}}
    later = TREE | {"time": 102.0, "totals": TREE["totals"] | {"draft_tokens": 80, "accepted_tokens": 40}}
    before = msgspec.convert(drafted, TreeResponse)
    assert load_lines(before, None)[1] == "Drafts accepted 40.0% since start"
    assert (
        load_lines(msgspec.convert(later, TreeResponse), before)[1]
        == "Drafts accepted 50.0% since start, 80.0% now"
    )
    nothing = TREE | {"totals": TREE["totals"] | {"draft_tokens": 0, "accepted_tokens": 0}}
    assert load_lines(msgspec.convert(nothing, TreeResponse), None)[1] == "Drafts accepted - since start"


def test_rates_of_a_server_that_was_started_again_are_left_out() -> None:
    totals = dict.fromkeys(TREE["totals"], 0)
    before = msgspec.convert(TREE, TreeResponse)
    lines = load_lines(msgspec.convert(TREE | {"time": 102.0, "totals": totals}, TreeResponse), before)
    assert lines[:2] == ["Hit rate - since start", "Running 3 of at most 256, waiting 12"]


def test_bars_show_pages_in_use_and_cached_ones() -> None:
    device, host, storage = tier_lines(msgspec.convert(TREE, TreeResponse).tiers, 80)
    assert [device.count(sign) for sign in "█▒░"] == [8, 14, 8]
    assert [host.count(sign) for sign in "█▒░"] == [0, 0, 30]
    assert "25.0% in use, 50.0% cached, 400 pages" in device
    assert storage == "Storage tier 12 pages, 2.8 GiB"


LARGE = 123_456_789


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_number_is_cut_at_any_width(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    text = "Tell me a story of " + "a very long way to say it, " * 20
    old = {"pages": LARGE, "idle_seconds": 86_400.0 * LARGE}
    nodes = [
        {"id": 0, "parent": -1, "own_pages": 0, "namespace": "salt 1", **old},
        {"id": 1, "parent": 0, "own_pages": 1, "starts_with": text, **old},
        {"id": 2, "parent": 1, "own_pages": 1, "pages": LARGE, "leases": LARGE, "starts_with": text},
    ]
    tier = {"capacity": 2 * LARGE, "free": 5, "evictable": LARGE, "pinned": LARGE, "pages": LARGE, "nodes": nodes}
    large = TREE | {
        "load": dict.fromkeys(TREE["load"], LARGE),
        "totals": dict.fromkeys(TREE["totals"], LARGE),
        "tiers": {"device": tier, "host": tier, "storage": {"pages": LARGE, "bytes": LARGE << 30}},
    }
    server.responses["/cache/tree"] = lambda _: large
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["top", "--once", "--base-url", server.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    n_numbers = " ".join(lines).count(f"{LARGE:,}")
    # Requests, evictions, pinned pages, the storage tier, and pages and last use of three runs.
    assert n_numbers == 3 + 2 + 1 + 2 + 6
    runs = [line for line in lines if line.startswith(f"{LARGE:,}") and "%" in line]
    assert len(runs) == 3
    assert all(len(line) <= max(width, 60) for line in lines)
    if width >= 80:
        assert "Tell me a story" in runs[1]


def test_the_joint_tree_of_both_tiers_has_marks_and_times(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [
        {"parent": -1, "own_pages": 0, "pages": 50, "age": 0, "idle_seconds": 3.4, "tiers": ["device", "host"]},
        {"parent": 0, "own_pages": 50, "pages": 50, "age": 9, "idle_seconds": 7300, "tiers": ["host"]},
        {"parent": 1, "own_pages": 5, "pages": 5, "tiers": ["device"]},
    ]
    server.responses["/cache/tree"] = lambda _: TREE | {"joint": {"pages": 50, "nodes": nodes}}
    assert main(["top", "--once", "--base-url", server.address]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["50", "100.0%", "3", "s", "ago", "device,", "host", "no", "salt"] in lines
    assert ["50", "100.0%", "2", "h", "ago", "host", "50", "pages"] in lines
    assert ["5", "10.0%", "next", "to", "be", "evicted", "device", "5", "pages"] in lines


def test_a_text_cannot_control_the_terminal(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    node = {"id": 1, "parent": 0, "own_pages": 1, "pages": 1, "age": 1, "starts_with": "<|begin|>a\x1b[2J\nb"}
    device = TREE["tiers"]["device"]
    nodes = [*device["nodes"][:1], node]
    server.responses["/cache/tree"] = lambda _: TREE | {"tiers": {"device": device | {"nodes": nodes}}}
    assert main(["top", "--once", "--base-url", server.address]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "'a\\x1b[2J b'" in shown


@pytest.mark.parametrize("key", rest_nightly([b"q", b"Q", b"xq"], kept=(0, 2)))
def test_q_quits_and_leaves_the_terminal_as_it_was(server: FakeServer, key: bytes) -> None:
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(far)
    command = [sys.executable, "-m", "radixkv", "top", "--base-url", server.address]
    process = subprocess.Popen(command, stdin=far, stdout=far, stderr=far, env=os.environ | {"TERM": "xterm"})
    shown = b""
    try:
        while b"Pool" not in shown:
            assert select.select([near], [], [], LIMIT_S)[0], shown
            shown += os.read(near, 1 << 16)
        assert b"q quits" in shown
        os.write(near, key)
        while process.poll() is None:
            if select.select([near], [], [], 0.1)[0]:
                os.read(near, 1 << 16)
        assert process.returncode == 0
        assert termios.tcgetattr(far) == before
    finally:
        process.kill()
        process.wait()
        os.close(near)
        os.close(far)


@st.composite
def trees(draw: st.DrawFn) -> list[Node]:
    """Nodes with parents before children, each with the pages of all below it."""
    parents = [draw(st.integers(-1, index - 1)) for index in range(draw(st.integers(0, 20)))]
    pages = [draw(st.integers(0, 3)) for _ in parents]
    for index in reversed(range(len(parents))):
        if parents[index] >= 0:
            pages[parents[index]] += pages[index]
    return [Node(parent, 0, n_pages) for parent, n_pages in zip(parents, pages, strict=True)]


@given(trees(), st.integers(1, 25))
def test_the_largest_runs_stand_below_their_parents(nodes: list[Node], most: int) -> None:
    lines = largest_runs(nodes, most)
    assert len(lines) == min(most, len(nodes))
    shown = [next(i for i, node in enumerate(nodes) if node is line) for _, line in lines]
    left = [node.pages for i, node in enumerate(nodes) if i not in shown]
    assert min((node.pages for _, node in lines), default=0) >= max(left, default=0)
    path: list[int] = []
    for (depth, node), index in zip(lines, shown, strict=True):
        del path[depth:]
        assert node.parent == (path[-1] if path else -1)
        path.append(index)
