"""Runs side by side: made-up runs, whose every figure is known."""

from __future__ import annotations

import json
import re
import statistics

import numpy as np
import pytest
from made_runs import IMAGES_PER_STEP, STEPS, VALIDATION_IMAGES, make_run, rewrite

from train.errors import TrainError
from train.options.language_model import LanguageModelOptions
from train.recording.metrics import METRICS_FILE, TRAINING_IMAGES, interval
from train.recording.outcomes import Outcomes
from train.report import comparison
from train.report.classifier import Classifier
from train.report.compared import MEASURES, Figure
from train.report.comparison import compare
from train.report.plots import DARK, LIGHT


def table(found):
    return [list(found.header), *map(list, found.rows)]


def test_two_runs(tmp_path):
    make_run(tmp_path / "a", [11, 33, 22], seed=1, learning_rate=0.1, watts=300.0)
    make_run(tmp_path / "b", [22, 22, 40], seed=1, learning_rate=0.4, step_seconds=2.0)
    found = compare([tmp_path / "a", tmp_path / "b"], accuracies=(0.5, 0.75, 0.9))
    assert found.title == "2 runs side by side" and found.notes == ()
    assert found.differing == {"--learning-rate": ("0.1", "0.4")}
    low, high = (100 * end for end in interval(0.75, VALIDATION_IMAGES))
    assert table(found.results_table) == [
        ["", "epochs", "best top-1", "last top-1", "images/sec", "time", "J/image", "kJ", "GPU GiB"],
        ["a", "3", f"75.00% ({low:.1f} to {high:.1f})", "50.00% (35.8 to 64.2)", "10.0", "18.0 s", "30", "3.6", "3.0"],
        ["b", "3", "90.91% (78.8 to 96.4)", "90.91% (78.8 to 96.4)", "5.0", "30.0 s", "-", "-", "-"],
    ]
    assert table(found.times_table) == [["time to", "50%", "75%", "90%"], ["a", "12.0 s", "12.0 s", "-"],
                                        ["b", "10.0 s", "30.0 s", "30.0 s"]]
    assert table(found.options_table) == [["option", "a", "b"], ["--learning-rate", "0.1", "0.4"]]
    assert found.runs_table is None
    assert "44 validation images (Wilson)" in found.explanation and "±" not in found.explanation


def test_seeds_become_mean_and_deviation(tmp_path):
    right = {0: 20, 1: 30, 2: 25}
    for seed, hits in right.items():
        make_run(tmp_path / f"lr=0.1,seed={seed}", [10, hits], seed=seed, learning_rate=0.1)
    make_run(tmp_path / "lr=0.2", [10, 26], seed=0, learning_rate=0.2)
    found = compare([tmp_path], accuracies=(0.5,))
    assert [row.name for row in found.rows] == ["lr=0.1", "lr=0.2"]
    shares = [hits / VALIDATION_IMAGES for hits in right.values()]
    best = found.rows[0].figure(MEASURES["best_top1"])
    assert best.mean == pytest.approx(statistics.fmean(shares))
    assert best.deviation == pytest.approx(statistics.stdev(shares))
    (_, _, _, cell, *_), (_, runs, *_) = found.results_table.rows
    assert cell == f"{best.mean:.2%} ± {best.deviation:.2%}" and runs == "1"
    assert found.times_table.rows[0] == ("lr=0.1", "12.0 s ± 0.0 s (2 of 3)")
    assert [row[:2] for row in found.runs_table.rows] == [(f"lr=0.1,seed={seed}", str(seed)) for seed in right]
    # The seeds differ as well: the first configuration has three, the second has one.
    assert found.differing == {"--seed": ("0, 1, 2", "0"), "--learning-rate": ("0.1", "0.2")}
    assert found.title == "4 runs of 2 configurations" and "±" in found.explanation


def test_metrics_of_plugins(tmp_path):
    """The table has the metrics of the epoch whose weights are kept; a run without such metrics has a dash. A run
    without validation has no metrics."""
    briers = [{"brier": 0.5}, {"brier": 0.25}, {"brier": 0.75}]
    make_run(tmp_path / "a", [10, 30, 20], plugin_metrics=briers)
    make_run(tmp_path / "b", [10, 20], learning_rate=0.3)
    make_run(tmp_path / "c", [20, 30, 10], evaluated=TRAINING_IMAGES, plugin_metrics=briers, learning_rate=0.2)
    found = compare([tmp_path])
    column = found.results_table.header.index("brier")
    assert [row[column] for row in found.results_table.rows] == ["0.25", "-", "-"]
    values = found.to_dict()
    assert values["rows"][0]["plugin_metrics"] == {"brier": {"mean": 0.25, "deviation": None, "values": [0.25]}}
    assert [row["runs"][0]["plugin_metrics"] for row in values["rows"]] == [{"brier": 0.25}, {}, {}]


def test_names_of_configurations(tmp_path):
    for folder in ("x", "y"):
        for seed in range(2):
            make_run(tmp_path / folder / f"seed={seed}", [10], seed=seed, learning_rate=0.1 if folder == "x" else 0.2)
    assert [row.name for row in compare([tmp_path]).rows] == ["x", "y"]
    assert [row.name for row in compare([tmp_path / "x"]).rows] == ["x"]
    for seed in range(2):
        make_run(tmp_path / f"run{seed}", [10], seed=seed, learning_rate=0.3)
    assert compare([tmp_path]).rows[0].name == "run0 and 1 more"


def test_many_configurations_are_the_lines_of_the_options(tmp_path):
    for rate in range(1, 7):
        make_run(tmp_path / f"r{rate}", [rate], learning_rate=rate / 10)
    found = compare([tmp_path]).options_table
    assert found.header == ("", "--learning-rate") and found.rows[0] == ("r1", "0.1") and len(found.rows) == 6


def test_what_is_not_complete_is_told_and_the_rest_compared(tmp_path):
    make_run(tmp_path / "good", [30])
    make_run(tmp_path / "error", [20], epochs=3, error=RuntimeError())
    rewrite(tmp_path / "error", lambda line: {**line, "reason": "error"} if line["event"] == "end" else line)
    make_run(tmp_path / "stopped", [20], epochs=3, error=RuntimeError())  # earlier versions gave no reason
    rewrite(tmp_path / "stopped", lambda line: {k: v for k, v in line.items() if k != "reason"})
    make_run(tmp_path / "killed", [20], epochs=3)
    rewrite(tmp_path / "killed", lambda line: None if line["event"] == "end" else line)
    make_run(tmp_path / "plain", [None], validate_every=0)
    make_run(tmp_path / "own", [44], evaluated=TRAINING_IMAGES, data="own")
    make_run(tmp_path / "none", [])
    make_run(tmp_path / "words", [10])
    words = {"config": "language_model", **vars(LanguageModelOptions())}
    rewrite(tmp_path / "words", lambda line: {**line, "config": words} if "config" in line else line)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / METRICS_FILE).write_text("[1, 2]\n")
    (tmp_path / "empty").mkdir()
    running = make_run(tmp_path / "running", [20], epochs=3, leave_open=True)
    found = compare([tmp_path, tmp_path / "empty"])
    running.__exit__(None, None, None)
    notes = "\n".join(found.notes)
    for sentence in (
        "damaged is left out: line 1 of", "empty is left out: it holds no run, since it has no metrics.jsonl",
        "none is left out: it has no finished step yet",
        "words is left out: it is a language model, which has no top-1 accuracy",
        "error ended with an error: its figures are those after 1 of 3 epochs",
        "stopped was stopped by a signal: its figures are those after 1 of 3 epochs",
        "killed was killed: its figures are those after 1 of 3 epochs",
        "running is still running: its figures are those after 1 of 3 epochs",
        "plain has no validation, so no accuracy: only its speed and loss are shown",
        "own has no validation, so no accuracy: it was evaluated on its training images",
    ):
        assert sentence in notes, sentence
    assert len(found.notes) == 10
    lines = {row[0]: row for row in found.results_table.rows}
    assert lines.keys() == {"good", "error", "stopped", "killed", "running", "plain", "own"}  # none of them a mean
    assert lines["error"][1] == "1 of 3 (failed)" and lines["running"][1] == "1 of 3 (running)"
    assert lines["plain"][2:5] == ("-", "-", "10.0") == lines["own"][2:5]


@pytest.mark.parametrize("field", [{"config": []}, {"step_ms": ["x", "y"]}, {"val_top1": "high"}, {"hardware": None}])
def test_values_that_are_none_of_a_run(field, tmp_path):
    make_run(tmp_path / "good", [30])
    make_run(tmp_path / "odd", [30])
    rewrite(tmp_path / "odd", lambda line: {**line, **field} if field.keys() & line.keys() else line)
    found = compare([tmp_path])
    assert [row.name for row in found.rows] == ["good"]
    sentence = f"odd is left out: {tmp_path / 'odd' / 'metrics.jsonl'} has values that are none of a run ("
    assert found.notes[0].startswith(sentence)


def test_runs_of_different_data_are_told(tmp_path):
    make_run(tmp_path / "a", [10], data="photos")
    make_run(tmp_path / "b", [10], data="others")
    assert compare([tmp_path]).notes == ("the runs have different --data or --val-split, so their accuracies are "
                                         "comparable only if the validation images are the same",)
    rewrite(tmp_path / "b", lambda line: {**line, "val_count": 50} if "val_count" in line else line)
    assert compare([tmp_path]).notes == ("the accuracies were measured on different validation images (44 and 50 of "
                                         "them), so they say little about each other",)


def test_earlier_runs_have_the_number_of_images_in_their_report(tmp_path):
    make_run(tmp_path, [11])
    rewrite(tmp_path, lambda line: {k: v for k, v in line.items() if not k.endswith("_count")})
    (member,) = compare([tmp_path]).members
    assert member.validation_images is None and member.interval(0.5) is None
    assert compare([tmp_path]).results_table.rows[0][2] == "25.00%"
    probabilities = np.eye(4)[np.arange(20) % 4]
    outcomes = Outcomes.of(probabilities, np.arange(20) % 4, range(20))
    Classifier(outcomes, list("abcd"), [], np.zeros((0, 8, 8, 3), np.uint8), np.zeros(0, int), "validation images",
               1).save(tmp_path / "report")
    assert compare([tmp_path]).members[0].interval(0.25) == interval(0.25, 20)


@pytest.mark.parametrize(("best", "expected"), [
    ([0.955, 0.91], (0.9, 0.92, 0.94, 0.95)),  # all reach 90 %
    ([0.955, 0.35], (0.3, 0.92, 0.94, 0.95)),
    ([0.25, 0.02], (0.1, 0.2)),
    ([0.01], ()),
    ([], ()),
])
def test_accuracies_are_chosen_by_what_the_runs_reach(best, expected):
    assert comparison._choose([Figure(tuple(best), len(best))] if best else [None]) == expected


def test_nothing_to_compare(tmp_path):
    with pytest.raises(TrainError, match=r"^there is no folder .*/none: give one that holds runs$"):
        compare([tmp_path / "none"])
    with pytest.raises(TrainError, match=r"^there is no run to compare: give .*; .* is left out: it holds no run"):
        compare([tmp_path])


def test_a_folder_given_twice_is_one_run(tmp_path):
    make_run(tmp_path / "a", [10])
    assert len(compare([tmp_path, tmp_path / "a", tmp_path / "." / "a"]).members) == 1


def test_json_has_every_figure(tmp_path):
    make_run(tmp_path / "a", [11, 33], watts=100.0, price_per_hour=3.6)
    values = json.loads(json.dumps(compare([tmp_path / "a"], (0.7, 0.99)).to_dict()))
    (row,) = values["rows"]
    assert row["best_top1"] == {"mean": 0.75, "deviation": None, "values": [0.75]}
    assert row["seconds_to"]["0.7"]["mean"] == pytest.approx(12) and row["seconds_to"]["0.99"] is None
    (run,) = row["runs"]
    assert run["joules"] == pytest.approx(100 * 2 * STEPS) and run["price"] == pytest.approx(12 * 3.6 / 3600)
    assert run["joules_per_image"] == pytest.approx(100 / IMAGES_PER_STEP) and run["validation_images"] == 44
    assert run["interval"]["best_top1"] == pytest.approx(interval(0.75, 44)) and run["state"] == "finished"
    assert run["options"]["price_per_hour"] == 3.6
    assert set(values["units"]) >= {*MEASURES, "interval", "seconds_to", "deviation"}


@pytest.mark.long
def test_the_page_is_self_contained(tmp_path):
    make_run(tmp_path / "<a> & b", [11, 33])
    make_run(tmp_path / "c", [12, 31], learning_rate=0.7)
    page = compare([tmp_path]).html()
    assert page.count("data:image/svg+xml;base64,") == 6  # three plots, light and dark
    assert "&lt;a&gt; &amp; b" in page and "<a> & b" not in page
    assert not re.search(r'(src|href)(set)?="(?!data:)', page)


@pytest.mark.long
def test_plots_of_seeds_and_of_more_runs_than_colours(tmp_path):
    for seed in range(2):
        make_run(tmp_path / f"s{seed}", [11, 30 + seed], seed=seed)
    for number in range(28):
        make_run(tmp_path / f"r{number}", [5, number], learning_rate=(number + 2) / 10)
    make_run(tmp_path / "none", [None, None], learning_rate=9.0)
    figures = compare([tmp_path]).figures
    drawn = {name: draw(LIGHT) for name, draw in figures.items()}
    assert len(drawn) == 3 and all(content.startswith(b"<?xml") for content in drawn.values())
    assert b"PolyCollection" in drawn["accuracy_by_epoch.svg"]  # the band of the seeds
    assert DARK.background.encode() in figures["loss_by_epoch.svg"](DARK)
    assert figures["loss_by_epoch.svg"](LIGHT) == drawn["loss_by_epoch.svg"]
