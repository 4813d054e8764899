"""Versions of libraries unknown to pip; the commit of an unpacked archive."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from common import environment
from common.mxnet_compat import mx


def test_versions_of_a_copied_mxnet(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    known = environment.versions()
    assert known.keys() >= {"python", "os", "numpy"}
    monkeypatch.setattr(metadata, "version", unknown)
    copied = environment.versions()
    assert copied["mxnet"] == mx.__version__ and "numpy" not in copied


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git here")
def test_commit_of_a_source_archive(tmp_path: Path) -> None:
    """`git archive`, which also makes GitHub's downloads, writes the commit into the file."""
    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", "-C", tmp_path, "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments],
                              check=True, capture_output=True).stdout

    checkout = Path(__file__).resolve().parents[1]
    for name in (".gitattributes", ".git_archival.txt"):
        shutil.copy(checkout / name, tmp_path)
    git("init")
    git("add", ".")
    git("commit", "--message", "all")
    assert environment._archived_commit(tmp_path) is None, "not written yet"
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        unpacked = archive.extractfile(".git_archival.txt")
        assert unpacked
        (tmp_path / ".git_archival.txt").write_bytes(unpacked.read())
    assert environment._archived_commit(tmp_path) == git("rev-parse", "HEAD").decode().strip()
    assert environment._archived_commit(tmp_path / "nowhere") is None
