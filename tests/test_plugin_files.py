"""Plug-in files: which are executed, what a run records, and the error messages."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common import files, plugins
from common.errors import UserError
from train import models

MODEL = """
    from train.plugins import model

    @model
    def small(num_classes):
        return num_classes
"""
EXECUTED = """
    from pathlib import Path
    from train.plugins import metric

    Path(__file__).with_suffix(".executed").touch()

    @metric
    def sure(probabilities, labels):
        return probabilities.max(axis=1)
"""


def test_what_is_registered(plugin: Callable[..., Path]) -> None:
    file = plugin(MODEL)
    (record,) = plugins.load([str(file)])
    assert record == f"{file}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}"
    found = plugins.get("model", "small")
    assert (found.made(5), found.place, found.record) == (5, f"{file}:3", record)
    assert models.names()[-1] == "small"
    assert plugins.load([str(file), record]) == (record,)  # not executed again
    assert plugins.get("model", "small") is found


WRONG = {
    "1 / 0": "the plug-in failed at {file}:1: ZeroDivisionError: division by zero",
    "def f(:": "the plug-in {file}:1 is not valid Python (",
    "x = 1\0": "the plug-in {file}:1 is not valid Python (",
    "from train.plugins import metric\nmetric(3)": "{file}:2: the metric 3 is not a function: define one with def,",
    "import functools\nfrom train.plugins import metric\nmetric(functools.partial(max))":
        "{file}:3: functools.partial(<built-in function max>) has no name: give one, as in rm.metric(\"mine\")(...)",
    "x = 1": "the plug-in {file} registers nothing: put a decorator such as @model before each thing that it adds",
    "class E(Exception):\n  def __str__(self): raise ValueError\nraise E": "the plug-in failed at {file}:3: E",
    "import no_such_module": "the plug-in failed at {file}:1: ModuleNotFoundError: No module named 'no_such_module'",
    "import sys\nsys.exit(3)": "the plug-in failed at {file}:2: SystemExit: 3",
    "from train.plugins import model\n\n@model\ndef resnet50(num_classes): pass":
        "{file}:3: the model 'resnet50' exists already, in this program: give it another name",
    "from train.plugins import schedule\n@schedule('cosine')\ndef mine(progress): pass":
        "{file}:2: the schedule 'cosine' exists already",
    "from train.plugins import metric\n@metric\ndef a(probabilities, labels): pass\n@metric('a')\ndef b(p, q): pass":
        "{file}:4: the metric 'a' exists already, at {file}:2: give it another name",
    "from train.plugins import metric\n@metric\ndef a(probabilities): pass":
        "{file}:2: the metric a takes (probabilities), and is called with probabilities and labels: change its",
    "from train.plugins import loss\n@loss\ndef bce(scores, targets): pass":
        "{file}:2: the loss 'bce' exists already, in this program: give it another name",
    "from train.plugins import loss\n@loss\ndef a(scores): pass":
        "{file}:2: the loss a takes (scores), and is called with scores and targets: change its arguments",
    "from train.plugins import loss\n@loss('a', probabilities='none')\ndef b(scores, targets): pass":
        "{file}:2: probabilities is 'none': give 'softmax' or 'sigmoid'",
    "from train.plugins import model\n@model('my net')\ndef a(num_classes): pass":
        "{file}:2: 'my net' is not a valid name for a model",
    "from train.plugins import callback\n@callback\ndef at_end(): pass":
        "{file}:2: the callback at_end has at_end, which is never called: the hooks are on_run_start, on_epoch_end",
    "from train.plugins import callback\n@callback\nclass C:\n  def on_epoch(self): pass":
        "{file}:2: the callback C has on_epoch, which is never called",
    "from train.plugins import callback\n@callback\nclass C: pass": "{file}:2: the callback C has none of the methods",
    "from train.plugins import callback\n@callback\nclass C:\n  def on_epoch_end(self, epoch): pass":
        "{file}:2: on_epoch_end of the callback C takes (self, epoch), and is called with epoch and metrics",
}


@pytest.mark.parametrize("source", WRONG)
def test_mistakes(source: str, plugin: Callable[..., Path]) -> None:
    file = plugin(source)
    before = dict(plugins._registered)
    with pytest.raises(UserError, match="^" + re.escape(WRONG[source].format(file=file))):
        plugins.load([str(file)])
    assert plugins._registered == before  # nothing of it remains


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--plugin no.py: there is no such file, and no installed plug-in of that name"):
        plugins.load(["no.py"])
    with pytest.raises(UserError, match=re.escape(f"--plugin {tmp_path}: there is no such file")):
        plugins.load([str(tmp_path)])


def test_two_files_of_one_name(plugin: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second = plugin(MODEL), plugin(EXECUTED, "other/my.py")
    with pytest.raises(UserError, match=f"the plug-ins {first} and {second} have the same name"):
        plugins.load([str(first), str(second)])


def test_a_file_that_has_changed_is_loaded_anew(plugin: Callable[..., Path]) -> None:
    (before,) = plugins.load([str(plugin(MODEL))])
    (after,) = plugins.load([str(plugin(MODEL.replace("return num_classes", "return -num_classes")))])
    assert before != after and plugins.get("model", "small").made(5) == -5
    assert plugins.together([before], [after]) == (after,)
    with pytest.raises(UserError, match="ZeroDivisionError"):
        plugins.load([str(plugin("1 / 0"))])
    assert plugins.get("model", "small").made(5) == -5  # the previous one is still there
    with pytest.raises(UserError, match=r"my.py has changed: its sha256 is \w{8}\.\.\., not \w{8}\.\.\."):
        plugins.load([before])


@pytest.fixture
def recorded(plugin: Callable[..., Path], tmp_path: Path) -> tuple[Path, str, Path]:
    """A plug-in that a run has recorded in another process: its file, its record, and its copy in the run's folder."""
    file = plugin(EXECUTED)
    (record,) = plugins.load([str(file)])
    plugins.keep([record], tmp_path / "run", files.write)
    plugins._loaded.clear()
    del plugins._registered["metric", "sure"]
    file.with_suffix(".executed").unlink()
    copy = tmp_path / "run" / "plugins" / record.partition("sha256=")[2][:8] / "my.py"
    assert copy.read_bytes() == file.read_bytes()
    return file, record, copy


def restore(record: str, copy: Path) -> None:
    plugins.restore([record], "the run", str(copy.parents[2]))


def test_a_recorded_file_is_found_again(recorded: tuple[Path, str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    file, record, copy = recorded
    plugins.restore([record], "the run", is_enough=lambda: True)
    assert not file.with_suffix(".executed").exists()  # it was not needed
    restore(record, copy)
    restore(record, copy)
    assert file.with_suffix(".executed").exists() and plugins.get("metric", "sure").record == record
    assert capsys.readouterr().err == f"plug-in {file}, as the run records it\n"


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_file_that_has_gone_or_changed(
    is_gone: bool, recorded: tuple[Path, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The copy of the file in the run's folder is used instead."""
    file, record, copy = recorded
    file.unlink()
    if not is_gone:
        file.write_text("1 / 0")
    restore(record, copy)
    assert copy.with_suffix(".executed").exists() and plugins.get("metric", "sure").file == str(copy)
    assert capsys.readouterr().err == (
        f"plug-in {copy}, as the run records it ({file} is missing or has changed; --plugin replaces it)\n")
    plugins._loaded.clear()
    copy.unlink()
    way_out = f"the run needs the plug-in {file}, which is not there: give its new path with --plugin"
    if not is_gone:
        way_out = (f"the plug-in {file} has changed since the run recorded it ({plugins.brief(record)}): give --plugin "
                   f"{file} to use it as it is now")
    with pytest.raises(UserError, match=re.escape(way_out)):
        restore(record, copy)


def test_a_changed_file_that_is_named(
    recorded: tuple[Path, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file, record, copy = recorded
    file.write_text(file.read_text() + "# changed\n")
    (now,) = plugins.load([str(file)])
    for _ in range(2):
        restore(record, copy)
    assert file.with_suffix(".executed").exists() and not copy.with_suffix(".executed").exists()
    assert capsys.readouterr().err == (
        f"the plug-in {plugins.brief(now)} is used, although the run was made with {plugins.brief(record)}\n")


@pytest.mark.parametrize("is_there", [True, False])
def test_what_nobody_has_named_is_not_executed(
    is_there: bool, recorded: tuple[Path, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder received from somebody else may contain anything, and name any path for it."""
    file, record, copy = recorded
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "another account"))
    if not is_there:
        file.unlink()
    found = file if is_there else copy
    way_out = (f"the run needs the plug-in {found}, which has not been used on this account yet: read it first, since "
               f"it runs with all your rights, then give --plugin {found}")
    with pytest.raises(UserError, match=re.escape(way_out)):
        restore(record, copy)
    assert not list(tmp_path.rglob("*.executed"))
    plugins.load([str(found)])
    plugins._loaded.clear()
    del plugins._registered["metric", "sure"]
    restore(record, copy)  # known to this account from now on
    assert plugins.get("metric", "sure").file == str(found)


def test_a_record_of_a_relative_path(recorded: tuple[Path, str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A record with a relative path stands for an installed package, not for a file in this folder."""
    file, record, _ = recorded
    monkeypatch.chdir(file.parent)
    with pytest.raises(UserError, match="the run needs the plug-in my.py, which is not there: .* install its package"):
        plugins.restore([f"my.py#sha256={record.partition('sha256=')[2]}"], "the run")
    assert not file.with_suffix(".executed").exists()


def test_of_an_installed_package(
    plugin: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(EXECUTED, "packaged.py")
    about = tmp_path / "packaged-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nours = packaged\n")
    with pytest.raises(UserError, match="--plugin ours: there is no such file"):
        plugins.load(["ours"])
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"no installed plug-in of that name \(installed are: ours\)"):
        plugins.load(["theirs"])
    (record,) = plugins.load(["ours"])
    assert record == f"ours#sha256={hashlib.sha256((tmp_path / 'packaged.py').read_bytes()).hexdigest()}"
    assert plugins.get("metric", "sure").record == record
    plugins.keep([record], tmp_path / "run", files.write)
    assert not (tmp_path / "run").exists()
    plugins._loaded.clear()
    del plugins._registered["metric", "sure"]
    plugins.restore([record], "the run")
    assert plugins.get("metric", "sure").record == record


def test_of_the_program_itself(plugin: Callable[..., Path]) -> None:
    from train.plugins import metric

    (record,) = plugins.load([str(plugin(EXECUTED))])
    for _ in range(2):  # like a notebook cell that is run again
        metric("own")(lambda probabilities, labels: labels)
    assert {each.name for each in plugins.active("metric", [record])} == {"sure", "own"}
    assert {each.name for each in plugins.active("metric", [])} == {"own"}  # in every run of this process


def test_help_waits_for_nothing(tmp_path: Path) -> None:
    """`--help` executes no plug-in, and so does not wait for its imports."""
    (tmp_path / "my.py").write_text("raise SystemExit('executed')")
    program = ("import sys; from train.__main__ import main\n"
               "try: main(['train', '--plugin', 'my.py', '--help'])\nexcept SystemExit: pass\n"
               "print({'numpy', 'mxnet', 'nvidia.dali'} & sys.modules.keys(), file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.stderr == "set()\n" and "--plugin FILE" in done.stdout


def test_the_run_s_copy_serves_where_a_part_of_a_network_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """An example is an ONNX file whose weights are in another file."""
    network, part, run = tmp_path / "net.two", tmp_path / "net.two.data", tmp_path / "run"
    network.write_bytes(b"net ")
    part.write_bytes(b"weights")

    def read(path: Path) -> bytes:
        if path != network:  # a copy, which is whole
            return path.read_bytes()
        if not part.exists():
            raise UserError(f"{path} has its weights in {part.name}, which is not beside it")
        return path.read_bytes() + part.read_bytes()

    monkeypatch.setattr(plugins, "_data_formats", dict(plugins._data_formats))
    plugins.add_data_format(
        ".two", lambda file, content: plugins.register("model", "two", content, data_file=file), read)
    with plugins.forgotten():
        (record,) = plugins.load([str(network)])
        assert plugins.get("model", "two").made == b"net weights"
        plugins.keep([record], run, files.write)
    part.unlink()
    with plugins.forgotten():
        plugins.restore([record], "the run", str(run))
        assert plugins.get("model", "two").made == b"net weights"
    assert "net.two is missing or has changed" in capsys.readouterr().err
    with plugins.forgotten(), pytest.raises(UserError, match="weights in net.two.data, which is not beside it"):
        plugins.restore([record], "the run", str(tmp_path / "another"))
