"""benchmarks/map.py without a GPU: its cells, resuming, and its plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError


@pytest.fixture
def map_program(benchmark_module: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, on a machine that seems to have a GPU, with files in `tmp_path`."""
    program = benchmark_module("map")
    monkeypatch.setenv("PEER_PYTHON", "python")
    monkeypatch.setattr(program, "LINES", tmp_path / "map.jsonl")
    monkeypatch.setattr(program, "PICTURE", tmp_path / "map.png")
    monkeypatch.setattr(program, "find_gpus", lambda: ["a GPU"])
    monkeypatch.setattr(program, "git_commit", lambda: "a" * 40)
    monkeypatch.setattr(program, "hardware", lambda: {"gpus": ["NVIDIA H200"]})
    return program


def start(program: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["map.py", *options])
    program.main()


def test_what_people_run_comes_first(map_program: Any) -> None:
    listed = list(map_program.cells(map_program.Options()))
    assert len(listed) == len({*listed}) == 4 * (6 * 5 * 3 + 7 * 2)
    assert str(listed[0]) == "resnet50 training fp16, batch 256, 224 pixels"
    assert {cell.size for cell in listed[:60]} == {224} and listed[0].steps == 46 and listed[-1].use == "inference"
    assert {cell.size for cell in listed if cell.use == "inference"} == {224}


def test_a_stopped_map_resumes(map_program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                               tmp_path: Path) -> None:
    """A cell that failed is a line with the reason, and not tried again; another commit is measured anew."""
    measured: list[Any] = []

    def measure(cell: Any, options: Any) -> dict[str, Any]:
        measured.append(cell)
        if cell.batch == 64:
            return {"error": "out of memory"}
        found = {"ours": [10.0] * 5, "theirs": {"compile": [20.0] * 5, "graph": [10.0 + cell.batch / 8] * 5}}
        return found | {"ratio": map_program.ratio_of(found)}

    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(map_program, "measure", measure)
    monkeypatch.setattr(map_program.time, "monotonic", lambda: next(clock))
    some = ("--networks", "resnet18", "--uses", "training", "--batches", "8", "32", "64", "--dtypes", "float16",
            "--sizes", "224")
    start(map_program, monkeypatch, *some, "--limit", "15")
    assert [cell.batch for cell in measured] == [8] and "2 cells are left" in capsys.readouterr().out
    start(map_program, monkeypatch, *some)
    assert [cell.batch for cell in measured] == [8, 32, 64]
    out = capsys.readouterr().out
    assert "2 of 2: resnet18 training fp16, batch 64, 224 pixels: out of memory" in out
    assert "the worst: resnet18 training fp16, batch 8, 224 pixels: 1.10; " in out and (tmp_path / "map.png").exists()
    assert [json.loads(line).get("ratio") for line in (tmp_path / "map.jsonl").read_text().splitlines()] == [
        1.1, 1.4, None]
    start(map_program, monkeypatch, *some)
    assert len(measured) == 3
    monkeypatch.setattr(map_program, "git_commit", lambda: "b" * 40)
    start(map_program, monkeypatch, *some)
    assert len(measured) == 6


def test_a_failed_cell_says_why(map_program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of its process."""
    monkeypatch.setattr(map_program, "WORKER", "import sys; sys.exit('not enough memory')")
    cell = map_program.Cell("resnet18", "training", 8, 224, "float16")
    assert map_program.measure(cell, map_program.Options()) == {"error": "not enough memory"}


def test_mistakes(map_program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="has no measured cell: run this program without --draw on a GPU first"):
        start(map_program, monkeypatch, "--draw")
    monkeypatch.setattr(map_program, "find_gpus", lambda: [])
    with pytest.raises(UserError, match="measured on an NVIDIA GPU, and there is none here"):
        start(map_program, monkeypatch)
