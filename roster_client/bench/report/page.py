"""The common parts of reports: self-contained HTML without scripts, printable on A4, with the commands to repeat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files


def page(title: str, cards: Iterable[str], parts: Iterable[str]) -> str:
    """Returns the HTML of a page: title, hardware, and the parts (HTML; empty ones are omitted)."""
    style = files(__package__).joinpath("report.css").read_text("utf-8")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style>"
    )
    top = f'<h1>{escape(title)}</h1><p class="card">{escape("; ".join(cards))}</p>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>{top}{"".join(filter(None, parts))}</body></html>\n'
    )


def number_table(columns: Sequence[str], rows: Iterable[Sequence[str]], groups: Iterable[int] = ()) -> str:
    """Returns a table whose first column names the row; `groups`: indexes of the rows with a line above."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    begins = set(groups)
    lines = []
    for number, (name, *cells) in enumerate(rows):
        mark = ' class="group"' if number in begins else ""
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f"<tr{mark}><th>{escape(name)}</th>{values}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def fact_table(facts: Mapping[str, Sequence[str]]) -> str:
    """Returns a table with one row per fact; a fact may have several lines."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{'<br>'.join(map(escape, lines))}</td></tr>" for name, lines in facts.items()
    )
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def paragraphs(lines: Iterable[str], style: str = "") -> str:
    """Returns one paragraph per line; `style`: their CSS class."""
    mark = f' class="{style}"' if style else ""
    return "".join(f"<p{mark}>{escape(line)}</p>" for line in lines)


def repetition(commands: Iterable[str]) -> str:
    """Returns the section with the commands that repeat the measurement."""
    return f"<h2>To repeat it</h2><pre>{escape(chr(10).join(dict.fromkeys(commands)))}</pre>"
