"""``radixkv bench --base-url`` as people run it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fake_openai import output_ids, output_text

SMALL = ["--num-prompts", "5", "--num-shots", "2", "--output-len", "3", "--max-concurrency", "1"]


def bench(*flags):
    command = [sys.executable, "-m", "radixkv.cli", "bench", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_run_prints_its_box_and_appends_its_line(fake, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"earlier": true}\n')
    done = bench(
        "--base-url", fake.address, *SMALL, "--output-file", path, "--warmup-requests", 2, "--goodput", "ttft:9e9"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Serving Benchmark Result" in done.stdout
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"earlier": True}
    assert second["workload"] == "fewshot"
    assert second["cache"] is None
    assert second["cache_flushed"] is True
    assert (second["num_prompts"], second["completed"], second["failed"]) == (5, 5, 0)
    assert second["model"] == "fake-model"
    assert second["request_goodput"] == second["request_throughput"]
    report = second["cache_report"]
    assert report["cache_hit_rate_pct"] == report["optimum_pct"] > 50  # the fake server has an infinite cache
    assert len(second["outputs_sha256"]) == 64
    environment = second["environment"]
    assert environment.keys() == {"commit", "versions", "processor", "cores"}
    assert environment["versions"].keys() >= {"radixkv", "python", "torch"}
    assert environment["cores"] >= 1
    prompts = [body["prompt"] for body in fake.bodies]
    assert len(prompts) == 7
    assert not any("Question" in prompt for prompt in prompts[:2])
    assert fake.flushes == 1


def test_the_same_seed_gives_the_same_requests_and_digest(fake, tmp_path):
    path = tmp_path / "lines.jsonl"
    for seed in (1, 1, 2):
        assert bench("--base-url", fake.address, *SMALL, "--seed", seed, "--output-file", path).returncode == 0
    one, same, other = (json.loads(line)["outputs_sha256"] for line in path.read_text().splitlines())
    assert one == same != other


def test_chats_send_each_answer_back_and_report_what_was_reused(fake, tmp_path):
    path = tmp_path / "lines.jsonl"
    flags = ["--num-sessions", 3, "--num-turns", 3, "--num-shots", 1, "--output-len", 4, "--warmup-requests", 0]
    fake.key = "secret"
    flags += ["--api-key", "secret", "--output-file", path]
    done = bench("--base-url", fake.address, "--workload", "multiturn", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Sessions:                                3" in done.stdout
    line = json.loads(path.read_text())
    assert (line["workload"], line["num_sessions"], line["num_turns"], line["num_prompts"]) == (
        "multiturn",
        3,
        3,
        9,
    )
    assert (line["completed"], line["total_output_tokens"]) == (9, 36)
    report = line["cache_report"]
    assert report["cache_hit_rate_pct"] == report["optimum_pct"] > 70
    prompts = sorted((body["prompt"] for body in fake.bodies), key=len)
    for prompt in prompts[3:]:
        before = max((other for other in prompts if prompt.startswith(other) and other != prompt), key=len)
        assert prompt.startswith(before + "".join(map(output_text, output_ids(before, 4))))


def test_failed_requests_are_reported_and_make_the_exit_code_1(fake, tmp_path):
    dataset = tmp_path / "problems.jsonl"
    questions = ["shot", "one", "FAULT two", "FAULT three"]
    dataset.write_text("".join(json.dumps({"question": q, "answer": "a"}) + "\n" for q in questions))
    fake.fault = "http_500"
    path = tmp_path / "lines.jsonl"
    flags = ["--num-prompts", 3, "--num-shots", 1, "--output-file", path, "--dataset-path", dataset]
    done = bench("--base-url", fake.address, *flags)
    assert done.returncode == 1
    assert "2 x BadReply: HTTP status 500" in done.stdout
    [line] = map(json.loads, path.read_text().splitlines())
    assert (line["completed"], line["failed"], line["outputs_sha256"]) == (1, 2, None)
    assert line["dataset"] == "problems.jsonl"


def test_a_server_of_another_engine_gives_no_digest(fake, tmp_path):
    fake.returns_ids = fake.reports_cached = fake.has_flush = False
    path = tmp_path / "lines.jsonl"
    done = bench("--base-url", fake.address, *SMALL, "--output-file", path)
    assert done.returncode == 0
    line = json.loads(path.read_text())
    assert line["outputs_sha256"] is None
    assert line["cache_flushed"] is False
    assert line["cache_report"]["optimum_pct"] is None
    assert "No digest of the outputs" in done.stdout


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--base-url", "URL", "--compare-cache"], 2, "--compare-cache starts servers of its own"),
        (["--base-url", "URL", "--page-size", "32"], 2, "--page-size=32 cannot change the server at --base-url"),
        (["--compare-cache", "--disable-radix-cache"], 2, "leave out --no-enable-prefix-caching"),
        (["--api-key", "secret"], 2, "--api-key is for a running server"),
        (["--base-url", "URL", "--workload", "multiturn", "--num-prompts", "4"], 2, "has no num_prompts"),
        (["--base-url", "localhost:1"], 1, "'localhost:1' is not an address"),
        (["--base-url", "http://127.0.0.1:9"], 1, "does not answer"),
        (["--base-url", "URL", "--workload", "nothing"], 1, "workload 'nothing' is unknown"),
        (["--base-url", "URL", "--num-prompts", "many"], 2, "'many' is not a whole number"),
        (["--base-url", "URL", "--request-rate", "0"], 2, "request_rate 0.0 must be above 0"),
        (["--base-url", "URL", "--seed", "-1"], 2, "seed -1 must be at least 0"),
        (["--base-url", "URL", "--warmup-requests", "-1"], 2, "warmup_requests -1 must be at least 0"),
        (["--base-url", "URL", "--num-prompts", "0"], 2, "num_prompts 0 must be between 1 and 1000000"),
        (["--base-url", "URL", "--max-concurrency", "0"], 2, "max_concurrency 0 must be between 1 and 1000000"),
        (["--base-url", "URL", "--request-rate", "nan"], 2, "'nan' is not a number"),
        (["--base-url", "URL", "--goodput", "ttfb:3"], 2, "'ttfb:3' names none of ttft, tpot, e2el"),
        (["--base-url", "URL", "--goodput", "ttft:x"], 2, "'ttft:x' has no limit above 0 ms; write ttft:200"),
        (["--base-url", "URL", "--goodput", "ttft"], 2, "'ttft' has no limit above 0 ms; write ttft:200"),
        (["--base-url", "URL", "--dataset-path", "/nowhere.jsonl"], 1, "cannot read the data set /nowhere.jsonl"),
        (["--base-url", "URL", "--output-file", "/nowhere/lines.jsonl"], 1, "cannot write --output-file"),
    ],
)
def test_wrong_use_is_one_clear_line(fake, flags, code, message):
    done = bench(*(fake.address if flag == "URL" else flag for flag in flags))
    assert done.returncode == code
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.startswith("radixkv bench: error: ")
    assert done.stderr.count("\n") == 1
    assert fake.bodies == []


def test_a_reader_of_the_report_that_has_left_gives_no_traceback(fake):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "radixkv.cli", "bench", "--base-url", fake.address, *SMALL]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_run_without_a_traceback(fake, number):
    fake.delay = 0.2
    command = [
        sys.executable,
        "-m",
        "radixkv.cli",
        "bench",
        "--base-url",
        fake.address,
        *SMALL,
        "--output-len",
        "300",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while not fake.bodies:
            time.sleep(0.01)
        fake.delay = 0.0
        running.send_signal(number)
        assert running.communicate(timeout=30) == ("", "")
        assert running.returncode == 130


def test_a_server_that_cannot_start_is_one_line():
    done = bench("--model", "/nowhere/model")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "radixkv bench: error: the server ended before it was ready: radixkv serve: error: "
    )
    assert "/nowhere/model" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_warm_up_that_fails_ends_the_run(fake):
    with_wrong_path = fake.address.replace("http://", "http://user@") + "/other"
    done = bench("--base-url", with_wrong_path, "--model", "fake-model", *SMALL)
    assert done.returncode == 1
    assert "warm-up request" in done.stderr
    assert "404" in done.stderr
    assert done.stderr.count("\n") == 1
