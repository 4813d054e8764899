"""Writing RecordIO from folders and from tar files like ILSVRC2012's, with and without interruptions."""

import errno
import fcntl
import io
import os
import tarfile

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_folder
from PIL import Image

from common.mxnet_compat import mx
from pipelines import DataError, files, make_records
from pipelines.make_records import Options, plan_files, plan_train_tar, plan_val_tar, write_records
from pipelines.sources import open_source

SYNSETS = ["n01440764", "n01443537", "n02084071"]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            add(tar, name, content)
    return buffer.getvalue()


@pytest.fixture
def tars(tmp_path):
    """A training and a validation tar like ILSVRC2012's, and their content: name -> bytes."""
    rng = np.random.default_rng(3)

    def picture():
        return encode(smooth_image(rng, *map(int, rng.integers(30, 90, 2))))

    train = {synset: {f"{synset}_{i}.JPEG": picture() for i in range(4)} for synset in SYNSETS}
    val = {f"ILSVRC2012_val_{i + 1:08}.JPEG": picture() for i in range(5)}
    (tmp_path / "train.tar").write_bytes(tar_of({f"{synset}.tar": tar_of(train[synset]) for synset in SYNSETS[::-1]}))
    (tmp_path / "val.tar").write_bytes(tar_of(val))
    return tmp_path, train, val


def contents(path):
    """{image bytes: label} of a .rec file, and its number of records."""
    source = open_source(path, "train")
    return {source.read(i).tobytes(): source.label(i) for i in range(len(source))}, len(source)


def test_train_tar(tars):
    folder, train, _ = tars
    plan = plan_train_tar(folder / "train.tar", [])
    assert plan.classes == [(synset, synset) for synset in SYNSETS]
    assert write_records(plan, folder / "out", "train", Options()) == (12, [])
    expected = {image: label for label, synset in enumerate(SYNSETS) for image in train[synset].values()}
    assert contents(folder / "out/train.rec") == (expected, 12)
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["classes.txt", "train.idx", "train.rec"]
    with pytest.raises(DataError, match=r"train\.rec exists; remove it"):
        write_records(plan, folder / "out", "train", Options())
    with pytest.raises(DataError, match="synset n01440764 is not among the 1 classes"):
        plan_train_tar(folder / "train.tar", [(SYNSETS[1], "goldfish")])


LABELS = [2, 0, 1, 1, 2]
NAMES = [f"ILSVRC2012_val_{i + 1:08}" for i in range(5)]


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"{SYNSETS[label]}\n" for label in LABELS),
        "".join(f"{name}.JPEG {label}\n" for name, label in zip(NAMES, LABELS, strict=True)),
        "ImageId,PredictionString\n"
        + "".join(f"{NAMES[i]},{SYNSETS[LABELS[i]]} 1 2 3 4\n" for i in (4, 2, 0, 1, 3)),
    ],
    ids=["synsets", "name and number", "Kaggle"],
)
def test_val_tar(tars, text):
    folder, _, val = tars
    (folder / "labels.txt").write_text(text)
    classes = [(synset, synset) for synset in SYNSETS]
    write_records(plan_val_tar(folder / "val.tar", folder / "labels.txt", classes), folder / "out", "val", Options())
    assert contents(folder / "out/val.rec")[0] == dict(zip(val.values(), LABELS, strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("490\n361\n171\n822\n297\n", "bare numbers are ILSVRC2012 ids"),
        ("n01440764\n", "has 1 labels for 5 images"),
        ("n01440764\n" * 4 + "n99999999\n", "label n99999999 of ILSVRC2012_val_00000005.JPEG is outside the 3 classes"),
        (f"{NAMES[0]}.JPEG 1\n", f"has no label for {NAMES[1]}.JPEG and 3 others"),
        (f"{NAMES[0]}.JPEG 3\n", "label 3 of .* is outside the 3 classes"),
        (f"{NAMES[0]}.JPEG 1\nn01440764\n", "'n01440764' has no label in its line"),
    ],
)
def test_wrong_labels(tars, text, message):
    folder, _, _ = tars
    (folder / "labels.txt").write_text(text)
    classes = [(synset, synset) for synset in SYNSETS]
    with pytest.raises(DataError, match=message):
        plan_val_tar(folder / "val.tar", folder / "labels.txt", classes)
    with pytest.raises(DataError, match="give a file of labels with --labels"):
        plan_val_tar(folder / "val.tar", None, classes)
    with pytest.raises(DataError, match="the order of the classes is not known"):
        plan_val_tar(folder / "val.tar", folder / "labels.txt", [])
    (folder / "labels.txt").unlink()
    with pytest.raises(DataError, match=r"labels\.txt: cannot be read \(No such file"):
        plan_val_tar(folder / "val.tar", folder / "labels.txt", classes)


@pytest.mark.parametrize("in_header", [False, True])
def test_tar_that_is_cut_off(tars, in_header):
    folder, _, _ = tars
    (folder / "labels.txt").write_text(f"{SYNSETS[0]}\n" * 5)
    classes = [(synset, synset) for synset in SYNSETS]
    plans = {"train": plan_train_tar, "val": lambda path, classes: plan_val_tar(path, folder / "labels.txt", classes)}
    for name, plan in plans.items():
        path = folder / f"{name}.tar"
        with tarfile.open(path) as tar:
            last = tar.getmembers()[-1]
        path.write_bytes(path.read_bytes()[: last.offset + 100 if in_header else last.offset_data + last.size // 2])
        with pytest.raises(DataError, match=rf"{name}\.tar: not a tar file that can be read .*; download it again"):
            plan(path, classes)


@pytest.mark.parametrize("stop", [0, 1, 7, 29])
def test_interrupted_work_goes_on_to_equal_files(tmp_path, monkeypatch, stop):
    write_folder(tmp_path / "images", 30, 3, seed=stop)
    plan = plan_files(tmp_path / "images", "train")
    write_records(plan, tmp_path / "whole", "train", Options(seed=4))

    monkeypatch.setattr(make_records, "_COMMIT_EVERY", 4)
    read, calls = make_records._read, []

    def read_until(entry, options):
        calls.append(entry)
        if len(calls) > stop:
            raise KeyboardInterrupt
        return read(entry, options)

    monkeypatch.setattr(make_records, "_read", read_until)
    options = Options(seed=4, num_threads=1)
    with pytest.raises(KeyboardInterrupt):
        write_records(plan, tmp_path / "parts", "train", options)
    assert not (tmp_path / "parts/train.rec").exists()
    # Simulate a machine that stopped in the middle of both writes.
    with (tmp_path / "parts/.train.rec.partial").open("ab") as file:
        file.write(b"torn")
    with (tmp_path / "parts/.train.journal").open("a") as file:
        file.write("999 99")
    calls.clear()
    monkeypatch.setattr(make_records, "_read", lambda entry, options: calls.append(entry) or read(entry, options))
    with pytest.raises(DataError, match="interrupted conversion with other images or options"):
        write_records(plan, tmp_path / "parts", "train", Options(seed=5))
    assert write_records(plan, tmp_path / "parts", "train", options)[0] == 30
    assert len(calls) == 30 - stop  # nothing was done twice
    for name in ("train.rec", "train.idx", "classes.txt"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(list((tmp_path / "parts").iterdir())) == 3


def test_resize(tmp_path):
    rng = np.random.default_rng(0)
    originals = {}
    for i, (width, height) in enumerate([(120, 90), (64, 200), (30, 41), (48, 48), (47, 300)]):
        image = smooth_image(rng, width, height)
        path = tmp_path / "images" / "c" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        originals[width, height] = np.asarray(image, np.float32)
    write_records(plan_files(tmp_path / "images", "train"), tmp_path / "out", "train", Options(resize=48, quality=95))
    expected = {(64, 48): (120, 90), (48, 150): (64, 200), (30, 41): (30, 41), (48, 48): (48, 48), (47, 300): (47, 300)}
    images, _ = contents(tmp_path / "out/train.rec")
    for encoded in images:
        with Image.open(io.BytesIO(encoded)) as image:
            width, height = expected.pop(image.size)
            shrunk = image.size != (width, height)
            assert image.format == ("JPEG" if shrunk else "PNG")
            back = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), np.float32)
        assert np.abs(back - originals[width, height]).mean() < (4 if shrunk else 1e-6)
    assert not expected


@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "PPM"])
def test_resize_of_sixteen_bits(tmp_path, image_format, rng):
    image = smooth_image(rng, 90, 60).convert("L")
    (tmp_path / "images/c").mkdir(parents=True)
    wide = Image.fromarray(np.asarray(image, np.uint16) * 257)
    (tmp_path / "images/c/a.png").write_bytes(encode(wide, image_format))
    write_records(plan_files(tmp_path / "images", "train"), tmp_path / "out", "train", Options(resize=30))
    (encoded,) = contents(tmp_path / "out/train.rec")[0]
    with Image.open(io.BytesIO(encoded)) as shrunk:
        expected = np.asarray(image.resize((45, 30), Image.Resampling.LANCZOS), np.float32)
        assert np.abs(np.asarray(shrunk.convert("L"), np.float32) - expected).mean() < 3  # a JPEG's loss, and rounding


def test_bad_images(tmp_path):
    files = write_folder(tmp_path / "images", 9, 3, seed=1)
    files[4].write_bytes(b"")
    files[6].write_bytes(files[6].read_bytes()[:-100])
    plan = plan_files(tmp_path / "images", "train")
    with pytest.raises(DataError, match=r"empty, holds no bytes; replace it"):
        write_records(plan, tmp_path / "out", "train", Options())
    # Copying reads only the headers; shrinking decodes the images, which also finds the truncated one.
    count, skipped = write_records(plan, tmp_path / "out", "train", Options(skip_bad=True))
    assert (count, [name for name, _ in skipped]) == (8, [str(files[4])])
    count, skipped = write_records(plan, tmp_path / "small", "train", Options(resize=32, skip_bad=True))
    assert (count, sorted(name for name, _ in skipped)) == (7, sorted([str(files[4]), str(files[6])]))
    assert len(open_source(tmp_path / "out", "train")) == 8


def test_two_at_once_are_refused(tmp_path):
    write_folder(tmp_path / "images", 4, 2, seed=1)
    plan = plan_files(tmp_path / "images", "train")
    (tmp_path / "out").mkdir()
    with (tmp_path / "out/.train.rec.partial").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"train\.rec\.partial: another process is writing this file"):
            write_records(plan, tmp_path / "out", "train", Options())
    assert write_records(plan, tmp_path / "out", "train", Options()) == (4, [])


@pytest.mark.parametrize("function", ["flock", "new_record_path"])
def test_a_lock_that_comes_late_spares_the_finished_file(tmp_path, monkeypatch, function):
    """The other process finishes after this one has opened the unfinished file but before it locks it, or even
    earlier."""
    write_folder(tmp_path / "images", 4, 2, seed=1)
    plan = plan_files(tmp_path / "images", "train")
    module = fcntl if function == "flock" else make_records
    original = getattr(module, function)

    def other_is_faster(*arguments):
        found = original(*arguments) if function == "new_record_path" else None
        monkeypatch.setattr(module, function, original)
        assert write_records(plan, tmp_path / "out", "train", Options()) == (4, [])
        return found or original(*arguments)

    monkeypatch.setattr(module, function, other_is_faster)
    with pytest.raises(DataError, match=r"train\.rec: another process has just written this file; use it"):
        write_records(plan, tmp_path / "out", "train", Options())
    assert len(open_source(tmp_path / "out", "train")) == 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["classes.txt", "train.idx", "train.rec"]


def test_a_journal_does_not_outlive_its_records(tmp_path, monkeypatch):
    """If the journal survived a conversion that finished at the last moment, the next conversion would begin with
    zeros."""
    images = {file.read_bytes() for file in write_folder(tmp_path / "images", 4, 2, seed=1)}
    plan = plan_files(tmp_path / "images", "train")
    replace = os.replace

    def replace_and_stop(source, target):
        replace(source, target)
        if str(target).endswith("train.rec"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_and_stop)
        with pytest.raises(KeyboardInterrupt):
            write_records(plan, tmp_path / "out", "train", Options())
    (tmp_path / "out/train.rec").unlink()
    assert write_records(plan, tmp_path / "out", "train", Options()) == (4, [])
    assert contents(tmp_path / "out/train.rec")[0].keys() == images


@pytest.mark.parametrize("name, damage, message", [
    (".train.rec.partial", lambda file: file.unlink(), r"partial: has 0 of the [\d,]+ bytes that were written"),
    (".train.rec.partial", lambda file: os.truncate(file, 7), r"partial: has 7 of the [\d,]+ bytes that were"),
    (".train.journal", lambda file: file.write_bytes(b"\xff"), r"journal: belongs to an interrupted conversion with"),
    (".train.journal", lambda file: file.open("a").write("7 x\n"), r"journal: line '7 x\\n' is not `key offset end`"),
    ("classes.txt", lambda file: file.write_bytes(b"caf\xe9\n"), r"classes\.txt: lists other classes than those of"),
])
def test_unfinished_work_that_is_damaged_is_not_gone_on_with(tmp_path, name, damage, message):
    """Bytes missing from the records would otherwise become zeros."""
    images = write_folder(tmp_path / "images", 9, 3, seed=1)
    images[np.random.default_rng(0).permutation(9)[-1]].write_bytes(b"none")  # the last one to be written
    plan = plan_files(tmp_path / "images", "train")
    with pytest.raises(DataError, match="not an image"):
        write_records(plan, tmp_path / "out", "train", Options())
    damage(tmp_path / "out" / name)
    with pytest.raises(DataError, match=message):
        write_records(plan, tmp_path / "out", "train", Options(skip_bad=True))
    assert not (tmp_path / "out" / "train.rec").exists()


@pytest.mark.parametrize("name", ["classes.txt", ".train.journal", ".train.rec.partial"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, name):
    """The disk is full when `name` is written; once there is space, the same command resumes."""
    write_folder(tmp_path / "images", 9, 3, seed=1)
    plan = plan_files(tmp_path / "images", "train")
    write_bytes, append = files.write_bytes, make_records._Journal.append

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if name == ".train.rec.partial":
            patch.setattr(make_records._Journal, "append", lambda *a: full() if a[1] == 5 else append(*a))
        else:
            patch.setattr(files, "write_bytes", lambda *a: full() if a[0].name == name else write_bytes(*a))
        with pytest.raises(DataError, match="out: cannot be written .No space left on device.; fix that, then"):
            write_records(plan, tmp_path / "out", "train", Options())
    assert not (tmp_path / "out/train.rec").exists()
    assert write_records(plan, tmp_path / "out", "train", Options()) == (9, [])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["classes.txt", "train.idx", "train.rec"]


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    files.write_text(tmp_path / "a.txt", "before")

    def cut_off(path, content):
        path.open("wb").write(content[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(tmp_path), "write_bytes", cut_off)
    with pytest.raises(OSError, match="No space"):
        files.write_text(tmp_path / "a.txt", "afterwards")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "before")]


def test_other_classes_are_not_mixed_in(tmp_path):
    write_folder(tmp_path / "a", 4, 2, seed=1)
    write_folder(tmp_path / "b", 4, 4, seed=1)
    write_records(plan_files(tmp_path / "a", "train"), tmp_path / "out", "train", Options())
    with pytest.raises(DataError, match=r"classes\.txt: lists other classes"):
        write_records(plan_files(tmp_path / "b", "train"), tmp_path / "out", "val", Options())


@pytest.mark.parametrize("name", ["two\nlines", "a\ttab", " blank", "blank "])
def test_a_class_that_a_line_cannot_hold_is_refused(tmp_path, name):
    """If the class were accepted, its records would have other classes than their folders."""
    write_folder(tmp_path / "data" / "train", 4, 2, seed=1)
    (tmp_path / "data" / "train" / "c01").rename(tmp_path / "data" / "train" / name)
    with pytest.raises(DataError, match=r"classes\.txt: cannot hold the class name") as error:
        write_records(plan_files(tmp_path / "data", "train"), tmp_path / "out", "train", Options())
    assert repr(name) in str(error.value) and "\n" not in str(error.value)
    assert os.listdir(tmp_path / "out") == []


def test_a_class_name_with_a_line_separator_stays_one_line(tmp_path):
    """U+2028 ends a line for Python, but not for an editor."""
    write_folder(tmp_path / "data" / "train", 4, 2, seed=1)
    (tmp_path / "data" / "train" / "c00").rename(tmp_path / "data" / "train" / "a\u2028b")
    write_records(plan_files(tmp_path / "data", "train"), tmp_path / "out", "train", Options())
    assert open_source(tmp_path / "out", "train").class_names == ["a\u2028b", "c01"]


def test_mxnet_reads_the_file(tmp_path):
    write_folder(tmp_path / "images", 8, 4, seed=9)
    write_records(plan_files(tmp_path / "images", "train"), tmp_path / "out", "train", Options())
    source = open_source(tmp_path / "out", "train")
    iterator = mx.io.ImageRecordIter(
        path_imgrec=str(tmp_path / "out/train.rec"),
        path_imgidx=str(tmp_path / "out/train.idx"),
        data_shape=(3, 24, 24),
        batch_size=8,
        resize=24,
        preprocess_threads=1,
    )
    labels = iterator.next().label[0].asnumpy().astype(int).tolist()
    assert labels == [source.label(i) for i in range(8)]


def test_records_are_not_converted_again(tmp_path):
    write_folder(tmp_path / "images", 4, 2, seed=1)
    write_records(plan_files(tmp_path / "images", "train"), tmp_path / "out", "train", Options())
    with pytest.raises(DataError, match=r"train\.rec: RecordIO .* no conversion; give class folders"):
        plan_files(tmp_path / "out", "train")
