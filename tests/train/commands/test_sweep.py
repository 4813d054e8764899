"""Sweeps: the runs, one after the other or in parallel. Most trainings here copy made-up runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from made_runs import make_run
from several_processes import LIMIT, python_path

from common import files, plugins
from common.command_line import part_of
from common.errors import ProgramError, UserError
from train.command_line import read, understood
from train.commands import grid, sweep
from train.errors import TrainError
from train.options.runs import Sweep, SweepOptions
from train.processes.signals import StoppedBySignal
from train.processes.topology import GpuPlace
from train.report import plots, runs


def planned(*words):
    values = read(SweepOptions, [str(word) for word in words], command="sweep")
    return grid.plan(part_of(Sweep, values), values)


def written(folder: Path, content: str, name: str = "grid.json") -> Path:
    (folder / name).write_text(content)
    return folder / name


# --- what is trained ---


def test_every_combination_with_every_seed(tmp_path):
    file = written(tmp_path, '{"learning-rate": [0.1, 0.2, 0.1], "mirror": false, "decay_epochs": [[3], [3, 5]],'
                             ' "schedule": "step"}')
    points = planned(file, "--seeds", 2, "--seed", 5, "--epochs", 9, "--output", tmp_path / "out")
    assert [point.name for point in points][1:3] == ["learning_rate=0.1,decay_epochs=3.0,seed=6",
                                                     "learning_rate=0.1,decay_epochs=3.0+5.0,seed=5"]
    assert len(points) == 8 and len({point.folder for point in points}) == 8
    assert {point.folder.parent for point in points} == {tmp_path / "out"}
    first = points[0].config
    assert (first.learning_rate, first.mirror, first.decay_epochs, first.seed) == (0.1, False, (3.0,), 5)
    values = read(SweepOptions, points[0].arguments[:-4], command="sweep")
    assert values["learning_rate"] == 0.1 and values["mirror"] is False and values["epochs"] == 9
    assert points[0].arguments[-4:] == ["--output", str(points[0].folder), "--resume", "auto"]


def test_toml(tmp_path):
    pytest.importorskip("tomllib", reason="Python 3.10 has none")
    points = planned(written(tmp_path, 'optimizer = ["sgd", "lamb"]\n', "opt.toml"))
    assert [str(point.folder) for point in points] == ["runs/sweep-opt/optimizer=sgd", "runs/sweep-opt/optimizer=lamb"]
    assert points[1].config.learning_rate != points[0].config.learning_rate  # each with its recipe


def test_the_length_of_the_demonstration_is_the_same_for_all(tmp_path):
    """A single run on the sample set chooses its number of epochs by the machine's speed; the runs of a sweep do
    not."""
    (point,) = planned("--seeds", 1)
    assert str(point.folder) == "runs/sweep-cpu_sample/seed=0"
    assert point.arguments[:4] == ["--seed", "0", "--epochs", str(point.config.epochs)]


def test_names_that_are_no_names_of_folders(tmp_path):
    points = planned(written(tmp_path, json.dumps({"data": ["a/b", "a:b", "x" * 300]})))
    assert len({point.name for point in points}) == 3
    assert all(len(point.name) < 140 and "/" not in point.name for point in points)


@pytest.mark.parametrize(("content", "words", "sentence"), [
    ('{"lerning_rate": [1]}', "", "FILE: lerning_rate is not a training option that a grid can vary; did you mean "
                                  r"learning-rate\? \(see --help\)"),
    ('{"output": ["a"]}', "", "FILE: output is not a training option that a grid can vary$"),
    ('{"seeds": 3}', "", "FILE: seeds is not a training option"),
    ('{"learning_rate": []}', "", "FILE: learning_rate has no values"),
    ('{"learning_rate": [null]}', "", "FILE: learning_rate cannot be null"),
    ('{"learning_rate": ["x"]}', "", "FILE: --learning-rate needs a number, not 'x'"),
    ('{"learning_rate": [-1]}', "", "FILE: --learning-rate -1.0 must be from"),
    ('{"learning_rate": [true]}', "", "FILE: --learning-rate needs a value"),
    ('{"mirror": ["yes"]}', "", "FILE: yes belongs to no option"),
    ('{"decay_epochs": [3, 5]}', "", r"FILE: decay_epochs takes several numbers at once.*\[\[\.\.\.\], \[\.\.\.\]\]$"),
    ('{"model": ["resnet19"]}', "", "FILE: there is no model 'resnet19'"),
    ('{"seed": [1, 2]}', "--seeds 2", "FILE has seeds, and --seeds 2 is given"),
    ('{"mixup": [0.1]}', "--mixup 0.2", "FILE gives mixup, which is given on the command line as well"),
    ('{"mixup": [0.1], "cut-out": 3}', "", "FILE: cut-out is not a training option .* did you mean cutout"),
    ('{"clip-norm": [1], "clip_norm": [2]}', "", "FILE gives clip_norm, which is given twice"),
    ('{"patience": [0, 3]}', "--validate-every 0", "^patience=3 cannot be trained: --patience 3 needs the accuracy"),
    ("[]", "", "FILE names no options: write "),
    ("{", "", r"FILE is not a JSON file \("),
    ("\xff", "", r"FILE is not a JSON file \("),
])
def test_grids_that_are_refused(content, words, sentence, tmp_path):
    file = written(tmp_path, content)
    with pytest.raises(TrainError, match=sentence.replace("FILE", str(file))):
        planned(file, *words.split())


def test_what_else_is_refused(tmp_path):
    with pytest.raises(TrainError, match="^a sweep needs something to vary: give a grid file, or --seeds 3$"):
        planned("--epochs", 3)
    with pytest.raises(TrainError, match="none.json .No such file or directory.: give a file"):
        planned(tmp_path / "none.json")
    with pytest.raises(TrainError, match="is not a grid file: its name must end in .toml or .json$"):
        planned(tmp_path)
    with pytest.raises(TrainError, match="x.toml (as JSON|is not a TOML file)"):
        planned(written(tmp_path, "a = [", "x.toml"))


@pytest.mark.parametrize(("option", "sentence"), [
    ("plugin", "plugin=gone cannot be trained: --plugin gone: there is no such file"),
    ("weights", "weights=gone cannot be trained: .*gone"),
    ("config", "there is no preset 'gone'"),
    ("data", "data=gone cannot be trained: data path gone does not exist"),
])
def test_files_that_are_missing_are_told_before_anything_runs(option, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "own_process", pytest.fail)
    file = written(tmp_path, json.dumps({option: ["gone"]}))
    with pytest.raises(UserError, match=sentence):
        sweep.main(read(SweepOptions, [str(file), "--output", str(tmp_path / "out")], command="sweep"))
    assert not (tmp_path / "out").exists()


def test_plugins_in_a_grid(plugin, tmp_path):
    """Two plug-ins register the same schedule, and the grid chooses it by name: each training uses its own plug-in."""
    source = "from train.plugins import schedule\n@schedule\ndef mine(progress): return {}"
    files_ = [plugin(source.format(factor), f"{name}.py") for name, factor in (("a", "1"), ("b", "1 - progress"))]
    grid_file = written(tmp_path, json.dumps({"plugin": [str(file) for file in files_], "schedule": "mine"}))
    points = planned(grid_file)
    assert [plugins.name_of(point.config.plugin[0]) for point in points] == ["a.py", "b.py"]
    assert all(point.config.plugin[0] in point.arguments for point in points)
    assert plugins.find("schedule", "mine") is None
    files_[1].write_text("raise ValueError(3)")
    with pytest.raises(TrainError, match=r"b\.py.* cannot be trained: the plug-in failed at .*b.py:1: ValueError: 3"):
        planned(grid_file)


def test_the_page_on_runs(tmp_path):
    """The commands on the page are valid, and its grid file is a valid grid."""
    pytest.importorskip("tomllib", reason="Python 3.10 has none")
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text()
    commands = re.findall(r"^    python -m train (.*)$", page, re.MULTILINE)
    assert {understood(shlex.split(command))[0] for command in commands} == {"compare", "runs", "sweep"}
    (content,) = re.findall("^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(planned(written(tmp_path, content, "grid.toml"), "--seeds", 2, "--epochs", 20)) == 3 * 2 * 2 * 2


# --- training ---


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Trainings are shell commands here: `trained[name] = command`, with $FOLDER; default: a copy of a made-up run."""
    commands: dict[str, str] = {}

    def start(_, *arguments):
        folder = Path(arguments[arguments.index("--output") + 1])
        made = tmp_path / "made" / folder.name
        if not made.exists():
            rate = float(arguments[arguments.index("--learning-rate") + 1])
            seed = int(arguments[arguments.index("--seed") + 1])
            make_run(made, [11, int(20 * rate)], learning_rate=rate, seed=seed)
        command = commands.get(folder.name, "cp -r $MADE $FOLDER")
        return ["bash", "-c", f"FOLDER={shlex.quote(str(folder))} MADE={shlex.quote(str(made))}; {command}"]

    monkeypatch.setattr(sweep, "own_process", start)
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(plots.Drawing, "svg", b"<?xml")
    monkeypatch.setattr(sweep, "check_same", lambda *arguments: None)  # the copies have other options
    return commands


@pytest.fixture
def swept(tmp_path, monkeypatch, capfd):
    """Runs a sweep of two learning rates and two seeds; returns its output. Raises its error."""
    file = written(tmp_path, '{"learning_rate": [1.0, 2.0]}')

    def run(*words):
        capfd.readouterr()
        options = (file, "--seeds", "2", "--device", "cpu", "--output", tmp_path / "out", *words)
        sweep.main(read(SweepOptions, [str(word) for word in options], command="sweep"))
        return capfd.readouterr().out

    return run


@pytest.mark.long(but=["1"])
@pytest.mark.parametrize("parallel", ["1", "3"])
def test_a_sweep_ends_in_the_comparison(parallel, swept, trained, tmp_path):
    out = swept("--parallel", parallel)
    assert "== learning_rate=1.0,seed=0 (1 of 4)" in out
    assert f"comparison: {tmp_path / 'out' / 'comparison'}.html, .md and .json\n" in out
    values = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [(row["name"], len(row["runs"])) for row in values["rows"]] == [("learning_rate=1.0", 2),
                                                                           ("learning_rate=2.0", 2)]
    assert values["rows"][1]["best_top1"]["mean"] == pytest.approx(40 / 44)
    assert (tmp_path / "out" / "comparison.html").exists() and (tmp_path / "out" / "comparison.md").exists()
    if parallel == "3":
        assert "learning_rate=2.0,seed=1: epoch 2 of 2, validation top-1 90.9%" in out
        assert (tmp_path / "out" / "learning_rate=1.0,seed=0.log").read_text() == ""
    assert swept("--parallel", parallel).count("finished before, skipped") == 4


@pytest.mark.parametrize("parallel", ["1", "2"])
def test_one_that_fails_is_told_and_the_rest_goes_on(parallel, swept, trained, tmp_path, capfd):
    trained["learning_rate=1.0,seed=1"] = "echo 'error: no luck' >&2; exit 2"
    with pytest.raises(ProgramError) as failure:
        swept("--parallel", parallel)
    assert str(failure.value) == ("1 of 4 runs failed (learning_rate=1.0,seed=1), see their messages above: repeat the "
                                  "command to try them again")
    assert failure.value.exit_code == 1
    out = capfd.readouterr().out
    assert "== learning_rate=1.0,seed=1 failed with exit code 2" in out
    assert ("; error: no luck\n" in out) == (parallel == "2")
    assert len(json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]) == 2
    del trained["learning_rate=1.0,seed=1"]
    out = swept()
    assert out.count("skipped") == 3 and "== learning_rate=1.0,seed=1 (2 of 4)" in out


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])  # SIGINT is blocked until our training has started
def test_a_signal_stops_the_trainings_and_begins_no_more(number, swept, trained, tmp_path, capfd):
    for name in ("learning_rate=1.0,seed=0", "learning_rate=1.0,seed=1"):
        trained[name] = (f"trap 'touch $FOLDER.told; exit {128 + number}' {number:d}; touch $FOLDER.begun; "
                         "for i in $(seq 600); do sleep 0.1; done")

    def send():
        begun = [tmp_path / "out" / f"learning_rate=1.0,seed={seed}.begun" for seed in range(2)]
        while not all(path.exists() for path in begun):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    before = signal.getsignal(number)
    with pytest.raises(StoppedBySignal, match="^stopped: repeat the command to resume$") as stop:
        swept("--parallel", "2")
    sender.join(LIMIT)
    assert stop.value.exit_code == 128 + number and signal.getsignal(number) is before
    out, err = capfd.readouterr()
    assert "learning_rate=2.0" not in out and "failed" not in out
    assert err == "stopping: the trainings save their state\n"
    assert len(list((tmp_path / "out").glob("*.told"))) == 2 and not (tmp_path / "out" / "comparison.json").exists()


def test_a_training_that_somebody_else_stops_counts_as_failed(swept, trained, capfd):
    trained["learning_rate=1.0,seed=0"] = "kill -TERM $$"
    with pytest.raises(ProgramError, match=r"^1 of 4 runs failed \(learning_rate=1.0,seed=0\)"):
        swept()
    assert "== learning_rate=1.0,seed=0 was stopped by a signal" in capfd.readouterr().out


def test_a_full_disk_is_seen_before_the_next_training(swept, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 100))
    with pytest.raises(ProgramError, match=r"has 0.00 GiB left, and a run of this sweep takes 0.00: make room"):
        swept()
    assert [path.name for path in runs.find(tmp_path / "out")] == ["learning_rate=1.0,seed=0"]


def test_nothing_trains_and_there_is_nothing_to_compare(swept, trained, tmp_path):
    for rate in ("1.0", "2.0"):
        for seed in range(2):
            trained[f"learning_rate={rate},seed={seed}"] = "exit 3"
    with pytest.raises(ProgramError, match="^4 of 4 runs failed"):
        swept()
    assert not (tmp_path / "out" / "comparison.json").exists()


def test_folders_that_are_taken(swept, trained, tmp_path):
    make_run(tmp_path / "out", [3])
    with pytest.raises(TrainError, match=r"out is the folder of a run, and a sweep's runs have folders of their own"):
        swept()
    shutil.rmtree(tmp_path / "out")
    held = files.alone_in(tmp_path / "out", TrainError("it is free"))
    with held, pytest.raises(TrainError, match="^another sweep is at work in .*out: wait"):
        swept()


def test_a_run_with_other_options_is_not_gone_on_with(swept, tmp_path):
    make_run(tmp_path / "out" / "learning_rate=1.0,seed=0", [3], learning_rate=0.5)
    with pytest.raises(TrainError, match=r"^the run in .*seed=0 was made with --\S+ .*, but this sweep has .*: give "
                                         "another --output"):
        swept()


def test_gpus_are_shared_out(swept, monkeypatch):
    gpus = [GpuPlace(str(number), "H100", 1, 1, frozenset(), 0, ()) for number in (3, 5)]
    monkeypatch.setattr(sweep.topology, "read_gpus", lambda: gpus)
    points = planned("--seeds", 4)
    first, second = sweep._slots(0, points)
    assert first and second
    assert [sweep._environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in (first, second)] == ["3", "5"]
    assert sweep._slots(1, points) == [None] and sweep._environment(None) == dict(os.environ)
    with pytest.raises(TrainError, match="^--parallel 3 needs 3 GPUs, and there are 2 here: lower --parallel, or give "
                                         "--device cpu$"):
        sweep._slots(3, points)
    on_cpu = sweep._slots(3, planned("--seeds", 4, "--device", "cpu"))
    assert len(on_cpu) == 3 and all("CUDA_VISIBLE_DEVICES" not in slot.environment for slot in on_cpu)


@pytest.mark.long
@pytest.mark.usefixtures("narrow_network")
def test_real_trainings(tiny_options, tmp_path, run_train, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", python_path(light=True))
    monkeypatch.chdir(tmp_path)
    arguments = ["sweep", "--seeds", "2", *tiny_options, "--val-split", "0.3", "--output", "out"]
    code, out, err = run_train(*arguments)
    assert code == 0, err
    values = json.loads(Path("out/comparison.json").read_text())
    (row,) = values["rows"]
    assert [run["seed"] for run in row["runs"]] == [0, 1] and row["best_top1"]["deviation"] is not None
    assert all(run["state"] == "finished" and run["validation_images"] for run in row["runs"])
    before = Path("out/seed=0/metrics.jsonl").read_bytes()
    code, out, err = run_train(*arguments)
    assert code == 0 and out.count("finished before, skipped") == 2, err
    assert Path("out/seed=0/metrics.jsonl").read_bytes() == before
    code, _, err = run_train(*arguments, "--learning-rate", "0.25")
    assert code == 2 and "was made with --learning-rate 0.5, but this sweep has 0.25" in err
