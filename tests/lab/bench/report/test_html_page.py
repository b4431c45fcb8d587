import itertools
import subprocess
import sys

import pytest

from radixkv.errors import ConfigError
from radixkv.lab.bench.report.html_page import (
    Section,
    label_ends,
    new_figure,
    require_folder,
    save,
    style,
    write_page,
)
from support.report_page import PNG, Page


def drawn():
    figure = new_figure(4, 3)
    axes = figure.subplots()
    style(axes, title="It rises", x_title="time (s)", y_title="pages")
    axes.plot([1, 2], [1, 2])
    return figure


def test_a_chart_is_a_png_of_its_size(tmp_path):
    save(drawn(), tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(PNG)
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (4 * 144, 3 * 144)


def test_a_page_is_self_contained_and_escapes_texts(tmp_path):
    odd = "<script>alert('&amp;')</script>"
    section = Section(odd, odd, ("", odd), [(odd, "1"), ("b", "2")], drawn(), f'"{odd}"')
    write_page(tmp_path / "a.html", odd, [section, Section("No picture")])
    page = Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert page.texts.count(odd) == 6  # title, heading of the page and the section, paragraph, two cells
    assert page.cells == ["", odd, odd, "1", "b", "2"]
    assert [load[:22] for load in page.loads] == ["data:image/png;base64,"]


@pytest.mark.parametrize("heights", [(9.9, 10, 9.95, 5, 5.1, 0), (0, 0.1, 0.2, 0.3), (10, 10, 10)])
def test_labels_do_not_overlap_and_are_inside_the_axes(heights):
    figure = new_figure(6, 3)
    axes = figure.subplots()
    axes.set_ylim(0, 10)
    label_ends(axes, [(1, y, f"line {y}", "#000000") for y in heights])
    figure.draw_without_rendering()
    by_height = sorted(axes.texts, key=lambda text: text.get_window_extent().y0)
    assert [text.get_text() for text in by_height] == [f"line {y}" for y in sorted(heights)]
    boxes = [text.get_window_extent() for text in by_height]
    assert all(upper.y0 > lower.y0 + 0.8 * lower.height for lower, upper in itertools.pairwise(boxes))
    inside = axes.get_window_extent()
    assert inside.y0 < (boxes[0].y0 + boxes[0].y1) / 2 + 1
    assert (boxes[-1].y0 + boxes[-1].y1) / 2 < inside.y1 + 1


def test_an_unwritable_path_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"cannot write to --plot {folder}: "):
            require_folder(folder, "--plot")
    with pytest.raises(ConfigError, match="cannot write .*none/a.png: No such file"):
        save(drawn(), tmp_path / "none" / "a.png")
    with pytest.raises(ConfigError, match="cannot write .*: Is a directory"):
        write_page(tmp_path, "A page", [])


def test_what_radixkv_has_not_written_stays(tmp_path):
    (tmp_path / ".writable").write_text("mine")
    (tmp_path / ".index.html.part").write_text("mine, too")
    write_page(tmp_path / "index.html", "radixkv bench: chat", [])
    require_folder(tmp_path, "--plot")
    write_page(tmp_path / "index.html", "radixkv simulate: chat", [])
    assert (tmp_path / ".writable").read_text() == "mine"
    assert (tmp_path / ".index.html.part").read_text() == "mine, too"
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "index.html").write_text("<!doctype html><title>My site</title>")
    with pytest.raises(ConfigError, match="index.html of another program; give another folder"):
        require_folder(tmp_path, "--plot")


def test_a_missing_folder_is_created_empty(tmp_path):
    require_folder(tmp_path / "new" / "folder", "--plot")
    require_folder(tmp_path / "new" / "folder", "--plot")
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "folder"]
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_without_matplotlib_the_extra_is_named_and_reports_without_charts_work():
    code = """
import sys
sys.modules["matplotlib"] = None
import radixkv.lab.bench.report.run_page, radixkv.lab.bench.report.result_table
from radixkv.lab.bench.report.html_page import require_matplotlib
from radixkv.errors import ConfigError
try:
    require_matplotlib()
except ConfigError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'radixkv[plot]'" in result.stdout
