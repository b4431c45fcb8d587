"""Tests of ``radixkv simulate --servers``."""

from __future__ import annotations

import json

import pytest

from radixkv.cli import main
from radixkv.errors import ConfigError
from radixkv.lab.simulator import simulation
from radixkv.lab.simulator.caches import Capacity
from radixkv.lab.simulator.recording import read_recording


@pytest.fixture
def trace(tmp_path):
    """Conversations of four turns in turn, each with four blocks more in every turn."""
    file = tmp_path / "trace.jsonl"
    turns = [(chat, turn) for first in range(0, 24, 6) for turn in range(1, 5) for chat in range(first, first + 6)]
    file.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": n,
                    "input_length": 2048 * turn,
                    "output_length": 1,
                    "hash_ids": [100 * chat + block for block in range(4 * turn)],
                }
            )
            + "\n"
            for n, (chat, turn) in enumerate(turns)
        )
    )
    return file


def simulate(*flags):
    return main(["simulate", *map(str, flags)])


def test_table_and_json_lines_of_several_servers(trace, tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    flags = ("--servers", "1,4", "--events-delay", 1, "--output-file", file)
    assert simulate("--trace", trace, "--capacity", "20480", *flags) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    order = [(row["servers"], row["routing"], row["capacity_tokens"]) for row in rows]
    routed = [(4, routing, 20480) for routing in ("round-robin", "prefix", "events")]
    assert order == [(1, None, 20480), (1, None, 81920), *routed, (1, None, None)]
    alone, pooled, round_robin, prefix, events, infinite = (row["hit_rate_pct"] for row in rows)
    assert alone < round_robin < 0.6 * prefix
    assert prefix == events
    assert 0.95 * pooled < prefix <= pooled == infinite
    assert [row["busiest_server"] is None for row in rows] == [row["servers"] == 1 for row in rows]
    assert all(row["busiest_server"] >= 1 for row in rows[2:5])
    assert [row["events_delay"] for row in rows] == [None, None, None, None, 1, None]
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].split()[2:5] == ["servers", "routing", "busiest"]
    assert printed[7].split()[:4] == ["20.48k", "lru", "4", "events"]

    assert simulate("--trace", trace, "--capacity", "20480", "--policy", "lru", "--output-file", file) == 0
    again = json.loads(file.read_text().splitlines()[6])
    times = {"seconds", "cpu_seconds", "date"}
    assert {key: again[key] for key in again.keys() - times} == {key: rows[0][key] for key in again.keys() - times}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--servers", "0"], "0 servers are not 1 to 10,000"),
        (["--servers", "4,x"], "'x' is not a whole number"),
        (["--routing", "prefix"], "--routing needs several servers"),
        (["--events-delay", "3"], "--events-delay needs several servers"),
        (["--servers", "2", "--routing", "random"], "'random' is not a routing; use round-robin, prefix, events"),
        (
            ["--servers", "2", "--routing", "prefix", "--events-delay", "3"],
            "--events-delay is for --routing events",
        ),
        (["--servers", "2", "--events-delay", "-1"], "events_delay -1 must be at least 0"),
        (["--servers", "2", "--concurrency", "2"], "--concurrency is for one server"),
        (["--servers", "2", "--eviction-policy", "lru,oracle"], "oracle supports only one server"),
        (["--servers", "2", "--ends-known", "0.5"], "--ends-known supports only one server"),
        (["--servers", "2", "--plot", "pictures"], "--plot draws one server only"),
    ],
)
def test_flags_that_several_servers_exclude(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        simulate("--trace", "absent.jsonl", "--capacity", "1k", *flags)
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_what_several_servers_exclude_is_refused_before_anything_runs(trace):
    recording = read_recording(trace)
    for arguments, message in (
        ({}, "routings is empty"),
        ({"routings": ["prefix"], "ends_known": 0.5}, "ends_known 0.5 .* which requests a server gets"),
    ):
        with pytest.raises(ConfigError, match=message):
            simulation.Simulation(recording, [Capacity(1024)], ["lru"], servers=(1, 2), **arguments)
