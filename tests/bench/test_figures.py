import hashlib
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.bench.figures import cache_report, figures, outputs_sha256, summary
from radixkv.bench.record import Measurement, PromptTokensDetails, Record, Usage
from radixkv.bench.report import box, comparison, failures

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


def record(arrivals, prompt=(1, 2, 3, 4), output=(7, 8), cached=0, error=None):
    usage = Usage(len(prompt), len(output), None if cached is None else PromptTokensDetails(cached))
    return Record(
        arrivals=list(arrivals),
        usage=usage,
        prompt_token_ids=list(prompt),
        token_ids=list(output),
        error=error,
    )


def line(measurement, cache="on"):
    extra = {"cache": cache, "cache_flushed": True, "max_concurrency": 8, "request_rate": "inf"}
    return extra | figures(measurement)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1000), min_size=1, max_size=40))
def test_latencies_are_summed_up_as_numpy_does(seconds):
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


def test_nothing_measured_is_none_and_not_zero():
    assert set(summary("itl", []).values()) == {None}


def test_figures_count_good_requests_over_the_whole_duration():
    records = [
        record([0.1, 0.2, 0.4], output=(1, 2, 3)),
        record([0.3], output=(5,)),
        record([0.1], error="it broke"),
    ]
    found = figures(Measurement(records, duration=2.0))
    assert found.keys() >= API_KEYS
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["request_throughput"] == 1.0
    assert (found["input_throughput"], found["output_throughput"], found["total_throughput"]) == (4.0, 2.0, 6.0)
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx(150)
    assert found["mean_itl_ms"] == pytest.approx(150)
    assert found["mean_e2e_latency_ms"] == pytest.approx(350)
    assert found["concurrency"] == pytest.approx(0.35)


def test_goodput_counts_the_requests_that_keep_every_limit():
    measurement = Measurement([record([0.1, 0.2]), record([0.1, 0.9]), record([0.3, 0.35])], duration=0.5)
    assert figures(measurement, {"ttft": 200, "tpot": 500})["request_goodput"] == 2.0
    assert figures(measurement, {"ttft": 400, "e2el": 1000})["request_goodput"] == 6.0
    assert figures(measurement)["request_goodput"] is None


def test_the_cache_report_is_in_shares_of_prompt_tokens():
    records = [record([1], (1, 2, 3, 4), cached=0), record([1], (1, 2, 3, 5), cached=2)]
    assert cache_report(records) == {
        "total_prompt_tokens": 8,
        "total_cached_tokens": 2,
        "cache_hit_rate_pct": 25.0,
        "optimum_pct": 37.5,
    }


def test_what_a_server_does_not_tell_is_none():
    silent = record([1], cached=None)
    silent.prompt_token_ids = None
    silent.token_ids = None
    found = figures(Measurement([record([1]), silent], duration=1.0))
    report = found["cache_report"]
    assert (report["total_cached_tokens"], report["cache_hit_rate_pct"], report["optimum_pct"]) == (
        None,
        None,
        None,
    )
    assert found["outputs_sha256"] is None
    text = box({"cache": None, "cache_flushed": False, "max_concurrency": 8, "request_rate": "inf"} | found)
    assert "No digest of the outputs: the server returns no token ids." in text
    assert "the cache may not have been cold" in text
    assert re.search(r"^Cache hit rate \(%\): +n/a$", text, re.MULTILINE)


def test_the_digest_is_over_little_endian_int32_ids_in_order():
    expected = hashlib.sha256(struct.pack("<5i", 1, 2, 3, 70000, 5)).hexdigest()
    assert outputs_sha256([record([1], output=(1, 2)), record([1], output=(3, 70000, 5))]) == expected
    assert outputs_sha256([record([1], output=(3, 70000, 5)), record([1], output=(1, 2))]) != expected
    assert outputs_sha256([record([1]), record([1], error="it broke")]) is None


def test_the_box_has_the_lines_that_people_know():
    text = box(line(Measurement([record([0.1, 0.2]), record([0.1, 0.3], cached=2)], duration=2.0)))
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
    assert values["Cache hit rate (%)"] == "25.00"
    assert values["Optimum, infinite cache (%)"] == "37.50"


def test_the_comparison_shows_ratios_and_whether_outputs_are_equal():
    off = line(Measurement([record([0.4, 0.6]), record([0.4, 0.6])], duration=4.0), "off")
    on = line(Measurement([record([0.1, 0.2]), record([0.1, 0.2], cached=3)], duration=1.0), "on")
    text = comparison(off, on)
    assert re.search(r"^Request throughput \(req/s\) +0\.50 +2\.00 +4\.00x$", text, re.MULTILINE)
    assert re.search(r"^Mean TTFT \(ms\) +400\.00 +100\.00 +4\.00x$", text, re.MULTILINE)
    assert "Cache hit rate 37.50%, optimum 37.50%: 100.00% of it" in text
    assert "Outputs equal: yes" in text
    assert "Outputs equal: NO" in comparison(off, on | {"outputs_sha256": "other"})
    assert "Outputs equal: NO" in comparison(off | {"outputs_sha256": None}, on | {"outputs_sha256": None})


def test_failures_are_told_once_with_their_count():
    assert failures(["a", "b", "a"]) == "2 x a\n1 x b"
