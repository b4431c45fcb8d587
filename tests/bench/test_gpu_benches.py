"""The GPU benchmarks run in small on a machine without GPU, so that failures show."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from radixkv.processes.server_process import running_server
from support.paths import ROOT

BENCH = ROOT / "bench"
TICK_S = 0.02
"""By how much two times of processors may differ that the kernel counts in ticks of 10 ms."""
WORKLOADS = """
def fewshot(requests=1000, shared=1000, question=8, output=4):
    return [[([7] * shared + [100 + i] * question, output) for i in range(requests)]]

def multiturn(sessions=1000, turns=2, system=1000, user=8, output=4):
    chats = [[9 + i] * system for i in range(sessions)]
    return [[(chat + [5] * user * turn, output) for chat in chats] for turn in range(1, turns + 1)]

ALL = {"fewshot": fewshot, "multiturn": multiturn}
"""


def run(
    script: str, tmp_path: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    output = tmp_path / "lines.jsonl"
    command = [sys.executable, str(BENCH / script), "--device", "cpu", "--output-file", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def workloads(tmp_path: Path) -> str:
    path = tmp_path / "workloads.py"
    path.write_text(WORKLOADS, encoding="utf-8")
    return str(path)


@pytest.mark.nightly
def test_engine_counts_the_tokens_of_the_workloads(tmp_path: Path, workloads: str) -> None:
    arguments = ("--small", "--workloads-file", workloads, "--setting", "max_num_seqs=4")
    lines = run("engine.py", tmp_path, *arguments)
    assert [line["workload"] for line in lines] == ["fewshot", "multiturn"]
    fewshot, multiturn = lines
    assert (fewshot["requests"], fewshot["prompt_tokens"], fewshot["output_tokens"]) == (8, 8 * (48 + 8), 8 * 4)
    assert multiturn["prompt_tokens"] == 3 * (32 + 8) + 3 * (32 + 16)
    assert fewshot["hit_rate_pct"] == pytest.approx(100 * 7 * 48 / (8 * 56), abs=0.01)
    for line in lines:
        assert (line["mode"], line["cache"]) == ("offline", "on")
        assert line["duration"] > 0
        assert min(line["gemm_1_ms"], line["gemm_256_ms"], line["gemm_8192_ms"]) > 0
        assert line["first_token_s"] > 0
        assert {"gpu", "driver", "commit", "versions"} <= line["environment"].keys()


@pytest.mark.nightly
def test_engine_without_the_cache_and_with_random_weights(tmp_path: Path, workloads: str) -> None:
    arguments = ("--small", "--workloads-file", workloads, "--setting", "max_num_seqs=4")
    flags = ("--cache", "off", "--workloads", "fewshot", "--weights", "random")
    (off,) = run("engine.py", tmp_path, *arguments, *flags)
    assert (off["cache"], off["hit_rate_pct"], off["settings"]["load_format"]) == ("off", 0.0, "auto")
    assert 1 < off["distinct_last_tokens"] <= 8


@pytest.mark.nightly
def test_pressure_and_long_context_run_only_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--small", "--workloads", "pressure,long_context", "--setting", "max_total_tokens=320")
    line, long = run("engine.py", tmp_path, *flags)
    assert (line["requests"], line["output_tokens"], line["pages"]) == (16, 16 * 4, 20)
    assert line["hit_rate_pct"] == 0.0
    assert long["prompt_tokens"] == 2 * 208
    assert long["hit_rate_pct"] == pytest.approx(100 * 200 / 416, abs=0.01), (
        "the second question finds the document"
    )
    assert len(long["phase_seconds"]) == 2
    assert 0 < max(long["phase_seconds"]) < sum(long["phase_seconds"]) <= long["duration"] + 0.001
    assert 200 // 16 <= long["pages_used"] <= 200 // 16 + 4, "both questions share the document's pages"
    monkeypatch.syspath_prepend(BENCH)
    engine, known = importlib.import_module("engine"), importlib.import_module("token_workloads").ALL
    assert known.keys() - engine.select_workloads("all", known) == {"pressure", "long_context"}
    assert engine.select_workloads("none", known) == []


@pytest.mark.nightly
def test_engine_names_an_unknown_workload() -> None:
    command = [sys.executable, str(BENCH / "engine.py"), "--small", "--device", "cpu", "--workloads", "chess"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    known = "single, decode, unshared, fewshot, multiturn, agents, pressure, long_context, all and none"
    assert done.stderr.strip() == f"no workload chess; there are {known}"


@pytest.mark.nightly
def test_steps_are_timed(tmp_path: Path) -> None:
    lines = run("profile_step.py", tmp_path, "--small", "--no-profile", "--steps", "3")
    assert [line["tokens"] for line in lines] == [4, 4, 8, 64, 52]
    assert all(line["ms_per_step"] > line["launch_ms"] > 0 for line in lines)


@pytest.mark.nightly
def test_drafts_of_recorded_answers_are_switched(tmp_path: Path) -> None:
    words = "one two three four five six seven eight nine ten " * 8
    call = {"function": {"name": "count", "arguments": '{"to": 10}'}}
    messages = [
        {"role": "user", "content": words},
        {"role": "assistant", "content": words},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": words, "tool_calls": [call]},
    ]
    runs = [{"task_id": task, "trial": trial, "messages": messages} for trial in (0, 1) for task in (0, 1)]
    questions = [{"question": f"What is {n} + 1?", "answer": f"It is <<{n}+1>>{n + 1}."} for n in range(8)]
    for name, lines in (("messages", runs), ("questions", questions)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    tokens = tmp_path / "tokens.npz"
    files = ("--messages", tmp_path / "messages", "--questions", tmp_path / "questions", "--output", tokens)
    tokenizer = ROOT / "radixkv" / "checkpoints" / "tiny"
    tokenize = [sys.executable, BENCH / "drafts.py", "tokenize", *files, "--tokenizer", tokenizer]
    subprocess.run(tokenize, check=True)
    short = ("--seconds", "0.3", "--pairs", "2", "--rows", "2")
    found = run("drafts.py", tmp_path, "--small", "--tokens", str(tokens), *short)
    names = ["taubench", "first_trials", "extraction", "chats", "random", "agents"]
    assert [line["workload"] for line in found] == names
    assert all(line["outputs_equal"] and line["ratio_low"] <= line["ratio_median"] for line in found)
    assert found[0]["off"]["drafted"] == 0 < found[0]["on"]["accepted"]
    assert found[0]["on"]["tokens_per_step"] > found[0]["off"]["tokens_per_step"]


@pytest.mark.nightly
def test_events_are_counted_beside_an_engine_without_them(tmp_path: Path) -> None:
    settings = ("--small", "--rows", "8", "--pages", "800", "--steps", "5", "--pairs", "3")
    (line,) = run("gpu_events.py", tmp_path, *settings)
    assert line["step_ms_off"] > 0
    assert line["page_events_per_step"] > 1


@pytest.mark.nightly
def test_a_soak_adds_up(tmp_path: Path) -> None:
    (line,) = run("gpu_soak.py", tmp_path, "--requests", "60", "--every", "30")
    assert sum(line["ends"].values()) == line["requests"] == 60
    assert [sample["requests"] for sample in line["samples"]] == [30, 60]


@pytest.mark.nightly
def test_processor_time_and_placements_of_an_own_server_are_recorded(tmp_path: Path) -> None:
    arguments = ("--small", "--cache", "on", "--processes", "2", "--flag=--data-parallel-size=2")
    lines = run("gpu_server.py", tmp_path, *arguments)
    assert [line["workload"] for line in lines] == ["fewshot", "multiturn"]
    for line in lines:
        processor = line["processor"]
        assert processor["frontend_s"] + TICK_S >= processor["frontend_loop_s"] > 0
        assert len(processor["runtimes_s"]) == len(processor["runtimes_pct"]) == 2
        assert max(processor["runtimes_s"]) > 0
        placed = [sum(reasons.values()) for reasons in line["placements"].values()]
        assert len(placed) == 2
        assert sum(placed) == line["num_prompts"]
        assert line["host_memory"]["limit"] >= line["host_memory"]["frontend"]["anonymous"] > 0
        timeline = line["timeline"]
        assert len({len(column) for column in timeline.values()}) == 1
        assert all(len(generated) == 2 for generated in timeline["generated"])
        assert len(line["client_spans_s"]) == 2
        assert min(begin for begin, _ in line["client_spans_s"]) == 0.0
        assert max(end for _, end in line["client_spans_s"]) == pytest.approx(line["duration"], abs=0.001)


@pytest.mark.nightly
def test_a_running_server_is_asked_without_torch_at_a_share_of_its_rate(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch')", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    arguments = ("--small", "--processes", "2", "--prompt-form", "tokens", "--saturation-pct", "50")
    arguments += ("--engine", "radixkv, tiny", "--cache", "on")

    async def ask() -> list[dict[str, Any]]:
        async with running_server(["--model=tiny", "--device=cpu"]) as address:
            where = ("--address", address.removeprefix("http://"))
            return await asyncio.to_thread(
                run, "gpu_server.py", tmp_path, *arguments, *where, environment=environment
            )

    lines = asyncio.run(ask())
    assert [line["workload"] for line in lines] == ["fewshot", "fewshot", "multiturn", "multiturn"]
    for line in lines:
        assert (line["engine"], line["cache"], line["cache_flushed"]) == ("radixkv, tiny", "on", True)
        assert (line["completed"], line["failed"]) == (line["num_prompts"], 0)
        assert line["cache_report"]["optimum_pct"] > 0
    for closed, poisson in pairwise(lines):
        if poisson["request_rate"] != "inf":
            sessions = closed.get("num_sessions") or closed["num_prompts"]
            assert poisson["request_rate"] == pytest.approx(0.5 * sessions / closed["duration"], abs=0.001)
            assert poisson["mean_lateness_ms"] is not None
            assert poisson["total_input_tokens"] == closed["total_input_tokens"]


@pytest.mark.nightly
def test_choices_of_attention_are_compared_with_measured_times() -> None:
    command = [sys.executable, str(BENCH / "attention_choices.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *cases, summary = done.stdout.splitlines()
    assert len(cases) == 80
    assert "of 80 choices" in summary
