"""A document is a list of blocks, rendered as Markdown, or as one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from textwrap import indent


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Plot:
    file: str
    caption: str


@dataclass(frozen=True)
class Tiles:
    """A few main figures: (value, label)."""

    figures: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: str = ""  # title of a collapsed table in HTML; "": not collapsed


def duration(seconds: float) -> str:
    """A duration in words: seconds below a minute, otherwise hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds))) if seconds >= 60 else f"{seconds:.1f} s"


Block = Heading | Text | Code | Plot | Tiles | Table


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """Render as Markdown; plots are links to their files."""
    parts = [f"# {title}"]
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"## {text}")
            case Text(text):
                parts.append(text)
            case Code(text):
                parts.append(indent(text, 4 * " "))
            case Plot(file, caption):
                parts.append(f"![{caption}]({file})")
            case Tiles(figures):
                parts.append(" · ".join(f"**{value}** {what}" for value, what in figures))
            case Table(header, rows):
                lines = [header, ["---"] * len(header), *rows]
                cells = [[_cell(str(cell)) for cell in line] for line in lines]
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    """Escape a cell of a Markdown table: on one line, with all special characters quoted."""
    return re.sub(r"([|<*`$])", r"\\\1", " ".join(text.split()))


URL = re.compile(r"(https?://[^\s;,()<>]*[^\s;,.:()<>])")
SHORT = 24  # characters; shorter cells are never broken, and wide tables scroll
STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --muted: #6e7781; --line: #e4e8ec; --soft: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --back: #0f1319; --text: #e6edf3; --muted: #8b949e; --line: #262c35; --soft: #171c24; }
}
body { background: var(--back); color: var(--text); font: 16px/1.55 system-ui, sans-serif; margin: 0; }
main { max-width: 56rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 1.25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tile { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: .85rem; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--muted); font-weight: 600; }
th, td { padding: .3rem 1.25rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
td.short { white-space: nowrap; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem;
      white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
figure { margin: 1rem 0; }
img { width: 100%; height: auto; border-radius: .4rem; }
figcaption { color: var(--muted); font-size: .85rem; }
summary { cursor: pointer; }
a { color: inherit; }
"""


def html_page(title: str, blocks: Sequence[Block], light: Mapping[str, bytes], dark: Mapping[str, bytes]) -> str:
    """Render as HTML; `light` and `dark` are the plots of both colour schemes, PNG by file name."""
    text_of = html.escape
    parts = []
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"<h2>{text_of(text)}</h2>")
            case Text(text):
                parts.append(f"<p>{_html_text(text)}</p>")
            case Code(text):
                parts.append(f"<pre>{text_of(text)}</pre>")
            case Plot(file, caption):
                parts.append(
                    f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_data_url(dark[file])}">'
                    f'<img src="{_data_url(light[file])}" alt="{text_of(caption)}"></picture>'
                    f"<figcaption>{text_of(caption)}</figcaption></figure>"
                )
            case Tiles(figures):
                tiles = "".join(
                    f'<div class="tile"><b>{text_of(value)}</b><span>{text_of(what)}</span></div>'
                    for value, what in figures
                )
                parts.append(f'<div class="tiles">{tiles}</div>')
            case Table(header, rows, folded):
                head = "".join(f"<th>{text_of(cell)}</th>" for cell in header) if any(header) else ""
                body = "".join(f"<tr>{''.join(_html_cell(str(cell)) for cell in row)}</tr>" for row in rows)
                table = f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
                parts.append(f"<details><summary>{text_of(folded)}</summary>{table}</details>" if folded else table)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text_of(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{text_of(title)}</h1>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _html_cell(text: str) -> str:
    """A table cell; a number stays on one line with its unit."""
    return f"<td{' class=short' * (len(text) <= SHORT)}>{_html_text(text)}</td>"


def _html_text(text: str) -> str:
    """Escaped text, with web addresses as links."""
    between, *rest = (html.escape(part) for part in URL.split(text))
    links = (f'<a href="{url}">{url}</a>{after}' for url, after in zip(rest[::2], rest[1::2], strict=True))
    return "".join([between, *links])


def _data_url(picture: bytes) -> str:
    form = "svg+xml" if picture.startswith(b"<?xml") else "png"
    return f"data:image/{form};base64,{base64.b64encode(picture).decode()}"
