"""The tests that `make check` chooses for a changed file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import changed
import pytest

SOURCES = {
    "train/loop.py": "from train import checkpoint", "train/checkpoint.py": "import common.files",
    "train/alone.py": "", "train/named.py": "", "train/models/net.py": "", "common/files.py": "",
    "common/__init__.py": "", "benchmarks/speed.py": "",
    "tests/helper.py": "", "tests/train/test_loop.py": "from train.loop import Trainer\nimport helper",
    "tests/train/test_checkpoint.py": "import os\nimport sys\nfrom train import checkpoint",
    "tests/train/test_few.py": "import train.checkpoint", "tests/test_speed.py": "'named'",
    "tests/test_setup.py": "'setup.sh'",
    "tests/train/models/test_models.py": "",
}


@pytest.mark.parametrize("path, tests", [
    ("tests/train/test_few.py", ["tests/train/test_few.py"]),
    ("train/checkpoint.py", ["tests/train/test_checkpoint.py", "tests/train/test_few.py"]),
    ("common/files.py", ["tests/train/test_few.py", "tests/train/test_checkpoint.py"]),
    ("benchmarks/speed.py", ["tests/test_speed.py"]),
    ("tests/helper.py", ["tests/train/test_loop.py"]),
    ("train/named.py", ["tests/test_speed.py"]),
    ("train/models/net.py", ["tests/train/models/test_models.py"]),
    ("scripts/setup.sh", ["tests/test_setup.py"]),
    ("docs/setup.md", ["tests/test_docs.py"]),
    ("LICENSE", []),
])
def test_tests_of_a_file(path: str, tests: list[str]) -> None:
    """The order: tests at its place, tests about little else, tests of files that import it, tests that name it, tests
    beside it."""
    found = changed.Project(SOURCES).tests_of(path)
    assert found[:len(tests)] == tests and bool(found) == bool(tests)


def test_each_changed_file_has_its_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(changed, "MOST_FILES", 3)
    chosen = changed.choose(["train/checkpoint.py", "tests/helper.py", "LICENSE"], changed.Project(SOURCES))
    assert chosen == ["tests/train/test_checkpoint.py", "tests/train/test_loop.py", "tests/train/test_few.py"]
    assert capsys.readouterr().out == (
        "train/checkpoint.py: tests/train/test_checkpoint.py, tests/train/test_few.py\n"
        "tests/helper.py: tests/train/test_loop.py\nLICENSE: no tests\n")
    assert changed.choose([], changed.Project(SOURCES)) == []
    assert capsys.readouterr().out == "no tests: nothing has changed\n"


needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")


@needs_git
def test_files_that_are_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes since a branch left main, committed or not; also in a folder of another checkout."""
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(changed, "ROOT", tmp_path)
    git("init", "-q", "-b", "main")
    for name in ("old", "committed", "edited", "deleted"):
        (tmp_path / name).write_text("")
    git("add", ".")
    git("commit", "-qm", "main")
    git("checkout", "-qb", "branch")
    (tmp_path / "committed").write_text("new")
    git("commit", "-qam", "branch")
    (tmp_path / "edited").write_text("new")
    (tmp_path / "unknown ü").write_text("new")
    (tmp_path / "deleted").unlink()
    assert changed.changed_since(changed.start_of_branch()) == ["committed", "deleted", "edited", "unknown ü"]
    assert changed.changed_since("HEAD") == ["deleted", "edited", "unknown ü"]
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "new").touch()
    git("add", "inside")
    monkeypatch.setattr(changed, "ROOT", tmp_path / "inside")
    assert changed.changed_since("HEAD") == ["new"]


def test_a_file_that_is_gone_has_the_tests_of_those_that_import_it() -> None:
    left = {path: text for path, text in SOURCES.items() if path != "train/loop.py"}
    assert changed.Project(left).tests_of("train/loop.py")[0] == "tests/train/test_loop.py"


def test_a_file_that_is_no_python_imports_nothing() -> None:
    assert list(changed.imported("def")) == []


def test_a_commit_that_is_none() -> None:
    """An unknown commit gets one sentence, also in a source archive, which has no commits at all."""
    done = subprocess.run([sys.executable, changed.__file__, "--since", "nowhere"], capture_output=True, text=True)
    what = "there is no commit nowhere: give" if (changed.ROOT / ".git").exists() else "there is no git, or no checkout"
    assert done.returncode == 2 and done.stderr.startswith(f"error: {what}") and done.stderr.count("\n") == 1
