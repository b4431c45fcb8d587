"""Numbers in most tables of docs/paging-study.md are those of the result lines.

Not compared: the rows of MUR, FI, DR and MBS by workload, the times of mapping, the table of published and measured
values, and the rows of KOR.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import pytest

from radixkv.lab.studies.paging.schemes import Granule
from support.json_lines import read_lines
from support.paths import ROOT

PAGE = (ROOT / "docs" / "paging-study.md").read_text(encoding="utf-8")
RESULTS = ROOT / "bench" / "results"
STUDY = read_lines(RESULTS / "paging.jsonl")
GPU = read_lines(RESULTS / "vattention.jsonl")
WORKLOADS = ("uniform-short", "variable-length", "shared-prefix", "multi-turn", "parallel-sampling")
PUBLISHED = ("uniform between", "log-normal", "quantiles")

Line = Mapping[str, Any]


def table(header: str, after: str = "") -> list[list[str]]:
    """Returns the rows of the first table whose header begins so, after some text of the page."""
    lines = PAGE.split(after or "# ", 1)[1].split(f"\n{header}", 1)[1].splitlines()[2:]
    rows = list(takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def number(text: str) -> float:
    return float(re.sub(r"[,%*`]", "", text))


def is_rounded(text: str, value: float, digits: int) -> bool:
    """Whether a number of the page is this value, rounded either way at half."""
    return abs(number(text) - value) <= 0.5 * 10**-digits + 1e-9


def label(line: Line) -> str:
    """Returns a scheme as the page names it."""
    if not line["granule_bytes"]:
        return f"`{line['scheme']}`"
    return f"`{line['scheme']}`, {Granule(line['granule_bytes'], line.get('layers_in_a_tensor') or 1).name}"


def simulated() -> Iterator[Line]:
    for line in STUDY:
        is_published = line.get("lengths", "").startswith(PUBLISHED)
        if is_published and line["pool_tokens"] == 65_536 and line.get("study") != "measure":
            yield line


@pytest.mark.parametrize(
    ("heading", "field", "digits"),
    [("MUR, utilisation:", "utilisation_pct", 1), ("TaS, sequences", "mean_batch", 0)],
)
def test_schemes(heading: str, field: str, digits: int) -> None:
    last = {(label(line), line["workload"]): line for line in simulated() if "study" not in line}
    rows = table("| scheme | uniform-short |", after=heading)
    assert len(rows) == 14
    for name, *cells in rows:
        for workload, cell in zip(WORKLOADS, cells, strict=True):
            assert is_rounded(cell, last[name, workload][field], digits), (name, workload)


def test_page_sizes() -> None:
    last = {(line["page_size"], line["workload"]): line for line in simulated() if line.get("study") == "page_size"}
    for size, *cells in table("| size | uniform |"):
        lines = [last[int(size), workload] for workload in WORKLOADS]
        assert [number(cell) for cell in cells[:5]] == [round(line["lost_pct"], 1) for line in lines]
        assert number(cells[5]) == round(sum(line["entries_per_1000_tokens"] for line in lines) / 5)
        assert number(cells[6]) == round(sum(line["host_us_per_token"] for line in lines) / 5, 1)
        assert number(cells[7]) == sum(line["retractions"] for line in lines)


def gpu_case(text: str) -> str:
    """Returns the case of a result line that a table's first cell names."""
    return text.replace(",", "").replace("×", "x")


def test_block_tables_on_a_gpu() -> None:
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in GPU:
        if line["part"] == "tables":
            found.setdefault((line["case"], line["kernel"], line["layout"], line["page_size"]), []).append(line)
    for case, *cells in table("| decode, rows × tokens |"):
        name = f"decode {gpu_case(case)}"
        for kernel, us, in_order, scattered in (("triton", *cells[:3]), ("fa2", *cells[3:])):
            assert any(is_rounded(us, line["us"], 0) for line in found[name, kernel, "contiguous", None])
            assert any(is_rounded(in_order, line["ratio"], 3) for line in found[name, kernel, "in order", 16])
            assert any(is_rounded(scattered, line["ratio"], 3) for line in found[name, kernel, "scattered", 16])


def test_prompts_over_pages_on_a_gpu() -> None:
    found = {(line["case"], line["kernel"], line["page_size"]): line for line in GPU if line["part"] == "tables"}
    rows = table("| prompts | FA3, contiguous, µs |")
    assert len(rows) == 6
    for case, *cells in rows:
        name = gpu_case(case if "×" in case else f"1 × {case}")
        for kernel, us, *ratios in (("fa3", *cells[:4]), ("fa2", *cells[4:])):
            assert is_rounded(us, found[f"prompt {name}", kernel, None]["us"], 0), (case, kernel)
            for page_size, ratio in zip((1, 16, 64), ratios, strict=True):
                line = found[f"prompt {name}", kernel, page_size]
                assert is_rounded(ratio, line["ratio"], 2), (case, kernel, page_size)


def test_all_layers_in_one_tensor() -> None:
    found = {
        (line["case"], line["page_size"], line["layers_in_a_tensor"]): line
        for line in GPU
        if line["part"] == "layers"
    }
    rows = table("| rows × tokens | contiguous, µs |")
    assert {gpu_case(case) for case, *_ in rows} == {case for case, _, _ in found}
    for case, us, *ratios in rows:
        name = gpu_case(case)
        assert is_rounded(us, found[name, None, 1]["us"], 0), case
        columns = ((None, 32), (1, 1), (16, 1), (64, 1), (16, 32))
        for (page_size, n_layers), ratio in zip(columns, ratios, strict=True):
            assert is_rounded(ratio, found[name, page_size, n_layers]["ratio"], 3), (case, page_size, n_layers)


def test_page_sizes_on_a_gpu() -> None:
    found = {
        (line["case"], line["kv_heads"], line["page_size"]): line for line in GPU if line["part"] == "page-sizes"
    }
    rows = table("| rows × tokens | KV heads |")
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert len(rows) * (len(sizes) + 1) == len(found)
    for case, n_kv_heads, us, *ratios in rows:
        name, n_heads = f"decode {gpu_case(case)}", int(n_kv_heads)
        assert is_rounded(us, found[name, n_heads, None]["us"], 0), (case, n_heads)
        for page_size, ratio in zip(sizes, ratios, strict=True):
            assert is_rounded(ratio, found[name, n_heads, page_size]["ratio"], 3), (case, n_heads, page_size)


@pytest.mark.parametrize(
    ("after", "date", "n_rows"),
    [("**What a shared prefix brings.**", "2026-11-24", 14), ("**Sharing by mapping in both", "2026-11-30", 18)],
)
def test_shared_prefixes(after: str, date: str, n_rows: int) -> None:
    found = {
        (line["case"], line["scheme"]): line for line in GPU if line["part"] == "sharing" and line["date"] == date
    }
    rows = table("| rows × (prefix + own) |", after=after)
    assert len(rows) == n_rows
    case = ""
    for name, scheme, shared, gib, us, ratio, mapping_ms in rows:
        case = gpu_case(name) or case
        spelled = scheme.replace("`", "").replace(", shared pages read once", ", shared runs")
        line = found[case, spelled.replace(", 2 MiB/32", ", all layers in a tensor")]
        assert number(shared) == line["shared_tokens"], (case, scheme)
        assert is_rounded(gib, line["model_gib"], 1), (case, scheme)
        assert is_rounded(us, line["us"], 0), (case, scheme)
        assert is_rounded(ratio, line["ratio"], 2), (case, scheme)
        assert bool(mapping_ms) == (line["mapping_ms_per_row"] is not None), (case, scheme)
        assert not mapping_ms or is_rounded(mapping_ms, line["mapping_ms_per_row"], 1), (case, scheme)


def test_results_with_all_layers_in_one_tensor_are_right() -> None:
    lines = [line for line in GPU if line["date"] == "2026-11-30"]
    assert max(line["relative_error"] for line in lines) < 0.00315
    for line in lines:
        if line.get("stored_layers") == 32:
            assert line["stored_gib"] == pytest.approx(line["model_gib"], rel=0.001)


def test_spreads_that_the_page_names() -> None:
    def spread(part: str, case: str) -> float:
        lines = [line for line in GPU if line["part"] == part and re.fullmatch(case, line["case"])]
        return max(line["ratio_max"] - line["ratio_min"] for line in lines)

    assert is_rounded("0.026", spread("page-sizes", ".*"), 3)
    assert is_rounded("0.008", spread("layers", "decode .*"), 3)
    assert is_rounded("0.03", spread("layers", "prompt (?!1 x 32768).*"), 2)
    assert is_rounded("0.13", spread("layers", "prompt 1 x 32768"), 2)


def test_throughput_of_the_engine() -> None:
    measured: dict[tuple[str, int, int], list[float]] = {}
    for line in STUDY:
        if line.get("study") == "measure" and "batch_size" in line:
            key = line["scheme"], line["length"], line["batch_size"]
            measured.setdefault(key, []).append(line["output_throughput"])
    schemes = ("static", "reserve-maximum", "reserve-power-of-two", "oracle", "paged", "radix")
    length = 0
    for first, batch, *cells in table("| length | batch |"):
        length = int(number(first)) if first else length
        if batch.isdigit():
            for scheme, cell in zip(schemes, cells, strict=True):
                if cell:
                    values = measured[scheme, length, int(batch)]
                    assert any(is_rounded(cell, value, 0) for value in values), (scheme, length, batch)


def test_tables_are_at_most_100_columns() -> None:
    assert [line for line in PAGE.splitlines() if line.startswith("|") and len(line) > 100] == []


@pytest.mark.parametrize("header", ["| memory | decode, Triton |", "| scheme | CPU | Hopper |"])
def test_scores_count_what_ran(header: str) -> None:
    rows = table(header)
    assert len(rows) >= 4
    for _, *cells, score in rows:
        assert len(cells) == 4
        assert number(score) == sum(cell.startswith("yes (") for cell in cells)


def test_tests_that_scores_name_exist() -> None:
    section = PAGE.split("## Kernels and platforms", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", section)
    assert len(named) >= 6
    for file, name in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {name}(" in path.read_text(encoding="utf-8"), (file, name)
