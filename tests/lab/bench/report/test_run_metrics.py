import hashlib
import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.lab.bench.load.server_counters import DraftTokenCounts
from radixkv.lab.bench.report.result_table import MAX_REASONS, comparison, failures, result_table
from radixkv.lab.bench.report.run_metrics import cache_report, draft_report, outputs_sha256, run_metrics, summary
from support.cases import examples
from support.report_records import failed, line, measured, record

API_KEYS = {
    "completed",
    "duration",
    "request_throughput",
    "input_throughput",
    "output_throughput",
    "total_throughput",
    "concurrency",
    "cache_report",
} | {
    f"{kind}_{name}_ms"
    for kind in ("mean", "median", "std", "p90", "p95", "p99")
    for name in ("ttft", "tpot", "itl", "e2e_latency")
}


@examples(200)
@given(st.lists(st.floats(0, 1000), min_size=1, max_size=40))
def test_latency_summaries_equal_those_of_numpy(seconds):
    values = np.array(seconds) * 1000
    expected = {
        "mean_x_ms": values.mean(),
        "median_x_ms": np.median(values),
        "std_x_ms": values.std(),
        "p90_x_ms": np.percentile(values, 90),
        "p95_x_ms": np.percentile(values, 95),
        "p99_x_ms": np.percentile(values, 99),
    }
    assert summary("x", seconds) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_missing_measurements_are_none_and_not_zero():
    assert set(summary("itl", []).values()) == {None}


def test_metrics_count_successful_requests_over_the_whole_duration():
    result = run_metrics(
        measured(
            record([0.1, 0.2, 0.4], output=(1, 2, 3)), record([0.3], output=(5,)), failed("timeout"), duration=2.0
        )
    )
    assert result.keys() >= API_KEYS
    assert (result["completed"], result["failed"], result["total_choices"]) == (2, 1, 2)
    assert result["request_throughput"] == 1.0
    assert (result["input_throughput"], result["output_throughput"], result["total_throughput"]) == (4.0, 2.0, 6.0)
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == pytest.approx(150)
    assert result["mean_itl_ms"] == pytest.approx(150)
    assert result["mean_e2e_latency_ms"] == pytest.approx(350)
    assert result["concurrency"] == pytest.approx(0.35)
    assert result["mean_lateness_ms"] is None


def test_the_time_to_first_token_of_returning_turns_is_that_of_turns_after_the_first():
    records = [record([0.9]), record([0.1]), record([0.3]), failed("timeout")]
    for turn, each in enumerate(records):
        each.turn = turn
    result = run_metrics(measured(*records))
    assert result["mean_returning_ttft_ms"] == pytest.approx(200)
    assert re.search(r"^Mean TTFT, returning turns \(ms\): +200\.00$", result_table(line(measured(*records))), re.M)
    single_turns = measured(record([0.9]))
    assert run_metrics(single_turns)["mean_returning_ttft_ms"] is None
    assert "returning" not in result_table(line(single_turns))


def test_in_an_open_loop_latencies_count_from_when_a_request_should_have_been_sent():
    result = run_metrics(measured(record([0.1, 0.3], late=0.05), record([0.1, 0.3], late=0.15)))
    assert (result["mean_ttft_ms"], result["mean_e2e_latency_ms"]) == (pytest.approx(200), pytest.approx(400))
    assert result["mean_itl_ms"] == pytest.approx(200)  # a gap has no start
    assert (result["mean_lateness_ms"], result["p99_lateness_ms"]) == (pytest.approx(100), pytest.approx(149))
    assert result["concurrency"] == pytest.approx(0.3)  # in flight they were for 0.3 s each


def test_all_choices_of_a_request_count_as_one_request():
    result = run_metrics(
        measured(record([0.1, 0.4], output=(1, 2), more=[([0.2, 0.3, 0.9], (3, 4, 5))]), duration=1.0)
    )
    assert (result["completed"], result["total_choices"], result["total_output_tokens"]) == (1, 2, 5)
    assert result["total_input_tokens"] == 4
    assert (result["mean_ttft_ms"], result["mean_e2e_latency_ms"]) == (pytest.approx(100), pytest.approx(900))
    assert result["mean_itl_ms"] == pytest.approx((300 + 100 + 600) / 3)  # within one choice only


def test_accuracy_covers_the_answers_that_can_be_checked():
    records = [record([1], right=True), record([1], right=True), record([1], right=False), record([1])]
    result = run_metrics(measured(*records, failed("timeout")))
    assert (result["n_checked"], result["accuracy_pct"]) == (3, pytest.approx(200 / 3))
    nothing = run_metrics(measured(record([1])))
    assert (nothing["n_checked"], nothing["accuracy_pct"]) == (0, None)


def test_every_failure_is_counted_by_its_kind():
    kinds = ["http_500", "not_sent", "timeout", "not_sent", "not_sent", "http_500"]
    result = run_metrics(measured(record([1]), *map(failed, kinds)))
    assert (result["completed"], result["failed"]) == (1, 6)
    assert list(result["errors"].items()) == [("not_sent", 3), ("http_500", 2), ("timeout", 1)]
    text = result_table(line(measured(record([1]), *map(failed, kinds))))
    assert re.search(r"^Failed requests: +6\n  not_sent: +3\n  http_500: +2\n  timeout: +1$", text, re.MULTILINE)


def test_a_run_that_ended_early_has_the_reason_and_partial_metrics():
    partial = measured(record([0.5]), failed("stopped"), aborted="the server went away", duration=1.0)
    result = run_metrics(partial)
    assert (result["aborted"], result["completed"], result["request_throughput"]) == (
        "the server went away",
        1,
        1.0,
    )
    assert "the server went away" in result_table(line(partial))


def test_metrics_of_a_run_without_successes():
    result = run_metrics(measured(failed("connect"), duration=1.0))
    assert (result["completed"], result["request_throughput"], result["mean_ttft_ms"]) == (0, 0.0, None)
    assert set(result["cache_report"].values()) == {0, None}
    assert "Failed requests" in result_table(line(measured(failed("connect"))))


def test_goodput_counts_the_requests_within_every_limit():
    measurement = measured(record([0.1, 0.2]), record([0.1, 0.9]), record([0.3, 0.35]), duration=0.5)
    assert run_metrics(measurement, {"ttft": 200, "tpot": 500})["request_goodput"] == 2.0
    assert run_metrics(measurement, {"ttft": 400, "e2el": 1000})["request_goodput"] == 6.0
    assert run_metrics(measurement)["request_goodput"] is None


def test_the_steps_of_answers_are_not_known_if_a_request_failed():
    drafts = DraftTokenCounts(9, 2)
    answers = [record([1], output=(7, 8, 9, 10), more=[([1], (1, 2))]), record([1], output=(7, 8))]
    assert draft_report(answers, drafts)["tokens_a_step"] == 5 / 3
    assert draft_report([*answers, failed("timeout")], drafts)["tokens_a_step"] is None
    assert draft_report([record([1], output=(7,))], DraftTokenCounts(0, 0)) == {
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "acceptance_pct": None,
        "tokens_a_step": None,
        "steps_without_overlap": None,
        "by_source": {},
    }


def test_the_cache_report_is_in_shares_of_prompt_tokens():
    records = [record([1], (1, 2, 3, 4), cached=0), record([1], (1, 2, 3, 5), cached=2)]
    assert cache_report(records) == {
        "total_prompt_tokens": 8,
        "total_cached_tokens": 2,
        "cache_hit_rate_pct": 25.0,
        "optimum_pct": 37.5,
    }


def test_the_optimum_takes_requests_in_the_order_in_which_they_were_sent():
    turn = record([1], (1, 2), (3, 4), started=0.0, more=[([1], (5, 6, 7))])
    other = record([1], (1, 2, 5, 6, 9), started=2.0)  # another session's, in between
    next_turn = record([1], (1, 2, 5, 6, 9, 8), started=5.0)
    assert cache_report([next_turn, turn, other])["optimum_pct"] == pytest.approx(100 * (0 + 4 + 5) / 13)


def test_known_prompts_of_failed_requests_may_be_hit_but_do_not_count():
    prompt = [1, 2, 3, 4]
    records = [
        failed("stream", 0.0, prompt),
        record([1], prompt, started=1.0, cached=3),
        failed("stream", 2.0, prompt),
    ]
    report = cache_report(records)
    assert (report["total_prompt_tokens"], report["optimum_pct"], report["cache_hit_rate_pct"]) == (4, 75.0, 75.0)


def test_values_that_the_server_does_not_report_are_none():
    silent = record([1], cached=None, returns_ids=False)
    result = run_metrics(measured(record([1]), silent))
    report = result["cache_report"]
    assert (report["total_cached_tokens"], report["cache_hit_rate_pct"], report["optimum_pct"]) == (
        None,
        None,
        None,
    )
    assert result["outputs_sha256"] is None
    text = result_table(line(measured(record([1]), silent), None, cache_flushed=False))
    assert re.search("No digest of the outputs: .*token ids", text)
    assert "No optimum" in text
    assert "may not have been cold" in text
    assert re.search(r"^Cache hit rate \(%\): +n/a$", text, re.MULTILINE)


def test_the_digest_is_over_little_endian_int32_ids_in_order():
    expected = hashlib.sha256(struct.pack("<5i", 1, 2, 3, 70000, 5)).hexdigest()
    assert outputs_sha256([record([1], output=(1, 2)), record([1], output=(3, 70000, 5))]) == expected
    assert outputs_sha256([record([1], output=(1, 2), more=[([1], (3, 70000, 5))])]) == expected
    assert outputs_sha256([record([1], output=(3, 70000, 5)), record([1], output=(1, 2))]) != expected
    assert outputs_sha256([record([1]), failed("timeout")]) is None


def test_the_result_table_has_the_usual_lines():
    records = [record([0.1, 0.2], right=True, late=0.0), record([0.1, 0.3], cached=2, right=False, late=0.0)]
    text = result_table(line(measured(*records, duration=2.0)))
    lines = text.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert set(lines[-1]) == {"="}
    values = dict(re.findall(r"^(.+?):? {2,}(\S+)$", text, re.MULTILINE))
    assert values["Successful requests"] == "2"
    assert values["Failed requests"] == "0"
    assert values["Benchmark duration (s)"] == "2.00"
    assert values["Total input tokens"] == "8"
    assert values["Total generated tokens"] == "4"
    assert values["Request throughput (req/s)"] == "1.00"
    assert values["Output token throughput (tok/s)"] == "2.00"
    assert values["Total token throughput (tok/s)"] == "6.00"
    assert (values["Mean TTFT (ms)"], values["Mean E2E (ms)"], values["Mean TPOT (ms)"]) == (
        "100.00",
        "250.00",
        "150.00",
    )
    assert {
        f"{kind} {name} (ms)" for kind in ("Mean", "Median", "P99") for name in ("TTFT", "TPOT", "ITL", "E2E")
    } <= set(values)
    assert (values["Answers checked"], values["Accuracy (%)"]) == ("2", "50.00")
    assert (values["Mean lateness of sending (ms)"], values["P99 lateness of sending (ms)"]) == ("0.00", "0.00")
    assert values["Cache hit rate (%)"] == "25.00"
    assert values["Optimum, infinite cache (%)"] == "37.50"
    assert "Choices of successful requests" not in values


def test_the_result_table_leaves_out_lateness_and_accuracy_without_values():
    text = result_table(line(measured(record([0.1], more=[([0.1], (1,))]))))
    assert "lateness" not in text
    assert "Accuracy" not in text
    assert re.search(r"^Choices of successful requests: +2$", text, re.MULTILINE)


def test_the_comparison_shows_ratios_and_whether_outputs_are_equal():
    answers = [record([0.4, 0.6], right=True), record([0.4, 0.6], right=False)]
    off = line(measured(*answers, duration=4.0), "off")
    answers = [record([0.1, 0.2], right=True), record([0.1, 0.2], cached=3, right=True)]
    on = line(measured(*answers, duration=1.0), "on")
    text = comparison(off, on)
    assert re.search(r"^Request throughput \(req/s\) +0\.50 +2\.00 +4\.00x$", text, re.MULTILINE)
    assert re.search(r"^Mean TTFT \(ms\) +400\.00 +100\.00 +4\.00x$", text, re.MULTILINE)
    assert re.search(r"^Accuracy \(%\) +50\.00 +100\.00 +2\.00x$", text, re.MULTILINE)
    assert "Cache hit rate 37.50%, optimum 37.50%: 100.00% of it" in text
    assert "Outputs equal: yes" in text
    assert "Outputs equal: NO" in comparison(off, on | {"outputs_sha256": "other"})
    for documented in (off, off | {"outputs_sha256": None}):
        assert "Outputs equal: not known" in comparison(documented, on | {"outputs_sha256": None})
    assert "Accuracy" not in comparison(off | {"accuracy_pct": None}, on | {"accuracy_pct": None})


def test_failures_are_listed_once_with_their_count_and_the_list_is_short():
    assert failures(["a", "b", "a"]) == "2 x a\n1 x b"
    lines = failures(["often"] * 3 + [f"broken\n  id {n}" for n in range(MAX_REASONS + 1)]).splitlines()
    assert lines[:2] == ["3 x often", "1 x broken id 0"]
    assert lines[MAX_REASONS:] == ["2 x other reasons"]
