"""Page of a comparison: the picture as inline SVG and the tables, in one file, light and dark."""

import io
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from matplotlib import rc_context

from compare.run_folder import RunRecord
from compare.run_picture import STYLE as PICTURE_STYLE
from compare.run_picture import picture

INK = "#010203"
"""Color of text and axes in the SVG, replaced by the page's."""
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem }
div { overflow-x: auto }
svg { width: 100%; height: auto; fill: currentColor }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { border-bottom: 1px solid #8886; padding: .2rem .7rem; text-align: right }
th:first-child, td:first-child { text-align: left }
"""


def write_page(
    file: Path, runs: Sequence[RunRecord], metric: str, window: float, title: str | None, axis: str, text: str
) -> None:
    """Write the page. `text`: the report, Markdown of list items, headings, paragraphs and tables."""
    colors = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    with rc_context(PICTURE_STYLE | dict.fromkeys(colors, INK)), io.StringIO() as out:
        picture(runs, metric, window, title, axis).savefig(out, format="svg", transparent=True, metadata={"Date": None})
        svg = out.getvalue().replace(INK, "currentColor")
    # The seventh curve is black, which a dark page would hide. Matplotlib writes no black fill, so STYLE has one.
    svg = svg[svg.index("<svg") :].replace("#000000", "currentColor")
    heading = escape(title or "Comparison of runs")
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{heading}</title><style>{STYLE}</style>'
    file.write_text("\n".join([head, f"<h1>{heading}</h1>", svg, *_blocks(text), "</html>\n"]), encoding="utf-8")


def _blocks(text: str) -> Iterator[str]:
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if block.startswith("## "):
            yield f"<h2>{escape(block[3:])}</h2>"
        elif block.startswith("|"):
            head, _, *body = ([escape(cell) for cell in _cells(line)] for line in lines)
            rows = [f"<tr><th>{'<th>'.join(head)}", *(f"<tr><td>{'<td>'.join(row)}" for row in body)]
            yield f"<div><table>{''.join(rows)}</table></div>"
        elif block.startswith("- "):
            yield "<ul>" + "".join(f"<li>{escape(line[2:])}" for line in lines) + "</ul>"
        else:
            yield f"<p>{escape(block)}</p>"


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip("| "))]
