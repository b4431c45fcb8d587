"""``radixkv bench`` with its own servers, and ``radixkv generate``, as commands."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from radixkv import cli
from support.live import LIMIT_S, children, complaints, is_running, wait_for

POOL = ["--max-total-tokens", "16384", "--grammar-backend", "none"]
SMALL = ["--num-prompts", "6", "--num-shots", "3", "--output-len", "4", "--warmup-requests", "1"]


def command(*flags):
    return [sys.executable, "-m", "radixkv.cli", *map(str, flags)]


def run(*flags):
    return subprocess.run(command(*flags), capture_output=True, text=True, timeout=LIMIT_S)


def listening_port(pid):
    """Returns the port that a process listens on; 0 if none."""
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            return int(fields[1].rpartition(":")[2], 16)
    return 0


def n_generated(pid):
    """Returns the number of tokens that the server has generated."""
    with contextlib.suppress(OSError, httpx.HTTPError):
        text = httpx.get(f"http://127.0.0.1:{listening_port(pid)}/metrics", timeout=LIMIT_S).text
        return float(re.search(r"^radixkv:generation_tokens_total (\S+)$", text, re.MULTILINE)[1])
    return 0


@pytest.mark.nightly
def test_cache_off_and_on_give_the_same_tokens_and_nearly_the_optimum(tmp_path):
    path = tmp_path / "lines.jsonl"
    done = run("bench", "--workload", "fewshot", "--compare-cache", *SMALL, *POOL, "--output-file", path)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    assert done.stdout.count("Serving Benchmark Result") == 2
    assert "Outputs equal: yes" in done.stdout
    off, on = map(json.loads, path.read_text().splitlines())
    assert (off["cache"], on["cache"]) == ("off", "on")
    assert off["cache_flushed"] is on["cache_flushed"] is True
    assert off["outputs_sha256"] == on["outputs_sha256"] is not None
    assert off["completed"] == on["completed"] == 6
    assert on["total_output_tokens"] == 24
    assert off["cache_report"]["total_cached_tokens"] == 0
    report = on["cache_report"]
    assert report["optimum_pct"] == off["cache_report"]["optimum_pct"]
    assert 0.95 * report["optimum_pct"] <= report["cache_hit_rate_pct"] <= report["optimum_pct"]


@pytest.mark.nightly
def test_a_server_with_drafts_gives_the_same_tokens_and_says_what_became_of_them(tmp_path):
    off, on = tmp_path / "off.jsonl", tmp_path / "on.jsonl"
    flags = ("bench", "--num-prompts", 4, "--num-shots", 3, "--output-len", 60, "--max-concurrency", 1, *POOL)
    assert run(*flags, "--output-file", off, "--speculative-config", "off").returncode == 0
    done = run(*flags, "--output-file", on)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    assert "Accepted drafts (%):" in done.stdout
    plain, drafted = (json.loads(path.read_text()) for path in (off, on))
    assert drafted["outputs_sha256"] == plain["outputs_sha256"] is not None
    assert plain["draft_report"] is None
    report = drafted["draft_report"]
    assert 0 < report["accepted_tokens"] <= report["draft_tokens"]
    assert 1 < report["tokens_a_step"] <= 17
    assert sum(one["draft_tokens"] for one in report["by_source"].values()) == report["draft_tokens"]
    assert "outputs are equal" in run("bench", "compare", off, on).stdout


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_to_a_run_also_ends_its_server(number):
    with subprocess.Popen(
        command("bench", "--num-prompts", 400, "--output-len", 200, *POOL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as bench:
        try:
            wait_for(lambda: any(map(children, children(bench.pid))), "no server and runtime")
            servers = children(bench.pid)
            runtimes = [runtime for server in servers for runtime in children(server)]
            bench.send_signal(number)
            output, errors = bench.communicate(timeout=LIMIT_S)
            assert (output, complaints(errors)) == ("", "")
        finally:
            bench.kill()
        assert bench.returncode == (-number if number == signal.SIGKILL else 130)
    assert runtimes
    wait_for(lambda: not any(map(is_running, servers + runtimes)), f"some of {servers + runtimes} are left")


@pytest.mark.nightly
def test_a_run_whose_server_is_killed_saves_its_partial_result(tmp_path):
    path = tmp_path / "lines.jsonl"
    flags = ["--num-prompts", 2000, "--num-shots", 1, "--output-len", 4, "--max-concurrency", 4]
    begun = command("bench", *flags, *POOL, "--output-file", path)
    with subprocess.Popen(begun, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        try:
            wait_for(lambda: children(bench.pid), "no server")
            (server,) = children(bench.pid)
            wait_for(lambda: n_generated(server) > 2 * 32 + 100, "no more than the warm-up")
            os.kill(server, signal.SIGKILL)
            output, errors = bench.communicate(timeout=LIMIT_S)
        finally:
            bench.kill()
    assert (bench.returncode, complaints(errors)) == (1, "")
    assert "The run ended early: " in output
    line = json.loads(path.read_text())
    assert line["aborted"] is not None
    assert line["completed"] > 0
    assert line["errors"]["not_sent"] > 0
    assert line["completed"] + line["failed"] == line["num_prompts"] == 2000


@pytest.mark.nightly
def test_generate_prints_the_same_answer_for_the_same_seed(sensitive, capsys):
    def answer(seed):
        flags = ["generate", "The rain in Spain", "--model", sensitive, "--max-tokens", "8", *POOL, "--seed", seed]
        assert cli.main(list(map(str, flags))) == 0
        written = capsys.readouterr()
        assert complaints(written.err) == ""
        return written.out

    first = answer(5)
    assert first.strip()
    assert answer(5) == first
    assert answer(6) != first
