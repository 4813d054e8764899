"""The folder of a run: a unique name, and enough space for its checkpoints."""

from __future__ import annotations

import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from train import run_folder
from train.commands import session
from train.config import Config

pytestmark = pytest.mark.usefixtures("narrow_network")


def test_room_for_a_checkpoint_is_looked_for_before_the_first_step(tiny_options, tmp_path, run_train, monkeypatch):
    """One sentence with both sizes; nothing is trained, and no folder is created."""
    options = ("--output", tmp_path / "run", *tiny_options, "--max-steps", "1", "--validate-every", "0")
    assert run_train(*options)[0] == 0
    size = (tmp_path / "run" / "checkpoints" / "step-00000001.npz").stat().st_size
    usage = shutil.disk_usage
    for factor, code in ((0.9, 2), (1.1, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=int(factor * size): usage(path)._replace(free=free))
        found, out, err = run_train(*options, "--output", tmp_path / f"{factor}")
        assert found == code, err
        if code:
            assert re.search(rf"error: a checkpoint of this run takes [\d.]+ MiB, and the disk of {tmp_path} has "
                             r"[\d.]+ MiB free: make room, or give another --output\n", err)
            assert "step 1" not in out and not (tmp_path / f"{factor}").exists()


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    """Whichever comes second gets another name. A run that ends before its first file leaves no folder."""
    class Clock:
        @staticmethod
        def now():
            return datetime(2026, 1, 2, 3, 4, 5)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "datetime", Clock)
    names = [str(session.run_folder_of(Config(config="demo"))) for _ in range(3)]
    assert names == [f"runs/demo-20260102-030405{suffix}" for suffix in ("", "-2", "-3")]
    (tmp_path / names[1] / "config.json").write_text("{}")
    run_folder.give_back()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [Path(names[1]).name]
