"""Checks that a file can be written, before work that takes minutes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.errors import UserError
from common.files import check_place, write


@pytest.mark.parametrize("name, reason", [
    ("file/x", "Not a directory"), ("file/new/x", "Not a directory"), ("folder", "Is a directory"),
    ("nowhere/x", "No such file or directory"), ("pipe", "it is not a regular file"),
    ("device", "it is not a regular file"),
])
def test_no_place(name, reason, tmp_path):
    """The check's message equals that of writing, except for the advice."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "nowhere").symlink_to("/nowhere/at all")
    with pytest.raises(UserError) as error:
        check_place(tmp_path / name, "give another --output")
    assert str(error.value) == f"cannot write {tmp_path / name} ({reason}): give another --output"
    with pytest.raises(UserError, match=f"^cannot write {tmp_path / name} "):
        write(tmp_path / name, b"")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "device").is_symlink()


def test_a_file_system_that_nobody_may_write_to():
    """Permissions alone would allow root to write there."""
    with pytest.raises(UserError, match=r"^cannot write /proc/runs/x \("):
        check_place(Path("/proc/runs/x"), "give another --output")


@pytest.mark.parametrize("name", ["x", "new/folder/x", "there"])
def test_a_place(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there").touch()
    check_place(Path(name), "")
    assert os.listdir() == ["there"], "nothing is made"
    write(Path(name), b"1")
    assert Path(name).read_bytes() == b"1"


def test_a_link_that_leads_nowhere_stays(tmp_path):
    """A dangling link may lead to a disk that is not mounted now."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    for use in (lambda: check_place(link, "give another place"), lambda: write(link, b"content")):
        with pytest.raises(UserError, match=r"link \(it is a link to a file that is not there\): give another place"):
            use()
    assert link.is_symlink()
    (tmp_path / "gone").write_bytes(b"")
    write(link, b"content")
