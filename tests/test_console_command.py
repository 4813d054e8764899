"""The console command `resnet-mxnet`, beside a user's files and packages with the names of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common import program
from common.packages import how_to_install
from resnet_mxnet import own_packages

REPOSITORY = Path(__file__).resolve().parents[1]
# The script that pip writes for an entry of [project.scripts].
SCRIPT = """#!{python}
import sys
from resnet_mxnet.command import console
if __name__ == "__main__":
    sys.exit(console())
"""
STRANGER = "raise SystemExit('a file of the user was run')\n"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the command in a folder with a `train.py`, and with a package `common` on PYTHONPATH."""
    folder, others, place = tmp_path / "folder", tmp_path / "others", tmp_path / "bin"
    for package in ("common", "pipelines"):
        (others / package).mkdir(parents=True)
        (others / package / "__init__.py").write_text(STRANGER)
    for path in (folder, place):
        path.mkdir()
    for name in ("train.py", "common.py", "graph_passes.py"):
        (folder / name).write_text(STRANGER)
    script = place / program.CONSOLE_COMMAND
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o755)

    def call(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": f"{others}:{REPOSITORY}", **variables}
        return subprocess.run([script, *map(str, arguments)], cwd=folder, capture_output=True, text=True,
                              env=environment, check=False)

    return call


def test_help_names_all_commands(run: Run) -> None:
    alone, asked = run(), run("--help")
    assert (asked.returncode, asked.stderr, asked.stdout) == (0, "", alone.stdout)
    assert asked.stdout.startswith("usage: resnet-mxnet [COMMAND]") and "python -m" not in asked.stdout
    words = {line.split()[0] for line in asked.stdout.splitlines() if line.startswith("  ") and line[2] != " "}
    assert words >= {"train", "predict", "export", "data", "passes", "launch", "multi-host", "report"}


@pytest.mark.parametrize("arguments, usage", [
    ("predict --help", "usage: resnet-mxnet predict "),
    ("data --help", "usage: resnet-mxnet data COMMAND"),
    ("data verify --help", "usage: resnet-mxnet data verify "),
    ("passes show --help", "usage: resnet-mxnet passes show "),
    ("launch --help", "usage: resnet-mxnet launch "),
    ("multi-host --help", "usage: resnet-mxnet multi-host "),
    ("report --help", "usage: resnet-mxnet report "),
    ("export --help", "usage: resnet-mxnet export "),
])
def test_help_of_a_command(run: Run, arguments: str, usage: str) -> None:
    """The help names the command, even if a line is broken within the name."""
    done = run(*arguments.split(), COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(usage)
    text = " ".join(done.stdout.split()).replace("scripts/platforms", "")
    assert "python -m" not in text and "scripts/" not in text


@pytest.mark.parametrize("arguments, sentence", [
    ("dat verify", "there is no command 'dat'; did you mean data? (see resnet-mxnet --help)"),
    ("data vrify x", "there is no command 'vrify'; did you mean verify? (see resnet-mxnet data --help)"),
    ("train --epcohs 3", "there is no option --epcohs; did you mean --epochs? (see resnet-mxnet train --help)"),
    ("launch -n x", "-n/--processes needs a whole number above 0, not 'x' (see resnet-mxnet launch --help)"),
])
def test_mistakes_name_the_command_that_was_typed(run: Run, arguments: str, sentence: str) -> None:
    done = run(*arguments.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {sentence}\n")


@pytest.mark.long
def test_it_trains_and_records_the_command(run: Run, tmp_path: Path) -> None:
    """The command also trains in processes of its own. No process runs the user's files of these names."""
    pytest.importorskip("horovod")
    done = run("launch", "-n", 2, "--data", "synthetic", "--device", "cpu", "--model", "resnet18", "--image-size", 32,
               "-b", 2, "--num-classes", 2, "--num-threads", 1, "--no-tensorboard", "--max-steps", 1, "--output",
               tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a file of the user" not in done.stdout + done.stderr
    command = f"{tmp_path / 'bin' / 'resnet-mxnet'} launch -n 2 --data synthetic"
    assert command in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_the_finder_knows_all_packages() -> None:
    assert {*own_packages.PACKAGES, "resnet_mxnet"} == {*program.PACKAGES}


@pytest.mark.parametrize("text, typed", [
    ("run python -m train quantize --checkpoint x", "run resnet-mxnet quantize --checkpoint x"),
    ("`python -m pipelines verify`", "`resnet-mxnet data verify`"),
    ("scripts/dgx1_8gpu.sh -n 2", "resnet-mxnet launch -n 2"),
    ("python -m train.report.page RUN", "resnet-mxnet report RUN"),
    ("python -m train.", "resnet-mxnet."),
    ("python -m train.processes.guard", "python -m train.processes.guard"),
])
def test_names_as_they_were_typed(monkeypatch: pytest.MonkeyPatch, text: str, typed: str) -> None:
    monkeypatch.delenv(program.CALLED_AS, raising=False)
    assert program.as_typed(text) == text
    monkeypatch.setenv(program.CALLED_AS, "/bin/resnet-mxnet")
    assert program.as_typed(text) == typed


NO_PACKAGE = "{} has no package {}: install {}"


@pytest.mark.parametrize("version, name, what", [
    ((3, 11), "numpy", "resnet-mxnet[cpu], or resnet-mxnet[gpu] for an NVIDIA GPU"),
    ((3, 12), "mxnet", "resnet-mxnet[cpu], or resnet-mxnet[gpu] for an NVIDIA GPU"),
    ((3, 13), "mxnet", "it with pip install --no-deps mxnet==1.9.1, or mxnet-cu117==1.9.1 for"),
    ((3, 11), "nvidia.dali", "resnet-mxnet[cpu]"),
])
def test_how_to_install(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], name: str, what: str) -> None:
    monkeypatch.setattr("sys.version_info", version)
    sentence = how_to_install(ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert sentence and sentence.startswith(NO_PACKAGE.format(sys.executable, name.partition(".")[0], what))


@pytest.mark.parametrize("name", ["train.nothing", "asyncio.nothing", None])
def test_a_fault_of_ours_is_no_missing_package(name: str | None) -> None:
    assert how_to_install(ModuleNotFoundError("No module named ...", name=name)) is None


@pytest.mark.parametrize("module, arguments", [
    ("train", "--max-steps 1"), ("train", "predict --checkpoint x y.jpg"), ("pipelines", "verify x"),
    ("graph_passes", "show --model resnet50_v1"), ("resnet_mxnet", "train --max-steps 1"),
    ("resnet_mxnet", "data verify x"),
])
def test_an_environment_without_packages(module: str, arguments: str) -> None:
    """`-S` leaves only Python's own library, without site-packages."""
    done = subprocess.run([sys.executable, "-S", "-m", module, *arguments.split()], cwd=REPOSITORY, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": ""}, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {sys.executable} has no package ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("version, allowed", [((3, 9), False), ((3, 10), True), ((3, 14), True), ((3, 15), False)])
def test_versions_of_python(version: tuple[int, int], allowed: bool) -> None:
    script = f"import sys; sys.version_info = {version}; import common; print('allowed')"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if allowed:
        assert (done.returncode, done.stdout) == (0, "allowed\n")
    else:
        sentence = f"error: Python 3.10 to 3.14 is needed, and {sys.executable} is {version[0]}.{version[1]}: "
        assert done.returncode == 2 and done.stderr.startswith(sentence) and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the project's wheel, without the packages that it needs."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps",
                    "--no-build-isolation", "--no-compile", "--target", folder, REPOSITORY], check=True)
    return folder


@pytest.mark.long
def test_the_wheel(installed: Path, tmp_path: Path) -> None:
    """The wheel holds all files of our packages, and no file that another package may have. Its command runs these
    files.
    """
    ours = {str(path.relative_to(REPOSITORY)) for name in program.PACKAGES for path in (REPOSITORY / name).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}
    elsewhere = "common/mxnet_hook.pth"  # is resnet_mxnet_hook.pth there
    assert len(ours) > 100 and [name for name in ours - {elsewhere} if not (installed / name).is_file()] == []
    own = {*program.PACKAGES, "bin", "resnet_mxnet_hook.py", "resnet_mxnet_hook.pth"}
    assert {path.name for path in installed.iterdir() if ".dist-info" not in path.name} == own
    (dist_info,) = installed.glob("*.dist-info")
    assert (dist_info / "licenses" / "LICENSE").is_file()
    (tmp_path / "train.py").write_text(STRANGER)
    version = subprocess.run([installed / "bin" / program.CONSOLE_COMMAND, "--version"], cwd=tmp_path, text=True,
                             capture_output=True, env={**os.environ, "PYTHONPATH": str(installed)}, check=True).stdout
    assert version.splitlines()[0] == f"resnet-mxnet {dist_info.name.split('-')[1].removesuffix('.dist')}"
