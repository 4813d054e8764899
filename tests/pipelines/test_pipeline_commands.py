"""`python -m pipelines`: the commands as a user calls them."""

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_folder
from PIL import Image

from pipelines import samples
from pipelines.__main__ import COMMANDS, main
from pipelines.show import ALONE, _Sheet
from pipelines.sources import open_source, same_images, splits_of


def names_of(source):
    return [source.name(i) for i in range(len(source))]


def run(capsys, *arguments):
    """Exit code, stdout and stderr of a command, in this process."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_from_folders_to_a_contact_sheet(tmp_path, capsys):
    write_folder(tmp_path / "in/train", 12, 3, seed=1)
    write_folder(tmp_path / "in/val", 6, 3, seed=2)
    code, out, _ = run(capsys, "make-records", tmp_path / "in", tmp_path / "rec")
    assert code == 0 and "train.rec: 12 images of 3 classes" in out and "val.rec: 6 images" in out

    (tmp_path / "rec/train.rec").rename(tmp_path / "train.rec")
    code, _, err = run(capsys, "make-records", tmp_path / "in", tmp_path / "rec")
    assert code == 2 and err.startswith(f"error: {tmp_path}/rec/val.rec exists; remove it")
    assert not (tmp_path / "rec/train.rec").exists()
    (tmp_path / "train.rec").rename(tmp_path / "rec/train.rec")

    code, out, _ = run(capsys, "verify", tmp_path / "rec")
    assert code == 0 and "12 images, 0 unusable" in out and "6 images, 0 unusable" in out

    sheet = tmp_path / "sheets/sheet.png"
    code, out, _ = run(capsys, "show", tmp_path / "rec", sheet, "--rows", 2, "--columns", 3, "--image-size", 128)
    assert code == 0
    with Image.open(sheet) as image:
        assert image.width > 3 * 128 and image.height > 2 * 128
        assert np.asarray(image.convert("RGB")).std() > 20
    assert [path.name for path in sheet.parent.iterdir()] == ["sheet.png"]
    plain = sheet.read_bytes()
    code, *_ = run(capsys, "show", tmp_path / "rec", sheet, "--rows", 2, "--columns", 3, "--image-size", 128,
                   "--cutout", 0.5, "--crop-padding", 9)
    assert code == 0 and sheet.read_bytes() != plain

    each = tmp_path / "each.jpg"
    code, *_ = run(capsys, "show", tmp_path / "rec", each, "--each", "--columns", 3, "--image-size", 112)
    assert code == 0
    with Image.open(each) as image:
        assert image.format == "JPEG"
        pixels = np.asarray(image, float)
    rows = [pixels[64 + number * 144 :][:112, 24 : 24 + 3 * 122] for number in range(len(ALONE))]
    assert rows[-1].shape == (112, 366, 3) and pixels.shape[0] == 64 + len(ALONE) * 144 - 10 + 24
    changed = {option for option, row in zip(ALONE, rows, strict=True) if np.abs(row - rows[0]).max() > 20}
    assert set(ALONE) - changed == {"none", "--train-interpolation random", "--blur 0.5"}  # smooth images change little

    figures = tmp_path / "bench.json"
    code, out, _ = run(
        capsys, "bench", tmp_path / "rec", "--seconds", 0.2, "--batch-size", 4, "--image-size", 32, "--json", figures
    )
    assert code == 0 and "+ decode and crop" in out
    stages = json.loads(figures.read_text())["stages"]
    assert [stage["stage"] for stage in stages] == ["read", "decode", "resize", "full"]
    for stage in stages:
        speeds = [4000 / ms for ms in stage["step_ms"]]
        assert stage["images_per_sec"] == pytest.approx(np.median(speeds))
        assert min(speeds) > 0


def test_make_records_says_what_it_leaves_out(tmp_path, capsys):
    """Remarks appear once, if both splits are made from one folder."""
    write_folder(tmp_path / "in", 12, 3, seed=1)
    (tmp_path / "in/empty").mkdir()
    (tmp_path / "in/c00/link").symlink_to(tmp_path)
    (tmp_path / "in/c01/.000.jpg").write_bytes(b"")
    for name in "ab":
        (tmp_path / f"in/c02/{name}.gif").write_bytes(b"GIF89a")
    code, out, _ = run(capsys, "make-records", tmp_path / "in", tmp_path / "rec", "--val-split", 0.3)
    *remarks, train, val = out.splitlines()
    assert code == 0 and "train.rec" in train and "val.rec" in val
    assert remarks == [f"{tmp_path}/in: {remark}" for remark in (
        "folders without an image do not count as classes: empty",
        f"links to folders are left out: {tmp_path}/in/c00/link",
        f"hidden images are left out: {tmp_path}/in/c01/.000.jpg",
        "files of formats that are not read are left out: 2 .gif (convert them to JPEG or PNG)",
    )]


def test_verify_says_so_with_its_exit_code_and_mends(tmp_path, capsys):
    files = write_folder(tmp_path / "train", 6, 2, seed=1)
    files[3].write_bytes(b"no image")
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1 and "6 images, 1 unusable: 1 not an image" in out and "no image of these classes" not in out
    code, out, _ = run(capsys, "verify", tmp_path, "--write-clean")
    assert code == 0 and "train.lst: 5 usable images" in out
    assert run(capsys, "verify", tmp_path)[0] == 0


def test_verify_names_classes_without_a_usable_image(tmp_path, capsys):
    for file in write_folder(tmp_path / "train", 6, 2, seed=1)[3:]:
        file.write_bytes(b"")
    code, out, _ = run(capsys, "verify", tmp_path, "--write-clean")
    assert code == 0 and f"{tmp_path}/train: no image of these classes is usable: c01 (replace the images, or" in out


def test_verify_finds_training_images_that_are_in_validation_too(tmp_path, capsys):
    files = write_folder(tmp_path / "train", 6, 2, seed=1)
    others = write_folder(tmp_path / "val", 4, 2, seed=2)
    others[1].write_bytes(files[2].read_bytes())
    files[5].write_bytes(files[2].read_bytes())
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1 and "train: 6 images, 2 unusable: 2 duplicate" in out and "val: 4 images, 0 unusable" in out
    for file in (files[2], files[5]):
        conflict = " as c00, and c01 here" * (file == files[5])
        assert f"{file}: duplicate, the same image as {others[1]}, which is for validation{conflict}\n" in out
    code, out, _ = run(capsys, "verify", tmp_path, "--write-clean")
    assert code == 0 and "train.lst: 4 usable images" in out and "val.lst: 4 usable images" in out
    assert run(capsys, "verify", tmp_path)[0] == 0
    assert len(open_source(tmp_path, "train")) == len(open_source(tmp_path, "val")) == 4


def test_verify_compares_the_parts_that_val_split_makes(tmp_path, capsys):
    files = write_folder(tmp_path / "in", 30, 2, seed=1)
    val = set(names_of(open_source(tmp_path / "in", "val", val_split=0.3)))
    train, (one, other) = [file for file in files if str(file) not in val], sorted(val)[:2]
    for path in (train[0], other):
        shutil.copyfile(one, path)
    assert run(capsys, "verify", tmp_path / "in")[0] == 0
    code, out, _ = run(capsys, "verify", tmp_path / "in", "--val-split", 0.3)
    assert code == 1 and "30 images, 1 unusable: 1 duplicate" in out
    assert f"{train[0]}: duplicate, the same image as {other}, which is for validation" in out
    assert run(capsys, "verify", tmp_path / "in", "--val-split", 0.3, "--write-clean")[0] == 0
    assert run(capsys, "verify", tmp_path / "in", "--val-split", 0.3)[0] == 0
    assert set(names_of(open_source(tmp_path / "in", "val", val_split=0.3))) == val  # now read from the list
    code, _, err = run(capsys, "verify", tmp_path / "in", "--val-split", 0.3, "--split", "train")
    assert code == 2 and "compares two parts of the training images: leave out --split train" in err


def test_make_records_of_the_parts_that_val_split_makes(tmp_path, capsys):
    write_folder(tmp_path / "in", 30, 2, seed=1)
    code, out, _ = run(capsys, "make-records", tmp_path / "in", tmp_path / "out", "--val-split", 0.3)
    parts = [open_source(tmp_path / "in", split, val_split=0.3) for split in ("train", "val")]
    assert code == 0 and f"train.rec: {len(parts[0])} images" in out and f"val.rec: {len(parts[1])} images" in out
    for part, split in zip(parts, ("train", "val"), strict=True):
        written = open_source(tmp_path / "out", split)
        assert (sorted(written.read(i).tobytes() for i in range(len(written)))
                == sorted(part.read(i).tobytes() for i in range(len(part))))


def test_without_splits_validation_reads_what_training_reads(folder, tmp_path, capsys):
    """Validation must use the clean list of such a folder, and the records made of it: otherwise it would meet the
    broken image, or find nothing."""
    broken = folder / "c01/004.JPEG"
    broken.write_bytes(b"no image")
    code, out, _ = run(capsys, "make-records", folder, tmp_path / "out", "--on-bad-image", "skip")
    assert code == 0 and f"out/val.rec: the same images, as {folder} has no validation images of its own" in out
    for _ in range(2):  # the second time from the lists, after new damage
        assert run(capsys, "verify", folder, "--write-clean")[0] == 0
        names = {split: names_of(open_source(folder, split)) for split in ("train", "val")}
        assert names["train"] == names["val"] and str(broken) not in names["val"]
        broken = folder / "c02/005.JPEG"
        broken.write_bytes(b"")
    assert len(names["val"]) == 10
    assert len(open_source(tmp_path / "out", "val")) == len(open_source(tmp_path / "out", "train")) == 11
    for data in (folder, tmp_path / "out"):
        assert splits_of(data) == ["train"] and same_images(data)  # as in the run's remark
    (tmp_path / "out/train.rec").unlink()
    (tmp_path / "out/train.idx").unlink()
    assert run(capsys, "make-records", folder, tmp_path / "out")[0] == 0  # again, over the existing link
    assert len(open_source(tmp_path / "out", "val")) == 10


def test_samples_are_the_built_in_set(tmp_path, capsys, monkeypatch):
    """As in training, the set is drawn if it is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(samples, "make_samples", partial(samples.make_samples, num_train=2, num_val=1))
    code, out, _ = run(capsys, "verify", "samples")
    assert code == 0 and "data/samples/train: 24 images, 0 unusable" in out and "data/samples/val: 12 images" in out
    code, out, _ = run(capsys, "show", "samples", "sheet.png", "--rows", 1, "--columns", 2, "--image-size", 32)
    assert code == 0 and (tmp_path / "sheet.png").exists()
    code, out, _ = run(capsys, "bench", "samples", "--seconds", 0.01, "--batch-size", 4, "--image-size", 32)
    assert code == 0 and out.startswith("samples train, cpu, batch 4")


def test_a_list_that_cannot_be_written_is_named_before_images_are_looked_at(tmp_path, capsys, monkeypatch):
    write_folder(tmp_path / "train", 6, 2, seed=1)

    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("pipelines.verify.map_in_order", lambda *arguments: pytest.fail("that took its time"))
    code, out, err = run(capsys, "verify", tmp_path, "--write-clean")
    assert (code, out) == (2, "")
    assert err == f"error: cannot write {tmp_path}/train.lst (Read-only file system): check permissions and space\n"


def test_make_samples(tmp_path, capsys):
    arguments = ("make-samples", tmp_path / "s", "--num-train", 1, "--num-val", 1)
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "1 training and 1 validation images of each of 12 classes" in out
    assert "was there already" in run(capsys, *arguments)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a command first: make-records, verify, bench"),
        (["verfy"], "there is no command 'verfy'; did you mean verify?"),
        (["verify"], "DATA must be given"),
        (["verify", "x", "--splt", "val"], "did you mean --split?"),
        (["bench", "x", "--batch-size", "many"], "--batch-size needs a whole number, not 'many'"),
        (["bench", "x", "--split", "test"], "test"),
        (["verify", "{tmp}/none", "--val-split", "2"], "--val-split 2 must be at least 0 and below 1"),
        (["verify", "{tmp}/none"], "none does not exist; give"),
        (["bench", "{tmp}"], "text.tar: is truncated or not a tar file"),
        (["bench", "{tmp}", "--json", "{tmp}/text.tar/x"], "x (Not a directory): give another --json"),
        (["bench", "synthetic"], "'synthetic' is not a place with image files"),
        (["verify", ""], "verify is followed by an empty value"),
        (["verify", "x", "--sweep"], "--sweep is an option of bench, not of verify"),
        (["verify", "{tmp}", "--num-threads", "-1"], "num_threads is -1"),
        (["verify", "{tmp}", "--num-classes", "0"], "num_classes is 0"),
        (["bench", "{tmp}", "--seconds", "nan"], "seconds is nan"),
        (["bench", "{tmp}", "--batch-size", "0"], "batch_size is 0"),
        (["show", "synthetic", "{tmp}/a.png", "--image-size", "0"], "image_size is 0"),
        (["show", "synthetic", "{tmp}/a.png", "--rows", "0"], "0 rows"),
        (["show", "synthetic", "{tmp}/a.png", "--randaugment-magnitude", "5"], "--randaugment-magnitude is for --auto"),
        (["show", "synthetic", "{tmp}/a.png", "--auto-augment", "randaugment", "--randaugment-magnitude-std", "1"],
         "is for --auto-augment randaugment-timm, and this is randaugment: leave it out"),
        (["show", "synthetic", "{tmp}/a.png", "--split", "val", "--hue", "0.1"], "--hue is for training images, and"),
        (["make-records", "{tmp}/none", "{tmp}/out"], "none does not exist"),
        (["make-records", "{tmp}/text.tar", "{tmp}/out"], "not a tar file"),
        (["show", "synthetic", "{tmp}/a.png", "--rows", "10000"], "10000 rows and 7 columns has"),
        (["make-records", "{tmp}", "{tmp}/out", "--resize", "-1"], "resize is -1"),
        (["make-records", "{tmp}", "{tmp}/out", "--quality", "0"], "quality is 0"),
        (["make-records", "{tmp}", "{tmp}/out", "--seed", "-1"], "seed is -1"),
        (["make-records", "{tmp}", "{tmp}/out", "--labels", "a"], "--labels a is for ILSVRC2012_img_val.tar alone"),
        (["make-records", "{tmp}", "{tmp}/out", "--classes", "a"], "--classes a is only for ILSVRC2012's tar files"),
        (["make-samples", "{tmp}", "--num-train", "0"], "0 training"),
        (["make-samples", "{tmp}/new", "--seed", "-1"], "seed is -1"),
        (["make-samples", "{tmp}/text.tar"], "holds something other"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(tmp_path, capsys, arguments, message):
    (tmp_path / "text.tar").write_text("no tar")
    code, out, err = run(capsys, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert code == 2 and not out
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert [path.name for path in tmp_path.iterdir()] == ["text.tar"]


@pytest.mark.parametrize("name", ["кот", "ňů", "άγ"])
def test_a_sheet_has_the_letters_of_its_classes(name):
    """A font without these letters draws an identical box for each, also in reverse order."""
    sheets = [_Sheet(1, 1, 112, "") for _ in range(2)]
    for sheet, caption in zip(sheets, (name, name[::-1]), strict=True):
        sheet.add(np.zeros((112, 112, 3), np.uint8), caption)
    assert np.any(np.asarray(sheets[0].image) != np.asarray(sheets[1].image))


def test_help_is_broken_at_the_margin_alone(capsys, monkeypatch):
    """Line breaks of the source must not appear in the help."""
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert not end.value.code
        lines = [line.strip("│").rstrip() for line in capsys.readouterr().out.splitlines()]
        for line, following in itertools.pairwise(lines):
            if following.startswith(10 * " ") and not line.strip().startswith("-"):  # a continuation line
                assert len(line) + 1 + len(following.split()[0]) > 76, (line, following)


def test_an_interrupted_second_split_goes_on(tmp_path, capsys):
    """The image that stopped it is replaced; finished records are not written again."""
    write_folder(tmp_path / "in/train", 6, 3, seed=1)
    files = write_folder(tmp_path / "in/val", 9, 3, seed=2)
    whole = files[4].read_bytes()
    files[4].write_bytes(b"")
    code, out, err = run(capsys, "make-records", tmp_path / "in", tmp_path / "rec")
    assert code == 2 and "train.rec: 6 images" in out and f"{files[4]}: empty" in err
    files[4].write_bytes(whole)
    code, out, _ = run(capsys, "make-records", tmp_path / "in", tmp_path / "rec")
    assert code == 0 and "train.rec" not in out and "val.rec: 9 images" in out
    code, _, err = run(capsys, "make-records", tmp_path / "in", tmp_path / "rec")
    assert code == 2 and "train.rec exists" in err


def test_names_with_markup_and_of_another_encoding(tmp_path, capsys):
    folder = tmp_path / "[/red] 100% ü" / "class [b]"
    write_folder(folder.parent, 2, 1, seed=1)
    (folder.parent / "c00").rename(folder)
    (folder / ":smile:[x].jpg").write_bytes(b"no image")
    code, out, _ = run(capsys, "verify", folder.parent)
    assert code == 1 and f"{folder}/:smile:[x].jpg: not an image, begins with" in out
    os.rename(folder / ":smile:[x].jpg", os.fsencode(folder) + b"/caf\xe9.jpg")
    code, out, err = run(capsys, "make-records", folder.parent, tmp_path / "rec")
    assert code == 2 and ": not an image, begins with" in err
    code, out, err = run(capsys, "verify", folder.parent, "--write-clean")
    assert code == 0 and "2 usable images" in out


def test_what_the_system_refuses_is_one_sentence(tmp_path, capsys):
    path = tmp_path / ("x" * 300)
    code, _, err = run(capsys, "verify", path)
    assert code == 2 and err.startswith(f"error: {path}") and "File name too long; check path" in err
    assert err.count("\n") == 1


@pytest.mark.long
def test_output_that_nobody_reads_to_its_end(tmp_path):
    files = write_folder(tmp_path / "train", 4, 2, seed=1)
    for i in range(600):  # more than a pipe's buffer
        files[0].with_name(f"{i:0200}.jpg").touch()
    command = f"set -o pipefail; '{sys.executable}' -m pipelines verify '{tmp_path}' | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 128 + signal.SIGPIPE
    assert result.stdout.endswith(": empty, holds no bytes\n")
    assert "Error" not in result.stderr and "error:" not in result.stderr


@pytest.mark.long
def test_as_a_program(tmp_path):
    command = [sys.executable, "-m", "pipelines", "verify", str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: data path") and "Traceback" not in result.stderr


def test_bench_and_show_take_what_messages_advise(tmp_path, capsys):
    """Both accept --on-bad-image skip, which the message about an unreadable image advises."""
    for file in write_folder(tmp_path / "data", 8, 2, seed=1)[:1]:
        file.write_bytes(b"no image")
    bench = ("bench", tmp_path / "data", "--seconds", 0.05, "--batch-size", 4, "--image-size", 32)
    code, _, err = run(capsys, *bench)
    assert code == 2 and "go on without them with --on-bad-image skip" in err
    assert run(capsys, *bench, "--on-bad-image", "skip")[0] == 0
    show = ("show", tmp_path / "data", tmp_path / "sheet.png", "--rows", 2, "--columns", 4, "--image-size", 32)
    assert run(capsys, *show)[0] == run(capsys, *show, "--on-bad-image", "skip")[0] == 0
    assert run(capsys, *show, "--on-bad-image", "error")[0] == 2


def test_the_summary_of_verify_tells_usable_images_apart(tmp_path, capsys):
    files = write_folder(tmp_path / "train", 4, 2, seed=1)
    files[0].write_bytes(b"")
    files[1].write_bytes(encode(smooth_image(np.random.default_rng(1), 60, 50).convert("CMYK")))
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert out.endswith(f"{tmp_path / 'train'}: 4 images, 1 unusable: 1 empty; usable, with a finding: 1 CMYK\n")
