"""Runs in their folders: state, and the list of them."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
from made_runs import make_run, rewrite

from common import files
from train.errors import TrainError
from train.recording.metrics import METRICS_FILE, TRAINING_IMAGES
from train.report import runs
from train.report.runs import FAILED, FINISHED, RUNNING, STOPPED, Run


def with_end(folder: Path, **fields: object) -> None:
    """Replace the fields of a run's end."""
    rewrite(folder, lambda line: {"event": "end", "time": line["time"], **fields} if line["event"] == "end" else line)


@pytest.mark.parametrize(("fields", "state", "reason"), [
    ({"completed": True, "reason": "epochs"}, FINISHED, "epochs"),
    ({"completed": True, "reason": "patience"}, FINISHED, "patience"),
    ({"completed": False, "reason": "max_steps"}, STOPPED, "max_steps"),
    ({"completed": False, "reason": "signal"}, STOPPED, "signal"),
    ({"completed": False, "reason": "error"}, FAILED, "error"),
    ({"completed": True}, FINISHED, "epochs"),  # in the format of earlier versions
    ({"completed": False}, STOPPED, "signal"),
])
def test_the_state_of_a_run_that_has_ended(fields, state, reason, tmp_path):
    make_run(tmp_path, [10, 20])
    with_end(tmp_path, **fields)
    run = Run.read(tmp_path)
    assert (run.state, run.reason) == (state, reason)
    assert run.is_over == (reason not in ("signal", "error"))


def test_a_limit_that_an_earlier_version_told_in_words(tmp_path):
    recorder = make_run(tmp_path, [10], epochs=3, leave_open=True)
    recorder.event("stop", reason="stopped: the time limit of 5 minutes is reached")
    recorder.__exit__(None, None, None)
    with_end(tmp_path, completed=True)
    assert Run.read(tmp_path).reason == "time_limit"


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path):
    recorder = make_run(tmp_path, [10], leave_open=True)
    assert Run.read(tmp_path).state == RUNNING
    with pytest.raises(TrainError, match="another process is at work"):
        make_run(tmp_path, [10])  # checking the lock does not take it
    recorder._logs.close()
    run = Run.read(tmp_path)
    assert (run.state, run.reason, run.is_over) == (FAILED, runs.KILLED, False)


def test_a_lock_is_got_although_somebody_looks(tmp_path, monkeypatch):
    """`runs` checks whether a run is active at the moment at which it begins."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    with path.open("a") as file:
        with path.open() as looking:
            assert files.lock(looking)
            monkeypatch.setattr("time.sleep", lambda seconds: seconds and looking.close())
            assert files.lock(file)
        assert files.is_locked(path)
    assert not files.is_locked(path) and not files.is_locked(tmp_path / "none")


def test_reading_without_steps_tells_the_same(tmp_path):
    make_run(tmp_path, [10, 30, 20])
    whole, light = Run.read(tmp_path), Run.read(tmp_path, with_steps=False)
    assert whole.record.step_ms and not light.record.step_ms
    assert light.record.epochs == whole.record.epochs
    assert light.state == whole.state and light.record.best == whole.record.best and light.record.best.epoch == 2


def test_options_of_other_versions(tmp_path):
    make_run(tmp_path, [10], learning_rate=0.3)
    earlier = {"depth": 34, "learning_rate": 0.3}
    rewrite(tmp_path, lambda line: {**line, "config": earlier} if "config" in line else line)
    options = Run.read(tmp_path).options
    assert options["model"] == "resnet34" and options["learning_rate"] == 0.3 and options["seed"] == 0
    rewrite(tmp_path, lambda line: {**line, "config": {"novelty": 3}} if "config" in line else line)
    options = Run.read(tmp_path).options
    assert options["novelty"] == 3 and options["seed"] == 0


def test_folders_are_found_below(tmp_path):
    for name in ("b", "sweep/x", "a/b/c", "a/b/d/e"):
        make_run(tmp_path / name, [10])
    (tmp_path / "b" / "inside").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert [str(path.relative_to(tmp_path)) for path in runs.find(tmp_path)] == ["a/b/c", "b", "sweep/x"]
    assert runs.find(tmp_path / "b") == [tmp_path / "b"]
    with pytest.raises(TrainError, match=r"^there is no folder .*/none: give one that holds runs$"):
        runs.find(tmp_path / "none")


def test_names_are_short():
    assert runs.names_of([Path("/runs/a"), Path("/runs/sweep/b")]) == ["a", "sweep/b"]
    assert runs.names_of([Path("/runs/a")]) == ["a"] and runs.names_of([]) == []


def test_the_list(tmp_path):
    for age, (name, right) in enumerate({"new": [10, 33], "plain": [None, None], "own": [11]}.items()):
        make_run(tmp_path / name, right, evaluated=TRAINING_IMAGES if name == "own" else "validation")
        os.utime(tmp_path / name / METRICS_FILE, (1e9 - age, 1e9 - age))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / METRICS_FILE).write_text("{}\n")
    damaged, new, plain, own = Run.list_runs([tmp_path])
    assert (new.folder.name, new.state, new.best_top1, new.best_epoch.epoch) == ("new", FINISHED, 0.75, 2)
    assert (new.epochs_done, new.epochs_wanted, new.record.model) == (2, 2, "resnet50")
    assert new.size == sum(path.stat().st_size for path in (tmp_path / "new").rglob("*"))
    assert math.isnan(plain.best_top1) and plain.best_epoch is None
    assert math.isnan(own.best_top1) and own.best_epoch.train_eval_top1 == 0.25
    told = [run.to_dict() for run in (new, plain, own)]
    assert [(each["best_top1"], each["best_train_eval_top1"]) for each in told] == [
        (0.75, None), (None, None), (None, 0.25)]
    assert damaged.state == runs.DAMAGED and "line 1 of" in damaged.reason and math.isnan(damaged.best_top1)
    assert damaged.to_dict()["reason"] == damaged.reason and damaged.record.epochs == []
    assert json.loads(json.dumps(new.to_dict()))["changed"] == "2001-09-09T01:46:40+00:00"


def test_a_run_in_two_of_the_folders_is_listed_once(tmp_path):
    make_run(tmp_path / "a", [10])
    (listed,) = Run.list_runs([tmp_path, tmp_path / "a", tmp_path / ".." / tmp_path.name])
    assert listed.folder == tmp_path / "a"


def test_a_run_that_is_removed_meanwhile(tmp_path):
    make_run(tmp_path, [10])
    run = Run.read(tmp_path)
    shutil.rmtree(tmp_path)
    assert (run.changed, run.size) == (0, 0)


def test_a_file_with_two_names_counts_once(tmp_path):
    (tmp_path / "step-1.npz").write_bytes(bytes(1000))
    os.link(tmp_path / "step-1.npz", tmp_path / "best.npz")
    assert runs.size_on_disk(tmp_path) == 1000


def test_a_run_that_was_ended_while_it_started(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"event": "units", "time": 0}\n')
    with pytest.raises(TrainError, match="names no session of a run"):
        Run.read(tmp_path)


def test_other_bytes_in_place_of_metrics_are_no_young_run(tmp_path):
    """Such a run could be removed. A line without an end may be one that was being written."""
    (tmp_path / METRICS_FILE).write_bytes(b"\x80\x02 no metrics")
    with pytest.raises(TrainError, match="metrics.jsonl is damaged: its first line is not JSON"):
        Run.read(tmp_path)


def test_values_that_are_none_of_a_run_are_listed_as_damaged(tmp_path):
    make_run(tmp_path, [3])
    rewrite(tmp_path, lambda line: {**line, "config": []} if "config" in line else line)
    (listed,) = Run.list_runs([tmp_path])
    assert listed.state == runs.DAMAGED and "has values that are none of a run" in listed.reason
