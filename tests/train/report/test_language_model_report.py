"""The report of a made-up run of a language model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from train.options.language_model import LANGUAGE_MODEL
from train.recording.metrics import EpochRow, LossPoint, RunRecord, perplexity, shown_perplexity
from train.report import language_model, plots
from train.report import page as report
from train.report.language_model import Facts, facts

CUT = "The beginning, where it is much higher, is cut off."


@pytest.fixture
def record() -> RunRecord:
    """Four steps of 1,000 words a second each; perplexities of e, 4 and 2 in validation."""
    losses = (1.0, math.log(4), math.log(2))
    facts = {"precision": "float16", "parameters": 1_234_567, "vocabulary": 96, "training_words": 4_000,
             "validation_words": 500, "unknown_share": 0.125, "best_possible": None}
    return RunRecord(
        config={"config": LANGUAGE_MODEL, "text": "a|b.txt", "hidden": 32, "layers": 2, "sequences": 10, "steps": 100},
        command="python -m train language-model --hidden 32",
        images_per_step=1_000,
        hardware={"cpu": "Some CPU", "gpus": []},
        step_ms=[1_000.0] * 4,
        loader_wait_ms=[200.0] * 4,
        compute_ms=[800.0] * 4,
        session_starts=[0],
        seconds=5.0,
        epochs=[EpochRow(number, number / 3600, 1_000.0, 1.5, 0.5, loss, 0.25, 0.5)
                for number, loss in enumerate(losses, start=1)],
        loss_curve=[LossPoint(step, step / 4, 3.0 / step, 0.1, 0.1) for step in range(1, 5)],
        # A resumed run has recorded it twice.
        events=[{"event": "language_model", "time": 0.1, "step": 0, **facts, "precision": "float32"},
                {"event": "language_model", "time": 0.2, "step": 2, **facts}],
    )


def test_what_it_says(record: RunRecord, tmp_path: Path) -> None:
    page = report.write_report(tmp_path, record).read_text()
    assert page.startswith("# Language model, 2 LSTM layers of 32 units: training report\n\n**2.00** perplexity in "
                           "validation, epoch 3 · **1.23 M** parameters · **1,000.0** words/sec in total")
    for line in ("steps spend 20.0% of their time",
                 "| 1 | 1.0 s | 1,000.0 | 4.48 | 2.72 |", "| precision | float16 |", "| text | a\\|b.txt |",
                 "| unknown words | 12.5% of those for validation", "language-model --hidden 32", "1000 words per step",
                 "(perplexity.png)"):
        assert line in page, line
    assert "images" not in page and "top-1" not in page and "float32" not in page and "best possible" not in page
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"report.md", "report.html", "report.json", "throughput.png", "time_split.png", "perplexity.png"}
    with Image.open(tmp_path / "perplexity.png") as picture:
        assert picture.size[0] > 500
    values = json.loads((tmp_path / "report.json").read_text())["language_model"]
    assert values["words_per_sec"]["mean"] == 1_000 and values["perplexity"][1]["validation"] == pytest.approx(4)


@pytest.mark.parametrize("share, shown", [(0.125, "12.5%"), (0.0005, "0.1%"), (0.0001, "less than 0.1%")])
def test_a_share_that_there_is_is_not_shown_as_none(share: float, shown: str) -> None:
    assert Facts("float32", 1, 8, 100, 10, share, None).unknown_shown == shown


@pytest.mark.usefixtures("undrawn")
def test_perplexity_without_end(record: RunRecord, tmp_path: Path) -> None:
    """No float holds it, and JSON has no infinity."""
    assert perplexity(1.0) == pytest.approx(math.e) and perplexity(1e6) == math.inf
    assert [shown_perplexity(loss) for loss in (2.0, 500.0, 1e6)] == ["7.39", "1.4e+217", "inf"]
    record.epochs[0].val_loss = record.loss_curve[0].loss = 1e6
    page = report.write_report(tmp_path, record).read_text()
    assert "| 4.48 | inf |" in page and page.count("(loss.png)") == 1 and "(perplexity.png)" not in page
    assert "images" not in page
    values = json.loads((tmp_path / "report.json").read_text())["language_model"]
    assert values["perplexity"][0] == {"epoch": 1, "training": pytest.approx(math.exp(1.5)), "validation": None}


@pytest.mark.usefixtures("undrawn")
def test_stopped_in_the_first_epoch(record: RunRecord, tmp_path: Path) -> None:
    record.epochs = []
    page = report.write_report(tmp_path, record).read_text()
    assert "(perplexity.png)" in page and "perplexity in validation" not in page
    record.loss_curve = []
    assert "(perplexity.png)" not in report.write_report(tmp_path, record).read_text()


def test_the_plot_shows_what_validation_has(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """The perplexity of guessing, at which training begins, would squash the rest."""
    limits = []
    monkeypatch.setattr(plots, "_legend", lambda axes, theme: limits.append(axes.get_ylim()))
    plots.perplexities(record, 1.75, plots.LIGHT)
    ((bottom, top),) = limits
    assert math.exp(3.0) > top == pytest.approx(1.5 * 4) and 1 < bottom < 1.75
    assert CUT in " ".join(str(block) for block in language_model.blocks(record, facts(record)))


def test_training_above_validation_is_shown(record: RunRecord) -> None:
    """The plot shows training perplexities above validation's, as with validation words that are easy to predict. Only
    the first epoch may be cut off."""
    for row in record.epochs:
        row.val_loss = 0.1
    assert plots.perplexity_top(record) == pytest.approx(1.5 * math.exp(0.75)), "of the step that ends the epoch"
    record.loss_curve = [LossPoint(1, 0.25, 4.0, 0.1, 0.1)]
    assert plots.perplexity_top(record) == pytest.approx(1.5 * math.exp(4.0)), "the last one before the validation"
    assert CUT not in " ".join(str(block) for block in language_model.blocks(record, facts(record)))
    record.epochs = []
    assert plots.perplexity_top(record) == math.inf
    assert CUT not in " ".join(str(block) for block in language_model.blocks(record, facts(record)))
