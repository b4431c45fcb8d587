"""Pictures in one style, and a page of HTML that holds them and the tables: what every report is drawn with.

matplotlib is used without pyplot, so nothing is kept between pictures, and imported in the functions only: reports
that draw nothing do not need it.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 144

INK = "#222222"
QUIET = "#6b6b6b"
FAINT = "#d9d9d9"
BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER)
"""Okabe and Ito's, which people with any kind of colour vision tell apart on white."""


@dataclass(frozen=True)
class Section:
    """A part of a page. All of it is text, never HTML."""

    heading: str
    paragraph: str = ""
    columns: Sequence[str] = ()
    """The heads of a table."""
    rows: Sequence[Sequence[str]] = ()
    """Its lines, a text a column; the first column says what the line is about."""
    figure: Figure | None = None
    described: str = ""
    """What the picture shows, for who does not see it."""
    file: str | None = None
    """The name under which the picture is saved beside the page as well."""


def require_matplotlib() -> None:
    """Raises ``ConfigError`` if there is no matplotlib: called before a long run whose pictures are wanted."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"pictures need matplotlib ({error}); pip install 'radixkv[plot]'") from None


def require_folder(folder: Path, flag: str) -> None:
    """Makes the folder for pictures. Raises ``ConfigError`` if it cannot be made, or not be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except FileExistsError:
        raise ConfigError(f"cannot write to {flag} {folder}: it is not a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot write to {flag} {folder}: {error.strerror}") from None


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty picture on white, its parts laid out when it is saved. Raises ``ConfigError`` without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(axes: Axes, *, title: str, x_title: str = "", y_title: str = "") -> None:
    """Gives axes the reports' look: a title that says what is seen, titles with units, a faint grid."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(x_title, fontsize=9.5, color=QUIET)
    axes.set_ylabel(y_title, fontsize=9.5, color=QUIET)
    axes.set_facecolor("white")
    axes.tick_params(which="both", colors=QUIET, labelsize=9, length=0)
    axes.grid(True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(QUIET)


def label_ends(axes: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes each label to the right of its point (x, y, text, colour), apart from the others.

    Call it last, when the limits of the axes are what they stay.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # lays the axes out, so that their height is known
    height_pt = axes.get_window_extent().height * 72 / DPI
    places = sorted(
        (
            (float(axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1]), x, y, text, colour)
            for x, y, text, colour in labels
        ),
    )
    least = 11.5 / height_pt  # of the axes' height, between two labels
    tops: list[float] = []
    for place, *_ in places:
        tops.append(max(place, tops[-1] + least) if tops else place)
    limit = 1.0
    for index in reversed(range(len(tops))):  # what was pushed out at the top goes down again
        tops[index] = min(tops[index], limit)
        limit = tops[index] - least
    for top, (place, x, y, text, colour) in zip(tops, places, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(6, (top - place) * height_pt),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )


def png(figure: Figure) -> bytes:
    """The picture as the bytes of a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Writes the picture as a PNG. Raises ``ConfigError`` if the path cannot be written."""
    _write(path, png(figure))


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Writes a page of HTML that needs nothing else: style and pictures are inside it, and there is no script.

    Pictures whose section names a ``file`` are saved beside it too.

    Raises:
        ConfigError: a path cannot be written.
    """
    body = "\n".join(_section(section, path.parent) for section in sections)
    _write(path, _PAGE.format(title=html.escape(title), body=body).encode())


def _section(section: Section, folder: Path) -> str:
    parts = [f"<h2>{html.escape(section.heading)}</h2>"]
    if section.paragraph:
        parts.append(f"<p>{html.escape(section.paragraph)}</p>")
    if section.figure is not None:
        data = png(section.figure)
        if section.file is not None:
            _write(folder / section.file, data)
        picture = base64.b64encode(data).decode()
        width = round(section.figure.get_figwidth() * 96)
        described = html.escape(section.described or section.heading)
        parts.append(f'<img width="{width}" alt="{described}" src="data:image/png;base64,{picture}">')
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
    """The whole file, or nothing of it."""
    part = path.with_name(f".{path.name}.part")
    try:
        try:
            part.write_bytes(data)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ max-width: 62rem; margin: 2rem auto; padding: 0 1rem; background: #fff; color: #222;
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.5rem; }}
h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
p {{ max-width: 46rem; white-space: pre-line; }}
img {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.25rem 0.8rem 0.25rem 0; text-align: right; border-bottom: 1px solid #e4e4e4; }}
th {{ font-weight: 500; }}
thead th {{ border-bottom-color: #888; }}
th:first-child {{ text-align: left; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
