"""Checkpoints: complete, atomic, verified; the newest and the best are kept."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import zipfile

import numpy as np
import pytest

from train import TrainError, checkpoint, saver
from train.checkpoint import Checkpoint, CheckpointFolder, Progress
from train.config import Config
from train.recording.outcomes import Outcomes, spread
from train.report import predictions
from train.report.predictions import Predictions


@pytest.fixture
def state(rng):
    """A checkpoint of random arrays in odd shapes."""
    arrays = {"stem_conv_weight": rng.standard_normal((5, 7, 7, 3), np.float32),
              "classifier_bias": rng.standard_normal(11, np.float32)}
    return Checkpoint(
        params=arrays,
        aux={"bn_moving_mean": rng.standard_normal(3, np.float32)},
        state={"mean": {name: 2 * array for name, array in arrays.items()}, "variance": arrays},
        config=Config(model="resnet18", decay_epochs=(1.5, 2.0), output="runs/x"),
        class_names=["Käfer", "b"],
        progress=Progress(step=42, epoch=3, epoch_step=2, best_top1=0.5),
        loader_states=[b"position 0", bytes(rng.integers(0, 256, 99, np.uint8))],
        numpy_rng=np.random.RandomState(int(rng.integers(2**32))).get_state(legacy=False),
        scalars={"loss_scale": 2048.0, "good_steps": 17, "updates": 40},
    )


def test_round_trip(state, tmp_path):
    path = tmp_path / "c.npz"
    checkpoint.save(state, path)
    saved, restored = np.random.RandomState(), np.random.RandomState()
    saved.set_state(state.numpy_rng)
    loaded = checkpoint.load(path)
    assert loaded.state.keys() == state.state.keys()
    for ours, theirs in ((state.params, loaded.params), (state.aux, loaded.aux),
                         *((state.state[slot], loaded.state[slot]) for slot in state.state)):
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            assert theirs[name].dtype == np.float32
            assert np.array_equal(theirs[name], array)
    for name in ("config", "class_names", "progress", "loader_states", "scalars"):
        assert getattr(loaded, name) == getattr(state, name), name
    restored.set_state(loaded.numpy_rng)
    assert np.array_equal(restored.random(3), saved.random(3))
    assert loaded.network == "resnet18 with 11 classes"
    assert np.array_equal(np.load(path)["params/classifier_bias"], state.params["classifier_bias"])  # plain NumPy


def test_one_of_version_1_is_read(state, tmp_path):
    """Version 1 stored the momentum under another name, and a network's depth in place of its name."""
    path, old = tmp_path / "c.npz", tmp_path / "old.npz"
    checkpoint.save(dataclasses.replace(state, state={"momentum": state.params}), path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(old, "w") as earlier:
        for name in archive.namelist():
            content = archive.read(name)
            if name == checkpoint.META:
                meta = json.loads(content)
                meta["config"] = {"depth": 18, "all_reduce": "auto", "output": "runs/x"}
                meta |= {"version": 1, "loss_scaling": meta.pop("scalars")}
                content = json.dumps(meta).encode()
            earlier.writestr(name.replace("state/momentum/", "momenta/"), content)
    loaded = checkpoint.load(old)
    assert loaded.config == Config(model="resnet18", output="runs/x") and loaded.network == "resnet18 with 11 classes"
    assert loaded.scalars == state.scalars and list(loaded.state) == ["momentum"]
    for name, array in state.params.items():
        assert np.array_equal(loaded.state["momentum"][name], array)


def test_a_clock_before_1980(state, tmp_path, monkeypatch):
    """A zip file cannot store a time before 1980: files are written all the same, and checkpoints of equal states are
    equal."""
    checkpoint.save(state, tmp_path / "now.npz")
    shown = Predictions(np.zeros((1, 2, 2, 3), np.uint8), ["a"], ["b"], np.ones(1), epoch=1)
    monkeypatch.setattr("time.time", lambda: 0.0)
    checkpoint.save(state, tmp_path / "then.npz")
    assert (tmp_path / "now.npz").read_bytes() == (tmp_path / "then.npz").read_bytes()
    predictions.save(shown, tmp_path)
    assert predictions.read(tmp_path).guessed == ["b"]


def test_truncated_anywhere_is_refused(state, tmp_path, rng):
    path = tmp_path / "c.npz"
    checkpoint.save(state, path)
    content = path.read_bytes()
    for size in [0, 1, len(content) - 1, *rng.integers(2, len(content) - 1, 8)]:
        path.write_bytes(content[:size])
        with pytest.raises(TrainError, match=rf"{re.escape(str(path))} is not a complete checkpoint"):
            checkpoint.load(path)


def test_flipped_bit_in_an_array_is_refused(state, tmp_path):
    path = tmp_path / "c.npz"
    checkpoint.save(state, path)
    content = bytearray(path.read_bytes())
    place = bytes(content).index(state.params["stem_conv_weight"].tobytes()[:64])
    content[place + 7] ^= 16
    path.write_bytes(content)
    with pytest.raises(TrainError, match=r"is not a complete checkpoint .*CRC"):
        checkpoint.load(path)


def test_an_option_of_a_later_version_is_named(state, tmp_path, monkeypatch):
    path = tmp_path / "later.npz"
    monkeypatch.setattr(Config, "to_dict", lambda config: {**dataclasses.asdict(config), "warp_drive": 9})
    checkpoint.save(state, path)
    sentence = f"cannot read the checkpoint {path}: its run had the option --warp-drive, which this version"
    with pytest.raises(TrainError, match=f"^{re.escape(sentence)}"):
        checkpoint.load(path)


def test_foreign_files_are_refused(tmp_path):
    other = tmp_path / "other.npz"
    np.savez(other, weights=np.zeros(3))
    with pytest.raises(TrainError, match="is not a checkpoint of this program"):
        checkpoint.load(other)
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("meta.json", "[1, 2]")
    with pytest.raises(TrainError, match="is not a checkpoint of this program"):
        checkpoint.load(other)
    with pytest.raises(TrainError, match=r"cannot read the checkpoint .*No such file"):
        checkpoint.load(tmp_path / "missing.npz")


def test_full_disk_leaves_the_last_good_one(state, tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path / "run", keep=1)
    folder.save(state)

    def no_room(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    later = dataclasses.replace(state, progress=Progress(step=43))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_room)
        with pytest.raises(TrainError, match=r"cannot save the checkpoint .*No space left.*--resume") as error:
            folder.save(later)
        with pytest.raises(TrainError, match=r"No space left on device\), the first one: make room and start again$"):
            CheckpointFolder(tmp_path / "other", keep=1).save(later)
    assert "\n" not in str(error.value)
    assert os.listdir(folder.path) == ["step-00000042.npz"]
    assert checkpoint.load(folder.path_of(42)).progress == state.progress


def test_newest_and_best_are_kept(state, tmp_path):
    folder = CheckpointFolder(tmp_path / "run", keep=2)
    for step, is_best in ((1, False), (2, True), (3, False), (10, False)):
        folder.save(dataclasses.replace(state, progress=Progress(step=step)), is_best)
    assert sorted(os.listdir(folder.path)) == ["best.npz", "step-00000003.npz", "step-00000010.npz"]
    assert checkpoint.load(folder.path / "best.npz").progress.step == 2
    assert checkpoint.find(str(tmp_path / "run")) == folder.path_of(10)
    assert checkpoint.find(str(tmp_path / "run"), prefer_best=True) == folder.path / "best.npz"
    assert checkpoint.find(str(folder.path_of(3))) == folder.path_of(3)


@pytest.mark.parametrize("is_best", [False, True])
def test_a_folder_that_is_removed_while_a_checkpoint_is_written(is_best, state, tmp_path, monkeypatch):
    """The checkpoint is written again, and the other lost files are named."""
    folder = CheckpointFolder(tmp_path / "run", keep=2)
    folder.save(state, is_best=True)
    to_remove = [folder.path]
    monkeypatch.setattr(os, "fsync", lambda descriptor: shutil.rmtree(to_remove.pop()) if to_remove else None)
    folder.save(dataclasses.replace(state, progress=Progress(step=43)), is_best)
    assert sorted(os.listdir(folder.path)) == ["best.npz"] * is_best + ["step-00000043.npz"]
    assert folder.removed() == ["best.npz"] * (not is_best) + ["step-00000042.npz"]
    assert folder.removed() == []


def test_what_a_killed_process_left_is_removed(state, tmp_path):
    folder = CheckpointFolder(tmp_path / "run", keep=2)
    folder.path.mkdir(parents=True)
    (folder.path / ".step-00000007.npz.partial").write_bytes(b"PK")
    folder.save(state)
    assert os.listdir(folder.path) == ["step-00000042.npz"]


def dies_at(call, work):
    """Do the work in a separate process, which ends in the middle as by SIGKILL: before its `call`-th renaming in a
    folder, counted from 1. False if it has fewer."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77
    count = 0

    def counted(change):
        def changed(*arguments, **options):
            nonlocal count
            count += 1
            if count == call:
                os._exit(77)
            return change(*arguments, **options)

        return changed

    for name in ("replace", "link", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    try:
        work()
    finally:
        os._exit(0)


@pytest.mark.long
def test_a_kill_at_any_rename_leaves_the_best_weights_in_best(state, tmp_path):
    """A run with a best of 40 % saves one of 90 % and is killed on the way. The resumed run knows of 90 % only if
    best.npz has these weights, and the next checkpoint removes all remains."""
    def reached(step, top1):
        return dataclasses.replace(state, progress=Progress(step=step, epoch=step, best_top1=top1))

    deaths = []
    for call in range(1, 20):
        run = tmp_path / str(call)
        folder = CheckpointFolder(run, keep=2)
        for step in (1, 2):
            folder.save(reached(step, 0.4), is_best=step == 1)
        if not dies_at(call, lambda folder=folder: folder.save(reached(3, 0.9), is_best=True)):
            break
        start = checkpoint.load(checkpoint.find(str(run)))
        best = checkpoint.load(checkpoint.find(str(run), prefer_best=True))
        assert start.progress.best_top1 == best.progress.best_top1, f"died at change {call}"
        assert (start.progress.step, best.progress.step) in ((2, 1), (3, 3)), f"died at change {call}"
        deaths.append(start.progress.step)
        folder.save(reached(4, start.progress.best_top1))
        assert not list(folder.path.glob(".*")), f"died at change {call}"
        assert checkpoint.load(folder.path / "best.npz").progress == best.progress
    assert {2, 3} <= set(deaths), "it is killed before and after the best has its name"


def test_a_best_that_cannot_be_read_is_not_gone_on_from(state, tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(state)
    (folder.path / "best.npz").write_bytes(b"PK")
    assert checkpoint.find(str(tmp_path)) == folder.path_of(42)


def test_find_without_checkpoint(tmp_path):
    with pytest.raises(TrainError, match="there is no checkpoint or run folder"):
        checkpoint.find(str(tmp_path / "missing"))
    with pytest.raises(TrainError, match="holds no checkpoint"):
        checkpoint.find(str(tmp_path))


def test_outcomes_lie_beside_the_weights_of_the_best(state, tmp_path, rng):
    """Outcomes are read back unchanged, without the weights. A damaged file, or a file of an earlier version, has no
    outcomes.
    """
    probabilities, labels = rng.dirichlet(np.ones(11), 30), rng.integers(0, 11, 30)
    outcomes = Outcomes.of(probabilities, labels, range(30), spread(30, 5))
    assert saver.best_outcomes(tmp_path) is None
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(dataclasses.replace(state, outcomes=vars(outcomes)), is_best=True)
    epoch, found = saver.best_outcomes(tmp_path)
    assert epoch == state.progress.epoch
    for name, array in vars(outcomes).items():
        np.testing.assert_array_equal(getattr(found, name), array, err_msg=name)
    assert len(found.sample) == 5 and checkpoint.load(folder.path / "best.npz").outcomes.keys() == vars(outcomes).keys()
    for other in (state, dataclasses.replace(state, outcomes={"pairs": outcomes.pairs})):
        folder.save(other, is_best=True)
        assert saver.best_outcomes(tmp_path) is None
    (folder.path / "best.npz").write_bytes(b"PK")
    assert saver.best_outcomes(tmp_path) is None
