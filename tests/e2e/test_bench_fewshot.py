"""``radixkv bench`` with the servers that it starts, and ``radixkv generate``, as people run them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.live import is_running

POOL = ["--max-total-tokens", "16384"]
SMALL = ["--num-prompts", "6", "--num-shots", "3", "--output-len", "4", "--warmup-requests", "1"]


def command(*flags):
    return [sys.executable, "-m", "radixkv.cli", *map(str, flags)]


@pytest.fixture
def environment(cache):
    return {**os.environ, "XDG_CACHE_HOME": str(cache)}


@pytest.fixture
def run(environment):
    return lambda *flags: subprocess.run(
        command(*flags), capture_output=True, text=True, timeout=120, env=environment
    )


def children(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        if int(text.rpartition(")")[2].split()[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def test_the_cache_off_and_on_gives_the_same_tokens_and_nearly_the_optimum(run, tmp_path):
    path = tmp_path / "lines.jsonl"
    done = run("bench", "--workload", "fewshot", "--compare-cache", *SMALL, *POOL, "--output-file", path)
    assert (done.returncode, done.stderr) == (0, "")
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_a_run_is_that_of_the_server_it_started(environment, number):
    with subprocess.Popen(
        command("bench", "--num-prompts", 400, "--output-len", 200, *POOL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as bench:
        deadline = time.monotonic() + 60
        servers = []
        while not (servers and children(servers[0])) and time.monotonic() < deadline:
            time.sleep(0.05)
            servers = children(bench.pid)
        runtimes = children(servers[0])
        bench.send_signal(number)
        assert bench.communicate(timeout=60) == ("", "")
        assert bench.returncode == (-number if number == signal.SIGKILL else 130)
    assert runtimes
    deadline = time.monotonic() + 10
    while left := [pid for pid in servers + runtimes if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_generate_prints_the_same_answer_for_the_same_seed(run):
    flags = ["generate", "The rain in Spain", "--max-tokens", "8", *POOL]
    one, same = (run(*flags, "--seed", "5") for _ in range(2))
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout.strip()
    assert one.stdout == same.stdout
    assert run(*flags, "--seed", "6").stdout != one.stdout
