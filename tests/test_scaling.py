"""What benchmarks/scaling.py makes of its measurements: files, table and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_results import faults

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("sys.argv", [str(BENCHMARKS / "scaling.py")])
    import scaling

    return scaling


def rows() -> list[dict[str, Any]]:
    """One GPU takes 20 ms for 100 images, two take 25 ms for 200, of which 1 ms waits for an all-reduce of 4 ms."""
    both = {
        "what": "synthetic", "gpus": 2, "batch": 100, "step_ms": [25.0] * 8, "nvlink_bytes": None,
        "buckets": [["weights 1", 30_000_000, "float16"], ["others", 2_000_000, "float32"]],
        "each_alone_ms": [20.0, 22.0], "exposed_ms": [1.0] * 8, "all_reduce_ms": [3.5, 0.5],
        "timeline": {"buckets": [[15.0, 19.0], [24.0, 24.5]], "parts": [24.0, 24.5, 25.0]},
    }  # fmt: skip
    return [{"what": "synthetic", "gpus": 1, "batch": 100, "step_ms": [20.0] * 8}, both]


def test_table(scaling: Any) -> None:
    _, _, one, two = scaling.table(rows()).splitlines()
    assert [cell.strip() for cell in one.split("|")[1:6]] == ["ours, synthetic", "1", "5,000", "5,000", "100.0%"]
    assert [cell.strip() for cell in two.split("|")[1:-1]] == [
        "ours, synthetic", "2", "8,000", "4,000", "80.0%", "4,545", "4.00 ms", "1.00 ms", "75%", "32 MB (computed)"
    ]  # fmt: skip


def test_files(scaling: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaling.write_lines(rows(), tmp_path)
    scaling.write_figures(rows(), tmp_path)
    result = json.loads((tmp_path / "resnet50_fp16_b100_synthetic_2gpu.json").read_text())
    result["commit"] = result["commit"] or "0" * 40
    assert faults(result, "resnet50_fp16_b100_synthetic_2gpu.json") == []
    assert result["ratio"] == 0.8
    assert [json.loads(line) for line in (tmp_path / "scaling.jsonl").read_text().splitlines()] == rows()
    for name in ("scaling.png", "allreduce_timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "80.0%" in capsys.readouterr().out
