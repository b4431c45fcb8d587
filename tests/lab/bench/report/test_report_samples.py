import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.lab.bench.report.charts import MAX_INTERVALS, MIN_INTERVALS, samples_of
from radixkv.lab.bench.report.run_metrics import run_metrics
from support.cases import examples
from support.report_records import failed, measured, record

moments = st.floats(0, 100)
ids = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@st.composite
def records(draw):
    prompt = draw(ids)
    return record(
        sorted(draw(st.lists(moments, min_size=1, max_size=5))),
        prompt,
        draw(ids),
        cached=draw(st.integers(0, len(prompt))),
        started=1000 + draw(moments),
    )


@examples(100)
@given(st.lists(records(), min_size=1, max_size=12))
def test_series_add_up_to_the_metrics_of_the_run(good):
    run = measured(*good, failed("timeout", started=3.0), duration=50.0)
    samples, result = samples_of(run), run_metrics(run)
    assert len(samples.output_tokens_per_s) == len(samples.hit_rate_pct) == len(samples.optimum_pct)
    assert MIN_INTERVALS <= len(samples.hit_rate_pct) <= MAX_INTERVALS
    assert sum(samples.output_tokens_per_s) * samples.interval_s == pytest.approx(result["total_output_tokens"])
    last = len(samples.hit_rate_pct) - 1
    began = min(each.started for each in good)
    for interval, share in enumerate(samples.hit_rate_pct):
        sent = [each for each in good if interval == min(int((each.started - began) / samples.interval_s), last)]
        n_prompt, n_cached = sum(each.n_prompt_tokens for each in sent), sum(each.n_cached_tokens for each in sent)
        assert share == (pytest.approx(100 * n_cached / n_prompt) if sent else None)
    assert list(samples.ttft_s) == sorted(each.ttft for each in good)
    assert list(samples.itl_s) == sorted(gap for each in good for gap in each.itl)


def test_throughput_and_hit_rate_are_in_the_right_intervals():
    # Of 20 seconds: two tokens in the first, one in the last; a miss at the start, a hit of 3 of 4 after ten.
    run = measured(
        record([0.5, 0.7], output=(1, 2), cached=0, started=100.0),
        record([0.5, 10.0], output=(1, 2), cached=3, started=110.0),
    )
    samples = samples_of(run)
    assert samples.interval_s == pytest.approx(1.0)
    assert samples.output_tokens_per_s == pytest.approx([2.0] + [0.0] * 9 + [1.0] + [0.0] * 8 + [1.0])
    assert samples.hit_rate_pct == [0.0] + [None] * 9 + [75.0] + [None] * 9
    assert samples.optimum_pct == [0.0] + [None] * 9 + [75.0] + [None] * 9


def test_values_that_the_server_does_not_report_have_no_series():
    samples = samples_of(measured(record([1], cached=None, returns_ids=False), record([1], cached=1)))
    assert {*samples.hit_rate_pct, *samples.optimum_pct} == {None}


def test_a_run_without_successes_has_samples():
    samples = samples_of(measured(failed("connect")))
    assert (list(samples.ttft_s), list(samples.itl_s)) == ([], [])
    assert not any(samples.output_tokens_per_s)
