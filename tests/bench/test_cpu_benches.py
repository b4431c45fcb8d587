"""The benchmarks of scheduler and sampler run in small, so that failures show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from support.paths import ROOT

CASES = ["decode_only", "admit_by_prefix", "churn", "blocked_by_memory", "floors", "generate"]
WORKLOADS = "ALL = {'same': lambda: [[([7] * 40, 3)] * 2] * 2}"


def run(script: str, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    output = tmp_path / "lines.jsonl"
    command = [sys.executable, str(ROOT / "bench" / script), "--output-file", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.mark.nightly
def test_each_case_of_the_schedule_writes_a_line(tmp_path: Path) -> None:
    lines = run("schedule.py", tmp_path, "--rows", "4", "--waiting", "8", "--steps", "5")
    assert [line["case"] for line in lines] == CASES
    assert all(line["ms_per_step"] > 0 and line["steps"] > 0 for line in lines)


@pytest.mark.nightly
def test_the_schedule_of_a_file_of_workloads(tmp_path: Path) -> None:
    path = tmp_path / "workloads.py"
    path.write_text(WORKLOADS, encoding="utf-8")
    (line,) = run("schedule.py", tmp_path, "--workloads-file", str(path))
    assert (line["case"], line["steps"]) == ("same", 6)
    assert line["schedule_ms"] >= line["cache_ms"] > 0


@pytest.mark.nightly
def test_a_short_prompt_has_its_first_token_before_the_long_ones(tmp_path: Path) -> None:
    (line,) = run("fair_chunks.py", tmp_path, "--prompts", "2", "--prompt-tokens", "2500", "--new-tokens", "2")
    assert line["short_first_token_s"] < line["last_long_first_token_s"] <= line["end_s"]


@pytest.mark.nightly
def test_rows_beside_prompts_take_fewer_and_longer_steps_without_chunks(tmp_path: Path) -> None:
    flags = (
        "--rows",
        "4",
        "--prompts",
        "2",
        "--prompt-tokens",
        "1200",
        "--new-tokens",
        "2",
        "--target-itl-ms",
        "off",
    )
    (chunks,) = run("fair_chunks.py", tmp_path, *flags, "--step-tokens", "300")
    (_, whole) = run("fair_chunks.py", tmp_path, *flags, "--step-tokens", "2048")
    assert chunks["steps_beside"] > whole["steps_beside"] >= 2
    assert whole["beside_max_ms"] >= whole["beside_median_ms"] > 0


@pytest.mark.nightly
def test_beams_share_pages_and_take_time(tmp_path: Path) -> None:
    lines = run("beams.py", tmp_path, "--prompts", "1", "--output-len", "4", "--pairs", "1", "--widths", "3")
    assert [line["case"] for line in lines] == ["pages", "pages", "table_entries", "table_entries", "time", "time"]
    assert all(line["page_steps_shared"] < line["page_steps_own"] for line in lines[:2])
    assert all(0 < line["mean_entries"] <= line["max_entries"] for line in lines[2:4])


@pytest.mark.nightly
def test_agents_with_branches_run_with_each_policy(tmp_path: Path) -> None:
    short = ("--sessions", "6", "--seconds", "30", "--pool-tokens", "30000")
    lines = run("branches.py", tmp_path, *short)
    assert [line["policy"] for line in lines] == ["lru", "learnt", "told", "keys"]
    assert all(0 < line["found_pct"] < 100 and line["turns_per_s"] > 0 for line in lines)


@pytest.mark.nightly
def test_keys_of_conversations_without_branches_change_nothing(tmp_path: Path) -> None:
    short = ("--sessions", "6", "--seconds", "30", "--pool-tokens", "30000")
    learnt, _, own_keys = run("branches.py", tmp_path, "--case", "mixed", *short)
    assert own_keys["policy"] == "own_keys"
    assert {**own_keys, "policy": "", "date": ""} == {**learnt, "policy": "", "date": ""}


@pytest.mark.nightly
def test_drafts_are_replayed_without_a_model(tmp_path: Path) -> None:
    short = ("--small", "--workloads", "random,agents", "--rows", "1,4", "--pairs", "2", "--seconds", "0.2")
    lines = run("drafts.py", tmp_path, "--no-model", "--device", "cpu", *short)
    assert [(line["workload"], line["rows"]) for line in lines] == [
        ("random", 1),
        ("random", 4),
        ("agents", 1),
        ("agents", 4),
    ]
    for line in lines:
        assert line["outputs_equal"]
        assert line["ratio_min"] <= line["ratio_median"] <= line["ratio_max"]
        assert line["off"]["drafted"] == 0 < line["off"]["tokens_per_s"]
        assert line["on"]["drafted"] >= line["on"]["accepted"]  # whether drafts pay depends on the machine's times


@pytest.mark.nightly
def test_drafts_of_the_models_own_answers_are_measured(tmp_path: Path) -> None:
    workload = tmp_path / "short.toml"
    workload.write_text('kind = "fewshot"\nnum_prompts = 2\nnum_shots = 1\noutput_len = 12\nmax_concurrency = 2\n')
    once = ("--device", "cpu", "--rows", "2", "--pairs", "2", "--seconds", "9", "--cpu-time")
    (line,) = run("drafts.py", tmp_path, "--own-answers", str(workload), *once)
    assert (line["workload"], line["model"], line["seconds_are"]) == ("short", "tiny", "CPU time")
    assert line["outputs_equal"]
    assert line["off"]["drafted"] == 0 < line["off"]["tokens_per_s"]


@pytest.mark.nightly
def test_the_sampler_writes_a_line_for_each_case_and_distribution(tmp_path: Path) -> None:
    lines = run("sampling.py", tmp_path, "--rows", "2", "--vocab", "1000", "--history", "20", "--rounds", "1")
    assert {line["logits"] for line in lines} == {"peaked", "spread", "flat"}
    assert len({(line["logits"], line["case"]) for line in lines}) == len(lines) == 3 * 10


@pytest.mark.nightly
def test_the_structure_of_the_product_is_counted(tmp_path: Path) -> None:
    (line,) = run("structure.py", tmp_path)
    assert line["lines"]["all"]["files"] == len(list((ROOT / "radixkv").rglob("*.py")))
    assert set(line["chat"]["folders"]) >= {"frontend/api/", "runtime/scheduler/", "tree/"}
    assert "runtime/open_loop.py" in line["reach"]["tiers"]["imported by"]
    assert line["calls_a_turn"]["radixkv"] > line["calls_a_turn"]["radixkv without the device"] > 0


@pytest.mark.nightly
def test_each_source_of_drafts_is_replayed(tmp_path: Path) -> None:
    alphabet = sorted(ByteLevel.alphabet())
    (tmp_path / "vocab.json").write_text(json.dumps({letter: n for n, letter in enumerate(alphabet)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    call = {"function": {"name": "find", "arguments": '{"city": "Paris", "day": "Monday"}'}}
    messages = [
        {"role": "user", "content": "A hotel."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "None."},
        {"role": "assistant", "content": "There is no hotel in Paris on Monday."},
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"trial": trial, "messages": messages}) for trial in (0, 1)))
    lines = run("draft_sources.py", tmp_path, "--chats", str(chats), "--tokenizer", str(tmp_path), "--calls", "3")
    means = {(line["runs"], line["source"]): line["tokens_a_step"] for line in lines if "tokens_a_step" in line}
    assert means["all", "tree"] > means["first trials", "tree"] == 1
    assert means["all", "all"] == means["all", "longest of tree, prompt, answers"] > means["all", "prompt"] > 1
    assert means["all", "best in hindsight"] == max(means.values())
    assert {line["source"] for line in lines if line["case"] == "acceptance"} == {"tree", "prompt", "answers"}
    assert all(0 < line["us"] <= line["max_us"] for line in lines if "us" in line)


@pytest.mark.nightly
def test_the_frontend_is_measured_with_one_runtime_and_two(tmp_path: Path) -> None:
    lines = run("frontend.py", tmp_path, "--seconds", "0.2", "--cases", "short", "chats", "replicas")
    assert [line["case"] for line in lines] == ["short", "chats", "replicas"]
    for line in lines:
        assert line["lost_tokens"] == 0 < line["processor_us_per_token"]


@pytest.mark.nightly
def test_modelled_replicas_share_documents_among_short_prompts(tmp_path: Path) -> None:
    (line,) = run("balance.py", tmp_path, "--workloads", "documents", "--request-us", "300", "--token-us", "10")
    assert line["ratio"] > 1.95
    assert sum(replica["prompts"] for replica in line["replicas"]) == 400
    assert all(sum(replica["reasons"].values()) == replica["prompts"] for replica in line["replicas"])


@pytest.mark.nightly
def test_pages_are_loaded_ahead_for_chats_that_wait(tmp_path: Path) -> None:
    small = ("--chats", "12", "--turns", "3", "--rows", "1", "--pages", "600", "--rate", "5", "--think-s", "1")
    without, with_ahead = run("load_ahead.py", tmp_path, *small)
    assert without["requests"] == with_ahead["requests"] == 36
    assert without["pages_loaded_ahead"] == 0 < with_ahead["pages_loaded_ahead_used"]
    lines = run("load_ahead.py", tmp_path, "--queue", "40", "--turn-tokens", "64", "--rows", "4")
    assert lines[-1]["turn_mean_us"] > 0


@pytest.mark.nightly
def test_expected_answers_preempt_a_quarter_of_those_of_a_reserve_at_equal_throughput(tmp_path: Path) -> None:
    """In virtual time, so that a busy machine changes nothing."""
    lines = run("admissions.py", tmp_path, "--case", "decode")
    by_admission = {line["admission"]: line for line in lines}
    few, many = by_admission["expected"], by_admission["reserved"]
    assert few["preemptions"] <= many["preemptions"] / 4
    assert few["output_tokens_per_s"] >= 0.98 * many["output_tokens_per_s"]


@pytest.mark.nightly
def test_fan_outs_are_counted_for_both_kinds_of_models(tmp_path: Path) -> None:
    flags = ("--case", "burst", "--policy", "lpm", "--step-tokens", "8192")
    attention, recurrent = run("fan_out.py", tmp_path, *flags)
    assert attention["again_tokens"] == 0 < recurrent["again_tokens"] <= 63 * 64


@pytest.mark.nightly
def test_waiting_prompts_are_measured_for_both_kinds_of_models(tmp_path: Path) -> None:
    flags = ("--waiting", "40", "--common-tokens", "500", "--turns", "6", "--runs", "1")
    lines = run("waiting_prompts.py", tmp_path, *flags)
    assert len(lines) == 8
    assert all(line["all_ms"] > 0 and line["prompt_tokens"] > 0 for line in lines)


@pytest.mark.nightly
def test_agents_call_tools_at_a_server_and_come_back(tmp_path: Path) -> None:
    small = (
        "--sessions",
        "4",
        "--seconds",
        "20",
        "--scale",
        "0.05",
        "--time-scale",
        "0.1",
        "--pool-tokens",
        "4000",
    )
    lines = run("paused_agents.py", tmp_path, "--case", "mixed", *small)
    assert [line["policy"] for line in lines] == ["none", "learnt"]
    assert all(line["returning_turns"] > 0 and not line["n_errors"] for line in lines)
    assert lines[0]["pauses"]["returns"] == 0 < lines[1]["pauses"]["returns"]


@pytest.mark.nightly
def test_adapters_take_time_and_are_loaded_beside_steps(tmp_path: Path) -> None:
    lines = run("lora.py", tmp_path, "--small", "--device", "cpu", "--repeat", "1")
    kinds = ["off", "off again", "base", "1 adapter", "half", "8 adapters"]
    of_decode = [("lora decode", rows, kind) for rows in (4, 16) for kind in kinds]
    of_fewshot = [("lora fewshot", None, kind) for kind in ("off", "base", "8 adapters")]
    found = [(line["workload"], line.get("rows"), line.get("kind")) for line in lines]
    activated = [("lora activated", None, kind) for kind in ("lora", "alora")]
    assert found == [*of_decode, *of_fewshot, ("lora load", 4, None), *activated]
    assert lines[-3]["load_s"] > 0
    assert lines[-1]["times_lora"] < 0.5


@pytest.mark.nightly
def test_adapters_take_turns_in_a_workload(tmp_path: Path) -> None:
    flags = ("--small", "--device", "cpu", "--workloads", "fewshot", "--adapters", "3")
    (line,) = run("engine.py", tmp_path, *flags)
    assert line["adapters"] == 3
    assert line["hit_rate_pct"] == pytest.approx(100 * 48 / line["prompt_tokens"], abs=0.01), (
        "one of eight requests follows one with its examples and its adapter"
    )


@pytest.mark.nightly
def test_turns_of_adapters_spare_prompts_and_go_by_slot_time(tmp_path: Path) -> None:
    """In virtual time, so that a busy machine changes nothing."""
    by_age, by_prefix, *shares = run("adapter_turns.py", tmp_path, "--seconds", "40")
    assert [line["found_pct"] > 75 for line in (by_age, by_prefix)] == [True, True], "no prompt is evicted in line"
    assert [(line["slots"], line["order"]) for line in shares] == [
        (1, "age"),
        (1, "slot time"),
        (2, "age"),
        (2, "slot time"),
    ]
    assert all(line["few_pct"] < 20 for line in shares[::2])
    assert all(45 < line["few_pct"] < 60 for line in shares[1::2])


@pytest.mark.nightly
def test_pages_in_shared_memory_are_stored_and_loaded(tmp_path: Path) -> None:
    url = f"shm://bench-{{page_bytes}}?size=64MiB&folder={tmp_path}"
    lines = run("shared_store.py", tmp_path, url, "--mebibytes", "8", "--rounds", "1")
    assert [(line["store"], line["model"], line["n_pages"]) for line in lines] == [
        ("shm", "tiny", 1),
        ("shm", "tiny", 102),
        ("shm", "8B", 1),
        ("shm", "8B", 4),
    ]


@pytest.mark.nightly
def test_servers_that_share_memory_find_what_the_others_have(tmp_path: Path) -> None:
    small = ("--sessions", "4", "--turns", "1", "--store-mebibytes", "128")
    agents, hits = run("shared_servers.py", tmp_path, "--stores", "shm", *small)
    assert agents["failed"] == 0 < agents["store_hits_pct"]
    assert hits["store_hits_pct"] > 99


@pytest.mark.nightly
def test_pages_are_copied_from_shared_memory_in_place(tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--models", "tiny", "--pages", "1", "5", "--rounds", "2", "--folder", str(tmp_path))
    one, five = run("copies_in_place.py", tmp_path, *flags)
    assert (one["pages"], five["pages"], five["page_bytes"]) == (1, 5, 80 << 10)
    assert min(five[f"{way}_us"] for way in ("host", "in_place", "through")) > 0


@pytest.mark.nightly
def test_prompts_are_fetched_from_disk_and_network(tmp_path: Path) -> None:
    small = ("--documents", "6", "--warm-up", "6", "--max-pages", "8", "--page-kib", "4", "--token-us", "2000")
    lines = run("two_places.py", tmp_path, *small, "--link", "0.2:1000")
    assert [line["case"] for line in lines] == ["computing", "disk", "network", "both", "everything"]
    computing, disk, network, both, everything = lines
    assert computing["hit_tokens"] == network["disk_tokens"] == disk["network_tokens"] == 0
    assert max(disk["hit_tokens"], network["hit_tokens"]) < both["hit_tokens"] <= everything["hit_tokens"]
    assert both["disk_tokens"] > 0 < both["network_tokens"]
    assert both["ttft_mean_ms"] < computing["ttft_mean_ms"]
