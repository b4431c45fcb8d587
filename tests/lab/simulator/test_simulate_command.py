"""Tests of the ``radixkv simulate`` command."""

from __future__ import annotations

import json
import os
from random import Random

import pytest

from radixkv.checkpoints import resolve, resolve_tokenizer
from radixkv.errors import ConfigError
from radixkv.lab.bench.formatting import format_tokens
from radixkv.lab.simulator import simulation
from radixkv.lab.simulator.caches import Capacity
from radixkv.lab.simulator.recording import read_recording
from radixkv.lab.simulator.replay import Replay
from support.json_lines import read_lines, write_lines
from support.simulate_command import simulate

BLOCK = 512


def mooncake(timestamp, n_tokens, hash_ids):
    line = {"timestamp": timestamp, "input_length": n_tokens, "output_length": 5, "hash_ids": hash_ids}
    return json.dumps(line) + "\n"


@pytest.fixture
def trace(tmp_path):
    """A trace of repeated requests in random order, which all start with block 0."""
    random = Random(0)
    file = tmp_path / "trace.jsonl"
    chats = [[0, *range(10 * chat + 1, 10 * chat + random.randrange(3, 8))] for chat in range(8)]
    file.write_text("".join(mooncake(n, BLOCK * len(c) - 9, c) for n, c in enumerate(random.choices(chats, k=80))))
    return file


def test_table_json_lines_and_plots_agree(trace, tmp_path, capsys):
    file, folder = tmp_path / "results.jsonl", tmp_path / "pictures"
    flags = ("--trace", trace, "--output-file", file, "--plot", folder, "--kv-bytes-per-token", 1 << 20)
    assert simulate(*flags, "--capacity", "5.12k,0.01024M,1M") == 0
    rows = read_lines(file)
    order = [(row["capacity_tokens"], row["policy"]) for row in rows]
    finite = [(capacity, policy) for capacity in (5120, 10240, 1_000_000) for policy in ("lru", "oracle")]
    assert order == [*finite, (None, "lru")]
    rates = dict(zip(order, (row["hit_rate_pct"] for row in rows), strict=True))
    assert 0 < rates[5120, "lru"] < rates[10240, "lru"] < rates[None, "lru"]
    assert all(rates[capacity, "lru"] < rates[capacity, "oracle"] for capacity in (5120, 10240))
    assert rates[1_000_000, "lru"] == rates[1_000_000, "oracle"] == rates[None, "lru"]

    n_prompt_tokens = sum(request["input_length"] for request in read_lines(trace))
    for row in rows:
        assert row["hit_rate_pct"] == round(100 * row["n_cached_tokens"] / n_prompt_tokens, 3)
        assert (row["n_requests"], row["n_prompt_tokens"]) == (80, n_prompt_tokens)
        assert (row["rule"], row["page_size"], row["trace"]) == ("blocks", 512, "trace.jsonl")
        assert (row["bench"], row["tokenizer"]) == ("simulate", None)
        assert row["n_evicted_tokens"] == BLOCK * row["n_evicted_pages"]
        assert row["evicted_bytes"] == row["n_evicted_tokens"] << 20
        assert row["most_cached_tokens"] <= (row["capacity_tokens"] or 10**9)
    assert rows[0]["capacity_bytes"] == 5120 << 20
    assert rows[-1]["capacity_bytes"] is None
    assert all(row["environment"]["versions"]["radixkv"] and row["date"] for row in rows)

    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"trace.jsonl: 80 requests, {n_prompt_tokens:,} prompt tokens; rule blocks, ")
    table = [line.split() for line in printed[3:10]]
    assert [line[2] for line in table] == [f"{row['hit_rate_pct']:.1f}%" for row in rows]
    assert [line[0] for line in table[::2]] == ["5.12k", "10.24k", "1M", "infinite"]
    page = (folder / "index.html").read_text()
    assert all(f"<td>{rate:.1f}%</td>" in page for rate in rates.values())
    assert (folder / "hit_rate_by_capacity.png").read_bytes().startswith(b"\x89PNG")

    assert simulate(*flags, "--capacity", "5120", "--policy", "oracle") == 0
    more = read_lines(file)
    assert more[: len(rows)] == rows, "results are appended"
    appended = [(row["capacity_tokens"], row["policy"]) for row in more[len(rows) :]]
    assert appended == [(5120, "oracle"), (None, "oracle")]


def test_a_result_is_saved_even_if_a_later_replay_is_interrupted(trace, tmp_path, monkeypatch):
    file, replays = tmp_path / "results.jsonl", []
    run = Replay.run

    def interrupted_at_the_fourth(self, progress):
        replays.append(self)
        if len(replays) == 4:
            raise KeyboardInterrupt
        return run(self, progress)

    monkeypatch.setattr(Replay, "run", interrupted_at_the_fourth)
    assert simulate("--trace", trace, "--capacity", "5120,10240", "--output-file", file) == 130
    assert [(row["capacity_tokens"], row["policy"]) for row in read_lines(file)] == [
        (5120, "lru"),
        (5120, "oracle"),
    ]


def test_results_name_the_tokenizer_of_a_trace_with_texts(tmp_path, simulated):
    said = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Good morning"}]
    flags = (
        "--trace",
        write_lines(tmp_path / "chats.jsonl", {"messages": said}),
        "--capacity",
        "1k",
        "--tokenizer",
    )
    folder = resolve_tokenizer("tiny")
    assert {row["tokenizer"] for row in simulated(*flags, "tiny")} == {"tiny"}
    assert {row["tokenizer"] for row in simulated(*flags, folder)} == {folder.name}


def test_singular_forms_and_small_sizes_in_the_table(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt_token_ids": [7]}\n{broken\n')
    flags = ("--capacity", "100k", "--kv-bytes-per-token", 768, "--page-size", 1, "--skip-bad-lines")
    assert simulate("--trace", file, *flags) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("trace.jsonl: 1 request, 1 prompt token; rule engine, pages of 1 token\n1 bad line")
    lru = printed.splitlines()[4].split()
    assert lru[-2:] == [f"{768 * 100_000 / 2**30:.3g}", "0"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--capacity", "6k"],
        ["--capacity", "6k", "--kv-bytes-per-token", "1KiB"],
        ["--capacity", "device=6k,host=12k,disk=1M"],
        ["--capacity", "device=6k,host=12k,disk=1M", "--servers", "4", "--kv-bytes-per-token", "1KiB"],
    ],
)
def test_no_line_has_more_than_100_columns_and_every_number_is_shown(trace, simulated, capsys, flags):
    rows = simulated("--trace", trace, "--eviction-policy", "lru", *flags)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    words = printed.split()
    for row in rows:
        for name in ("n_cached_tokens", "n_loaded_tokens", "n_fetched_tokens", "n_evicted_tokens"):
            has_column = name.split("_")[1] in words
            assert not has_column or format_tokens(row[name]) in words


@pytest.mark.parametrize(
    ("policies", "settings", "message"),
    [
        (["oracle"], {"concurrency": 2}, "policy oracle .* several in flight"),
        (["lru"], {"concurrency": 2, "ends_known": 0.5}, "ends_known 0.5 .* several in flight"),
        ([], {}, "policies .* give one or more"),
        (["lru"], {"capacities": [Capacity(1024, disk=4096)]}, "4096 tokens needs a host tier"),
        (["lru"], {"servers": (1, 2)}, "routings is empty"),
        (
            ["lru"],
            {"servers": (1, 2), "routings": ["prefix"], "ends_known": 0.5},
            "ends_known 0.5 .* which requests a server gets",
        ),
    ],
)
def test_what_excludes_each_other_is_refused_before_anything_runs(trace, policies, settings, message):
    recording = read_recording(trace, rule="engine", compact_pages=False)
    arguments = {"capacities": [Capacity(1024)], "policies": policies, **settings}
    with pytest.raises(ConfigError, match=message):
        simulation.Simulation(recording, **arguments)


def test_rule_engine_rejects_requests_that_do_not_fit_in_the_pool(trace, simulated, capsys):
    rows = simulated("--trace", trace, "--capacity", "3k,100k", "--rule", "engine")
    lengths = [request["input_length"] for request in read_lines(trace)]
    n_too_large = sum(length > 3000 // 16 * 16 for length in lengths)
    assert 0 < n_too_large < len(lengths)
    assert [row["n_too_large"] for row in rows] == [n_too_large, n_too_large, 0, 0, 0]
    assert {row["page_size"] for row in rows} == {16}
    remark = (
        f"{n_too_large} requests too large for 3k tokens (the largest has {max(lengths):,}): refused by the engine"
    )
    assert remark in capsys.readouterr().out


def test_concurrent_requests_are_replayed_with_rule_engine(trace, simulated, capsys):
    flags = ("--trace", trace, "--capacity", "6k")
    together, all_of_them = simulated(*flags, "--concurrency", 16)
    assert ", pages of 16 tokens, 16 in flight\n" in capsys.readouterr().out
    alone, _ = simulated(*flags, "--rule", "engine", "--policy", "lru")
    assert (together["rule"], together["policy"], together["concurrency"]) == ("engine", "lru", 16)
    assert (together["max_num_batched_tokens"], alone["max_num_batched_tokens"]) == (8192, None)
    assert alone["hit_rate_pct"] < together["hit_rate_pct"] < all_of_them["hit_rate_pct"]
    assert simulate(*flags, "--concurrency", 2, "--rule", "blocks") == 1
    assert "--rule engine" in capsys.readouterr().err
    assert simulate(*flags, "--concurrency", 2, "--max-num-batched-tokens", 1000) == 1
    assert "max_num_batched_tokens 1000 " in capsys.readouterr().err


def test_tiers_show_what_each_gave_and_the_time_saved(trace, tmp_path, simulated, capsys):
    folder = tmp_path / "pictures"
    capacities = ("--capacity", "6k,device=6k,host=12k,device=6k,host=1M", "--load-us-per-token", 5)
    policies = ("--eviction-policy", "lru,adaptive", "--ghost-capacity", 2)
    rows = simulated("--trace", trace, "--plot", folder, *capacities, *policies)
    tiers = [(None, "lru"), (None, "adaptive"), (12_000, "lru"), (12_000, "adaptive"), (1_000_000, "lru")]
    assert [(row["host_capacity_tokens"], row["policy"]) for row in rows][:5] == tiers
    assert [row["ghost_capacity"] for row in rows[:2]] == [None, 2]
    lru, infinite = rows[0:6:2], rows[-1]
    assert lru[0]["n_loaded_tokens"] == infinite["n_loaded_tokens"] == 0
    assert 0 < lru[1]["n_loaded_tokens"] < lru[2]["n_loaded_tokens"]
    assert lru[0]["hit_rate_pct"] < lru[1]["hit_rate_pct"] < lru[2]["hit_rate_pct"] == infinite["hit_rate_pct"]
    for row in rows:
        assert (row["load_us_per_token"], row["compute_us_per_token"]) == (5, 21.7)
        saved_us = 21.7 * row["n_cached_tokens"] - 5 * row["n_loaded_tokens"]
        assert row["saved_seconds"] == round(saved_us / 1e6, 3)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {"host", "saved", "loaded"} <= {*printed[0], *printed[1]}
    assert [line[1] for line in printed[2:9]] == ["-", "-", "12k", "12k", "1M", "1M", "-"]
    assert (folder / "hit_rate_by_capacity.png").exists()


def test_a_disk_shows_what_it_gave_and_the_time_saved(trace, tmp_path, simulated, capsys):
    folder = tmp_path / "pictures"
    capacities = ("--capacity", "6k,device=6k,host=12k,device=6k,host=12k,disk=1M", "--eviction-policy", "lru")
    flags = ("--trace", trace, "--plot", folder, *capacities, "--fetch-us-per-token")
    fast, slow = simulated(*flags, 5), simulated(*flags, 30)
    rows = [*fast, *slow]
    assert [row["disk_capacity_tokens"] for row in rows] == [None, None, 1_000_000, None] * 2
    assert [row["n_fetched_tokens"] > 0 for row in fast] == [False, False, True, False]
    assert fast[1]["hit_rate_pct"] < fast[2]["hit_rate_pct"] == fast[3]["hit_rate_pct"]
    assert slow[2]["n_fetched_tokens"] < fast[2]["n_fetched_tokens"] <= fast[2]["n_loaded_tokens"]
    for row in rows:
        copied_us = 2.4 * row["n_loaded_tokens"] + row["fetch_us_per_token"] * row["n_fetched_tokens"]
        assert row["saved_seconds"] == round((21.7 * row["n_cached_tokens"] - copied_us) / 1e6, 3)
    printed = capsys.readouterr().out
    assert " ".join(printed.split()).count("32.4 µs from disk") == 1, "only where computing is faster"
    table = [line.split() for line in printed.splitlines()[1:7]]
    assert {"disk", "fetched"} <= {*table[0], *table[1]}
    assert [line[1:3] for line in table[2:]] == [["-", "-"], ["12k", "-"], ["12k", "1M"], ["-", "-"]]
    assert (folder / "hit_rate_by_capacity.png").exists()


@pytest.fixture
def chats_in_turn(tmp_path):
    """Conversations of four turns in turn, each with four blocks more in every turn."""
    file = tmp_path / "trace.jsonl"
    turns = [(chat, turn) for first in range(0, 24, 6) for turn in range(1, 5) for chat in range(first, first + 6)]
    ids = [[100 * chat + block for block in range(4 * turn)] for chat, turn in turns]
    file.write_text("".join(mooncake(n, BLOCK * len(each), each) for n, each in enumerate(ids)))
    return file


def test_table_and_json_lines_of_several_servers(chats_in_turn, simulated, capsys):
    flags = ("--trace", chats_in_turn, "--capacity", "20480")
    rows = simulated(*flags, "--servers", "1,4", "--events-delay", 1)
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

    again, _ = simulated(*flags, "--policy", "lru")
    times = {"seconds", "cpu_seconds", "date"}
    assert {key: again[key] for key in again.keys() - times} == {key: rows[0][key] for key in again.keys() - times}


def test_known_ends_raise_the_hit_rate(trace, simulated, capsys):
    flags = ("--trace", trace, "--capacity", "6k", "--eviction-policy", "lru", "--ends-known")
    none, some, all_known = (simulated(*flags, share)[0] for share in (0, 0.5, 1))
    assert none["hit_rate_pct"] < some["hit_rate_pct"] <= all_known["hit_rate_pct"]
    assert [row["ends_known"] for row in (none, some, all_known)] == [0, 0.5, 1]
    assert "50% of ends known\n" in capsys.readouterr().out


def test_tiers_and_all_server_policies_with_several_requests_in_flight(trace, simulated):
    policies = ("--eviction-policy", "lru,lfuda,adaptive")
    capacities = ("--capacity", "12k,device=12k,host=1M,device=12k,host=16k,disk=1M", "--fetch-us-per-token", 1)
    *rows, infinite = simulated("--trace", trace, "--concurrency", 4, *capacities, *policies)
    for alone, tiers, disk in zip(rows[:3], rows[3:6], rows[6:], strict=True):
        assert alone["n_cached_tokens"] < tiers["n_cached_tokens"] <= infinite["n_cached_tokens"]
        assert tiers["n_loaded_tokens"] > tiers["n_fetched_tokens"] == 0
        assert alone["n_cached_tokens"] < disk["n_cached_tokens"] <= infinite["n_cached_tokens"]
        assert disk["n_fetched_tokens"] > 0


def test_answers_take_room_and_a_file_without_their_lengths_is_said_to_be_replayed_without(
    trace, tmp_path, simulated, capsys
):
    prompts = [{"prompt_token_ids": [*range(90), turn]} for turn in range(40)]
    flags = ("--trace", write_lines(tmp_path / "ids.jsonl", *prompts), "--capacity", 256, "--concurrency", 2)
    without, _ = simulated(*flags)
    assert "--output-len" in capsys.readouterr().out
    with_answers, infinite = simulated(*flags, "--output-len", 100)
    assert "--output-len" not in capsys.readouterr().out
    assert (without["n_answer_tokens"], with_answers["n_answer_tokens"]) == (None, 4000)
    assert without["n_evicted_pages"] < with_answers["n_evicted_pages"]
    assert infinite["n_evicted_pages"] == 0
    recorded = ("--trace", trace, "--capacity", "100k", "--concurrency", 2)
    assert simulated(*recorded)[-1]["n_answer_tokens"] > 0
    assert simulate(*recorded, "--output-len", 5) == 1
    assert "output_len 5" in capsys.readouterr().err


def test_a_model_determines_the_bytes_per_token(trace, simulated, capsys):
    flags = ("--trace", trace, "--capacity", "1M", "--policy", "lru")
    given, _ = simulated(*flags, "--model", "tiny")
    unknown, _ = simulated(*flags)
    config = resolve("tiny").config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    n_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    assert given["kv_bytes_per_token"] == n_bytes
    assert given["capacity_bytes"] == n_bytes * (1_000_000 // 512 * 512)
    assert unknown["kv_bytes_per_token"] is unknown["capacity_bytes"] is unknown["evicted_bytes"] is None
    assert "GiB" not in capsys.readouterr().out.rpartition("trace.jsonl:")[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--capacity 5Q", "'5Q'"),
        ("--capacity 1M,,2M", "''"),
        ("--capacity 0", "'0'"),
        ("--capacity 0.0001k", "'0.0001k'"),
        ("--capacity 1M --policy lru,lfu", "'lfu'"),
        ("--capacity 1M --rule mine", "invalid choice: 'mine'"),
        ("--capacity 1M --page-size 0", "page_size 0 "),
        ("--capacity 1M --kv-bytes-per-token -1", "kv_bytes_per_token -1 "),
        ("--capacity 1M --concurrency 0", "concurrency 0 "),
        ("--capacity 1M --concurrency 2 --policy lru,oracle", "oracle supports only one request"),
        ("--capacity 1M --concurrency 2 --ends-known 0.5", "--ends-known supports only one"),
        ("--capacity host=5M", "'host=5M' needs device="),
        ("--capacity 1M,host=5M", "'host=5M' needs device="),
        ("--capacity device=1M,host=5M,host=6M", "'host=6M' needs device="),
        ("--capacity disk=50M", "'disk=50M' needs host="),
        ("--capacity 1M,disk=50M", "'disk=50M' needs host="),
        ("--capacity device=1M,disk=50M", "'disk=50M' needs host="),
        ("--capacity device=1M,host=5M,disk=50M,disk=60M", "'disk=60M' needs host="),
        ("--capacity device=1M,host=5M,disk=0", "'0'"),
        ("--capacity gpu=1M", "'gpu=1M' is not a tier"),
        ("--capacity device=1M,host=0", "'0'"),
        ("--capacity 1M --ends-known 1.5", "ends_known 1.5 "),
        ("--capacity 1M --ghost-capacity 2", "--eviction-policy adaptive"),
        ("--capacity 1M --policy adaptive --ghost-capacity -1", "ghost_capacity -1 "),
        ("--capacity 1M --load-us-per-token 2", "--load-us-per-token needs a host tier"),
        ("--capacity device=1M,host=2M --fetch-us-per-token 2", "--fetch-us-per-token needs a disk tier"),
        ("--capacity device=1M,host=2M,disk=3M --fetch-us-per-token 0", "fetch_us_per_token 0 "),
        ("--capacity device=1M,host=2M --compute-us-per-token 0", "compute_us_per_token 0 "),
        ("--capacity 1M --max-num-batched-tokens 512", "--concurrency"),
        ("--capacity 1M --output-len 5", "--concurrency"),
        ("--capacity 1M --concurrency 2 --output-len 0", "output_len 0 "),
        ("--capacity 1M --model tiny --kv-bytes-per-token 1", "--model"),
        ("--capacity 1M --trace -", "standard input"),
        ("", "--capacity"),
        ("--capacity 1M --servers 0", "0 servers are not 1 to 10,000"),
        ("--capacity 1M --servers 4,x", "'x' is not a whole number"),
        ("--capacity 1M --routing prefix", "--routing needs several servers"),
        ("--capacity 1M --events-delay 3", "--events-delay needs several servers"),
        ("--capacity 1M --servers 2 --routing any", "'any' is not a routing; use round-robin, prefix, events"),
        ("--capacity 1M --servers 2 --routing prefix --events-delay 3", "--events-delay is for --routing events"),
        ("--capacity 1M --servers 2 --events-delay -1", "events_delay -1 must be at least 0"),
        ("--capacity 1M --servers 2 --concurrency 2", "--concurrency is for one server"),
        ("--capacity 1M --servers 2 --eviction-policy lru,oracle", "oracle supports only one server"),
        ("--capacity 1M --servers 2 --ends-known 0.5", "--ends-known supports only one server"),
        ("--capacity 1M --servers 2 --plot pictures", "--plot draws one server only"),
        ("--capacity 1M --replicas 2 --plot pictures", "--plot draws one server only"),
        ("--capacity 1M --replicas 2 --servers 2", "--servers"),
        ("--capacity 1M --replicas 2 --routing prefix", "--routing needs several servers"),
        ("--capacity 1M --replicas 0", "0 servers are not 1 to 10,000"),
        ("--capacity 1M --replicas 2 --policy oracle", "oracle supports only one request in flight"),
        ("--capacity 1M --data-parallel-size 2 --ends-known 0.5", "--ends-known supports only one request"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        simulate("--trace", tmp_path / "absent.jsonl", *flags.split())
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


GOOD = mooncake(0, 700, [1, 2])
HI = '{"messages": [{"role": "user", "content": "hi"}]'
CHAT = HI + "}\n"
TINY = ["--tokenizer", "tiny"]
REFUSED_FILES = [
    (GOOD + "{broken\n", [], "line 2 of "),
    (GOOD + mooncake(1, 700, [1, 2, 3]), [], "3 hash_ids"),
    ("{broken\n" + GOOD, [], "line 1 of "),
    ("", [], "hash_ids (Mooncake), prompt_token_ids"),
    ('{"question": "?", "answer": "1"}\n', [], "hash_ids (Mooncake), prompt_token_ids"),
    ('{"prompt_token_ids": [1, 2]}\n{"prompt_token_ids": []}\n', [], "line 2 of "),
    ('{"prompt_token_ids": [1, 4294967296]}\n', [], "line 1 of "),
    ('{"prompt_token_ids": [1]}\n', ["--rule", "blocks"], "rule blocks "),
    ('{"prompt_token_ids": [1]}\n', TINY, "tokenizer 'tiny'"),
    ('{"messages": [{"role": "user", "content": "hi"}]}\n', [], "--tokenizer"),
    ('{"conversations": [{"from": "human", "value": "hi"}]}\n', TINY, "no conversation of"),
    ('{"messages": [{"content": "hi"}]}\n', TINY, "line 1 of "),
    ('{"messages": [{"role": "assistant"}]}\n', TINY, "no conversation of"),
    (CHAT + '{"messages": []}\n', TINY, "line 2 of "),
    (CHAT + HI + ', "continue_final_message": true, "add_generation_prompt": true}\n', TINY, "line 2 of "),
    (CHAT + HI + ', "chat_template_kwargs": {"add_generation_prompt": false}}\n', TINY, "line 2 of "),
    (CHAT + HI + ', "reasoning_effort": 3}\n', TINY, "line 2 of "),
    (CHAT + '{"prompt": "hi", "messages": []}\n', TINY, "line 2 of "),
    (CHAT + '{"prompt": ""}\n', TINY, "line 2 of "),
    (CHAT + '{"prompt": ["hi", 3]}\n', TINY, "line 2 of "),
    (CHAT + '{"prompt": [[]]}\n', TINY, "line 2 of "),
    ('{"prompt": [7, 8]}\n{"prompt": "hi"}\n', [], "--tokenizer"),
    ('{"prompt": [7, 8]}\n', ["--conversations"], "line 1 of "),
    (GOOD, ["--conversations"], "--conversations"),
    (GOOD, ["--page-size", "48"], "page_size 48 "),
    (GOOD, ["--capacity", "511"], "capacity 511 "),
    (GOOD, ["--capacity", "device=1M,host=511"], "capacity 511 "),
    (GOOD, ["--capacity", "device=1M,host=1M,disk=511"], "capacity 511 "),
    (GOOD, ["--model", "no/such/model"], "no/such/model"),
]


@pytest.mark.parametrize(("text", "flags", "message"), REFUSED_FILES)
def test_an_invalid_trace_is_reported_before_anything_runs(text, flags, message, tmp_path, capsys):
    file, output = tmp_path / "trace.jsonl", tmp_path / "results.jsonl"
    file.write_text(text)
    assert simulate("--trace", file, "--capacity", "1M", "--output-file", output, *flags) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert output.read_text() == ""


def test_bad_lines_are_skipped_and_counted_on_request(tmp_path, simulated, capsys):
    file = tmp_path / "trace.jsonl"
    file.write_text("{broken\n" + GOOD + mooncake(1, 700, [1]) + GOOD)
    row, *_ = simulated("--trace", file, "--capacity", "1M", "--skip-bad-lines")
    assert (row["n_bad_lines"], row["n_requests"], row["hit_rate_pct"]) == (2, 2, 50.0)
    assert "2 bad lines" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--output-file", "--plot"])
def test_an_unwritable_output_is_reported_before_the_trace_is_read(flag, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    flags = ("--trace", tmp_path / "missing", "--capacity", "1M", flag, tmp_path / "file" / "below")
    assert simulate(*flags) == 1
    assert flag in capsys.readouterr().err


def test_a_missing_trace_or_one_that_is_not_a_file_is_reported(tmp_path, capsys):
    assert simulate("--trace", tmp_path / "missing", "--capacity", "1M") == 1
    assert str(tmp_path / "missing") in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert simulate("--trace", path, "--capacity", "1M") == 1
        assert f"{path}: it is read twice and must be a regular file" in capsys.readouterr().err
