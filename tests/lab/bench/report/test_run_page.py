import re

import pytest
from matplotlib.text import Text

from radixkv.errors import ConfigError
from radixkv.lab.bench.report.charts import cache_comparison, hit_rate, itl, samples_of, throughput, ttft
from radixkv.lab.bench.report.run_page import Run, plot
from support.report_page import PNG, Page
from support.report_records import failed, line, measured, record

ALL = {"index.html", "off_on.png", "ttft.png", "itl.png", "throughput.png", "hit_rate.png"}


def run_of(*records, cache="on", duration=2.0, **keys):
    measurement = measured(*records, duration=duration)
    return Run(line(measurement, cache, **keys), samples_of(measurement))


def answers(pace, cached, n=30, **keys):
    return [
        record([pace * k for k in (2, 3, 4)], (1, 2, 3, n, n), (7, 8, 9), cached=cached, started=n * pace, **keys)
        for n in range(n)
    ]


def drawn(folder, *runs):
    plot(runs, folder)
    pngs = [path for path in folder.iterdir() if path.suffix == ".png"]
    assert all(path.read_bytes().startswith(PNG) for path in pngs)
    page = Page((folder / "index.html").read_text(encoding="utf-8"))
    assert [load[:22] for load in page.loads] == ["data:image/png;base64,"] * len(pngs)
    return {path.name for path in folder.iterdir()}, page


@pytest.mark.nightly
def test_cache_off_and_on_give_every_chart_with_alt_text_and_all_metrics(tmp_path):
    machine = {"commit": "c0ffee", "processor": "<b>"}
    off = run_of(*answers(0.4, 0, right=True), cache="off", duration=20.0, environment=machine)
    on = run_of(*answers(0.1, 3, right=True), duration=5.0, environment=machine)
    files, page = drawn(tmp_path, off, on)
    assert files == ALL
    cells = page.cells
    for label, *values in (
        ("Mean TTFT (ms)", "800.00", "200.00"),
        ("Request throughput (req/s)", "1.50", "6.00"),
        ("Cache hit rate (%)", "0.00", "60.00"),
        ("Optimum, infinite cache (%)", "58.00", "58.00"),
        ("Accuracy (%)", "100.00", "100.00"),
    ):
        column = len(cells) - 1 - cells[::-1].index(label)
        assert cells[column + 1 : column + 3] == values
    throughput = cells.index("Request throughput (req/s)")
    assert cells[:4] == ["", "cache off", "cache on", "better"]
    assert cells[throughput + 1 : throughput + 4] == ["1.50", "6.00", "4.00x"]
    for key, value in (
        ("workload", "fewshot"),
        ("max_concurrency", "8"),
        ("commit", "c0ffee"),
        ("processor", "<b>"),
    ):
        assert cells[cells.index(key) + 1] == value
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert (headings[0], headings[-1]) == ("Result", "Settings and environment")
    assert 'alt="With the prefix cache on: 4.00 times the requests per second"' in text
    assert 'alt="Median time to first token: 800 ms (cache off), 200 ms (cache on)"' in text
    assert 'alt="Output tokens per second: 4.5 (cache off), 18 (cache on)"' in text
    assert 'alt="60.0% of prompt tokens came from the cache; 58.0% were possible"' in text


def test_charts_say_what_was_measured_where_and_when_and_name_curves_beside_them():
    model = r"a$\bad$name"  # would be a formula
    facts = {"model": model, "date": "2026-11-22T10:00:00", "environment": {"processor": "EPYC", "cores": 2}}
    off = run_of(*answers(0.4, 0), cache="off", duration=20.0, **facts)
    on = run_of(*answers(0.1, 3), duration=5.0, **facts)
    for section in (
        cache_comparison(off, on),
        ttft([off, on]),
        itl([off, on]),
        throughput([off, on]),
        hit_rate(on),
    ):
        section.figure.draw_without_rendering()
        texts = [text.get_text() for text in section.figure.findobj(Text)]
        assert f"fewshot; {model}; EPYC, 2 cores; 2026-11-22" in texts
        assert section.figure.get_suptitle().strip() == section.alt_text
        for axes in section.figure.axes:
            if legend := axes.get_legend():
                assert legend.get_window_extent().y0 >= axes.get_window_extent().y1
    gpu = run_of(*answers(0.1, 3), environment={"gpu": "NVIDIA H200", "processor": "EPYC", "cores": 2})
    assert gpu.caption == "fewshot; NVIDIA H200"


@pytest.mark.parametrize("right", [True, None])  # six charts, or five
def test_the_labels_of_bars_stay_inside_their_axes(right):
    off = run_of(*answers(0.4, 0, right=right), cache="off", duration=20.0)
    section = cache_comparison(off, run_of(*answers(0.1, 3, right=right), duration=1.2))
    section.figure.draw_without_rendering()
    for axes in section.figure.axes:
        assert len(axes.texts) == 2
        assert all(text.get_window_extent().x1 <= axes.get_window_extent().x1 for text in axes.texts)


def test_charts_without_measurements_are_left_out(tmp_path):
    records = [record([0.1], output=(1,), cached=None, returns_ids=False) for _ in range(3)]
    files, page = drawn(tmp_path, run_of(*records, cache=None, cache_flushed=False))
    assert files == {"index.html", "ttft.png", "throughput.png"}
    assert any("returns no token ids" in text for text in page.texts)


@pytest.mark.parametrize("cache", ["on", None])
def test_a_run_without_successes_has_a_page_with_the_errors(tmp_path, cache):
    files, page = drawn(tmp_path, run_of(failed("http_500"), cache=cache, environment={}))
    assert files == {"index.html"}
    assert page.cells[page.cells.index("  http_500") + 1] == "1"


def test_charts_of_an_earlier_run_are_removed_and_other_files_stay(tmp_path):
    for name in ("off_on.png", "hit_rate.png", "mine.png"):
        (tmp_path / name).write_bytes(PNG)
    plot([run_of(record([0.1], output=(1,), cached=None))], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "ttft.png", "throughput.png", "mine.png"}
    (tmp_path / "itl.png").mkdir()
    with pytest.raises(ConfigError, match="cannot remove .*itl.png: Is a directory"):
        plot([run_of(record([0.1]))], tmp_path)


def test_all_latencies_may_be_equal(tmp_path):
    files, _ = drawn(tmp_path, run_of(*[record([0.0, 0.0]) for _ in range(3)]))
    assert files == ALL - {"off_on.png"}
