"""A document is a list of blocks, rendered as Markdown, or as one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import html
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from textwrap import indent
from typing import NamedTuple


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


class Picture(NamedTuple):
    """An image with the network's prediction."""

    jpeg: bytes
    guess: str
    probability: float
    true: str


@dataclass(frozen=True)
class Pictures:
    """A grid of pictures in HTML; in Markdown the PNG file that contains them all."""

    file: str
    caption: str
    pictures: Sequence[Picture]


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


Block = Heading | Text | Code | Plot | Pictures | Tiles | Table


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
            case Plot(file, caption) | Pictures(file, caption):
                parts.append(f"![{caption}]({file})")
            case Tiles(figures):
                parts.append(" · ".join(f"**{value}** {what}" for value, what in figures))
            case Table(header, rows):
                marks = ["---:" if is_number else "---" for is_number in _numbers(block)]
                lines = [header, marks, *rows]
                cells = [[_cell(str(cell)) for cell in line] for line in lines]
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    """Escape a cell of a Markdown table: on one line, with all special characters quoted."""
    return re.sub(r"([|<*`$])", r"\\\1", " ".join(text.split()))


_NUMBER = re.compile(r"[-+~]*\d[\d,.:]*( ?(%|s|ms|W|GiB|MHz|J)| (of|to) \d[\d,.]*( %)?)?")  # with its unit
_NO_NUMBER = {"", "-", "...", "none", "not known", "not measured"}  # also occurs in a column of numbers


def _numbers(table: Table) -> list[bool]:
    """Which columns of a table hold numbers."""
    columns = [[str(cell).strip() for cell in column] for column in zip(*table.rows, strict=True)]
    return [all(cell in _NO_NUMBER or _NUMBER.fullmatch(cell) for cell in column) and not _NO_NUMBER.issuperset(column)
            for column in columns] or [False] * len(table.header)


URL = re.compile(r"(https?://[^\s;,()<>]*[^\s;,.:()<>])")
SHORT = 24  # characters; shorter cells are never broken where there is room
MANY = 5  # columns; a table with more has smaller letters on a phone
STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --muted: #636c76; --line: #e4e8ec; --soft: #f6f8fa;
        --right: #1d7f57; --wrong: #c2501c; }
@media (prefers-color-scheme: dark) {
  :root { --back: #0f1319; --text: #e6edf3; --muted: #8b949e; --line: #262c35; --soft: #171c24;
          --right: #4fc794; --wrong: #f0883e; }
}
body { background: var(--back); color: var(--text); font: 16px/1.55 system-ui, sans-serif; margin: 0; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 1.25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
p { max-width: 50rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tile { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: .85rem; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--muted); font-weight: 600; vertical-align: bottom; }
th, td { padding: .3rem 1.25rem .3rem 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; vertical-align: top; }
td.short { white-space: nowrap; }
.num { text-align: right; white-space: nowrap; }
th.num { white-space: normal; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem;
      white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
figure { margin: 0; min-width: 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem;
         margin: 1rem 0; }
.plots img { max-width: 100%; height: auto; border-radius: .4rem; }
figcaption, .caption { color: var(--muted); font-size: .85rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 1rem .75rem;
            margin: 1rem 0 .5rem; }
.pictures img { display: block; width: 100%; border-radius: .4rem; outline: 3px solid transparent; }
.pictures .wrong img { outline-color: var(--wrong); }
.pictures figcaption { font-size: .85rem; line-height: 1.35; padding-top: .35rem; overflow-wrap: anywhere; }
.pictures b { color: var(--right); }
.pictures .wrong b { color: var(--wrong); }
.bar { display: block; height: 4px; border-radius: 2px; background: var(--line); margin-bottom: .25rem; }
.bar i { display: block; height: 100%; border-radius: 2px; background: var(--right); }
.wrong .bar i { background: var(--wrong); }
summary { cursor: pointer; }
a { color: inherit; }
@media (max-width: 40rem) {
  main { padding: 1.25rem .75rem 3rem; }
  h1 { font-size: 1.35rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: .5rem; }
  .tile { padding: .6rem .7rem; }
  .tile b { font-size: 1.3rem; overflow-wrap: anywhere; }
  table { font-size: .8rem; }
  th, td { padding-right: .6rem; }
  th:last-child, td:last-child { padding-right: 0; }
  td.short:not(.num) { white-space: normal; min-width: min(7.6em, 24vw); }
  .many { font-size: min(.62rem, 88vw / (4.3 * var(--columns))); width: 100%; } /* a column is about 4.3 em wide */
  .many th { letter-spacing: -.03em; }
  .many th, .many td { padding-right: .45em; }
}
"""


def html_page(title: str, blocks: Sequence[Block], light: Mapping[str, bytes], dark: Mapping[str, bytes]) -> str:
    """Render as HTML; `light` and `dark` are the plots of both colour schemes, SVG by file name."""
    parts = []
    for kind, group in itertools.groupby(blocks, type):
        made = [_html_block(block, light, dark) for block in group]
        # plots stand side by side, if there is room
        parts += [f'<div class="plots">{"".join(made)}</div>'] if kind is Plot else made
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _html_block(block: Block, light: Mapping[str, bytes], dark: Mapping[str, bytes]) -> str:
    text_of = html.escape
    match block:
        case Heading(text):
            return f"<h2>{text_of(text)}</h2>"
        case Text(text):
            return f"<p>{_html_text(text)}</p>"
        case Code(text):
            return f"<pre>{text_of(text)}</pre>"
        case Plot(file, caption):
            sources = (_data_url(plots[file], "svg+xml") for plots in (dark, light))
            return ('<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{}"><img src="{}" alt="{}">'
                    "</picture><figcaption>{}</figcaption></figure>").format(*sources, *[text_of(caption)] * 2)
        case Pictures(_, caption, pictures):
            grid = "".join(map(_html_picture, pictures))
            return f'<div class="pictures">{grid}</div><p class="caption">{text_of(caption)}</p>'
        case Tiles(figures):
            tiles = (f'<div class="tile"><b>{text_of(value)}</b><span>{text_of(what)}</span></div>'
                     for value, what in figures)
            return f'<div class="tiles">{"".join(tiles)}</div>'
        case Table():
            return _html_table(block)


def _html_picture(picture: Picture) -> str:
    jpeg, guess, probability, true = picture
    is_right = guess == true
    text = f"{'✓' if is_right else '✗'} {guess}"
    truth = "" if is_right else f"<br>is: {html.escape(true)}"
    return (f'<figure class="{"right" if is_right else "wrong"}"><img src="{_data_url(jpeg, "jpeg")}" '
            f'alt="{html.escape(true)}"><figcaption><span class="bar"><i style="width:{probability:.0%}"></i></span>'
            f"<b>{html.escape(text)}</b> {probability:.0%}{truth}</figcaption></figure>")


def _html_table(table: Table) -> str:
    numbers = _numbers(table)
    head = "".join(f"<th{' class=num' * is_number}>{_html_heading(cell)}</th>"
                   for cell, is_number in zip(table.header, numbers, strict=True)) if any(table.header) else ""
    body = "".join(f"<tr>{''.join(map(_html_cell, map(str, row), numbers))}</tr>" for row in table.rows)
    count = len(table.header)
    many = f' class="many" style="--columns:{count}"' * (count > MANY)
    shown = f'<div class="scroll"><table{many}><tr>{head}</tr>{body}</table></div>'
    return f"<details><summary>{html.escape(table.folded)}</summary>{shown}</details>" if table.folded else shown


def _html_heading(text: str) -> str:
    """A column's heading, which breaks after a slash, and not in the hyphen of top-1."""
    return html.escape(text).replace("/", "/<wbr>").replace("-", "-&#8288;")


def _html_cell(text: str, is_number: bool) -> str:
    """A table cell; a number stays on one line with its unit."""
    kinds = [*["short"] * (len(text) <= SHORT), *["num"] * is_number]
    marked = f' class="{" ".join(kinds)}"' if kinds else ""
    return f"<td{marked}>{_html_text(text)}</td>"


def _html_text(text: str) -> str:
    """Escaped text, with web addresses as links."""
    between, *rest = (html.escape(part) for part in URL.split(text))
    links = (f'<a href="{url}">{url}</a>{after}' for url, after in zip(rest[::2], rest[1::2], strict=True))
    return "".join([between, *links])


def _data_url(content: bytes, form: str) -> str:
    return f"data:image/{form};base64,{base64.b64encode(content).decode()}"
