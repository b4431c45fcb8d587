"""``radixkv bench --base-url`` as people run it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_openai import output_ids, output_text

from radixkv.bench.workloads import WorkloadChanges, load_workload, workload_names
from radixkv.cli import main
from radixkv.cli.load_flags import COUNTS, WORKLOADS
from support.live import LIMIT_S

SMALL = ["--num-prompts", "5", "--num-shots", "2", "--output-len", "3", "--max-concurrency", "1"]


COMMAND = [sys.executable, "-m", "radixkv.cli", "bench"]


def bench(*flags):
    return subprocess.run([*COMMAND, *map(str, flags)], capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def inside(capsys):
    """Runs the command in this process, which is faster: exit code, standard output and error."""

    def run(*flags):
        try:
            code = main(["bench", *map(str, flags)])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


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
    assert (second["num_prompts"], second["num_requests"], second["completed"], second["failed"]) == (5, 5, 5, 0)
    assert second["accounting"]["agree"] is True
    assert second["model"] == "fake-model"
    assert second["request_goodput"] == second["request_throughput"]
    report = second["cache_report"]
    assert report["cache_hit_rate_pct"] == report["optimum_pct"] > 50  # the fake server has an infinite cache
    assert len(second["outputs_sha256"]) == 64
    environment = second["environment"]
    assert environment.keys() == {"commit", "versions", "processor", "cores", "gpu", "driver"}
    assert environment["versions"].keys() >= {"radixkv", "python", "torch"}
    assert environment["cores"] >= 1
    prompts = [body["prompt"] for body in fake.bodies]
    assert len(prompts) == 7
    assert not any("Question" in prompt for prompt in prompts[:2])
    assert fake.flushed == [("POST", "/flush_cache")]


def test_the_same_seed_gives_the_same_requests_and_digest(fake, tmp_path, inside):
    path = tmp_path / "lines.jsonl"
    for seed in (1, 1, 2):
        assert inside("--base-url", fake.address, *SMALL, "--seed", seed, "--output-file", path)[0] == 0
    one, same, other = (json.loads(line)["outputs_sha256"] for line in path.read_text().splitlines())
    assert one == same != other


def test_chats_send_each_answer_back_and_report_what_was_reused(fake, tmp_path, inside):
    path = tmp_path / "lines.jsonl"
    flags = ["--num-sessions", 3, "--num-turns", 3, "--num-shots", 1, "--output-len", 4, "--warmup-requests", 0]
    fake.key = "secret"
    flags += ["--api-key", "secret", "--output-file", path]
    code, output, errors = inside("--base-url", fake.address, "--workload", "multiturn", *flags)
    assert (code, errors) == (0, "")
    assert "Sessions:                                3" in output
    line = json.loads(path.read_text())
    assert (line["workload"], line["num_sessions"], line["num_turns"], line["num_prompts"]) == (
        "multiturn",
        3,
        3,
        9,
    )
    assert (line["completed"], line["total_output_tokens"]) == (9, 36)
    report = line["cache_report"]
    assert report["cache_hit_rate_pct"] == report["optimum_pct"] > 60
    prompts = sorted((body["prompt"] for body in fake.bodies), key=len)
    for prompt in prompts[3:]:
        before = max((other for other in prompts if prompt.startswith(other) and other != prompt), key=len)
        assert prompt.startswith(before + "".join(map(output_text, output_ids(before, 4))))


def test_failed_requests_are_reported_and_make_the_exit_code_1(fake, tmp_path, inside):
    dataset = tmp_path / "problems.jsonl"
    questions = ["shot", "one", "FAULT two", "FAULT three"]
    dataset.write_text("".join(json.dumps({"question": q, "answer": "a"}) + "\n" for q in questions))
    fake.fault = "http_500"
    path = tmp_path / "lines.jsonl"
    flags = ["--num-prompts", 3, "--num-shots", 1, "--output-file", path, "--dataset-path", dataset]
    code, output, _ = inside("--base-url", fake.address, *flags)
    assert code == 1
    assert "2 x HTTP status 500" in output
    [line] = map(json.loads, path.read_text().splitlines())
    assert (line["completed"], line["failed"], line["outputs_sha256"]) == (1, 2, None)
    assert line["errors"] == {"http_500": 2}
    assert line["aborted"] is None
    assert line["dataset"] == "problems.jsonl"


def test_a_server_of_another_engine_gives_no_digest(fake, tmp_path, inside):
    fake.returns_ids = fake.reports_cached = False
    fake.flushes_at = []
    path = tmp_path / "lines.jsonl"
    code, output, _ = inside("--base-url", fake.address, *SMALL, "--output-file", path)
    assert code == 0
    line = json.loads(path.read_text())
    assert line["outputs_sha256"] is None
    assert line["cache_flushed"] is False
    assert line["cache_report"]["optimum_pct"] is None
    assert "No digest of the outputs" in output


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
        (["--base-url", "URL", "--warmup-requests", "-1"], 2, "warmup_requests -1 must be between 0 and 1000000"),
        (
            ["--base-url", "URL", "--warmup-requests", "1000001"],
            2,
            "warmup_requests 1000001 must be between",
        ),
        (["--base-url", "URL", "--model", "\udcff"], 1, r"model '\udcff' is not UTF-8"),
        (["--base-url", "URL", "--num-prompts", "0"], 2, "num_prompts 0 must be between 1 and 1000000"),
        (["--base-url", "URL", "--max-concurrency", "0"], 2, "max_concurrency 0 must be between 1 and 1000000"),
        (["--base-url", "URL", "--request-rate", "nan"], 2, "'nan' is not a number"),
        (["--base-url", "URL", "--goodput", "ttfb:3"], 2, "'ttfb:3' names none of ttft, tpot, e2el"),
        (["--base-url", "URL", "--goodput", "ttft:x"], 2, "'ttft:x' has no limit above 0 ms; write ttft:200"),
        (["--base-url", "URL", "--goodput", "ttft"], 2, "'ttft' has no limit above 0 ms; write ttft:200"),
        (["--base-url", "URL", "--dataset-path", "/nowhere.jsonl"], 1, "cannot read the data set /nowhere.jsonl"),
        (["--base-url", "URL", "--output-file", "/nowhere/lines.jsonl"], 1, "cannot write --output-file"),
        (["--base-url", "URL", "--plot", "/proc/pictures"], 1, "cannot write to --plot /proc/pictures"),
        (["--base-url", "URL", "--plot", "/proc/version"], 1, "--plot /proc/version: it is not a folder"),
        (["--base-url", "URL", "--speed", "2"], 1, "speed 2.0 needs a workload with a clock of its own"),
        (
            ["--base-url", "URL", "--request-timeout", "0"],
            2,
            "request_timeout 0.0 must be above 0 s and at most 1e+06",
        ),
        (["--base-url", "URL", "--request-timeout", "inf"], 2, "request_timeout inf must be above 0 s"),
        (["--base-url", "URL", "--request-timeout", "10m"], 2, "'10m' is not a number"),
        (["--base-url", "URL", "--max-context", "99"], 2, "has no max_context"),
        (["--base-url", "URL", "--workload", "trace", "--too-long", "cut"], 2, "invalid choice: 'cut'"),
        (
            ["--base-url", "URL", "--workload", "trace", "--block-len", "513"],
            2,
            "block_len 513 must be at most 512",
        ),
        (["--base-url", "URL", "--speed", "0"], 2, "speed 0.0 must be above 0"),
        (["--base-url", "URL", "--speed", "2", "--request-rate", "3"], 2, "which --request-rate replaces"),
        (["--base-url", "URL", "--skip-bad-lines"], 2, "--skip-bad-lines is for a data set"),
        (["--base-url", "URL", "--prompt-form", "tokens"], 2, "needs the --tokenizer of the server"),
        (["--base-url", "URL", "--prompt-form", "ids"], 2, "invalid choice: 'ids'"),
        (["--base-url", "URL", "--tokenizer", "tiny"], 2, "--tokenizer=tiny cannot change the server"),
        (["--base-url", "URL", "--prompt-form", "tokens", "--tokenizer", "/nowhere"], 1, "tokenizer '/nowhere' is"),
    ],
)
def test_wrong_use_is_one_clear_line(fake, inside, flags, code, message):
    found, output, errors = inside(*(fake.address if flag == "URL" else flag for flag in flags))
    assert (found, output) == (code, "")
    assert message in errors
    assert errors.startswith("radixkv bench: error: ")
    assert errors.count("\n") == 1
    assert fake.bodies == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plot", "x", "compare", "a", "b"], "--plot stands before compare"),
        (["--seed=0", "paging"], "--seed stands before paging"),
        (["--page-size", "32", "paging", "--page-size", "16"], "--page-size stands before paging"),
    ],
)
def test_flags_that_a_command_below_would_not_read_are_refused(inside, flags, said):
    code, output, errors = inside(*flags)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert said in errors


def test_the_line_says_how_a_server_was_started(fake, tmp_path, inside, monkeypatch):
    started = []

    @asynccontextmanager
    async def started_server(flags):
        started.append(flags)
        yield fake.address

    monkeypatch.setattr("radixkv.bench.started.started_server", started_server)
    path = tmp_path / "lines.jsonl"
    assert inside(*SMALL, "--output-file", path, "--compare-cache", "--page-size", 32)[0] == 0
    assert inside(*SMALL, "--output-file", path, "--tokenizer", "\udcff")[0] == 0
    assert inside("--base-url", fake.address, *SMALL, "--output-file", path)[0] == 0
    told = [(line["cache"], line["server"]) for line in map(json.loads, path.read_text().splitlines())]
    assert told == [
        ("off", ["--page-size=32"]),
        ("on", ["--page-size=32"]),
        ("on", ["--tokenizer=?"]),
        (None, None),
    ]
    assert started[:2] == [["--page-size=32", "--no-enable-prefix-caching"], ["--page-size=32"]]


def test_every_key_of_a_line_is_in_the_docs(fake, tmp_path, inside):
    path = tmp_path / "lines.jsonl"
    assert inside("--base-url", fake.address, *SMALL, "--output-file", path)[0] == 0
    line = json.loads(path.read_text())
    told = set(re.findall(r"`(\w+)`", (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text("utf-8")))
    latencies = {key for key in line if key.endswith("_ms")}  # test_figures.py has those
    parameters = set(load_workload("fewshot").__struct_fields__)  # docs/workloads.md has those
    assert line.keys() - latencies - parameters <= told
    assert line["accounting"].keys() | line["environment"].keys() <= told | {"agree"}


def test_the_flags_are_those_of_the_workloads():
    counts = [flag[2:].replace("-", "_") for flag, _ in COUNTS]
    assert [*counts[:-1], "too_long", counts[-1]] == list(WorkloadChanges.__struct_fields__)
    assert sorted(WORKLOADS) == workload_names()


def test_a_reader_of_the_report_that_has_left_gives_no_traceback(fake):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "radixkv.cli", "bench", "--base-url", fake.address, *SMALL]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_warming_up_ends_a_run_without_a_word(fake, number):
    fake.stall = 30.0
    command = [*COMMAND, "--base-url", fake.address, *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while not fake.bodies:
            time.sleep(0.01)
        running.send_signal(number)
        assert running.communicate(timeout=LIMIT_S) == ("", "")
        assert running.returncode == 130
    fake.opens_at = 0.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_what_there_is(fake, tmp_path, number):
    fake.hangs_at = 4
    path = tmp_path / "lines.jsonl"
    flags = [*SMALL, "--num-prompts", "100", "--warmup-requests", "0", "--output-file", str(path)]
    command = [*COMMAND, "--base-url", fake.address, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while len(fake.bodies) < 4:
            time.sleep(0.01)
        running.send_signal(number)
        output, errors = running.communicate(timeout=LIMIT_S)
        assert (running.returncode, errors) == (130, "")
    assert "The run ended early: it was interrupted." in output
    line = json.loads(path.read_text())
    assert line["aborted"] == "it was interrupted"
    assert line["completed"] == 3
    assert line["errors"]["stopped"] == 1
    assert line["completed"] + line["failed"] == line["num_prompts"] == 100


def test_a_server_that_goes_away_ends_the_run_with_the_partial_result_saved(fake, tmp_path, inside):
    fake.dies_at = 8
    path = tmp_path / "lines.jsonl"
    flags = ["--num-prompts", 50, "--num-shots", 1, "--max-concurrency", 2, "--warmup-requests", 1]
    code, output, errors = inside("--base-url", fake.address, *flags, "--output-file", path)
    assert (code, errors) == (1, "")
    assert "The run ended early: the server at" in output
    line = json.loads(path.read_text())
    assert line["aborted"].startswith(f"the server at {fake.address} is gone: ")
    assert 5 <= line["completed"] <= 7
    assert line["errors"]["not_sent"] >= 40
    assert line["completed"] + line["failed"] == 50


def test_a_server_that_hangs_ends_the_run_and_what_there_is_is_saved(fake, tmp_path, inside):
    fake.hangs_at = 6
    path = tmp_path / "lines.jsonl"
    flags = ["--request-timeout", 2.0, "--output-file", path]
    code, output, errors = inside("--base-url", fake.address, *SMALL, *flags)
    assert (code, errors) == (1, "")
    assert f"The run ended early: the server at {fake.address} answers nobody: " in output
    line = json.loads(path.read_text())
    assert line["completed"] == 3  # after 2 that warm up
    assert line["errors"] == {"timeout": 1, "not_sent": 1}
    assert line["request_timeout_s"] == 2.0


def test_a_server_that_hangs_from_the_first_request_on_is_told_of(fake, inside):
    fake.hangs_at = 1
    code, output, errors = inside("--base-url", fake.address, *SMALL, "--request-timeout", 1.0)
    assert (code, output) == (1, "")
    assert f"a warm-up request to {fake.address} failed: SocketTimeoutError" in errors
    assert errors.count("\n") == 1


def test_an_open_loop_says_its_rate_and_how_late_requests_were_sent(fake, tmp_path, inside):
    path = tmp_path / "lines.jsonl"
    flags = ["--num-prompts", 8, "--num-shots", 1, "--output-len", 2, "--output-file", path]
    assert inside("--base-url", fake.address, *flags, "--request-rate", 100)[0] == 0
    assert inside("--base-url", fake.address, *flags, "--request-rate", "inf")[0] == 0
    opened, closed = map(json.loads, path.read_text().splitlines())
    assert (opened["request_rate"], opened["max_concurrency"]) == (100.0, None)
    assert opened["mean_lateness_ms"] >= 0
    assert (closed["request_rate"], closed["max_concurrency"], closed["mean_lateness_ms"]) == ("inf", 8, None)


def test_a_trace_is_sent_by_its_own_clock(fake, tmp_path, inside):
    trace, path = tmp_path / "trace.jsonl", tmp_path / "lines.jsonl"
    rows = [{"timestamp": 10_000 * n, "input_length": 20, "output_length": 2, "hash_ids": [n]} for n in range(3)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no row\n")
    flags = [
        "--workload",
        "trace",
        "--dataset-path",
        trace,
        "--output-file",
        path,
        "--speed",
        50,
        "--num-prompts",
        3,
    ]
    code, output, errors = inside("--base-url", fake.address, *flags)
    assert (code, output) == (1, "")
    assert f"{trace}" in errors
    code, output, errors = inside("--base-url", fake.address, *flags, "--skip-bad-lines")
    assert (code, errors) == (0, "")
    assert re.search("Speed of the data set's clock: +50.00\n", output)
    line = json.loads(path.read_text())
    assert (line["request_rate"], line["speed"], line["left_out"]["bad_lines"]) == ("trace", 50.0, 1)
    assert 0.4 <= line["duration"] < 20


def test_requests_of_a_trace_that_are_too_long_are_skipped_or_scaled_by_choice(fake, tmp_path, inside):
    trace, path = tmp_path / "trace.jsonl", tmp_path / "lines.jsonl"
    rows = [{"timestamp": n, "input_length": 40 * 9**n, "output_length": 8, "hash_ids": [n]} for n in range(2)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--base-url", fake.address, "--workload", "trace", "--dataset-path", trace, "--num-prompts", 2]
    flags += ["--block-len", 512, "--warmup-requests", 0, "--output-file", path]
    assert inside(*flags, "--max-context", 367, "--too-long", "skip")[0] == 0
    assert [len(body["prompt"]) for body in fake.bodies] == [40]
    assert inside(*flags, "--max-context", 184, "--too-long", "scale")[0] == 0
    assert [(len(body["prompt"]), body["max_tokens"]) for body in fake.bodies[1:]] == [(20, 4), (180, 4)]
    told = [(line["max_context"], line["left_out"]) for line in map(json.loads, path.read_text().splitlines())]
    assert told == [(367, {"too_long": 1}), (184, {"scaled": 2})]


def test_plain_requests_and_chats_alone_suffice_for_a_strict_server(fake, tmp_path, inside):
    fake.known_fields = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
    fake.says_done = fake.returns_ids = False
    path = tmp_path / "lines.jsonl"
    flags = ["--base-url", fake.address, "--workload", "chat", "--num-sessions", 2, "--num-turns", 2]
    code, output, errors = inside(*flags)
    assert (code, output) == (1, "")
    assert "Unexpected fields in the request: ['ignore_eos', 'return_token_ids']" in errors
    assert "--plain-requests leaves out what is not OpenAI's" in errors
    assert inside(*flags, "--plain-requests", "--output-file", path)[::2] == (0, "")
    line = json.loads(path.read_text())
    assert (line["completed"], line["plain_requests"]) == (4, True)
    assert set(fake.paths) == {"/v1/chat/completions"}


def test_prompts_are_sent_as_token_ids_if_asked(fake, tmp_path, inside):
    path = tmp_path / "lines.jsonl"
    flags = ["--base-url", fake.address, *SMALL, "--prompt-form", "tokens", "--tokenizer", "tiny"]
    assert inside(*flags, "--output-file", path)[::2] == (0, "")
    assert all(isinstance(body["prompt"], list) for body in fake.bodies)
    assert json.loads(path.read_text())["prompt_form"] == "tokens"


def test_a_models_revision_is_not_asked_of_another_tokenizer(fake, inside, monkeypatch):
    @asynccontextmanager
    async def started_server(flags):
        yield fake.address

    monkeypatch.setattr("radixkv.bench.started.started_server", started_server)
    flags = ["--model", "org/model", "--revision", "v2", "--tokenizer", "tiny", "--prompt-form", "tokens"]
    code, _, errors = inside(*SMALL, *flags)
    assert (code, errors) == (0, "")
    assert all(isinstance(body["prompt"], list) for body in fake.bodies)


def test_pictures_are_written(fake, tmp_path, inside):
    code, output, _ = inside("--base-url", fake.address, *SMALL, "--plot", tmp_path / "pictures")
    assert code == 0
    assert (tmp_path / "pictures" / "index.html").stat().st_size > 1000
    assert str(tmp_path / "pictures" / "index.html") in output


def test_a_server_that_cannot_start_is_one_line(inside):
    code, output, errors = inside("--model", "/nowhere/model")
    assert (code, output) == (1, "")
    assert errors.startswith("radixkv bench: error: the server ended before it was ready: radixkv serve: error: ")
    assert "/nowhere/model" in errors
    assert errors.count("\n") == 1


def test_a_warm_up_that_fails_ends_the_run(fake, inside):
    with_wrong_path = fake.address.replace("http://", "http://user@") + "/other"
    code, output, errors = inside("--base-url", with_wrong_path, "--model", "fake-model", *SMALL)
    assert (code, output) == (1, "")
    assert "warm-up request" in errors
    assert "404" in errors
    assert errors.count("\n") == 1
