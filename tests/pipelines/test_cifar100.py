"""CIFAR-100's files (pickles and .bin), and other data in CIFAR-10's layout."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from image_helpers import encode, smooth_image
from test_cifar import Harmful

from pipelines import MEAN, STD, DataError, ImageTransform, LoaderConfig, open_loader
from pipelines.__main__ import main
from pipelines.sources import has_label_sets, open_source, splits_of
from pipelines.sources.cifar100 import COARSE, FINE

SPLITS = {"train": "train", "test": "val"}


class Made(NamedTuple):
    """The folder of generated files, and their content."""

    folder: Path
    images: np.ndarray  # (N, 3, 32, 32)
    fine: np.ndarray
    coarse: np.ndarray


def write_cifar100(folder: Path, kind: str, name: str, images: np.ndarray, fine: np.ndarray, coarse: np.ndarray
                   ) -> None:
    """Write one split in the format of the archives on CIFAR's page."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "binary":
        rows = [bytes([c, f]) + image.tobytes() for image, f, c in zip(images, fine, coarse, strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(rows))
        for of, names in (("fine", FINE), ("coarse", COARSE)):
            (folder / f"{of}_label_names.txt").write_text("".join(f"{each}\n" for each in names) + "\n")
    else:
        batch = {b"filenames": [b"a.png"] * len(fine), b"batch_label": b"training batch 1 of 1",
                 b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist(),
                 b"data": images.reshape(len(images), -1)}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        meta = {f"{of}_label_names".encode(): [each.encode() for each in names]
                for of, names in (("fine", FINE), ("coarse", COARSE))}
        (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))


def make(folder: Path, kind: str, rng: np.random.Generator, num_train: int = 12, num_val: int = 5) -> Made:
    """Write both splits; the labels include the highest possible ones, and one class has two training images."""
    count = num_train + num_val
    images = rng.integers(0, 256, (count, 3, 32, 32), np.uint8)
    fine, coarse = rng.integers(0, 100, count), rng.integers(0, 20, count)
    fine[[0, 1, -1]], coarse[[0, 1, -1]] = 99, 19
    for name, part in (("train", slice(num_train)), ("test", slice(num_train, None))):
        write_cifar100(folder, kind, name, images[part], fine[part], coarse[part])
    return Made(folder, images, fine, coarse)


@pytest.fixture(params=["binary", "python"])
def cifar100(request: pytest.FixtureRequest, tmp_path: Path, rng: np.random.Generator) -> Made:
    return make(tmp_path / f"cifar-100-{request.param}", request.param, rng)


def labels(data: Path, split: str = "train", **reading: Any) -> list[int]:
    source = open_source(data, split, **reading)
    return [source.label(i) for i in range(len(source))]


def test_pixels_and_both_labels(cifar100):
    folder, images, fine, coarse = cifar100
    for data in (folder, folder.parent):
        assert splits_of(data) == ["train", "val"] and has_label_sets(data)
        for choice in ({}, {"labels": "auto"}, {"labels": "fine"}):
            assert labels(data, **choice) == fine[:12].tolist() and labels(data, "val", **choice) == fine[12:].tolist()
        assert labels(data, labels="coarse") == coarse[:12].tolist()
    source = open_source(folder, "train")
    assert source.class_names == list(FINE) and source.label_set == "fine" and not source.remarks
    source = open_source(folder, "val", labels="coarse")
    assert source.class_names == list(COARSE) and source.label_set == "coarse"
    assert Path(source.name(3).split()[0]).stem == "test" and source.name(3).endswith(" image 3")

    config = LoaderConfig(data=str(folder), split="val", batch_size=5, image_size=32, num_threads=1, labels="coarse",
                          transform=ImageTransform(val_crop_fraction=1.0))
    with open_loader(config) as loader:
        (batch,) = loader
    np.testing.assert_array_equal(batch.label.asnumpy(), coarse[12:])
    pixels = batch.data.asnumpy() * np.float32(STD) + np.float32(MEAN)
    np.testing.assert_allclose(pixels, images[12:].transpose(0, 2, 3, 1), atol=1e-3)


def test_as_a_user_may_have_unpacked_them(cifar100, tmp_path):
    """The files may lie in any folder, and the lists of classes may be missing."""
    folder, _, fine, _ = cifar100
    elsewhere = folder.rename(tmp_path / "elsewhere")
    assert labels(elsewhere) == fine[:12].tolist()
    for name in ("meta", "fine_label_names.txt", "coarse_label_names.txt"):
        (elsewhere / name).unlink(missing_ok=True)
    source = open_source(elsewhere, "train")
    assert source.class_names == list(FINE)
    assert open_source(elsewhere, "train", labels="coarse").class_names == list(COARSE)


def test_keys_that_python_3_wrote(tmp_path, rng):
    images = rng.integers(0, 256, (2, 3072), np.uint8)
    batch = {"data": images, "fine_labels": [3, 4], "coarse_labels": [1, 2]}
    (tmp_path / "train").write_bytes(pickle.dumps(batch))
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"class {i}" for i in range(5)]}))
    source = open_source(tmp_path, "train")
    assert [source.label(0), source.label(1)] == [3, 4] and source.class_names[4] == "class 4"
    with pytest.raises(DataError, match=r"meta: is not a meta of CIFAR-100, a pickle with coarse_label_names"):
        open_source(tmp_path, "train", labels="coarse")


# --- which labels ---


@pytest.mark.parametrize("stored", ["cifar-10", "folders", "a list"])
def test_labels_are_refused_where_there_is_one(tmp_path, stored, capsys, rng):
    if stored == "cifar-10":
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            (tmp_path / f"{name}.bin").write_bytes(bytes(3073) + b"\1" + bytes(3072))
    else:
        for name in "ab":
            (tmp_path / name).mkdir()
            (tmp_path / name / "0.jpg").write_bytes(encode(smooth_image(rng, 32, 32)))
        if stored == "a list":
            (tmp_path / "train.lst").write_text("0\t0\ta/0.jpg\n1\t1\tb/0.jpg\n")
    for choice in ("fine", "coarse"):
        with pytest.raises(DataError, match=f"has one label for each image, and --labels {choice} chooses"):
            open_source(tmp_path, "train", labels=choice)
        assert main(["verify", str(tmp_path), "--labels", choice]) == 2
        assert "has one label for each image" in capsys.readouterr().err
    assert not has_label_sets(tmp_path)


def test_labels_are_refused_for_generated_images():
    with pytest.raises(DataError, match="synthetic: has one label for each image, and --labels fine"):
        open_loader(LoaderConfig(data="synthetic", labels="fine"))
    with pytest.raises(DataError, match="labels is 'rough'; choose 'auto' or 'fine' or 'coarse'"):
        LoaderConfig(data="synthetic", labels="rough")


def test_a_position_is_of_its_labels(cifar100):
    """A saved position is refused with other labels, although both kinds of labels have the same images."""
    config = {"data": str(cifar100.folder), "batch_size": 4, "image_size": 32, "num_threads": 1}
    with open_loader(LoaderConfig(**config, labels="coarse")) as loader:
        state = loader.state()
        assert json.loads(state)["labels"] == "coarse" and loader.config.labels == "coarse"
    with open_loader(LoaderConfig(**config)) as loader:
        assert loader.config.labels == "fine"
        with pytest.raises(DataError, match="belongs to labels coarse, but this loader has fine; resume with .*labels"):
            loader.restore(state)
    with open_loader(LoaderConfig(**config, labels="coarse")) as loader:
        loader.restore(state)


def test_decoded_images_and_parts_know_their_labels(cifar100):
    config = LoaderConfig(data=str(cifar100.folder / ".."), batch_size=4, image_size=32, num_threads=1, cache_gib=None,
                          labels="coarse")
    with open_loader(config) as loader:
        assert loader.config.labels == "coarse" and loader.cache_bytes
    for file in cifar100.folder.glob("test*"):
        file.unlink()
    for split in ("train", "val"):
        part = open_source(cifar100.folder, split, val_split=0.3, labels="coarse")
        assert part.label_set == "coarse" and part.class_names == list(COARSE)


def test_verify_and_show(cifar100, capsys, tmp_path):
    folder = cifar100.folder
    assert main(["verify", str(folder), "--labels", "coarse"]) == 0
    assert "12 images, 0 unusable" in capsys.readouterr().out
    assert main(["show", str(folder), str(tmp_path / "sheet.png"), "--labels", "coarse", "--rows", "1",
                 "--columns", "2", "--image-size", "32"]) == 0
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_a_list_of_classes_beside_them(cifar100):
    path = cifar100.folder / "classes.txt"
    path.write_text("".join(f"my {name}\n" for name in COARSE))
    assert open_source(cifar100.folder, "train", labels="coarse").class_names[0] == "my aquatic_mammals"
    with pytest.raises(DataError, match=r"classes.txt lists 20 classes, and the data have 100 \(apple, .*\); correct "
                                        r"it or remove it, or give --labels coarse if it lists the coarse ones$"):
        open_source(cifar100.folder, "train")


# --- what is damaged, or something else ---


def spoil_meta(made: Made, content: bytes) -> str:
    """Damage the list of the fine classes; returns its name."""
    path = next(file for file in (made.folder / "meta", made.folder / "fine_label_names.txt") if file.exists())
    path.write_bytes(content)
    return path.name


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda content: content[:-5], "is not a CIFAR-100 file"),
    (lambda content: b"", "is not a CIFAR-100 file"),
    (lambda content: content[:40], "is not a CIFAR-100 file"),
    (lambda content: content[:3074] + bytes([0, 100]) + content[3076:] if len(content) % 3074 == 0 else
     content.replace(b"fine_labels", b"fane_labels"), r"bin image 1: label 100 is outside|is not a CIFAR-100 file"),
])
def test_damaged_files(cifar100, spoil, message):
    (file,) = cifar100.folder.glob("train*")
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(DataError, match=message) as error:
        open_source(cifar100.folder, "train")
    assert file.name in str(error.value) and "\n" not in str(error.value)
    assert labels(cifar100.folder, "val") == cifar100.fine[12:].tolist()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x80\x02}q\x00.", b"\xff\xfe\n", b"apple\napple\n"])
def test_damaged_lists_of_classes(cifar100, content):
    name = spoil_meta(cifar100, content)
    with pytest.raises(DataError) as error:
        open_source(cifar100.folder, "train")
    assert name in str(error.value) and "\n" not in str(error.value)


def test_fewer_names_than_labels(cifar100):
    names = FINE[:50]
    spoil_meta(cifar100, pickle.dumps({"fine_label_names": names}) if (cifar100.folder / "meta").exists() else
               "\n".join(names).encode())
    with pytest.raises(DataError, match="label 99 is outside the 50 classes; unpack the archive again, or correct"):
        open_source(cifar100.folder, "train")


def test_pickles_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train", "meta"):
        (tmp_path / name).write_bytes(pickle.dumps({b"data": Harmful(), b"fine_labels": [0],
                                                    b"fine_label_names": Harmful()}))
        with pytest.raises(DataError, match=r"it asks for subprocess.call"):
            open_source(tmp_path, "train")
        (tmp_path / name).write_bytes(pickle.dumps({b"fine_label_names": ["a"]}))
    assert not (tmp_path / "harmed").exists()


def test_labels_that_are_no_whole_numbers(tmp_path, rng):
    """Labels that are not integers are refused instead of being truncated."""
    images = rng.integers(0, 256, (2, 3072), np.uint8)
    (tmp_path / "train").write_bytes(pickle.dumps({"data": images, "fine_labels": [0.5, 1.0]}))
    with pytest.raises(DataError, match="its labels are float64, not whole numbers"):
        open_source(tmp_path, "train")


def test_a_folder_train_is_none_of_them(tmp_path, rng):
    """Neither a folder called train nor an unrelated file of that name is taken for CIFAR-100's train file."""
    for name in ("train/a", "train/b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "0.jpg").write_bytes(encode(smooth_image(rng, 32, 32)))
    (tmp_path / "test").write_text("a list of something")
    (tmp_path / "train.bin").write_bytes(b"tokens of a text")
    assert len(open_source(tmp_path, "train")) == 2 and splits_of(tmp_path) == ["train"]


# --- CIFAR-10 or CIFAR-100 ---


def test_a_binary_file_under_the_name_of_the_other(tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(3073))
    with pytest.raises(DataError, match=r"train.bin: is not a CIFAR-100 file: its 3073 bytes are not a whole number of "
                                        r"images of 3074 bytes; they would fit CIFAR-10's images of 3073 bytes: if "):
        open_source(tmp_path, "train")
    (tmp_path / "train.bin").rename(tmp_path / "test_batch.bin")
    assert len(open_source(tmp_path, "val")) == 1
    (tmp_path / "test_batch.bin").write_bytes(bytes(3074))
    with pytest.raises(DataError, match=r"test_batch.bin: is not a CIFAR-10 file: its 3074 bytes are not a whole "
                                        r"number of images of 3073 bytes; if it is CIFAR-100's, with 3074 bytes an "
                                        r"image, rename it to train.bin or test.bin"):
        open_source(tmp_path, "val")


def test_a_size_that_fits_both(tmp_path):
    """The file may be 3,074 images of CIFAR-10 or 3,073 of CIFAR-100. The name decides, unless a label is
    impossible."""
    path = tmp_path / "train.bin"
    path.write_bytes(bytes(3073 * 3074))
    assert len(open_source(tmp_path, "train")) == 3073
    path.write_bytes((b"\7" + b"\xff" * 3072) * 3074)
    with pytest.raises(DataError, match=r"bytes fit CIFAR-100 and CIFAR-10, but as CIFAR-100 it would "
                                        r"have the invalid fine label 255; if it is a file of CIFAR-10, rename it to "
                                        r"data_batch_1.bin"):
        open_source(tmp_path, "train")


def test_both_in_one_folder(cifar100):
    """CIFAR-10 and CIFAR-100 in one folder, as torchvision downloads them."""
    folder = cifar100.folder.parent
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (batches / f"{name}.bin").write_bytes(bytes(3073) + b"\1" + bytes(3072))
    with pytest.raises(DataError, match=f"holds CIFAR-10 .* and CIFAR-100 .*; give {batches} or {cifar100.folder}$"):
        open_source(folder, "train")
    assert len(open_source(batches, "train")) == 10 and len(open_source(cifar100.folder, "train")) == 12


# --- CIFAR-10's layout with a batches.meta of its own ---


def write_batches(folder: Path, rng: np.random.Generator, count: int, size: int = 3, kind: str = "py",
                  said: str = "", num_labels: int = 3) -> list[int]:
    """Write `count` batches; returns the labels of all images."""
    found: list[int] = []
    for number in range(1, count + 1):
        images, own = rng.integers(0, 256, (size, 3072), np.uint8), rng.integers(0, num_labels, size).tolist()
        found += own
        if kind == "bin":
            rows = [bytes([label]) + image.tobytes() for image, label in zip(images, own, strict=True)]
            (folder / f"data_batch_{number}.bin").write_bytes(b"".join(rows))
        else:
            batch = {b"data": images, b"labels": own} | ({b"batch_label": said.format(number).encode()} if said else {})
            (folder / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=2))
    return found


def write_meta(folder: Path, names: list[str], kind: str = "py", **more: Any) -> None:
    if kind == "bin":
        (folder / "batches.meta.txt").write_text("".join(f"{name}\n" for name in names) + "\n")
    else:
        meta = {b"label_names": [name.encode() for name in names]} | {key.encode(): more[key] for key in more}
        (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))


@pytest.mark.parametrize("kind", ["py", "bin"])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_own_classes_and_any_number_of_batches(tmp_path, rng, kind, count):
    found = write_batches(tmp_path, rng, count, kind=kind)
    write_meta(tmp_path, ["red fox", "wolf", "jackal"], kind)
    source = open_source(tmp_path, "train")
    assert source.class_names == ["red fox", "wolf", "jackal"] and not source.remarks
    assert [source.label(i) for i in range(len(source))] == found and len(found) == 3 * count
    (tmp_path / "classes.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"classes.txt lists 2 classes, and the data have 3 \(red fox, wolf, jackal\); "
                                        "correct it or remove it$"):
        open_source(tmp_path, "train")


def test_what_batches_meta_says_otherwise(tmp_path, rng):
    write_batches(tmp_path, rng, 2)
    write_meta(tmp_path, ["a", "b", "c"], num_cases_per_batch=3, num_vis=3072)
    assert not open_source(tmp_path, "train").remarks
    write_meta(tmp_path, ["a", "b", "c"], num_cases_per_batch=10_000, num_vis=784)
    assert open_source(tmp_path, "train").remarks == [
        f"{tmp_path}/batches.meta: says that an image has 784 values (num_vis), but the images of the batches "
        "have 3,072",
        f"{tmp_path}/batches.meta: says that each batch has 10,000 images (num_cases_per_batch), but data_batch_1 has "
        "3, data_batch_2 has 3; all of them are read"]
    write_meta(tmp_path, ["a"])
    write_batches(tmp_path, rng, 1, size=40)
    with pytest.raises(DataError, match="label [12] is outside the 1 classes"):
        open_source(tmp_path, "train")


def test_batches_that_are_missing(tmp_path, rng):
    write_batches(tmp_path, rng, 4, num_labels=10)
    with pytest.raises(DataError, match="data_batch_5 is missing beside CIFAR-10's other files"):
        open_source(tmp_path, "train")
    write_batches(tmp_path, rng, 4, said="training batch {} of 4")  # their batch labels say that there are four
    assert len(open_source(tmp_path, "train")) == 12
    write_batches(tmp_path, rng, 4, said="training batch {} of 5")
    with pytest.raises(DataError, match="data_batch_1: calls itself 'training batch 1 of 5', but there are 4 batches;"):
        open_source(tmp_path, "train")
    write_batches(tmp_path, rng, 6)
    assert open_source(tmp_path, "train").remarks == [
        f"{tmp_path}: has 6 batches of training images, more than CIFAR-10's 5; all of them are read"]
    (tmp_path / "data_batch_2").unlink()
    with pytest.raises(DataError, match="data_batch_2 is missing"):
        open_source(tmp_path, "train")


@pytest.mark.parametrize(("meta", "problem"), [
    (b"", "is not a batches.meta of CIFAR-10's layout"),
    (pickle.dumps([1, 2]), "is not a batches.meta of CIFAR-10's layout"),
    (pickle.dumps({"names": ["a"]}), "is not a batches.meta of CIFAR-10's layout"),
    (pickle.dumps({"label_names": ["a"], "num_cases_per_batch": "many"}), "is not a batches.meta of CIFAR-10's layout"),
    (pickle.dumps({"label_names": []}), "lists no class"),
    (pickle.dumps({"label_names": ["a", " "]}), "one of its class names is empty"),
    (pickle.dumps({"label_names": ["a", "b", "a"]}), "the class name 'a' occurs twice"),
    (pickle.dumps({"label_names": Harmful()}), "it asks for subprocess.call"),
])
def test_damaged_batches_meta(tmp_path, rng, meta, problem):
    write_batches(tmp_path, rng, 5)
    (tmp_path / "batches.meta").write_bytes(meta)
    with pytest.raises(DataError, match=problem) as error:
        open_source(tmp_path, "train")
    assert str(error.value).startswith(f"{tmp_path}/batches.meta: ") and "\n" not in str(error.value)


def test_a_binary_file_that_was_cut_between_two_images_is_told(tmp_path):
    """The test file has the published size; the training file has lost images."""
    (tmp_path / "test.bin").write_bytes(bytes(10_000 * 3074))
    (tmp_path / "train.bin").write_bytes(bytes(7 * 3074))
    (tmp_path / "fine_label_names.txt").write_text("".join(f"{each}\n" for each in FINE))
    assert not open_source(tmp_path, "val").remarks
    assert list(open_source(tmp_path, "train").remarks) == [
        f"{tmp_path}/train.bin: has 7 images and not 50,000, so it may be cut off (unpack the archive again)"]
