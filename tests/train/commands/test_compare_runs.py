"""The commands compare and runs, on made-up runs."""

from __future__ import annotations

import json
import os
import time

import pytest
from made_runs import make_run

from train import __main__ as program
from train.recording.metrics import METRICS_FILE


@pytest.fixture
def run(capfd):
    """Runs `python -m train ARGUMENTS` in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        capfd.readouterr()
        code = program.main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def two(tmp_path):
    make_run(tmp_path / "a", [11, 33])
    make_run(tmp_path / "b [x]", [12, None], learning_rate=0.7)
    return tmp_path


def test_tables_on_the_terminal(two, run):
    (two / "broken").mkdir()
    (two / "broken" / METRICS_FILE).write_text("?\n")
    code, out, err = run("compare", two, "--accuracies", "0.7")
    assert code == 0
    assert "75.00% (60.6 to 85.4)" in out and "b [x]" in out and "--learning-rate" in out and " 70%" in out
    assert err.startswith("broken is left out: line 1 of") and err.count("\n") == 1


def test_forms(two, run):
    for name, sign in (("c.html", "<!doctype html>"), ("c.json", '{\n "units"'), ("c.md", "# 2 runs side by side")):
        code, out, err = run("compare", two / "a", two / "b [x]", "--output", two / "made" / name)
        assert (code, err) == (0, "") and f"comparison: {two / 'made' / name}" in out
        assert (two / "made" / name).read_text().startswith(sign)
    text = (two / "made" / "c.md").read_text()
    for plot in ("accuracy_by_epoch", "accuracy_by_time", "loss_by_epoch"):
        assert f"](c_{plot}.svg)" in text and (two / "made" / f"c_{plot}.svg").read_bytes().startswith(b"<?xml")
    code, out, _ = run("compare", two, "--format", "markdown")
    assert code == 0 and out.startswith("# 2 runs") and ".svg" not in out
    code, out, _ = run("compare", two, "--format", "json")
    assert json.loads(out)["rows"][0]["name"] == "a"
    code, _, _ = run("compare", two, "--format", "html", "--output", two / "page")
    assert code == 0 and (two / "page").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("words", "sentence"), [
    (["--output", "c.pdf"], "--output c.pdf ends in none of .html, .md, .json, which determine the format: rename it, "
                            "or give --format"),
    (["--output", "c.txt", "--format", "text"], "--format text is for the terminal: give markdown, html or json for "
                                                "c.txt"),
    (["--accuracies", "70"], "--accuracies 70.0 must be above 0 and at most 1 each"),
])
def test_what_compare_refuses(words, sentence, two, run):
    assert run("compare", two, *words) == (2, "", f"error: {sentence}\n")


def test_a_page_that_cannot_be_written_is_told_before(two, run):
    code, _, err = run("compare", two, "--output", two / "a" / METRICS_FILE / "c.md")
    assert code == 2 and "cannot write" in err


def test_the_list(two, run):
    os.utime(two / "a" / METRICS_FILE, (time.time() - 7500,) * 2)
    open_run = make_run(two / "c", [3], epochs=9, leave_open=True)
    code, out, err = run("runs", two)
    open_run.__exit__(None, None, None)
    header, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert header.split() == ["run", "state", "best", "top-1", "epochs", "network", "age", "size"]
    assert lines[-1].split()[:9] == [str(two / "a"), "finished", "75.00%", "2", "of", "2", "resnet50", "2", "h"]
    assert any("running" in line and "1 of 9" in line for line in lines) and len(lines) == 3
    code, out, _ = run("runs", "list", two, "--json")
    assert code == 0 and {row["state"] for row in json.loads(out)} == {"finished"}


def test_damaged_and_missing_folders(tmp_path, run):
    assert run("runs", tmp_path) == (0, f"no runs in {tmp_path}\n", "")
    (tmp_path / METRICS_FILE).write_text("?\n")
    code, out, err = run("runs", tmp_path)
    assert code == 0 and "damaged" in out and err.startswith("line 1 of")
    code, _, err = run("runs", tmp_path / "none")
    assert code == 2 and err == f"error: there is no folder {tmp_path / 'none'}: give one that holds runs\n"


def test_runs_without_a_folder_are_those_of_runs(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a", [3])
    code, out, _ = run("runs")
    assert code == 0 and "runs/a" in out
