"""``radixkv simulate`` in virtual time: its rows, and what it refuses."""

from __future__ import annotations

import re
from random import Random

import pytest

from support.json_lines import write_lines
from support.simulate_command import simulate

CALL = {"type": "function", "function": {"name": "search", "arguments": "{}"}}


@pytest.fixture
def log(tmp_path):
    """Lines of token ids with times: chats of three turns, of which two go on at a time."""
    random, lines = Random(3), []
    for pair in range(6):
        chats = [[random.randrange(1000) for _ in range(100)] for _ in range(2)]
        for turn in range(3):
            for chat in chats:
                at = 1000 * (10 * pair + 3 * turn)
                lines.append({"prompt_token_ids": list(chat), "token_ids": chat[-7:], "timestamp": at})
                chat += [random.randrange(1000) for _ in range(50)]
    return write_lines(tmp_path / "log.jsonl", *lines)


def test_each_policy_is_compared_with_none_and_with_the_oracle(log, simulated, capsys):
    flags = ("--capacity", "device=480,host=4k", "--admission", "expected", "--learn-pauses", "--load-ahead")
    rows = simulated("--trace", log, *flags)
    assert [(row["admission"], row["pauses"], row["loads_ahead"]) for row in rows] == [
        ("reserved", "none", False),
        ("expected", "learnt", True),
        ("known", "known", True),
        ("reserved", "none", False),
    ]
    assert [row["capacity_tokens"] for row in rows] == [480, 480, 480, None]
    for row in rows:
        assert (row["n_requests"], row["n_returns"], row["n_answer_tokens"]) == (36, 24, 36 * 7)
        assert (row["arrivals"], row["speed"], row["concurrency"]) == ("recorded", 1.0, None)
        assert row["duration_s"] == pytest.approx(56, abs=1)
        assert row["output_tokens_per_s"] == pytest.approx(36 * 7 / row["duration_s"], abs=0.1)
        assert 0.004 < row["ttft_p50_s"] <= row["ttft_p99_s"] < 0.1
    assert rows[-1]["returns_on_device_pct"] == 100
    printed = capsys.readouterr().out
    assert "; recorded times\n" in printed
    assert "24 of 36 requests go on from an earlier one" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100


def test_times_are_scaled_or_replaced(log, simulated):
    fast, _ = simulated("--trace", log, "--capacity", "4k", "--speed", "4")
    assert fast["duration_s"] == pytest.approx(56 / 4, abs=1)
    drawn, _ = simulated("--trace", log, "--capacity", "4k", "--request-rate", "5", "--user-median-s", "2")
    assert (drawn["arrivals"], drawn["speed"], drawn["request_rate"]) == ("synthetic", None, 5)
    assert (drawn["tool_median_s"], drawn["user_median_s"]) == (1, 2)


@pytest.mark.parametrize("extreme", ["1e-6", "1e6"])
def test_the_least_and_the_most_of_each_setting_give_times(log, simulated, extreme):
    costs = ("--step-ms", extreme, "--read-us-per-token", extreme, "--compute-us-per-token", extreme)
    for row in simulated("--trace", log, "--capacity", "4k", "--speed", "1", *costs):
        assert 50 < row["duration_s"] < 1e10
    pauses = ("--tool-median-s", extreme, "--user-median-s", extreme)
    for flags in (("--speed", extreme), ("--request-rate", extreme, *pauses)):
        for row in simulated("--trace", log, "--capacity", "4k", *flags):
            assert 0.004 < row["ttft_p50_s"] <= row["ttft_p99_s"] < 1


def test_prompt_tokens_take_their_time_without_a_host_tier(log, simulated):
    flags = ("--trace", log, "--capacity", "4k", "--speed", "1", "--compute-us-per-token")
    quick, slow = (simulated(*flags, us)[0] for us in ("10", "1000"))
    assert (quick["compute_us_per_token"], slow["compute_us_per_token"]) == (10, 1000)
    assert slow["ttft_p50_s"] > 5 * quick["ttft_p50_s"]


def test_prompt_tokens_take_by_default_what_tiers_weigh_against_loads(log, simulated):
    flags = ("--trace", log, "--capacity", "4k", "--speed", "1000000")
    default, same, device = (
        simulated(*flags, *cost)[0]["duration_s"]
        for cost in ((), ("--compute-us-per-token", "21.7"), ("--compute-us-per-token", "20.7"))
    )
    assert default == same > device


def test_messages_tell_which_tools_an_answer_calls(tmp_path, simulated):
    """Only what is after a call waits for a tool, in a conversation and in a log of requests."""
    said = [{"role": "user", "content": "Find the blue book, and say where it is."}]
    turns = []
    for number in range(3):
        turns.append(list(said))
        said += [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": f"shelf {number}"},
        ]
    said += [{"role": "assistant", "content": "On a shelf."}]
    conversation = write_lines(tmp_path / "conversation.jsonl", {"messages": said})
    requests = write_lines(tmp_path / "requests.jsonl", *({"messages": one} for one in [*turns, said[:-1]]))
    durations = {}
    for file in (conversation, requests):
        for tool_s in (1, 10):
            flags = (
                "--request-rate",
                "1000",
                "--tool-median-s",
                tool_s,
                "--user-median-s",
                1e6,
                "--capacity",
                "4k",
            )
            row, _ = simulated("--trace", file, "--tokenizer", "tiny", *flags)
            assert row["n_returns"] == 3
            durations[file, tool_s] = row["duration_s"]
        assert 3 < durations[file, 10] / durations[file, 1] <= 10
    assert durations[conversation, 10] == pytest.approx(durations[requests, 10], abs=0.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--learn-pauses", "--concurrency", "4"],
            "--concurrency is not for replays in virtual time; .* --learn-pauses",
        ),
        (["--speed", "2", "--policy", "oracle"], "--policy oracle is not for replays in virtual time"),
        (["--load-ahead", "--ends-known", "1"], "--ends-known is not for"),
        (["--load-ahead"], "--load-ahead needs a host tier"),
        (["--num-states", "4"], "--num-states needs several requests in flight; give --concurrency"),
        (["--num-states", "0", "--speed", "2"], "num_states 0 must be at least 1"),
        (["--speed", "2", "--load-us-per-token", "2"], "--load-us-per-token needs a host tier"),
        (["--step-ms", "5"], "--step-ms is for replays in virtual time"),
        (["--speed", "2", "--request-rate", "1"], "--request-rate replaces; leave one out"),
        (["--speed", "1", "--max-num-seqs", "0"], "max_num_seqs 0 must be at least 1"),
        (["--speed", "1", "--max-num-seqs", "-3"], "max_num_seqs -3 must be at least 1"),
        (["--speed", "1", "--max-num-seqs", "2M"], "max_num_seqs 2097152 must be at most 1,048,576"),
        (["--speed", "0"], "speed 0 must be from 0.000001 to 1,000,000"),
        (["--speed", "inf"], "speed inf must be from"),
        (["--request-rate", "1e-300"], "request_rate 1e-300 must be from"),
        (["--request-rate", "1", "--tool-median-s", "-1"], "tool_median_s -1 must be from"),
        (["--request-rate", "1", "--user-median-s", "2e6"], r"user_median_s 2e\+06 must be from"),
        (["--speed", "1", "--step-ms", "1e300"], r"step_ms 1e\+300 must be from"),
        (["--speed", "1", "--read-us-per-token", "1e-7"], "read_us_per_token 1e-07 must be from"),
        (["--speed", "1", "--compute-us-per-token", "1e7"], r"compute_us_per_token 1e\+07 must be from"),
        (["--learn-pauses", "--tool-median-s", "1"], "--tool-median-s draws pauses at random; give --request-rate"),
    ],
)
def test_flags_that_exclude_each_other_are_refused_by_name(log, capsys, flags, message):
    with pytest.raises(SystemExit):
        simulate("--trace", log, "--capacity", "4k", *flags)
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error


def line(at, prompt, **fields):
    return {"prompt_token_ids": prompt, "token_ids": [1, 2], **({} if at is None else {"timestamp": at}), **fields}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(None, [1]), line(None, [1, 2])], "does not say when its requests arrived.* give --request-rate"),
        ([line(1, [1]), line(None, [1, 2])], "only 1 of the 2 requests"),
        ([line(5, [1]), line(4, [1, 2])], "timestamp 4 of request 2 .* before 5"),
        (
            [line(1, [1]), line(2, [2])],
            "no request of log.jsonl goes on from an earlier one; leave --learn-pauses out",
        ),
        (
            [line(1, [1], token_ids=[]), line(2, [1, 2], token_ids=[])],
            "does not say how long its answers are; give --output-len",
        ),
    ],
)
def test_what_a_log_cannot_tell_is_refused_by_name(tmp_path, capsys, lines, message):
    file = write_lines(tmp_path / "log.jsonl", *lines)
    assert simulate("--trace", file, "--capacity", "4k", "--learn-pauses") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    error = " ".join(printed.err.split())
    assert re.search(message, error), error


@pytest.mark.parametrize("kind", ["conversation", "requests"])
@pytest.mark.parametrize("function", [{"arguments": "{}"}, {"name": 3}, {"name": None}])
def test_a_call_of_a_tool_without_a_name_makes_a_bad_line(tmp_path, simulated, capsys, kind, function):
    """A bad line of a log of requests answers none of those before it."""

    def said(function):
        call = {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "function": function}]}
        return [{"role": "user", "content": "Hi"}, call, {"role": "tool", "content": "1"}]

    last = [{"role": "assistant", "content": "Done."}] if kind == "conversation" else []
    asked = [] if kind == "conversation" else [{"messages": said(function)[:1]}]
    lines = [*asked, *({"messages": [*said(one), *last]} for one in (function, CALL["function"]))]
    file = write_lines(tmp_path / "log.jsonl", *lines)
    flags = ("--trace", file, "--tokenizer", "tiny", "--capacity", "4k", "--request-rate", "1")
    assert simulate(*flags) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"line {len(asked) + 1} of " in error
    assert re.search(r"messages\[1\]\.tool_calls\[1\]\.function\.name must be a text; correct it, or skip", error)
    row, _ = simulated(*flags, "--skip-bad-lines")
    assert (row["n_bad_lines"], row["n_requests"], row["n_returns"]) == (1, 2, 1)
    assert row["n_answer_tokens"] > 2, "the good line says what the first answer is"
