"""``radixkv bench paging`` with small settings, and its engine measurement on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli import main
from radixkv.lab.bench.environment import machine
from radixkv.lab.studies.paging import command as paging
from radixkv.lab.studies.paging import measure
from radixkv.lab.studies.paging import workloads as study_workloads
from radixkv.lab.studies.paging.measure import MEASURABLE
from radixkv.lab.studies.paging.schemes import SCHEMES
from radixkv.lab.studies.paging.sequences import SimulatedSequence
from radixkv.lab.studies.paging.tables import (
    cost_table,
    lost_table,
    measured_targets,
    page_size_remarks,
    saturation_lines,
    targets,
)
from radixkv.wire.messages import Submit
from support.cases import rest_nightly
from support.json_lines import read_lines

SMALL = ("--max-total-tokens", "2048", "--max-model-len", "512", "--num-prompts", "40", "--page-sizes", "1,16")
FEW = ("--schemes", "reserve-maximum,radix")


def run(*arguments: str) -> int:
    return main(["bench", "paging", *arguments])


@pytest.mark.nightly
def test_a_finished_workload_is_saved_when_the_next_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lines.jsonl"
    flags = ("--num-prompts", "8", "--workloads", "parallel-sampling,uniform-short", "--output-file", str(output))
    assert run(*SMALL, *FEW, *flags) == 1
    captured = capsys.readouterr()
    assert "parallel-sampling: 32 sequences" in captured.out
    assert "memory never ran out in uniform-short" in captured.err
    lines = read_lines(output)
    assert [line["workload"] for line in lines] == ["parallel-sampling"] * 2


def test_lengths_that_do_not_fit_are_refused_before_the_first_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lines.jsonl"
    assert run(*SMALL, *FEW, "--workloads", "uniform-short,shared-prefix", "--output-file", str(output)) == 1
    assert "--max-model-len 512 holds none" in capsys.readouterr().err
    assert not output.exists() or not output.read_bytes()


def test_captions_name_one_core() -> None:
    assert machine({"processor": "AMD EPYC", "cores": 1}) == "AMD EPYC, 1 core"
    assert machine({"processor": "AMD EPYC", "cores": 2}) == "AMD EPYC, 2 cores"


def test_a_short_run_says_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--workloads", "uniform-short", "--schemes", "reserve-maximum", "--page-sizes", "none")
    assert run(*flags) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "a pool of 8,192 tokens; all workloads and schemes take about 20 seconds, with --full"
    )
    assert "pool of 8,192 tokens, at most 2,048 a sequence" in " ".join(printed.split())


@pytest.mark.nightly
def test_tables_lines_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "lines.jsonl", tmp_path / "plots"
    names = "variable-length,multi-turn"
    flags = ("--workloads", names, "--num-prompts", "25", "--output-file", str(output), "--plot", str(plots))
    code = run(*SMALL, "--full", *flags)
    printed = capsys.readouterr().out
    assert code == 0
    assert "variable-length: 25 sequences" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert "largest batch / that of reserve-maximum > 4" in printed
    lines = read_lines(output)
    by_scheme = [line for line in lines if "study" not in line]
    n_schemes = len(SCHEMES) + 4
    schemes = [line["scheme"] for line in by_scheme]
    assert schemes[:n_schemes] == schemes[n_schemes:]
    assert tuple(dict.fromkeys(schemes)) == tuple(SCHEMES) == paging.SCHEMES
    assert [line["granule_bytes"] for line in by_scheme if "vattention" in line["scheme"]] == [
        65536,
        2097152,
        2097152,
    ] * 4
    for line in lines:
        shares = ("occupied", "reserved", "internal", "external", "free", "cached")
        assert sum(line[f"{share}_pct"] for share in shares) == pytest.approx(100, abs=0.01)
        assert 0 < line["utilisation_pct"] <= 100
        assert {
            "duplicate_pct",
            "largest_batch",
            "date",
            "environment",
            "seed",
            "pool_tokens",
            "tokenizer",
        } <= line.keys()
    maximum, radix = by_scheme[0], by_scheme[n_schemes - 1]
    assert maximum["largest_batch"] == 2048 // 512
    assert radix["largest_batch"] > maximum["largest_batch"]
    assert "\n  multi-turn: " in printed.partition("Recommended")[2]
    assert [line["page_size"] for line in lines if line.get("study") == "page_size"] == [1, 16] * 2
    assert {path.name for path in plots.iterdir()} == {
        "index.html",
        "waste.png",
        "utilisation.png",
        "page_size.png",
    }
    page = (plots / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3
    assert "oracle-best-fit" in page


@pytest.mark.nightly
def test_a_page_size_at_which_memory_never_runs_out_is_a_missing_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plots = tmp_path / "lines.jsonl", tmp_path / "plots"
    flags = ("--workloads", "uniform-short", "--num-prompts", "17", "--page-sizes", "1,16,64", *FEW)
    assert run(*SMALL, *flags, "--output-file", str(output), "--plot", str(plots)) == 0
    remark = "no results of uniform-short at page size 1: memory never ran out"
    assert f"\n{remark}\n" in capsys.readouterr().out
    lines = read_lines(output)
    assert [line["page_size"] for line in lines if "study" in line] == [16, 64]
    assert remark in (plots / "index.html").read_text(encoding="utf-8")
    assert (plots / "page_size.png").exists()


def test_page_sizes_at_which_a_workload_is_missing_are_not_compared() -> None:
    def line(workload: str, page_size: int, lost_pct: float) -> dict[str, Any]:
        counts = {"entries_per_1000_tokens": 10.0, "retractions": 0, "mean_batch": 3.0, "host_us_per_token": 4.0}
        return {"workload": workload, "page_size": page_size, "lost_pct": lost_pct, **counts}

    lines = [line("a", 16, 2.0), line("a", 32, 3.0), line("b", 1, 0.0), line("b", 16, 2.0), line("b", 32, 5.0)]
    assert lost_table(lines)[1] == [["1", "-", "0.00"], ["16", "2.00", "2.00"], ["32", "3.00", "5.00"]]
    assert [row[0] for row in cost_table(lines)[1]] == ["16", "32"]
    assert page_size_remarks(lines, ["a", "b", "c"], [1, 16, 32]) == [
        "no results of a at page size 1: memory never ran out",
        "no results of c at page sizes 1, 16, 32: memory never ran out",
        "fewest slots are lost at page size 16 (2.00% on average over workloads); host time is lowest at the same "
        "page size (4.00 us per token)",
    ]
    assert page_size_remarks(lines[:1], ["a"], [16]) == [], "one size cannot be compared"


def test_the_command_names_the_workloads_of_the_study() -> None:
    assert tuple(study_workloads.WORKLOADS) == paging.WORKLOADS


@pytest.mark.nightly
def test_runs_on_one_core_print_the_same_and_do_not_import_torch(capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "import os, sys\n"
        "from radixkv.cli import main\n"
        "if hasattr(os, 'sched_setaffinity'): os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    flags = ("--workloads", "parallel-sampling", "--schemes", "resize,paged,radix", "--num-prompts", "15")
    arguments = ["bench", "paging", *SMALL[:-1], "none", *flags]
    command = [sys.executable, "-c", script, *arguments]
    in_another_process = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert main(arguments) == 0
    assert capsys.readouterr().out == in_another_process
    assert "paged, 16" in in_another_process


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workloads short", "'short'"),
        ("--schemes resize,reserve-all", "'reserve-all' is not a scheme; use reserve-maximum, "),
        ("--granule-sizes 3MiB", "'3MiB' is not a size of granules; use 64KiB, 2MiB, 2MiB/32"),
        ("--page-sizes 1,x", "'x'"),
        ("--gpu-memory-utilization 0.5", "--gpu-memory-utilization=0.5 "),
        ("--batch-sizes 4", "--batch-sizes have no effect without --measure"),
        ("--no-enable-prefix-caching --measure", "--no-enable-prefix-caching"),
        ("--seed -1", "seed -1 "),
        ("--skip-bad-lines", "--skip-bad-lines "),
    ],
)
def test_wrong_usage(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    rest_nightly(
        [
            ("--page-sizes 0,4", "page size 0 "),
            ("--page-size 1024", "page size 1024 "),
            ("--max-total-tokens 100", "--max-total-tokens 100 "),
            (
                "--max-total-tokens 1000 --max-model-len 256 --granule-sizes 2MiB",
                "--max-total-tokens 1000 is less than 1024",
            ),
            ("--num-prompts 0", "--num-prompts 0 "),
            ("--num-prompts 2 --workloads uniform-short", "uniform-short, with 2 sequences"),
            ("--dataset-path none.jsonl", "--dataset-path none.jsonl"),
            ("--output-file none/out.jsonl", "--output-file none/out.jsonl"),
            ("--measure --schemes paged,resize", "the engine cannot run resize; with --measure, --schemes are"),
            ("--measure --measure-lengths 8,64", "--measure-lengths 8 is not between 16 and --max-model-len 512"),
            ("--measure --measure-lengths 1024", "--measure-lengths 1024 is not between"),
            ("--measure --batch-sizes 0,4", "--batch-sizes 0 "),
            ("--measure --model /nowhere/model", "/nowhere/model"),
            ("--measure --device cpu --quantization fp8", "fp8"),
            ("--measure --max-num-seqs 8", "--max-num-seqs 8 is less than the largest of --batch-sizes, 512"),
        ],
        kept=(0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14),
    ),
)
def test_settings_that_cannot_work(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, *arguments.split()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_measuring_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of 512 tokens: 4 sequences of 128 are reserved; those of 64 tokens with a shared quarter need less.

    Without drafts, with which the number of steps depends on when they come.
    """
    served: list[list[int]] = []
    submits = measure._submits

    def noted(sequences: Sequence[SimulatedSequence]) -> Iterator[Submit]:
        served.append([sequence.answer.n_tokens for sequence in sequences])
        return submits(sequences)

    monkeypatch.setattr(measure, "_submits", noted)
    output, plots = tmp_path / "lines.jsonl", tmp_path / "plots"
    sizes = ("--max-total-tokens", "512", "--max-model-len", "128", "--num-prompts", "40", "--page-sizes", "none")
    sizes += ("--speculative-config", "off")
    flags = ("--measure", "--device", "cpu", "--page-size", "4", "--workloads", "variable-length", "--schemes")
    chosen = ("--measure-lengths", "64", "--batch-sizes", "4,16", "--plot", str(plots))
    assert run(*sizes, *flags, ",".join(MEASURABLE), *chosen, "--output-file", str(output)) == 0
    printed = capsys.readouterr().out
    lines = read_lines(output)
    lines = [line for line in lines if line.get("study") == "measure"]
    batches = {
        scheme: [line["batch_size"] for line in lines if (line["scheme"], line["length"]) == (scheme, 64)]
        for scheme in dict.fromkeys(line["scheme"] for line in lines)
    }
    assert batches.keys() == {"static", *MEASURABLE}
    for name in ("static", "reserve-maximum"):
        assert batches[name] == [4], "memory ends at 512 / 128 sequences"
    assert batches["oracle"] == [4, 8], "an oracle reserves 63 slots, so an extent of 64"
    assert 8 <= batches["paged"][-1] < batches["radix"][-1] <= 16
    for line in lines:
        assert line["requests"] == 3 * line["batch_size"]
        assert line["output_throughput"] > 0
        assert line["page_size"] == 4
        assert line["memory_ends_at"] == batches[line["scheme"]][-1]
        assert 0 < line["cache_seconds"] < line["management_seconds"]
        assert line["cache_pct_of_attention"] == pytest.approx(
            100 * line["cache_seconds"] / line["attention_seconds"], rel=0.01, abs=0.001
        )
        assert {"date", "environment", "seed", "pool_tokens", "device", "output_tokens"} <= line.keys()

    def at(scheme: str) -> dict[str, Any]:
        (line,) = [one for one in lines if (one["scheme"], one["length"], one["batch_size"]) == (scheme, 64, 4)]
        return line

    assert at("reserve-maximum") | {"scheme": "paged", "memory_ends_at": None} == at("paged") | {
        "memory_ends_at": None
    }, "one run serves all schemes without sharing"
    assert at("static")["output_tokens"] == at("paged")["output_tokens"] == at("radix")["output_tokens"]
    _, lengths, *_ = served  # behind the warm-up static batches come first, those of 4 alone
    n_least = sum(max(lengths[first : first + 4]) for first in range(0, len(lengths), 4))
    assert at("static")["steps"] == n_least, "rows of a static batch wait for its longest answer"
    assert len(lengths) == 12
    assert (at("paged")["cached_tokens"], at("radix")["cached_tokens"] > 0) == (0, True)
    assert "length 64: TaS / that of reserve-maximum > 2: " in printed
    assert (plots / "throughput.png").exists()
    assert (plots / "index.html").read_text(encoding="utf-8").count("data:image/png;base64,") == 3


def test_targets() -> None:
    reserving: dict[str, Any] = {"scheme": "reserve-maximum", "largest_batch": 10}
    radix: dict[str, Any] = {
        "scheme": "radix",
        "largest_batch": 40,
        "utilisation_pct": 95.1,
        "fragmentation_pct": 5.0,
        "duplicate_pct": 2.9,
    }
    assert [target.is_met for target in targets([reserving, radix])] == [True, False, True, False]
    assert [target.is_met for target in targets([radix])] == [True, False, True], "nothing to compare batches with"
    assert targets([reserving]) == []


def test_measured_targets() -> None:
    def line(scheme: str, batch_size: int, rate: float, cache_pct: float = 4.9) -> dict[str, Any]:
        sizes = {"length": 512, "batch_size": batch_size, "output_throughput": rate}
        return {"scheme": scheme, **sizes, "cache_pct_of_attention": cache_pct}

    lines = [line("reserve-maximum", 4, 60.0), line("reserve-maximum", 8, 100.0), line("reserve-maximum", 9, 99.0)]
    best = saturation_lines([*lines, line("radix", 8, 120.0), line("radix", 64, 201.0, 5.1)])
    assert [(one["scheme"], one["batch_size"]) for one in best] == [("reserve-maximum", 8), ("radix", 64)]
    assert [(target.value, target.is_met) for target in measured_targets(best)] == [(2.01, True), (5.1, False)]
    alone = saturation_lines([line("radix", 8, 120.0)])
    assert [target.is_met for target in measured_targets(alone)] == [True], "nothing to compare throughput with"
