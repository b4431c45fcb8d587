"""``radixkv bench --base-url`` from the command line."""

import re
from contextlib import asynccontextmanager

import pytest

from radixkv.lab.bench.flags import OVERRIDES, WORKLOADS
from radixkv.lab.bench.workloads.catalog import load_workload, workload_names
from support.agent_oracle import next_reply
from support.bench_command import SMALL, bench
from support.fake_openai import output_ids, output_text
from support.json_lines import read_lines, write_lines
from support.live import complaints
from support.paths import ROOT


def test_a_run_prints_its_table_and_appends_its_line(fake, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"earlier": true}\n')
    done = bench(
        "--base-url", fake.address, *SMALL, "--output-file", path, "--warmup-requests", 2, "--goodput", "ttft:9e9"
    )
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    assert "Serving Benchmark Result" in done.stdout
    first, second = read_lines(path)
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


@pytest.mark.nightly
def test_the_same_seed_gives_the_same_requests_and_digest(completed):
    one, same, other = (completed(*SMALL, "--seed", seed)[1]["outputs_sha256"] for seed in (1, 1, 2))
    assert one == same != other


def test_chats_send_answers_back_and_report_cached_tokens(fake, completed):
    flags = ["--num-sessions", 3, "--num-turns", 3, "--num-shots", 1, "--output-len", 4, "--warmup-requests", 0]
    fake.key = "secret"
    output, line = completed("--workload", "multiturn", *flags, "--api-key", "secret")
    assert "Sessions:                                3" in output
    parameters = ("workload", "num_sessions", "num_turns", "num_prompts")
    assert [line[name] for name in parameters] == ["multiturn", 3, 3, 9]
    assert (line["completed"], line["total_output_tokens"]) == (9, 36)
    report = line["cache_report"]
    assert report["cache_hit_rate_pct"] == report["optimum_pct"] > 60
    prompts = sorted((body["prompt"] for body in fake.bodies), key=len)
    for prompt in prompts[3:]:
        before = max((other for other in prompts if prompt.startswith(other) and other != prompt), key=len)
        assert prompt.startswith(before + "".join(map(output_text, output_ids(before, 4))))


def test_a_server_of_another_engine_gives_no_digest(fake, completed):
    fake.returns_ids = fake.reports_cached = False
    fake.flushes_at = []
    output, line = completed(*SMALL)
    assert line["outputs_sha256"] is None
    assert line["cache_flushed"] is False
    assert line["cache_report"]["optimum_pct"] is None
    assert "No digest of the outputs" in output


@pytest.fixture
def started(fake, monkeypatch):
    """The flags of each server that a run has started; the server that it uses is the fake one."""
    flags_of_servers = []

    @asynccontextmanager
    async def running_server(flags):
        flags_of_servers.append(flags)
        yield fake.address

    monkeypatch.setattr("radixkv.processes.server_process.running_server", running_server)
    return flags_of_servers


@pytest.mark.nightly
def test_the_line_has_the_flags_of_the_started_server(fake, tmp_path, inside, started):
    path = tmp_path / "lines.jsonl"
    assert inside(*SMALL, "--output-file", path, "--compare-cache", "--page-size", 32)[0] == 0
    assert inside(*SMALL, "--output-file", path, "--tokenizer", "\udcff")[0] == 0
    assert inside("--base-url", fake.address, *SMALL, "--output-file", path)[0] == 0
    reported = [(line["cache"], line["server"]) for line in read_lines(path)]
    assert reported == [
        ("off", ["--page-size=32"]),
        ("on", ["--page-size=32"]),
        ("on", ["--tokenizer=?"]),
        (None, None),
    ]
    assert started[:2] == [["--page-size=32", "--no-enable-prefix-caching"], ["--page-size=32"]]


class DraftMetrics:
    """``/metrics`` of a server in which every third token was a draft, and as many were not right."""

    def format(self, prompt, generated, cached):
        numbers = {
            "prompt_tokens_total": prompt,
            "generation_tokens_total": generated,
            "prefix_cache_hits_total": cached,
            "spec_decode_num_draft_tokens_total": 2 * generated // 3,
            "spec_decode_num_accepted_tokens_total": generated // 3,
            "spec_decode_num_steps_without_overlap_total": generated,
            'spec_decode_num_draft_tokens_by_source_total{source="tree"}': 2 * generated // 3,
            'spec_decode_num_accepted_tokens_by_source_total{source="tree"}': generated // 3,
        }
        lines = [
            f"# TYPE radixkv:{name.partition('{')[0]} counter\nradixkv:{name} {n}\n" for name, n in numbers.items()
        ]
        return "".join(lines)


@pytest.mark.nightly
def test_what_became_of_drafts_is_in_table_line_and_page(fake, tmp_path, completed):
    output, line = completed(*SMALL)
    assert line["draft_report"] is None
    assert "Speculative Decoding" not in output
    fake.metrics = DraftMetrics()
    output, line = completed(*SMALL, "--plot", tmp_path / "page")
    assert line["accounting"]["agree"] is True
    assert line["draft_report"] == {  # 5 answers of 3 tokens; the first token of each comes with its prompt
        "draft_tokens": 10,
        "accepted_tokens": 5,
        "acceptance_pct": 50.0,
        "tokens_a_step": 2.0,
        "steps_without_overlap": 15,
        "by_source": {"tree": {"draft_tokens": 10, "accepted_tokens": 5}},
    }
    rows = {
        "Drafted tokens": "10",
        "Accepted tokens": "5",
        "Accepted drafts (%)": "50.00",
        "  tree, 10 drafted (%)": "50.00",
        "Tokens a step of an answer": "2.00",
        "Steps without overlap": "15",
    }
    page = (tmp_path / "page" / "index.html").read_text("utf-8")
    for label, value in rows.items():
        assert re.search(rf"^{re.escape(label)}: +{value}$", output, re.MULTILINE), label
        assert re.search(rf"{re.escape(label)}</t[hd]>\s*<td>{value}</td>", page), label


@pytest.mark.nightly
def test_runs_with_drafts_are_compared_with_those_without(fake, tmp_path, inside, started, capsys):
    off, on = tmp_path / "off.jsonl", tmp_path / "on.jsonl"
    config = '{"method":"tree","num_speculative_tokens":4,"prompt_lookup_max":8,"prompt_lookup_min":2}'
    assert inside(*SMALL, "--output-file", off)[0] == 0
    fake.metrics = DraftMetrics()
    given = '{"method": "tree", "num_speculative_tokens": 4}'
    assert inside(*SMALL, "--output-file", on, "--speculative-config", given)[0] == 0
    assert started == [[], [f"--speculative-config={config}"]]
    code, output, _ = inside("compare", off, on)
    assert code == 0
    assert re.search(r"^Accepted drafts \(%\) +n/a +50.00 ", output, re.MULTILINE)
    assert re.search(r"^Tokens a step of an answer +n/a +2.00 ", output, re.MULTILINE)
    assert f"the servers differ: one with no flags, and one with --speculative-config={config}" in output
    assert "outputs are equal" in output


def test_every_key_of_a_line_is_in_the_docs(fake, completed):
    fake.metrics = DraftMetrics()
    _, line = completed(*SMALL)
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "benchmarks.md").read_text("utf-8")))
    parameters = set(load_workload("fewshot").__struct_fields__)  # see docs/workloads.md
    for key in (
        {*line, *line["cache_report"], *line["accounting"], *line["environment"], *line["draft_report"]}
        - parameters
        - {"agree"}
    ):
        word, _, name = key.partition("_")
        is_latency = {f"{word}_", name} <= documented
        assert key in documented or is_latency, key


def test_the_flags_are_those_of_the_workloads():
    assert {*OVERRIDES} <= {field for name in WORKLOADS for field in load_workload(name).__struct_fields__}
    assert sorted(WORKLOADS) == workload_names()


def test_an_open_loop_reports_its_rate_and_lateness(completed):
    flags = ["--num-prompts", 8, "--num-shots", 1, "--output-len", 2, "--request-rate"]
    (_, opened), (_, closed) = completed(*flags, 100), completed(*flags, "inf")
    assert (opened["request_rate"], opened["max_concurrency"]) == (100.0, None)
    assert opened["mean_lateness_ms"] >= 0
    assert (closed["request_rate"], closed["max_concurrency"], closed["mean_lateness_ms"]) == ("inf", 8, None)


def test_a_trace_is_sent_at_its_arrival_times(fake, tmp_path, inside, completed):
    rows = [{"timestamp": 10_000 * n, "input_length": 20, "output_length": 2, "hash_ids": [n]} for n in range(3)]
    trace = write_lines(tmp_path / "trace.jsonl", *rows, b"no row")
    flags = ["--workload", "trace", "--dataset-path", trace, "--speed", 50, "--num-prompts", 3]
    code, output, errors = inside("--base-url", fake.address, *flags)
    assert (code, output) == (1, "")
    assert f"{trace}" in errors
    output, line = completed(*flags, "--skip-bad-lines")
    assert re.search("Speed of the data set's clock: +50.00\n", output)
    assert (line["request_rate"], line["speed"], line["left_out"]["bad_lines"]) == ("trace", 50.0, 1)
    assert line["duration"] >= 0.4  # the data set's 20 s or more at speed 50


@pytest.mark.nightly
def test_long_requests_of_a_trace_are_skipped_or_scaled(fake, tmp_path, completed):
    rows = [{"timestamp": n, "input_length": 40 * 9**n, "output_length": 8, "hash_ids": [n]} for n in range(2)]
    trace = write_lines(tmp_path / "trace.jsonl", *rows)
    flags = ["--workload", "trace", "--dataset-path", trace, "--num-prompts", 2]
    flags += ["--block-len", 512, "--warmup-requests", 0]
    _, skipped = completed(*flags, "--max-context", 367, "--too-long", "skip")
    assert [len(body["prompt"]) for body in fake.bodies] == [40]
    assert (skipped["max_context"], skipped["left_out"]) == (367, {"too_long": 1})
    _, scaled = completed(*flags, "--max-context", 184, "--too-long", "scale")
    # They are a millisecond apart, so either may arrive first.
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in fake.bodies[1:]) == [(20, 4), (180, 4)]
    assert (scaled["max_context"], scaled["left_out"]) == (184, {"scaled": 2})


def test_plain_requests_work_with_a_strict_chat_server(fake, inside, completed):
    fake.known_fields = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
    fake.sends_done = fake.returns_ids = False
    flags = ["--workload", "chat", "--num-sessions", 2, "--num-turns", 2]
    code, output, errors = inside("--base-url", fake.address, *flags)
    assert (code, output) == (1, "")
    assert "['ignore_eos', 'return_token_ids']" in errors
    assert "--plain-requests" in errors
    _, line = completed(*flags, "--plain-requests")
    assert (line["completed"], line["plain_requests"]) == (4, True)
    assert set(fake.paths) == {"/v1/chat/completions"}


def test_prompts_are_sent_as_token_ids(fake, completed):
    _, line = completed(*SMALL, "--prompt-form", "tokens", "--tokenizer", "tiny")
    assert all(isinstance(body["prompt"], list) for body in fake.bodies)
    assert line["prompt_form"] == "tokens"


@pytest.mark.usefixtures("started")
def test_a_models_revision_does_not_apply_to_another_tokenizer(fake, inside):
    flags = ["--model", "org/model", "--revision", "v2", "--tokenizer", "tiny", "--prompt-form", "tokens"]
    code, _, errors = inside(*SMALL, *flags)
    assert (code, errors) == (0, "")
    assert all(isinstance(body["prompt"], list) for body in fake.bodies)


@pytest.mark.nightly
def test_charts_are_written(fake, tmp_path, inside):
    code, output, _ = inside("--base-url", fake.address, *SMALL, "--plot", tmp_path / "charts")
    assert code == 0
    assert (tmp_path / "charts" / "index.html").stat().st_size > 1000
    assert str(tmp_path / "charts" / "index.html") in output


@pytest.mark.parametrize("forgets", [False, True])
def test_an_agents_loop_is_run_and_its_accuracy_reported(fake, completed, forgets):
    """A server that forgets the tools' results answers rightly only where they say no more than that it is done."""

    def message(body):
        reply = next_reply(body["messages"])
        return reply.message if reply.tool_calls or not forgets else {"content": "It is so."}

    fake.message = message
    flags = ["--num-sessions", 4, "--num-turns", 2, "--num-shots", 1, "--warmup-requests", 0]
    output, line = completed("--workload", "agents", *flags, "--seed", 3)
    assert (line["failed"], line["completed"]) == (0, line["num_requests"])
    assert line["accuracy_pct"] < 30 if forgets else line["accuracy_pct"] == 100
    assert line["accounting"]["agree"] is True
    assert all(len(body["tools"]) == 3 for body in fake.bodies)
    roles = [message["role"] for message in fake.bodies[-1]["messages"]]
    assert roles.count("tool") >= 2
    assert "accuracy" in output.lower()
