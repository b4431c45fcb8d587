"""Self-contained HTML pages of charts and tables.

matplotlib is used without pyplot, which would keep state between figures. It is imported inside functions only, so
that reports without charts do not need it.
"""

from __future__ import annotations

import base64
import html
import importlib
import io
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 144
_TITLE = re.compile(rb"<title>radixkv ")
"""The beginning of every page that a command of radixkv writes."""
_MAX_HEAD_BYTES = 4096

TEXT_COLOUR = "#222222"
MUTED_COLOUR = "#6b6b6b"
GRID_COLOUR = "#d9d9d9"
BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER)
"""The palette of Okabe and Ito, which is distinguishable on white with any kind of colour vision."""


@dataclass(frozen=True)
class Section:
    """A section of a page. All texts are plain text and are escaped."""

    heading: str
    paragraph: str = ""
    columns: Sequence[str] = ()
    """The column heads of the table."""
    rows: Sequence[Sequence[str]] = ()
    """The rows of the table, one text for each column; the first column is the row's label."""
    figure: Figure | None = None
    alt_text: str = ""
    """Description of the chart for readers who do not see it."""
    file: str | None = None
    """File name under which the chart is also saved beside the page. None: it is not."""


def require_matplotlib() -> None:
    """Raises ``ConfigError`` if matplotlib is missing; called before a long run whose results are to be plotted."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib ({error}); pip install 'radixkv[plot]'") from None


def require_folder(folder: Path, flag: str) -> None:
    """Creates the folder for charts if missing.

    Raises:
        ConfigError: the folder cannot be created or written to, or its ``index.html`` is of another program; the
            text names ``flag``.
    """
    page = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if page.exists() and not (page.is_file() and _TITLE.search(page.read_bytes()[:_MAX_HEAD_BYTES])):
            raise ConfigError(f"{flag} {folder} has an index.html of another program; give another folder")
    except FileExistsError:
        raise ConfigError(f"cannot write to {flag} {folder}: it is not a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot write to {flag} {folder}: {error.strerror}") from None


def new_figure(width_in: float, height_in: float) -> Figure:
    """Returns an empty white figure that is laid out when it is saved.

    Raises:
        ConfigError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(axes: Axes, *, title: str = "", x_title: str = "", y_title: str = "") -> None:
    """Gives axes the style of the reports: a title, axis titles with units, a faint grid."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=TEXT_COLOUR)
    axes.set_xlabel(x_title, fontsize=9.5, color=MUTED_COLOUR)
    axes.set_ylabel(y_title, fontsize=9.5, color=MUTED_COLOUR)
    axes.set_facecolor("white")
    axes.tick_params(which="both", colors=MUTED_COLOUR, labelsize=9, length=0)
    axes.grid(True, color=GRID_COLOUR, linewidth=0.6)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(MUTED_COLOUR)


def entitle(figure: Figure, title: str, caption: str) -> None:
    """Gives a figure its title, the result, and below it a caption: what was measured, where and when.

    Both are plain text: dollar signs in the name of a file or a model are no formulas.
    """
    from matplotlib.text import Annotation

    heading = figure.suptitle(
        f"{title}\n", x=0.01, ha="left", fontsize=12, fontweight="bold", linespacing=1.3, color=TEXT_COLOUR
    )
    line = Annotation(caption, (0, 0.12), xycoords=heading, va="bottom", fontsize=9, color=MUTED_COLOUR)
    line.set_in_layout(False)  # the title's empty second line has the room
    for text in (heading, line):
        text.set_parse_math(False)
    figure.add_artist(line)


def legend(axes: Axes) -> None:
    """Names the curves above the axes, where no curve is."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False, fontsize=9.5, borderaxespad=0.2)


def label_ends(axes: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes each label (x, y, text, colour) to the right of its point, without overlaps.

    Must be called after the limits of the axes are final.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # computes the layout, and with it the height of the axes
    height_pt = axes.get_window_extent().height * 72 / DPI
    points = sorted(
        (
            (float(axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1]), x, y, text, colour)
            for x, y, text, colour in labels
        ),
    )
    spacing = 11.5 / height_pt  # minimum distance of two labels, as a fraction of the axes' height
    heights: list[float] = []
    for point, *_ in points:
        heights.append(max(point, heights[-1] + spacing) if heights else point)
    limit = 1.0
    for index in reversed(range(len(heights))):  # moves labels down that were pushed above the axes
        heights[index] = min(heights[index], limit)
        limit = heights[index] - spacing
    for height, (point, x, y, text, colour) in zip(heights, points, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(6, (height - point) * height_pt),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )


def png(figure: Figure) -> bytes:
    """Returns the figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes the figure as a PNG.

    Raises:
        ConfigError: the path cannot be written.
    """
    _write(path, png(figure))


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Writes a self-contained HTML page with its style and charts inside and without scripts.

    Charts whose section has a ``file`` are also saved beside the page.

    Raises:
        ConfigError: a path cannot be written.
    """
    body = "\n".join(_section(section, path.parent) for section in sections)
    page = Template((resources.files(__package__) / "page.html").read_text(encoding="utf-8"))
    _write(path, page.substitute(title=html.escape(title), body=body).encode())


def _section(section: Section, folder: Path) -> str:
    parts = [f"<h2>{html.escape(section.heading)}</h2>"]
    if section.paragraph:
        parts.append(f"<p>{html.escape(section.paragraph)}</p>")
    if section.figure is not None:
        data = png(section.figure)
        if section.file is not None:
            _write(folder / section.file, data)
        encoded = base64.b64encode(data).decode()
        width = round(section.figure.get_figwidth() * 96)
        alt_text = html.escape(section.alt_text or section.heading)
        parts.append(f'<img width="{width}" alt="{alt_text}" src="data:image/png;base64,{encoded}">')
    if section.rows:
        parts.append(_table(section.columns, section.rows))
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tags: Sequence[str]) -> str:
        return (
            "<tr>"
            + "".join(
                f"<{tag}>{html.escape(cell)}</{tag.partition(' ')[0]}>"
                for tag, cell in zip(tags, cells, strict=True)
            )
            + "</tr>"
        )

    head = line(columns, ['th scope="col"'] * len(columns)) if columns else ""
    body = [line(row, ['th scope="row"', *["td"] * (len(row) - 1)]) for row in rows]
    return "\n".join(["<table>", f"<thead>{head}</thead>", "<tbody>", *body, "</tbody>", "</table>"])


def _write(path: Path, data: bytes) -> None:
    """Writes the whole file or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
