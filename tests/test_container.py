"""The Dockerfile satisfies its linter, and copies all files that the set-up reads. Building it is tried by hand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))


def copied(dockerfile: str) -> set[str]:
    """The files that the first stage copies from the checkout."""
    first_stage = dockerfile.split("\nFROM ")[1]
    return {name for line in re.findall(r"^COPY (?!--)(.*) \S+$", first_stage, re.MULTILINE) for name in line.split()}


@pytest.mark.skipif(not HADOLINT, reason="hadolint is not installed beside this Python")
def test_linter(tmp_path: Path) -> None:
    assert subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True).stdout == ""
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN cd /tmp\n")
    assert "DL3006" in subprocess.run([HADOLINT, wrong], capture_output=True, text=True).stdout


def test_the_set_up_has_what_it_reads() -> None:
    """The files that make checks before a set-up, and the files that the package's metadata names."""
    rules = re.findall(r"^\.venv/[^:]*:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wanted = {name for rule in rules for name in rule.split()}
    assert {"pyproject.toml", "scripts/setup.sh", "train/processes/allreduce.cc"} <= wanted
    metadata = (ROOT / "pyproject.toml").read_text()
    licenses, packages = (re.findall(r'"/?(.*?)"', re.search(rf"^{key} = \[(.*)\]$", metadata, re.MULTILINE)[1])
                          for key in ("license-files", "include"))
    copied_to_site_packages = re.findall(r'^"(.+)" = ".+"$', metadata, re.MULTILINE)
    assert len(licenses) >= 1 and len(packages) >= 5 and len(copied_to_site_packages) >= 2
    wanted |= {"README.md", *licenses, *copied_to_site_packages, *(f"{name}/__init__.py" for name in packages)}
    for name in wanted:
        assert (ROOT / name).is_file()
        parents = {name, *map(str, Path(name).parents)}
        assert parents & copied((ROOT / "Dockerfile").read_text()), f"the Dockerfile does not copy {name}"
