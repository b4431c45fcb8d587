import json
import statistics
from itertools import product

import pytest

from radixkv.cli import main
from radixkv.errors import ConfigError
from radixkv.lab.bench.report.compare import compare, table
from support.report_records import line, measured, record


def run(rate=1.0, *, cache="on", hit=50.0, accuracy=None, **keys):
    """Returns a result line whose latencies are 1000 / rate."""
    times = {
        f"{kind}_{name}_ms": 1000 / rate
        for kind in ("mean", "median", "std", "p90", "p95", "p99")
        for name in ("ttft", "tpot", "itl", "e2e_latency")
    }
    return {
        "date": f"2026-11-21T00:00:00.{rate}",
        "workload": "fewshot",
        "model": "tiny",
        "cache": cache,
        "num_shots": 8,
        "request_throughput": rate,
        "output_throughput": 32 * rate,
        "duration": 48 / rate,
        "accuracy_pct": accuracy,
        "cache_report": {"cache_hit_rate_pct": hit},
        "environment": {"processor": "Xeon", "cores": 2},
        **times,
        **keys,
    }


@pytest.fixture
def written(tmp_path):
    def write(name, *runs):
        path = tmp_path / name
        path.write_text("".join(json.dumps(each) + "\n" for each in runs), encoding="utf-8")
        return path

    return write


def test_equal_numbers_of_runs_are_compared_pair_by_pair(written):
    rates, others = (1.0, 2.0, 4.0), (1.5, 2.5, 7.0)
    (result,) = compare([written("a", *map(run, rates)), written("b", *map(run, others))])
    pairs = [other / rate for rate, other in zip(rates, others, strict=True)]
    for key in ("request_throughput", "output_throughput", "mean_ttft_ms", "mean_itl_ms", "p99_e2e_latency_ms"):
        ratio = result.ratios[key]
        assert ratio.better == pytest.approx(statistics.median(pairs))  # over 1 is better, also for times
        assert (ratio.least, ratio.most) == (pytest.approx(min(pairs)), pytest.approx(max(pairs)))
        assert ratio.verdict == "better"
    assert (result.ratios["request_throughput"].first, result.ratios["request_throughput"].this) == (2.0, 2.5)
    assert (result.ratios["mean_ttft_ms"].first, result.ratios["mean_ttft_ms"].this) == (500.0, 400.0)
    assert (result.n_pairs, result.is_paired) == (3, True)


def test_unequal_numbers_of_runs_are_compared_all_with_all(written):
    rates, others = (4.0, 5.0), (1.0, 2.0, 3.0)
    (result,) = compare([written("a", *map(run, rates)), written("b", *map(run, others))])
    ratios = [other / rate for rate, other in product(rates, others)]
    ratio = result.ratios["request_throughput"]
    assert (ratio.better, ratio.least, ratio.most) == pytest.approx(
        (statistics.median(ratios), min(ratios), max(ratios))
    )
    assert (result.n_pairs, result.is_paired, ratio.verdict) == (6, False, "worse")


@pytest.mark.parametrize(
    ("others", "verdict"),
    [
        ((1.1, 2.2), "better"),
        ((0.9, 1.8), "worse"),
        ((0.9, 2.2), "inconclusive"),
        ((1.0, 2.2), "inconclusive"),
        ((1.0, 2.0), "equal"),
    ],
)
def test_a_spread_that_includes_1_is_inconclusive(written, others, verdict):
    (result,) = compare([written("a", run(1.0), run(2.0)), written("b", *map(run, others))])
    assert result.ratios["request_throughput"].verdict == verdict
    row = next(row for row in table(result).splitlines() if row.startswith("Request throughput"))
    assert row.endswith(verdict)


def test_one_pair_has_no_spread(written):
    (result,) = compare([written("a", run(1.0)), written("b", run(3.0))])
    assert result.ratios["request_throughput"].verdict == "one pair"


def test_hit_rate_and_accuracy_are_compared_and_a_hit_rate_of_0_has_no_ratio(written):
    off = written("off", *[run(1.0, cache="off", hit=0.0, accuracy=80.0)] * 2)
    on = written("on", *[run(4.0, cache="on", hit=92.0, accuracy=60.0)] * 2)
    (result,) = compare([off, on])  # only the cache differs: that is what is compared
    assert (result.first_cache, result.cache) == ("off", "on")
    assert result.ratios["accuracy_pct"].better == pytest.approx(0.75)
    hit_rate = result.ratios["cache_hit_rate_pct"]
    assert (hit_rate.first, hit_rate.this, hit_rate.better, hit_rate.verdict) == (0.0, 92.0, None, "n/a")
    assert "cache off / on" in table(result)


def test_runs_are_grouped_by_their_parameters_in_any_order(written):
    a = written(
        "a", run(1.0, cache="off"), run(2.0), run(9.0, workload="multiturn"), run(1.0, cache="off"), run(2.0)
    )
    b = written("b", run(4.0), run(3.0, cache="off"), run(4.0), run(3.0, cache="off"))
    result = compare([a, b])
    assert {(each.workload, each.cache): each.ratios["request_throughput"].better for each in result} == {
        ("fewshot", "on"): 2.0,
        ("fewshot", "off"): 3.0,
    }


def test_each_file_is_compared_with_the_first(written):
    files = [written(name, run(rate)) for name, rate in (("a", 1.0), ("b", 2.0), ("c", 8.0))]
    assert [each.ratios["request_throughput"].better for each in compare(files)] == [2.0, 8.0]


def test_runs_with_other_parameters_are_refused_unless_forced(written):
    a, b = written("a", run(1.0)), written("b", run(2.0, num_shots=4, model="other"))
    with pytest.raises(ConfigError, match=r"a and .*b .*model \('tiny' and 'other'\), num_shots \(8 and 4\)"):
        compare([a, b])
    (result,) = compare([a, b], force=True)
    assert result.ratios["request_throughput"].better == 2.0
    assert {"model differs: tiny and other", "num_shots differs: 8 and 4"} <= set(result.notes)


def test_force_needs_equal_numbers_of_groups(written):
    a = written("a", run(1.0, workload="agents"))
    b = written("b", run(2.0, workload="judge"), run(2.0, workload="trace"))
    with pytest.raises(ConfigError, match=r"workload \('agents' and 'judge'\)"):
        compare([a, b])
    with pytest.raises(ConfigError, match=r"--force .* 1 and 2$"):
        compare([a, b], force=True)


def test_server_flags_are_compared_and_noted(written):
    a = written("a", run(1.0, server=["--page-size=1"], cache="off"), run(2.0, server=["--page-size=1"]))
    b = written("b", run(4.0, server=[]), run(3.0, server=[], cache="off"))
    c = written("c", run(4.0, server=None))
    off, on = compare([a, b])
    if off.cache == "on":
        off, on = on, off
    assert [each.ratios["request_throughput"].better for each in (off, on)] == [3.0, 2.0]
    assert "--page-size=1" in on.notes[0]
    assert "no flags" in on.notes[0]
    (theirs,) = compare([c, written("ours", run(8.0, server=[]))])
    assert "running" in theirs.notes[0]
    assert "no flags" in theirs.notes[0]
    both = written("both", run(1.0, server=[]), run(1.0, server=["--page-size=1"]))
    with pytest.raises(ConfigError, match=r"server \(\[\] and \['--page-size=32'\]\)"):
        compare([both, written("d", run(1.0, server=["--page-size=32"]))])


def test_an_ambiguous_match_is_refused(written):
    a = written("a", run(1.0, dataset="x"), run(1.0, dataset="y"))
    b = written("b", run(2.0))  # of a version that does not say
    with pytest.raises(ConfigError, match="cannot be matched"):
        compare([a, b])


def test_results_of_other_versions_may_lack_keys(written):
    old = run(1.0)
    for key in ("accuracy_pct", "mean_itl_ms", "environment", "num_shots", "cache_report"):
        del old[key]
    (result,) = compare([written("a", old), written("b", run(2.0, accuracy=90.0))])
    assert result.ratios["request_throughput"].better == 2.0
    assert result.ratios["mean_itl_ms"].verdict == "n/a"
    assert (result.ratios["accuracy_pct"].first, result.ratios["accuracy_pct"].this) == (None, 90.0)
    assert any(note.endswith("a does not have: num_shots") for note in result.notes)
    assert any(
        row.split() == ["Accuracy", "(%)", "n/a", "90.00", "n/a", "n/a"] for row in table(result).splitlines()
    )


def test_notes_name_differences_between_the_runs(written):
    a = run(1.0, failed=0, total_input_tokens=100, total_output_tokens=40, outputs_sha256="x")
    b = run(
        2.0, failed=3, total_input_tokens=90, total_output_tokens=41, outputs_sha256="y", aborted="it went away"
    )
    a["environment"] = {"processor": "Xeon", "cores": 2, "gpu": "NVIDIA A100"}
    b["environment"] = {"processor": "Xeon", "cores": 64, "gpu": "NVIDIA H200"}
    (result,) = compare([written("a", a), written("b", b)])
    text = table(result)
    for message in (
        "3 requests of",
        "has a run that ended early",
        "cores differs: 2 and 64",
        "gpu differs: NVIDIA A100 and NVIDIA H200",
        "prompt tokens differ: 100 and 90",
        "output tokens differ: 40 and 41",
        "outputs differ",
    ):
        assert f"note: {message}" in text or message in text
    assert "processor" not in text
    (result,) = compare([written("a", a), written("c", a)])
    assert result.notes == ["outputs are equal"]


def test_lines_of_this_version_are_read(written):
    a = line(measured(record([0.2, 0.4])))
    b = line(measured(record([0.1, 0.2], late=0.0), duration=1.0))
    (result,) = compare([written("a", a), written("b", b)])
    assert result.ratios["mean_ttft_ms"].better == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no runs"),
        ("\n\n", "has no runs"),
        ('{"workload": "x", "request_throughput": 1}\n{oops\n', "line 2 is not JSON"),
        ("\xff", "line 1 is not JSON"),
        pytest.param('{"workload": "x", "more": ' + "[" * 10**5 + "]" * 10**5 + "}", "line 1 .*JSON", id="deep"),
        ("[1]", "line 1 .*`object`"),
        ('{"request_throughput": 1}', "line 1 .*`workload`"),
        ('{"workload": "x", "n_operations": 1}', "line 1 "),
        ('{"workload": "x", "request_throughput": "1"}', r"line 1 .*got `str` - at `\$.request_throughput`"),
        ('{"workload": "x", "mean_ttft_ms": true}', r"line 1 .*got `bool` - at `\$.mean_ttft_ms`"),
        ('{"workload": "x", "request_throughput": 1, "failed": "no"}', r"line 1 .*`\$.failed`"),
        ('{"workload": "x", "request_throughput": 1, "server": 3}', r"line 1 .*`\$.server`"),
        ('{"workload": "x", "request_throughput": 1, "cache_report": 3}', r"line 1 .*`\$.cache_report`"),
    ],
)
def test_an_invalid_line_is_refused_by_file_and_line(tmp_path, written, text, message):
    path = tmp_path / "bad"
    path.write_bytes(text.encode("latin-1"))
    for files in ([written("a", run()), path], [path, written("a", run())]):
        with pytest.raises(ConfigError, match=f"bad.*{message}"):
            compare(files)


def test_the_command_prints_a_table_or_json_lines(written, capsys):
    a, b = str(written("a", run(1.0), run(2.0))), str(written("b", run(2.0), run(5.0)))
    assert main(["bench", "compare", a, b]) == 0
    text = capsys.readouterr().out
    assert f"fewshot, cache on: {b} against {a} (2 pairs)" in text
    assert "2.25x  2.00 to 2.50    better" in text
    assert main(["bench", "compare", a, b, "--json"]) == 0
    (result,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert result["ratios"]["request_throughput"]["better"] == 2.25


def test_wrong_use_of_the_command(written, capsys, tmp_path):
    path = str(written("a", run()))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "compare", path])
    assert ended.value.code == 2
    assert "only one file" in capsys.readouterr().err
    assert main(["bench", "compare", path, str(tmp_path / "none")]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert main(["bench", "compare", path, str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert main(["bench", "compare", path, str(written("b", run(num_shots=3)))]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["bench", "compare", path, str(written("b", run(num_shots=3))), "--force"]) == 0
