"""Faults of files: full disks, damaged or removed checkpoints, images and records that change."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import faulty
import numpy as np
import pytest
from faulty import (
    EPOCHS,
    STEPS_PER_EPOCH,
    FaultyRun,
    assert_nothing_lost,
    assert_same_end,
    assert_sentence,
    tries,
    wait_a_random_time,
)

NewRun = Callable[..., FaultyRun]
ENOUGH = "64m"
NO_ROOM = r"No space left on device|MiB free"  # while writing, or found before the first step


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own; skips if this user may not mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ENOUGH}", "faults", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system to be filled")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


def harm(path: Path, rng: np.random.Generator) -> str:
    """Truncate a file, overwrite 64 bytes of it at a random place, or remove it; returns a description."""
    size = path.stat().st_size
    place, way = int(rng.integers(size)), int(rng.integers(3))
    if way == 0:
        path.unlink()
        return "removed"
    with path.open("r+b") as file:
        if way == 1:
            file.truncate(place)
            return f"truncated to {place} bytes"
        file.seek(place)
        file.write(rng.bytes(64))
    return f"overwritten at {place}"


@tries(few=1)
def test_small_disk(new_run: NewRun, unbroken: FaultyRun, disk: Path, rng: np.random.Generator, number: int) -> None:
    """A disk that is too small by a random amount, later enlarged."""
    run = new_run(folder=disk / "run")
    resize(disk, f"{rng.integers(100, 6000)}k")
    run._words = lambda kind: disk.with_name(f"run.{kind}")  # type: ignore[method-assign]  # its output has room
    run.start()
    code = run.end()
    if code:
        assert_sentence(run, NO_ROOM, "make room")
    assert_nothing_lost(run)
    resize(disk, ENOUGH)
    assert run.finish() == 0, run.err
    assert_same_end(run, unbroken)


@tries()
def test_disk_that_fills(new_run: NewRun, unbroken: FaultyRun, disk: Path, rng: np.random.Generator,
                         number: int) -> None:
    """A disk that something else fills at a random moment, and that is emptied again."""
    run = new_run(folder=disk / "run")
    run._words = lambda kind: disk.with_name(f"run.{kind}")  # type: ignore[method-assign]  # its output has room
    run.start()
    wait_a_random_time(run, rng)
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    if run.end():
        assert_sentence(run, NO_ROOM, "make room")
    assert_nothing_lost(run)
    (disk / "filler").unlink()
    assert run.finish() == 0, run.err
    assert_same_end(run, unbroken)


@tries(few=1)
def test_damaged_checkpoint(new_run: NewRun, unbroken: FaultyRun, tmp_path: Path, rng: np.random.Generator,
                            number: int) -> None:
    """The newest checkpoint truncated, overwritten or removed at a random place."""
    run = new_run()
    shutil.copytree(unbroken.folder, run.folder)
    step = int(rng.integers(2, EPOCHS * STEPS_PER_EPOCH))
    folder = run.folder / "checkpoints"
    for path in sorted(folder.glob("step-*.npz"))[step:]:
        path.unlink()
    (folder / "best.npz").unlink()
    if step >= STEPS_PER_EPOCH:
        shutil.copy(folder / f"step-{STEPS_PER_EPOCH:08d}.npz", folder / "best.npz")
    newest = folder / f"step-{step:08d}.npz"
    done = harm(newest, rng)
    print(f"step {step}: {done}")
    if run.finish():
        assert_sentence(run, re.escape(newest.name))
        newest.unlink()
        assert run.finish() == 0, run.err
    assert_same_end(run, unbroken)


@tries()
def test_image_that_changes(new_run: NewRun, unbroken: FaultyRun, images: Path, tmp_path: Path,
                            rng: np.random.Generator, number: int) -> None:
    """An image truncated, overwritten or removed in mid-run."""
    data = tmp_path / "data"
    shutil.copytree(images, data)
    run = new_run(data=data)
    run.start()
    wait_a_random_time(run, rng)
    victim = sorted(data.rglob("*.jpg"))[rng.integers(27)]
    print(victim, harm(victim, rng))
    if code := run.end():
        assert code in (1, 2), run.err
        assert_sentence(run, re.escape(victim.name))
        shutil.copy(images / victim.relative_to(data), victim)
        assert run.finish() == 0, run.err
        assert_same_end(run, unbroken)
    assert_nothing_lost(run)


@pytest.fixture(scope="session")
def records(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images as RecordIO."""
    folder = tmp_path_factory.mktemp("records")
    subprocess.run([sys.executable, "-m", "pipelines", "make-records", images, folder], check=True, capture_output=True,
                   cwd=faulty.REPOSITORY)
    return folder


@tries()
def test_records_that_shrink(new_run: NewRun, records: Path, tmp_path: Path, rng: np.random.Generator,
                             number: int) -> None:
    """A .rec truncated at a random place in mid-run."""
    data = tmp_path / "data"
    shutil.copytree(records, data)
    run = new_run("--validate-every", "0", data=data)
    run.start()
    wait_a_random_time(run, rng, least=1)
    victim = rng.choice(sorted(data.glob("*.rec")))
    size = victim.stat().st_size
    os.truncate(victim, int(rng.integers(size)))
    if code := run.end():
        assert code in (1, 2), run.err
        assert_sentence(run, re.escape(victim.name))
    assert_nothing_lost(run)
    shutil.copy(records / victim.name, victim)
    assert run.finish() == 0, run.err


@tries()
def test_folder_that_goes(new_run: NewRun, rng: np.random.Generator, number: int) -> None:
    """The run's folder, its checkpoints or its metrics removed in mid-run."""
    run = new_run()
    run.start()
    wait_a_random_time(run, rng, least=1)
    assert run.process
    gone = run.folder / ("", "checkpoints", "metrics.jsonl")[rng.integers(3)]
    ended = run.process.poll() is not None
    if gone.is_dir():
        shutil.rmtree(gone, ignore_errors=True)
    else:
        gone.unlink(missing_ok=True)
    code = run.end()
    assert "Traceback" not in run.err, run.err
    assert ended or code or (gone.exists() and gone.name == "checkpoints"), f"{gone} has gone, and nothing is said"
    if code:
        assert code == 1, run.err
        assert_sentence(run)
        assert faulty.checkpoint.load(faulty.checkpoint.find(str(run.folder))).progress.step == run.steps
