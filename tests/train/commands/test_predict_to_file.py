"""Predictions of many images, written to a file: every image once and in order, whatever is broken or interrupted."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from several_processes import SCRIPT, needs_horovod, python_path

from common.errors import UserError
from train import ranking, weights
from train.checkpoint import Checkpoint, save
from train.command_line import read
from train.commands import predict, predict_to_file
from train.commands.predict_to_file import top_of
from train.commands.prediction_file import Csv, JsonLines, PredictionFile
from train.config import Config
from train.errors import TrainError
from train.models.network import init_params
from train.models.resnet import resnet
from train.options.commands import PredictOptions
from train.processes.signals import StoppedBySignal
from train.ranking import most_likely

SIZE, BATCH = 32, 4
CLASS_NAMES = ["plain", 'with "quotes", and commas', "ünïcode", "four"]
COLUMNS = "file,class,index,probability,class_2,index_2,probability_2,error"

pytestmark = pytest.mark.usefixtures("narrow_network")


def make_run(folder: Path, seed: int) -> Path:
    params, aux = init_params(resnet(18, len(CLASS_NAMES)), seed=seed)
    config = Config(model="resnet18", image_size=SIZE)
    save(Checkpoint(params, aux, {}, config, CLASS_NAMES), folder / "checkpoints" / "best.npz")
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, narrow_network: None) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), seed=3)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_photos(tmp_path_factory.mktemp("photos"), seed)


def make_photos(folder: Path, seed: int) -> Path:
    """Ten images in two nested folders; one has a name that CSV must quote."""
    (folder / "within").mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for i in range(10):
        name = 'a, "b".png' if i == 3 else f"{i}.png"
        pixels = rng.integers(0, 256, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).save((folder / "within" if i % 2 else folder) / name)
    return folder


def run_predict(run_folder: Path, output: Path, *arguments: object) -> None:
    line = ["--checkpoint", run_folder, "--output", output, "--batch-size", BATCH, "--num-threads", 1, "--top", 2,
            *arguments]
    predict.main(read(PredictOptions, [str(word) for word in line], command="predict"))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def assert_same(path: Path, other: Path) -> None:
    """Check that two files are equal except for the last digit of a probability, which may depend on the batch size."""
    ours, theirs = ((rows if each.suffix == ".csv" else json_rows)(each) for each in (path, other))
    assert [row["file"] for row in ours] == [row["file"] for row in theirs]
    for own, known in zip(ours, theirs, strict=True):
        for name, value in known.items():
            if name.startswith("probability") and value:
                assert float(own[name]) == pytest.approx(float(value), rel=1e-4)
            else:
                assert own[name] == value


def json_rows(path: Path) -> list[dict[str, Any]]:
    """JSON lines in the form of `rows`."""
    found = []
    for line in map(json.loads, path.read_text().splitlines()):
        row = {"file": line["file"], "error": line.get("error", "")}
        for suffix, guess in zip(("", "_2"), line["predictions"], strict=False):
            row |= {f"{name}{suffix}": str(guess[name]) for name in ("class", "index", "probability")}
        found.append(row)
    return found


def files_of(photos: Path) -> list[str]:
    return [str(file) for folder in (photos, photos / "within") for file in sorted(folder.glob("*.png"))]


def test_every_image_once_and_in_order(run_folder, photos, tmp_path, capsys):
    output = tmp_path / "made" / "predictions.csv"  # its folder is created
    run_predict(run_folder, output, photos)
    assert output.read_text().splitlines()[0] == COLUMNS
    found = rows(output)
    assert [row["file"] for row in found] == files_of(photos)
    printed = capsys.readouterr().out
    assert "10 images in " in printed and " images/sec" in printed

    names = [Path(row["file"]) for row in found]
    for row, known in zip(found, predict.predict(PredictOptions(images=tuple(names), checkpoint=str(run_folder))),
                          strict=True):
        assert row["error"] == ""
        for suffix, guess in zip(("", "_2"), known.guesses[:2], strict=True):
            assert (row[f"class{suffix}"], int(row[f"index{suffix}"])) == (guess.name, guess.index)
            assert float(row[f"probability{suffix}"]) == pytest.approx(guess.probability, rel=1e-4)
    assert not list(output.parent.glob("*.part*"))


def test_the_reference_executor_predicts_the_same(run_folder, photos, tmp_path):
    for executor in ("mxnet", "reference"):
        run_predict(run_folder, tmp_path / f"{executor}.csv", photos / "0.png", "--device", "cpu",
                    "--executor", executor)
    assert_same(tmp_path / "reference.csv", tmp_path / "mxnet.csv")


def test_json_lines_say_the_same(run_folder, photos, tmp_path):
    run_predict(run_folder, tmp_path / "a.csv", photos)
    run_predict(run_folder, tmp_path / "a.jsonl", photos)
    assert "error" not in (tmp_path / "a.jsonl").read_text()
    assert_same(tmp_path / "a.jsonl", tmp_path / "a.csv")


def test_lists_of_files(run_folder, photos, tmp_path, monkeypatch):
    wanted = files_of(photos)[5:2:-1]
    listed = tmp_path / "some.txt"
    listed.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(wanted).encode() + b"\r\n\r\n")
    run_predict(run_folder, tmp_path / "list.csv", listed)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(wanted).encode())))
    run_predict(run_folder, tmp_path / "stdin.csv", "-")
    assert [row["file"] for row in rows(tmp_path / "list.csv")] == wanted
    assert (tmp_path / "list.csv").read_bytes() == (tmp_path / "stdin.csv").read_bytes()


@pytest.mark.long
def test_a_name_that_is_no_text(run_folder, photos, tmp_path):
    """File names are bytes; names in Latin-1 are not UTF-8."""
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    shutil.copy(files_of(photos)[0], odd)
    for form in ("csv", "jsonl"):
        output = tmp_path / f"odd.{form}"
        for _ in range(2):  # the second process finds that nothing is left
            run_predict(run_folder, output, odd)
    assert b"caf\xe9.png" in (tmp_path / "odd.csv").read_bytes()
    assert json.loads((tmp_path / "odd.jsonl").read_text())["file"] == str(odd)


@pytest.fixture
def some_bad(photos: Path, tmp_path: Path) -> list[str]:
    """The photos with a broken one in the first batch, and a second batch of missing ones only."""
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(files_of(photos)[0]).read_bytes()[:200])
    missing = [str(tmp_path / f"missing{i}.jpg") for i in range(BATCH)]
    return [*files_of(photos)[:3], str(broken), *missing, *files_of(photos)[3:]]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_bad_images_are_named(run_folder, photos, some_bad, tmp_path, form, capsys):
    listed, output = tmp_path / "all.txt", tmp_path / f"out.{form}"
    listed.write_text("\n".join(some_bad))
    run_predict(run_folder, output, listed)
    found = (rows if form == "csv" else json_rows)(output)
    errors = {row["file"]: row["error"] for row in found}
    classes = {row["file"]: row.get("class") for row in found}
    assert list(errors) == some_bad
    assert [file for file in some_bad if errors[file]] == some_bad[3:8] == [f for f in some_bad if not classes[f]]
    assert "cannot be read (No such file or directory)" in errors[some_bad[4]]
    assert f"5 of 15 images cannot be read: {output} has the reason of each" in capsys.readouterr().err

    good = tmp_path / f"good.{form}"
    run_predict(run_folder, good, photos)
    lines = output.read_bytes().splitlines(keepends=True)
    whole = tmp_path / f"without.{form}"
    whole.write_bytes(b"".join(line for line in lines if b"/broken" not in line and b"/missing" not in line))
    assert_same(whole, good)


def test_bad_images_can_be_an_error(run_folder, some_bad, tmp_path):
    listed = tmp_path / "all.txt"
    listed.write_text("\n".join(some_bad))
    with pytest.raises(UserError, match="broken.png|missing"):
        run_predict(run_folder, tmp_path / "out.csv", listed, "--on-bad-image", "error")


def test_no_readable_image_at_all(run_folder, tmp_path):
    listed, output = tmp_path / "all.txt", tmp_path / "out.csv"
    listed.write_text("\n".join(f"/nowhere/{i}.jpg" for i in range(6)))
    with pytest.raises(TrainError, match="no image of 6 can be read; .*out.csv has the reason of each"):
        run_predict(run_folder, output, listed)
    assert [row["error"] for row in rows(output)] == ["cannot be read (No such file or directory)"] * 6


@pytest.mark.long(but=["csv"])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_bad_images_of_earlier_sessions_count(run_folder, some_bad, tmp_path, form, capsys):
    listed, output = tmp_path / "all.txt", tmp_path / f"out.{form}"
    listed.write_text("\n".join(some_bad[:5]))
    run_predict(run_folder, output, listed)
    listed.write_text("\n".join(some_bad))
    capsys.readouterr()
    for earlier in (2, 5):  # in the second iteration no image is left to predict
        run_predict(run_folder, output, listed)
        said = f"5 of 15 images cannot be read ({earlier} of them found earlier): {output} has"
        assert said in capsys.readouterr().err
    listed.write_text("/nowhere/1.jpg")
    for _ in range(2):
        with pytest.raises(TrainError, match="no image of 1 can be read"):
            run_predict(run_folder, tmp_path / f"none.{form}", listed)


def test_the_rest_may_be_bad(run_folder, photos, tmp_path):
    """A resumed run that finds only bad images succeeds, because earlier images were good."""
    first, listed, output = tmp_path / "first.txt", tmp_path / "all.txt", tmp_path / "out.csv"
    first.write_text("\n".join(files_of(photos)[:4]))
    listed.write_text("\n".join([*files_of(photos)[:4], "/nowhere/1.jpg"]))
    run_predict(run_folder, output, first)
    run_predict(run_folder, output, listed)
    assert [row["error"] != "" for row in rows(output)] == [False] * 4 + [True]


def test_images_that_changed_since_are_told(run_folder, tmp_path, capsys):
    """Changed images are named, even if a file with an older time has replaced one. New images have no record yet."""
    photos = make_photos(tmp_path / "photos", 3)
    output = tmp_path / "out.csv"
    images = [Path(name) for name in files_of(photos)]
    other = tmp_path / "other.png"
    shutil.copy(images[4], other)
    os.utime(other, (0, 0))
    run_predict(run_folder, output, *images[:6])
    capsys.readouterr()
    run_predict(run_folder, output, *images[:7])
    assert capsys.readouterr().err == ""
    shutil.copy(images[4], images[2])
    other.rename(images[5])
    shutil.copy(images[4], images[8])
    run_predict(run_folder, output, *images)
    assert capsys.readouterr().err.startswith(
        f"{output}: 2 of its images changed after it was begun, so their predictions may be of the old images: "
        f"{images[2]}, {images[5]} (give another --output to predict all anew)\n")
    assert len(rows(output)) == 10


@pytest.mark.long(but=["0.0-csv", "0.01-jsonl"])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.55, 0.99])
def test_goes_on_where_the_file_ends(run_folder, photos, tmp_path, form, part, capsys):
    """Cut at any place, as by a kill, and resumed with another batch size."""
    output = tmp_path / f"out.{form}"
    run_predict(run_folder, output, photos)
    unbroken = tmp_path / f"unbroken.{form}"
    shutil.copy(output, unbroken)
    whole = output.read_bytes()
    cut = int(part * len(whole))
    output.write_bytes(whole[:cut])
    capsys.readouterr()
    run_predict(run_folder, output, photos, "--batch-size", 3)
    header = form == "csv"
    done = max(0, whole[:cut].count(b"\n") - header)
    left = 10 - done
    assert output.read_bytes()[: whole[:cut].rfind(b"\n") + 1] == whole[: whole[:cut].rfind(b"\n") + 1]
    assert_same(output, unbroken)
    whole = output.read_bytes()
    printed = capsys.readouterr().out
    assert (f"has {done} of 10 images" in printed) == (done > 0)
    assert f"{left} image{'s' * (left > 1)} in " in printed
    run_predict(run_folder, output, photos)
    assert "complete, nothing was left to do" in capsys.readouterr().out
    assert output.read_bytes() == whole


@pytest.mark.parametrize("cut", [b'"line one\n', b'"line one\nline', b'"line one\nline two.jpg",four,'])
def test_a_name_with_a_line_break_is_cut_anywhere(run_folder, tmp_path, cut):
    listed, output = tmp_path / "all.txt", tmp_path / "out.csv"
    listed.write_text("0.jpg")
    with pytest.raises(TrainError, match="no image of 1 can be read"):
        run_predict(run_folder, output, listed)
    with output.open("ab") as file:
        file.write(cut)
    whole = PredictionFile(output, CLASS_NAMES, 2, {}, {})
    assert whole.resume(["0.jpg", "line one\nline two.jpg"]) == (1, 1)
    assert [row["file"] for row in rows(output)] == ["0.jpg"]
    whole.close()


def test_progress_without_a_terminal(run_folder, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(predict_to_file, "LOG_SECONDS", 0.0)
    run_predict(run_folder, tmp_path / "out.csv", photos)
    lines = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    assert [line.partition(" images, ")[0] for line in lines] == ["4 of 10", "8 of 10", "10 of 10"]
    assert lines[-1].endswith(" images/sec, 0:00:00 left")


def test_full_disk_loses_nothing(run_folder, photos, tmp_path, monkeypatch):
    run_predict(run_folder, tmp_path / "whole.csv", photos)
    output, room = tmp_path / "out.csv", [600]

    def write(self: PredictionFile, content: bytes) -> None:
        part = content[: room[0]]
        room[0] -= len(part)
        self._file.write(part)
        if len(part) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(PredictionFile, "_write", write)
        with pytest.raises(TrainError, match=r"out.csv \(No space left on device\): make room and give the same "):
            run_predict(run_folder, output, photos)
    assert len(output.read_bytes()) == 600
    run_predict(run_folder, output, photos)
    assert_same(output, tmp_path / "whole.csv")


def test_nothing_follows_a_batch_that_a_full_disk_has_cut(run_folder, photos, tmp_path, monkeypatch):
    """The batches that wait behind it are not written, although there is room again."""
    run_predict(run_folder, tmp_path / "whole.csv", photos)
    output, whole, calls = tmp_path / "out.csv", PredictionFile._write, iter(range(100))

    def write(self: PredictionFile, content: bytes) -> None:
        if next(calls) == 1:  # after the header
            time.sleep(1)  # until the others are waiting
            whole(self, content[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(PredictionFile, "_write", write)
        with pytest.raises(TrainError, match="make room and give the same command again"):
            run_predict(run_folder, output, photos)
    run_predict(run_folder, output, photos)
    assert_same(output, tmp_path / "whole.csv")


@pytest.mark.long(but=["15"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_keep_what_is_done(run_folder, photos, tmp_path, monkeypatch, number):
    class Interrupted:
        """An executor that receives a signal in the third batch."""

        def __init__(self, executor: Any) -> None:
            self.executor, self.batches = executor, 0

        def infer(self, data: Any) -> None:
            self.batches += 1
            if self.batches == 3:
                signal.raise_signal(number)
            self.executor.infer(data)

        def request_probabilities(self) -> Any:
            return self.executor.request_probabilities()

    run_predict(run_folder, tmp_path / "whole.csv", photos)
    output, build = tmp_path / "out.csv", predict_to_file.inference_executor
    with monkeypatch.context() as patch:
        patch.setattr(predict_to_file, "inference_executor", lambda *arguments: Interrupted(build(*arguments)))
        with pytest.raises(StoppedBySignal, match=f"stopped: the same command goes on where {output} ends") as stop:
            run_predict(run_folder, output, photos)
    assert stop.value.exit_code == 128 + number
    assert 1 < output.read_bytes().count(b"\n") < 11
    run_predict(run_folder, output, photos)
    assert_same(output, tmp_path / "whole.csv")


DAMAGE = {  # a line, and its replacement
    "damaged jsonl": (4, b"no JSON\n"),
    "damaged csv": (5, b"a.png,four,3\n"),
    "open quote": (5, b'"a.png,four,3,0.5,four,3,0.5,\n'),
    "last line": (11, b"a.png,four,3\n"),
}


@pytest.mark.long(but=["checkpoint-*"])
@pytest.mark.parametrize("what, sentence", [
    ("checkpoint", "begun with another network, by the SHA-256 of its weights"),
    ("top", "begun with another --top: 2, now 3"),
    ("foreign", "exists already and was not begun by this command"),
    ("images", "but this command has"),
    ("fewer images", "but this command has none"),
    ("about", r"\.about\.json, which records how out\.csv was begun, is damaged: restore it"),
    ("damaged jsonl", r"out\.jsonl is damaged in line 4, after 3 images: repair"),
    ("damaged csv", r"out\.csv is damaged in line 5, after 3 images: repair"),
    ("open quote", r"out\.csv is damaged in line 5, after 3 images: repair"),
    ("last line", r"out\.csv is damaged in line 11, after 9 images: repair"),
    ("columns", "has other columns"),
    ("locked", "another process is writing"),
])
def test_another_file_is_refused_and_stays(run_folder, photos, tmp_path, what, sentence):
    output = tmp_path / ("out.jsonl" if what.endswith("jsonl") else "out.csv")
    run_predict(run_folder, output, photos)
    arguments: list[object] = [photos]
    if what == "checkpoint":
        run_folder = make_run(tmp_path / "other", seed=4)
    elif what == "top":
        arguments += ["--top", 3]
    elif what == "foreign":
        output.with_name(f"{output.name}.about.json").unlink()
    elif what == "images":
        arguments = [photos / "within", photos]
    elif what == "fewer images":
        arguments = files_of(photos)[:9]
    elif what == "about":
        output.with_name(f"{output.name}.about.json").write_bytes(b"{")
    elif what in DAMAGE:
        line, content = DAMAGE[what]
        lines = output.read_bytes().splitlines(keepends=True)
        output.write_bytes(b"".join([*lines[: line - 1], content, *lines[line:]]))
    elif what == "columns":
        output.write_text(output.read_text().replace("class_2", "class_3"))
    before = output.read_bytes()
    holder = PredictionFile(output, CLASS_NAMES, 2, {}, {}) if what == "locked" else None
    with pytest.raises(TrainError, match=sentence) as error:
        run_predict(run_folder, output, *arguments)
    assert "--output" in str(error.value) and "\n" not in str(error.value)
    assert output.read_bytes() == before
    if holder:
        holder.close()


def test_folder_that_cannot_be_written(run_folder, photos, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match=r"cannot write .*out.csv \(File exists\): give another --output"):
        run_predict(run_folder, tmp_path / "file" / "out.csv", photos)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(os.devnull)],
                         ids=["pipe", "folder", "device"])
def test_what_is_no_file_is_refused(run_folder, photos, tmp_path, make):
    make(tmp_path / "out.csv")
    with pytest.raises(TrainError, match=r"out.csv is not a regular file, so it .*: give another --output"):
        run_predict(run_folder, tmp_path / "out.csv", photos)
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


@pytest.mark.parametrize("arguments, sentence", [
    (("--output", "out.txt", "PHOTOS"), "--output out.txt must end in .csv or .jsonl"),
    (("--top", "9", "PHOTOS"), "--top 9 is more than the 4 classes"),
    (("--json", "PHOTOS"), "--json is for predictions that are printed"),
    (("--contact-sheet", "sheet.png", "PHOTOS"), "--contact-sheet is for predictions that are printed"),
    (("EMPTY",), "empty has no image files in it"),
    (("EMPTY/none.txt",), "none.txt lists no image files"),
    (("EMPTY/no.txt",), "no.txt cannot be read (No such file or directory)"),
    (("EMPTY/no.jpg",), "no.jpg does not exist"),
    (("PHOTOS", "--checkpoint", "PHOTOS"), "holds no checkpoint"),
])
def test_bad_input_is_one_sentence(run_folder, photos, tmp_path, arguments, sentence):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "none.txt").write_text("\n\n")
    words = [word.replace("PHOTOS", str(photos)).replace("EMPTY", str(tmp_path / "empty")) for word in arguments]
    with pytest.raises(UserError) as error:
        run_predict(run_folder, tmp_path / "out.csv", *words)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out.csv").exists() or not (tmp_path / "out.csv").read_bytes()


@pytest.mark.long
def test_probabilities_that_are_no_numbers_are_refused(photos, tmp_path, capsys):
    """Finite weights that are too large produce them; in a file and printed."""
    params, aux = init_params(resnet(18, len(CLASS_NAMES)), seed=3)
    params["classifier_weight"] = np.full_like(params["classifier_weight"], 3e38)
    save(Checkpoint(params, aux, {}, Config(model="resnet18", image_size=SIZE), CLASS_NAMES), tmp_path / "large.npz")
    sentence = "large.npz gives probabilities that are not numbers: its weights are too large for the precision"
    with pytest.raises(TrainError, match=sentence):
        run_predict(tmp_path / "large.npz", tmp_path / "out.csv", photos)
    assert rows(tmp_path / "out.csv") == []
    for form in ((), ("--json",)):
        line = ["--checkpoint", str(tmp_path / "large.npz"), str(photos), *form]
        with pytest.raises(TrainError, match=sentence):
            predict.main(read(PredictOptions, line, command="predict"))
    assert "probability" not in capsys.readouterr().out


def test_top_is_that_of_the_network_where_it_has_fewer(run_folder):
    trained = weights.load(str(run_folder))
    assert top_of(PredictOptions(images=()), trained) == 4
    with pytest.raises(TrainError, match="--top 6"):
        top_of(PredictOptions(images=(), top=6), trained)


def test_the_order_of_most_likely_classes(rng, monkeypatch):
    probabilities = rng.integers(0, 5, (50, 30)).astype(np.float32) / 5  # many are equal
    probabilities += np.linspace(0, 1e-3, 30, dtype=np.float32) * (rng.random((50, 1)) < 0.5)
    monkeypatch.setattr(ranking, "MOST_PASSES", 5)
    for top in (1, 3, 30):
        classes, best = most_likely(probabilities, top)
        assert classes.shape == best.shape == (50, top)
        np.testing.assert_array_equal(best, -np.sort(-probabilities, axis=1)[:, :top])
        np.testing.assert_array_equal(best, np.take_along_axis(probabilities, classes, axis=1))
        np.testing.assert_array_equal(classes, np.argsort(-probabilities, axis=1, kind="stable")[:, :top])


def test_records_are_read_back():
    """Records are read back by Python's own readers, and by the code that finds the end of a file."""
    names, files = ['a,"b"\n', "plain"], ['x"y\n,z', "line\rfeed", " plain "]
    for form in (Csv(names, 1), JsonLines(names, 1)):
        text = "".join([*(form.prediction(file, [0], [0.25]) for file in files), form.failure(files[0], 'no, "none"')])
        found = list(form.records(text.splitlines(keepends=True) if isinstance(form, JsonLines)
                                  else io.StringIO(text, newline="")))
        assert found == [*((file, False) for file in files), (files[0], True)]
        if isinstance(form, Csv):
            read = list(csv.reader(io.StringIO(text, newline="")))
            assert read[0] == [files[0], names[0], "0", "0.25", ""] and read[3] == [files[0], "", "", "", 'no, "none"']


@pytest.mark.parametrize("form", [Csv(CLASS_NAMES, 2), JsonLines(CLASS_NAMES, 2)])
def test_no_changed_byte_of_a_record_counts_as_done(form):
    """A record with a changed byte does not count as done, unless the byte is in a probability or in an error message,
    where nobody can notice it."""
    file = "one.jpg"
    for whole, unseen in ((form.prediction(file, [1, 0], [0.75, 0.125]), ("0.75", "0.125")),
                          (form.failure(file, "no image"), ("no image",))):
        (seen,) = form.records([whole])
        hidden = {place for text in unseen for place in range(whole.index(text), whole.index(text) + len(text))}
        for place in set(range(len(whole) - 1)) - hidden:
            for other in {"x", "0", "\x7f"} - {whole[place]}:
                found = []
                with contextlib.suppress(Exception):
                    found += form.records([whole[:place] + other + whole[place + 1 :]])
                assert seen[0] not in [name for name, _ in found], (place, other, found)


@pytest.mark.parametrize("form, whole, changed", [
    (Csv, ",four,3,", ",four,03,"), (Csv, ",four,3,", ",four,-1,"), (Csv, ",four,3,", ",four,2,"),
    (JsonLines, '"index": 3', '"index": -1'), (JsonLines, '"predictions"', '"predictionz"'),
    (JsonLines, '"probability": 0.25', '"probabilitx": 0.25'), (JsonLines, '"file"', '"fine"'),
])
def test_damaged_records_are_refused(tmp_path, form, whole, changed):
    path = tmp_path / f"out{'.csv' if form is Csv else '.jsonl'}"
    with PredictionFile(path, CLASS_NAMES, 2, {}, {}) as file:
        file.resume(["a.jpg", "b.jpg"])
        file.write([file.form.prediction(name, [3, 0], [0.5, 0.25]) for name in ("a.jpg", "b.jpg")])
    text = path.read_text()
    assert whole in text
    path.write_text(text.replace(whole, changed, 1))
    with (PredictionFile(path, CLASS_NAMES, 2, {}, {}) as file,
          pytest.raises(TrainError, match=r"is damaged in line \d, after 0 images: repair")):
        file.resume(["a.jpg", "b.jpg"])


@pytest.mark.long
@needs_horovod
def test_two_processes(run_folder, photos, tmp_path):
    """Together they write the file that one process writes. They also continue an interrupted run, which has left two
    records in the file itself and two of the next four in process 0's part; process 1's part does not exist yet."""
    alone, output, part = tmp_path / "alone.csv", tmp_path / "out.csv", tmp_path / "out.part0.csv"
    run_predict(run_folder, alone, photos)
    header, *lines = alone.read_bytes().splitlines(keepends=True)
    about = json.loads(Path(f"{alone}.about.json").read_text())
    for path, own, share in ((output, lines[:2], "all"), (part, lines[2:4], "0 of 2, of images 2 to 10")):
        path.write_bytes(b"".join([header, *own]))
        Path(f"{path}.about.json").write_text(json.dumps({**about, "part": share}))
    command = ["bash", SCRIPT, "-n", "2", "predict", "--device", "cpu", "--num-threads", "1", "--top", "2",
               "--checkpoint", run_folder, "--output", output, photos]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": python_path(light=True)}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "has 2 of 10 images" in done.stdout and "6 images in " in done.stdout
    assert_same(output, alone)
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.gpu
def test_gpu_predicts_as_the_cpu(run_folder, photos, tmp_path):
    """The GPU predicts like the CPU in float16, with any batch size, and when a file is resumed."""
    run_predict(run_folder, tmp_path / "cpu.csv", photos, "--device", "cpu")
    run_predict(run_folder, tmp_path / "gpu.csv", photos, "--device", "gpu")
    cpu, gpu = rows(tmp_path / "cpu.csv"), rows(tmp_path / "gpu.csv")
    assert [row["file"] for row in gpu] == [row["file"] for row in cpu]
    for ours, theirs in zip(gpu, cpu, strict=True):
        # 2 % of a probability: float16's step is 0.1 %, and the two decoders and resizers differ.
        assert float(ours["probability"]) == pytest.approx(float(theirs["probability"]), rel=0.02, abs=0.002)
    output = tmp_path / "gpu.csv"
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:6]))
    run_predict(run_folder, output, photos, "--device", "gpu")
    assert [row["file"] for row in rows(output)] == files_of(photos)


# --- true classes ---


@pytest.fixture
def class_folders(photos: Path, tmp_path: Path) -> Path:
    """Images in class folders, in a folder inside one, and in one that is not a class."""
    for number, folder in enumerate(("four", "four/of a day", "plain", "unsorted")):
        (tmp_path / "classes" / folder).mkdir(parents=True)
        shutil.copy(photos / "0.png", tmp_path / "classes" / folder / f"{number}.png")
    return tmp_path / "classes"


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_folders_tell_the_true_class(run_folder, class_folders, tmp_path, ending):
    """An image's folder tells its true class, also for an unreadable image, and after resuming."""
    (class_folders / "plain" / "9.png").write_bytes(b"no image")
    output = tmp_path / f"out.{ending}"
    run_predict(run_folder, output, class_folders)
    content = output.read_bytes()
    found = rows(output) if ending == "csv" else [json.loads(line) for line in content.splitlines()]
    assert [row["true"] for row in found] == ["four", "four", "plain", "plain", "" if ending == "csv" else None]
    assert [bool(row.get("error")) for row in found] == [False, False, False, True, False]
    output.write_bytes(content[: content.index(b"2.png")])  # in the middle of a record
    run_predict(run_folder, output, class_folders)
    assert output.read_bytes() == content


def test_no_folder_tells_a_class(run_folder, photos, tmp_path):
    """The file has no column for it. For a list, only the folder of each image counts, not one further up."""
    run_predict(run_folder, tmp_path / "out.csv", photos)
    assert "true" not in rows(tmp_path / "out.csv")[0]
    deep = tmp_path / "four" / "photos"
    shutil.copytree(photos, deep)
    listed = tmp_path / "list.txt"
    listed.write_text(f"{deep}/0.png\n")
    run_predict(run_folder, tmp_path / "listed.csv", listed)
    assert "true" not in rows(tmp_path / "listed.csv")[0]
    run_predict(run_folder, tmp_path / "given.csv", tmp_path / "four")
    assert {row["true"] for row in rows(tmp_path / "given.csv")} == {"four"}


def test_a_file_of_an_earlier_version_has_no_true_classes(run_folder, class_folders, photos, tmp_path):
    """Such a file is resumed if there are no true classes, and otherwise refused in one sentence."""
    for folder, sentence in ((photos, ""), (class_folders, "begun with another set of columns: without true classes, "
                                                           "now with true classes; give another --output")):
        output = tmp_path / folder.name / "out.csv"
        run_predict(run_folder, output, folder)
        about = output.with_name("out.csv.about.json")
        values = json.loads(about.read_bytes())
        del values["columns"]
        about.write_text(json.dumps(values))
        with pytest.raises(TrainError, match=sentence) if sentence else contextlib.nullcontext():
            run_predict(run_folder, output, folder)
