"""`.ci/run`: the environment that it gives to the tests, shown by a stand-in for make."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "run"
OF_A_SHELL = {
    "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "/elsewhere", "LANG": "de_DE.UTF-8",
    "LC_ALL": "C", "TERM": "xterm", "COLUMNS": "80", "TZ": "Asia/Tokyo", "MXNET_ENGINE_TYPE": "NaiveEngine",
    "OMP_NUM_THREADS": "7", "XDG_CACHE_HOME": "/cache", "MAKEFLAGS": "-k", "VIRTUAL_ENV": "/venv",
}
OF_PACKAGE_CLIENTS = {
    "PIP_INDEX_URL": "https://packages.example/simple", "PIP_CERT": "/a certificate.pem",
    "http_proxy": "http://proxy.example", "HTTPS_PROXY": "http://proxy.example", "no_proxy": "localhost",
    "SSL_CERT_FILE": "/certificate.pem", "REQUESTS_CA_BUNDLE": "/certificate.pem",
}


@pytest.fixture
def run_ci(tmp_path: Path) -> Callable[..., tuple[int, list[Path]]]:
    """Runs the script with a make that ends with `code`. Returns its exit code, and a folder for each call of make with
    its arguments and environment."""

    def run(code: int = 0, **variables: str) -> tuple[int, list[Path]]:
        make = tmp_path / "bin" / "make"
        make.parent.mkdir()
        make.write_text(
            f"#!{shutil.which('sh')}\n"
            f'call="{tmp_path}/calls/$1" && mkdir -p "$call" && cp /proc/$$/environ "$call/environment"\n'
            'cat >"$call/input" && ls -A "$HOME" >"$call/home" && pwd >"$call/folder" && touch "$HOME/left"\n'
            f"exit {code}\n")
        make.chmod(0o755)
        done = subprocess.run([SCRIPT], input="something", text=True, cwd=tmp_path, timeout=300,
                              env={"PATH": f"{make.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), **variables})
        return done.returncode, sorted((tmp_path / "calls").iterdir())

    return run


@pytest.fixture
def seed() -> dict[str, str]:
    """The seed that follows from the files; none where git does not know them."""
    tree = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=SCRIPT.parent, capture_output=True, text=True).stdout
    return {"RESNET_TEST_SEED": str(int(tree[:8], 16))} if tree else {}


def variables_of(call: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (call / "environment").read_text().split("\0") if line)


def test_nothing_of_the_shell_gets_through(run_ci, seed, tmp_path):
    code, calls = run_ci(**OF_A_SHELL, **OF_PACKAGE_CLIENTS)
    assert code == 0 and [call.name for call in calls] == ["test", "test-long"]
    for call in calls:
        found = variables_of(call)
        home = Path(found.pop("HOME"))
        assert found.pop("PATH") == f"{tmp_path}/bin:{os.environ['PATH']}"
        assert found == {"CI": "true", **seed, **OF_PACKAGE_CLIENTS}
        assert home != tmp_path and not home.exists()  # it was removed at the end
        assert (call / "input").read_text() == ""
        assert (call / "folder").read_text().strip() == str(SCRIPT.parents[1])
    assert (calls[0] / "home").read_text() == ""


def test_nothing_to_let_through(run_ci, seed):
    code, calls = run_ci()
    assert code == 0 and {*variables_of(calls[0])} == {"CI", "HOME", "PATH", *seed}


def test_the_first_that_fails_ends_it(run_ci):
    code, calls = run_ci(code=2)
    assert code == 2 and [call.name for call in calls] == ["test"]
