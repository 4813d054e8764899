"""The original CIFAR-10 files as a source: pickles and .bin files."""

import pickle
import subprocess

import numpy as np
import pytest

from pipelines import MEAN, STD, DataError, ImageTransform, LoaderConfig, open_loader
from pipelines.__main__ import main
from pipelines.sources import cifar as cifar_source
from pipelines.sources import open_source
from pipelines.sources.cifar import CLASSES


def write(folder, images, labels, kind, name):
    """Write `images` (N, 3, 32, 32) uint8 in the files' format."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "bin":
        rows = [bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(rows))
    else:
        batch = {b"data": images.reshape(len(images), -1), b"labels": labels.tolist(), b"batch_label": b"some batch"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.fixture(params=["bin", "py"])
def cifar(request, tmp_path, rng):
    """A folder with 5 x 3 training images and 4 test images; returns it with its images and labels."""
    folder = tmp_path / f"cifar-10-batches-{request.param}"
    images, labels = rng.integers(0, 256, (19, 3, 32, 32), np.uint8), rng.integers(0, 10, 19)
    for number in range(5):
        part = slice(3 * number, 3 * number + 3)
        write(folder, images[part], labels[part], request.param, f"data_batch_{number + 1}")
    write(folder, images[15:], labels[15:], request.param, "test_batch")
    return folder, images, labels


def test_pixels_and_labels(cifar):
    folder, images, labels = cifar
    for data in (folder, folder.parent):
        source = open_source(data, "train")
        assert len(source) == 15 and source.class_names == list(CLASSES)
        assert [source.label(i) for i in range(15)] == labels[:15].tolist()
    assert "data_batch_3" in source.name(7) and "image 1" in source.name(7)

    loader = open_loader(
        LoaderConfig(data=str(folder), split="val", batch_size=4, image_size=32, num_threads=1,
                     transform=ImageTransform(val_crop_fraction=1.0))
    )
    (batch,) = loader
    np.testing.assert_array_equal(batch.label.asnumpy(), labels[15:])
    pixels = batch.data.asnumpy() * np.float32(STD) + np.float32(MEAN)
    np.testing.assert_allclose(pixels, images[15:].transpose(0, 2, 3, 1), atol=1e-3)  # exact, as no JPEG is involved

    train = open_loader(LoaderConfig(data=str(folder), batch_size=5, image_size=64, num_threads=1))
    assert [batch.data.shape for batch in train] == [(5, 64, 64, 3)] * 3


def test_verify_names_the_folder_of_several_files(cifar, capsys):
    folder, *_ = cifar
    assert main(["verify", str(folder)]) == 0
    train, val = (line for line in capsys.readouterr().out.splitlines() if "images, " in line)
    assert train == f"{folder} (train): 15 images, 0 unusable" and val.startswith(f"{folder}/test_batch")


def one_file(folder):
    return next(iter(sorted(folder.glob("data_batch_2*"))))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.unlink(), "is missing beside CIFAR-10's other files"),
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), "is not a CIFAR-10 file"),
        (lambda file: file.write_bytes(b""), "is not a CIFAR-10 file"),
        (lambda file: file.write_bytes(file.read_bytes()[:40]), "is not a CIFAR-10 file"),
    ],
)
def test_broken_files(cifar, spoil, message):
    folder, *_ = cifar
    spoil(one_file(folder))
    with pytest.raises(DataError, match=message) as error:
        open_source(folder, "train")
    assert "data_batch_2" in str(error.value) and "\n" not in str(error.value)


def test_foreign_labels_are_refused(tmp_path, rng):
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"):
        write(tmp_path, rng.integers(0, 256, (2, 3, 32, 32), np.uint8), np.array([1, 77]), "bin", name)
    with pytest.raises(DataError, match="data_batch_1.bin image 1: label 77 is outside the 10 classes"):
        open_source(tmp_path, "train")


class Harmful:
    def __reduce__(self):
        return subprocess.call, (["touch", "harmed"],)


def test_pickles_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Harmful(), b"labels": []}))
    with pytest.raises(DataError, match=r"it asks for subprocess.call"):
        open_source(tmp_path, "val")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("old, new", [(b"numpy", b"numqy"), (b"_codecs", b"_codexs"), (b"multiarray", b"multiarrax"),
                                      (b"latin1", b"latix1")])
def test_pickles_with_a_changed_letter_get_one_sentence(tmp_path, rng, old, new):
    """Changed letters raise ModuleNotFoundError and LookupError, among others; all become one sentence."""
    images = rng.integers(0, 256, (2, 3, 32, 32), np.uint8)
    write(tmp_path, images, np.array([1, 2]), "py", "test_batch")
    path = tmp_path / "test_batch"
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(DataError, match="test_batch: is not a CIFAR-10 file, a pickle with data and labels"):
        open_source(tmp_path, "val")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_newer_protocols(tmp_path, rng, protocol):
    images = rng.integers(0, 256, (2, 3072), np.uint8)
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": images, b"labels": [1, 2]}, protocol=protocol))
    assert len(open_source(tmp_path, "val")) == 2


def test_a_copy_of_a_batch_is_told(cifar):
    folder, images, labels = cifar
    kind = "bin" if folder.name.endswith("bin") else "py"
    assert not open_source(folder, "train").remarks
    write(folder, images[3:6], labels[3:6], kind, "data_batch_4")
    ending = ".bin" * (kind == "bin")
    assert list(open_source(folder, "train").remarks) == [
        f"{folder}/data_batch_4{ending}: has the same images as data_batch_2{ending}, which come twice (unpack the "
        "archive again)"]


def test_a_binary_file_that_was_cut_between_two_images_is_told(tmp_path, monkeypatch):
    """CIFAR-10's files have 10,000 images each; the user's own batches may differ, and the last one is often
    smaller."""
    row = 3073

    def write_sizes(*sizes, test=1):
        for number, size in enumerate((test, *sizes)):
            name = f"data_batch_{number}.bin" if number else "test_batch.bin"
            (tmp_path / name).write_bytes(b"".join(bytes([0, number, i % 256, *bytes(row - 3)]) for i in range(size)))

    def told(split):
        return [remark.removeprefix(f"{tmp_path}/") for remark in open_source(tmp_path, split).remarks]

    write_sizes(4, 4, 4, 4, 3)
    assert told("train") == told("val") == []
    write_sizes(4, 4, 2, 4, 3)
    sentence = "data_batch_3.bin: has 2 images and not 4, so it may be cut off (unpack the archive again)"
    assert told("train") == [sentence] and told("val") == []
    monkeypatch.setattr(cifar_source, "BATCH_IMAGES", 4)  # as if published so
    assert told("train") == [sentence, sentence.replace("_3.bin: has 2", "_5.bin: has 3")]
    assert told("val") == ["test_batch.bin: has 1 images and not 4, so it may be cut off (unpack the archive again)"]
    (tmp_path / "batches.meta.txt").write_text("own\nclasses\n")
    assert told("train") == [sentence] and told("val") == []
    (tmp_path / "batches.meta.txt").unlink()
    write_sizes(4, 4, 4, 4, 4, test=4)
    assert told("train") == told("val") == []
