"""examples/quickstart.ipynb runs from its first cell to its last."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs() -> None:
    cells = code_cells(json.loads(NOTEBOOK.read_text()))
    assert len(cells) > 5 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    for cell in cells:
        compile("".join(cell["source"]), NOTEBOOK.name, "exec")


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook shows the run with its curves, and predictions with their pictures."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # for the tests; a user has oneDNN, which is 40 times as fast
    for name in ("MXNET_MKLDNN_ENABLED", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    if folder := os.environ.get("RESNET_SHOWN_NOTEBOOK"):  # to inspect it
        nbformat.write(notebook, Path(folder) / NOTEBOOK.name)
    shown = ["".join(output.get("data", {}).get("text/html", "") or output.get("text", "") for output in cell.outputs)
             for cell in code_cells(notebook)]
    assert "epoch 1/1 done" in shown[0] and shown[1].count("data:image/png;base64,") == 2
    assert shown[3].count("data:image/png;base64,") == 12 and "bricks" in shown[3]
    assert "did you mean --epochs?" in shown[-2]
    assert (tmp_path / "runs" / "quickstart" / "report" / "report.html").is_file()
