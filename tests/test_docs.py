"""README and docs: links lead somewhere, and figures agree with the files under benchmarks/results/ that they link."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PAGES = {str(path.relative_to(ROOT)): path for path in (*sorted(ROOT.glob("*.md")), ROOT / "benchmarks/README.md",
                                                        *sorted((ROOT / "docs").glob("*.md")),
                                                        ROOT / "tests/docs_questions.md")}
DOCS = [page for page, path in PAGES.items() if path.parent.name == "docs"]
LONGEST_PARAGRAPH = 5  # lines
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def anchors(page: str) -> set[str]:
    """The names by which GitHub links to a page's headings, and earlier names of headings (`<a id="...">`)."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    former = re.findall(r'^<a id="([^"]+)"></a>$', page, flags=re.MULTILINE)
    return {*former, *(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings)}


def dead_links(text: str, folder: Path) -> list[str]:
    found = []
    for _, target in LINK.findall(text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        page = folder / path
        if not page.exists() or (anchor and anchor not in anchors(page.read_text() if path else text)):
            found.append(target)
    return found


def long_paragraphs(text: str) -> list[str]:
    """The first lines of paragraphs, and of list items, with too many lines."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.split(r"\n(?:\s*\n|(?=- |\d+\. |\||#|    \S))", text)
    return [lines[0] for block in blocks if not re.match(r"[|#!]|    ", block)
            and len(lines := block.strip().splitlines()) > LONGEST_PARAGRAPH]


def wrong_figures(text: str, folder: Path) -> Iterator[str]:
    """Figures that differ from the result that they link to, in the digits given."""
    for shown, target in LINK.findall(text):
        number = re.match(r"[\d,]+(?:\.(\d+))?", shown)
        if number and target.endswith(".json"):
            value = json.loads((folder / target).read_text())["value"]
            if float(number[0].replace(",", "")) != round(value, len(number[1] or "")):
                yield f"{shown}, where {target} has {value}"


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    assert dead_links(PAGES[page].read_text(), PAGES[page].parent) == []


@pytest.mark.parametrize("page", PAGES)
def test_paragraphs_are_short(page: str) -> None:
    assert long_paragraphs(PAGES[page].read_text()) == []


@pytest.mark.parametrize("page", DOCS)
def test_command_comes_first(page: str) -> None:
    assert re.match(r"# .+\n\n    \S", PAGES[page].read_text())


@pytest.mark.parametrize("page", DOCS)
def test_headings_are_questions(page: str) -> None:
    """All but "For maintainers" and the headings of extending.md, which name what can be added."""
    headings = re.findall(r"^##? (.+)$", PAGES[page].read_text(), flags=re.MULTILINE)
    others = [heading for heading in headings if not heading.endswith("?") and heading != "For maintainers"]
    assert page == "docs/extending.md" or others == []


@pytest.mark.parametrize("page", PAGES)
def test_figures(page: str) -> None:
    assert list(wrong_figures(PAGES[page].read_text(), PAGES[page].parent)) == []


def test_picture_shows_the_results(benchmark_module: Callable[[str], Any]) -> None:
    """The picture agrees with the results; if not, `python benchmarks/overview.py` draws it anew."""
    overview = benchmark_module("overview")
    with Image.open(ROOT / "benchmarks/results/overview.png") as picture:
        assert json.loads(picture.text["Description"]) == [list(bar) for bar in overview.bars()]


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_to_be_measured(page: str) -> None:
    assert "TO MEASURE" not in PAGES[page].read_text()


def test_mistakes_are_found(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"value": 1234.56}')
    (tmp_path / "page.md").write_text("# The `cuda` executor\n")
    text = "[1,235](result.json) [1,234.5 s](result.json) [a](page.md#the-cuda-executor) [b](#below) [c](none.md)"
    assert dead_links(text, tmp_path) == ["#below", "none.md"]
    assert list(wrong_figures(text, tmp_path)) == ["1,234.5 s, where result.json has 1234.56"]
    text = "# Heading\n\n" + 5 * "five lines\n" + "\n" + 9 * "    code\n" + "\n- six" + 5 * "\n  lines" + "\n- item\n"
    assert long_paragraphs(text) == ["- six"]
