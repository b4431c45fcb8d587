"""Runs of ``radixkv bench`` that end early, and their partial results."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.bench_command import COMMAND, SMALL
from support.cases import rest_nightly
from support.json_lines import read_lines, write_lines
from support.live import LIMIT_S, complaints


def test_failed_requests_are_reported_and_make_the_exit_code_1(fake, tmp_path, inside):
    questions = ["shot", "one", "FAULT two", "FAULT three"]
    dataset = write_lines(tmp_path / "problems.jsonl", *({"question": q, "answer": "a"} for q in questions))
    fake.fault = "http_500"
    path = tmp_path / "lines.jsonl"
    flags = ["--num-prompts", 3, "--num-shots", 1, "--output-file", path, "--dataset-path", dataset]
    code, output, _ = inside("--base-url", fake.address, *flags)
    assert code == 1
    assert "2 x HTTP status 500" in output
    [line] = read_lines(path)
    assert (line["completed"], line["failed"], line["outputs_sha256"]) == (1, 2, None)
    assert line["errors"] == {"http_500": 2}
    assert line["aborted"] is None
    assert line["dataset"] == "problems.jsonl"


def test_a_closed_output_pipe_gives_no_traceback(fake):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "radixkv.cli", "bench", "--base-url", fake.address, *SMALL]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    os.close(writing)
    assert (done.returncode, complaints(done.stderr)) == (1, "")


def interrupted(fake, number, n_requests, *flags):
    """Runs the command until the server has got so many requests, then signals; returns what it printed."""
    command = [*COMMAND, "--base-url", fake.address, *SMALL, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while len(fake.bodies) < n_requests:
            time.sleep(0.01)
        running.send_signal(number)
        output, errors = running.communicate(timeout=LIMIT_S)
    assert (running.returncode, complaints(errors)) == (130, "")
    return output, errors


@pytest.mark.nightly
@pytest.mark.parametrize("number", rest_nightly([signal.SIGINT, signal.SIGTERM], kept=(0,)))
def test_ctrl_c_during_warm_up_ends_the_run_without_a_result(fake, number):
    fake.stall = 30.0
    output, errors = interrupted(fake, number, 1)
    assert output == ""
    assert errors.endswith("radixkv: interrupted\n")
    fake.opens_at = 0.0


@pytest.mark.parametrize("number", rest_nightly([signal.SIGINT, signal.SIGTERM], kept=(1,)))
def test_ctrl_c_saves_the_partial_result(fake, tmp_path, number):
    fake.hangs_at = 4
    path = tmp_path / "lines.jsonl"
    flags = ["--num-prompts", "100", "--warmup-requests", "0", "--output-file", str(path)]
    output, _ = interrupted(fake, number, 4, *flags)
    assert "interrupted" in output
    line = json.loads(path.read_text())
    assert line["aborted"] == "it was interrupted"
    assert line["completed"] == 3
    assert line["errors"]["stopped"] == 1
    assert line["completed"] + line["failed"] == line["num_prompts"] == 100


def test_a_server_that_goes_away_ends_the_run_and_saves_the_partial_result(fake, tmp_path, inside):
    fake.dies_at = 8
    path = tmp_path / "lines.jsonl"
    flags = ["--num-prompts", 50, "--num-shots", 1, "--max-concurrency", 2, "--warmup-requests", 1]
    code, output, errors = inside("--base-url", fake.address, *flags, "--output-file", path)
    assert (code, errors) == (1, "")
    assert f"the server at {fake.address} is gone" in output
    line = json.loads(path.read_text())
    assert line["aborted"].startswith(f"the server at {fake.address} is gone: ")
    assert 5 <= line["completed"] <= 7
    assert line["errors"]["not_sent"] >= 40
    assert line["completed"] + line["failed"] == 50


def test_a_server_that_hangs_ends_the_run_and_saves_the_partial_result(fake, tmp_path, inside):
    fake.hangs_at = 6
    path = tmp_path / "lines.jsonl"
    flags = ["--request-timeout", 2.0, "--output-file", path]
    code, output, errors = inside("--base-url", fake.address, *SMALL, *flags)
    assert (code, errors) == (1, "")
    assert f"the server at {fake.address} has stopped answering" in output
    line = json.loads(path.read_text())
    assert line["completed"] == 3  # after 2 of the warm-up
    assert line["errors"] == {"timeout": 1, "not_sent": 1}
    assert line["request_timeout_s"] == 2.0


def test_a_server_that_hangs_at_once_fails_the_warm_up(fake, inside):
    fake.hangs_at = 1
    code, output, errors = inside("--base-url", fake.address, *SMALL, "--request-timeout", 1.0)
    assert (code, output) == (1, "")
    assert "warm-up" in errors
    assert f"{fake.address} failed: SocketTimeoutError" in errors
    assert errors.count("\n") == 1
