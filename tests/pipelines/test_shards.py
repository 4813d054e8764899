"""WebDataset and TFRecord shards: they give the images and labels of the files that they were made from; and damaged
ones are refused."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_helpers import Images, encode, samples, smooth_image, write_tar
from tfrecord_files import example, write_tfrecord

from pipelines import DataError, LoaderConfig, open_loader
from pipelines.__main__ import main
from pipelines.make_records import tar_kind
from pipelines.sources import ShardSource, open_source
from pipelines.verify import verify_split


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def make_images(rng: np.random.Generator) -> Callable[[int], Images]:
    """Make `count` images of four classes."""
    def make(count: int) -> Images:
        sizes = rng.integers(30, 90, (count, 2))
        return [(encode(smooth_image(rng, int(w), int(h))), i % 4) for i, (w, h) in enumerate(sizes)]

    return make


def content(data: Path, split: str = "train") -> Images:
    source = open_source(data, split)
    return [(source.read(i).tobytes(), source.label(i)) for i in range(len(source))]


# Ways to name shards: paths of two training shards and of one validation shard.
TAR_LAYOUTS = {
    "folders": ("train/000000.tar", "train/000001.tar", "val/000000.tar"),
    "names": ("imagenet1k-train-0000.tar", "imagenet1k-train-0001.tar", "imagenet1k-validation-00.tar"),
}
TFRECORD_LAYOUTS = {
    "TensorFlow": ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"),
    "TFDS": ("i2012-train.tfrecord-00000-of-00002", "i2012-train.tfrecord-00001-of-00002", "i2012-val.tfrecord"),
    "Kaggle": ("ld_train00-1338.tfrec", "ld_train01-1338.tfrec", "ld_val00-669.tfrec"),
    "folders": ("train/00-512x512-798.tfrec", "train/01-512x512-798.tfrec", "val/00-512x512-232.tfrec"),
}


@pytest.mark.parametrize("layout", TAR_LAYOUTS)
@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_shards(make_images, tmp_path, layout, tar_format):
    first, second, val = make_images(5), make_images(4), make_images(3)
    a, b, c = (tmp_path / name for name in TAR_LAYOUTS[layout])
    write_tar(a, samples(first), tar_format)
    write_tar(b, samples(second, 5, folder="deep/" + "x" * 120 + "/"), tar_format)  # a name too long for a plain header
    write_tar(c, samples(val), tar_format)
    assert content(tmp_path) == first + second
    assert content(tmp_path, "val") == val
    assert content(a) == first
    assert open_source(tmp_path, "train").name(2) == f"{a}/0002.jpg"


@pytest.mark.parametrize("layout", TFRECORD_LAYOUTS)
def test_tfrecord_shards(make_images, tmp_path, layout):
    first, second, val = make_images(5), make_images(4), make_images(3)
    a, b, c = (tmp_path / name for name in TFRECORD_LAYOUTS[layout])
    # TensorFlow's ImageNet counts its classes from 1, TFDS from 0.
    keys, base = (("image", "label"), 0) if layout == "TFDS" else (("image/encoded", "image/class/label"), 1)
    write_tfrecord(a, [example(image, label + base, keys) for image, label in first])
    write_tfrecord(b, [example(image, label + base, keys, packed=False) for image, label in second])
    write_tfrecord(c, [example(image, label + base, keys) for image, label in val])
    assert content(tmp_path) == first + second
    assert content(tmp_path, "val") == val
    assert content(c, "val") == val


def test_labels_that_begin_at_0_stay(make_images, tmp_path):
    images = make_images(5)
    write_tfrecord(tmp_path / "train.tfrecord", [example(image, label) for image, label in images])
    assert content(tmp_path) == images


def test_shards_give_the_batches_of_the_files_they_were_made_of(make_images, tmp_path):
    """A batch depends on seed, epoch and number only, not on the storage format."""
    images = make_images(11)
    write_tar(tmp_path / "tar/train-0.tar", samples(images[:6]))
    write_tar(tmp_path / "tar/train-1.tar", samples(images[6:], 6))
    write_tfrecord(tmp_path / "tf/train-00000-of-00001", [example(image, label + 1) for image, label in images])
    (tmp_path / "files").mkdir()
    for i, (image, _) in enumerate(images):
        (tmp_path / f"files/{i}.jpg").write_bytes(image)
    lines = [f"{i}\t{label}\tfiles/{i}.jpg\n" for i, (_, label) in enumerate(images)]
    (tmp_path / "train.lst").write_text("".join(lines))
    found = []
    for data in (tmp_path, tmp_path / "tar", tmp_path / "tf"):
        with open_loader(LoaderConfig(data=str(data), batch_size=3, image_size=24, seed=7)) as loader:
            found.append([(b.data.asnumpy(), b.label.asnumpy()) for _ in range(2) for b in loader])
    for other in found[1:]:
        for (data, label), (other_data, other_label) in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(label, other_label)
            np.testing.assert_array_equal(data, other_data)


def test_the_index_is_made_once_and_anew_when_a_shard_changes(make_images, tmp_path, monkeypatch):
    shard, images = tmp_path / "data/train.tar", make_images(4)
    write_tar(shard, samples(images))
    content(shard.parent)
    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", lambda *_, **__: pytest.fail("the shard is walked through again"))
        assert content(shard.parent) == images
    write_tar(shard, samples(images[:2]))
    os.utime(shard, ns=(1, 1))
    assert content(shard.parent) == images[:2]


@pytest.mark.parametrize("stored", ["tar", "tfrecord"])
@pytest.mark.parametrize("is_told", [True, False])
def test_other_labels_of_the_same_size_and_time(make_images, tmp_path, monkeypatch, stored, is_told):
    """Such files come from rsync -a. If the file system shows no difference, the bytes around the images do."""
    def write(labels: list[int]) -> None:
        if stored == "tar":
            write_tar(shard, samples([(image, label) for (image, _), label in zip(images, labels, strict=True)]))
        else:
            write_tfrecord(shard, [example(image, label, ("image", "label")) for (image, _), label in
                                   zip(images, labels, strict=True)])
        os.utime(shard, ns=(1, 1))

    shard, images = tmp_path / f"data/train.{stored}", make_images(12)
    shard.parent.mkdir()
    if not is_told:
        monkeypatch.setattr(ShardSource, "_key", lambda self: "always the same")
    for labels in ([i % 4 for i in range(12)], [i % 3 for i in range(12)], [0, *(i % 3 for i in range(1, 11)), 1]):
        write(labels)
        source = open_source(shard, "train")
        assert [source.label(i) for i in range(12)] == labels


def test_make_records_and_verify_take_shards(make_images, tmp_path, capsys):
    images = make_images(6)
    images[3] = images[3][0][:100], images[3][1]
    write_tar(tmp_path / "tar/train-0.tar", samples(images))
    report = verify_split(str(tmp_path / "tar"), "train")
    assert [(name, finding.usable) for name, finding in report.findings] == [
        (f"{tmp_path}/tar/train-0.tar/0003.jpg", False)
    ]
    assert main(["verify", str(tmp_path / "tar"), "--write-clean"]) == 2
    assert "--on-bad-image skip" in capsys.readouterr().err
    # Without --resize only a missing image header is noticed; with --resize every image is decoded.
    arguments = ["make-records", str(tmp_path / "tar"), str(tmp_path / "rec"), "--resize", "1000"]
    assert main(arguments) == 2
    assert "train-0.tar/0003.jpg: " in capsys.readouterr().err
    assert main([*arguments, "--on-bad-image", "skip"]) == 0
    assert sorted(content(tmp_path / "rec")) == sorted(images[:3] + images[4:])
    assert main(["make-records", str(tmp_path / "tar/train-0.tar"), str(tmp_path / "one"), *arguments[3:],
                 "--on-bad-image", "skip"]) == 0
    assert (tmp_path / "one/train.rec").read_bytes() == (tmp_path / "rec/train.rec").read_bytes()


def truncated_tar(path: Path, image: bytes) -> str:
    write_tar(path, samples([(image, 0)]))
    path.write_bytes(path.read_bytes()[: 5 * 512 + len(image) // 2])
    return r"is truncated or not a tar file \(unexpected end of data\); download"


def tar_cut_in_a_header(path: Path, image: bytes) -> str:
    write_tar(path, {"a.cls": b"0", "b.cls": b"0"})
    path.write_bytes(path.read_bytes()[: 2 * 512 + 100])
    return r"is truncated or not a tar file"


def no_tar(path: Path, image: bytes) -> str:
    path.write_bytes(image)
    return r"is truncated or not a tar file"


def tar_without_a_label(path: Path, image: bytes) -> str:
    write_tar(path, {"a/1.jpg": image, "a/1.cls": b"0", "a/2.jpg": image})
    return r"sample a/2 has an image but no \.cls with its label"


def tar_without_an_image(path: Path, image: bytes) -> str:
    write_tar(path, {"1.cls": b"0"})
    return r"sample 1 has a label but no image"


def tar_with_a_word_for_a_label(path: Path, image: bytes) -> str:
    write_tar(path, {"1.cls": b"hen", "1.jpg": image})
    return r"/1\.cls: holds b'hen', not a class number"


def tar_with_a_huge_label(path: Path, image: bytes) -> str:
    write_tar(path, {"1.cls": b"5000000000", "1.jpg": image})
    return r"/1\.cls: label 5000000000 is not a class number \(0 to 999,999\); correct it"


def tar_with_a_sample_twice(path: Path, image: bytes) -> str:
    write_tar(path, samples([(image, 0), (image, 1)]))
    with tarfile.open(path, "a") as tar:
        tar.addfile(tarfile.TarInfo("0001.cls"))
    return r"sample 0001 has two labels; write"


def tar_with_two_images_of_a_sample(path: Path, image: bytes) -> str:
    write_tar(path, {"1.cls": b"0", "1.jpg": image, "1.png": image})
    return r"sample 1 has two images; write"


def tar_without_samples(path: Path, image: bytes) -> str:
    write_tar(path, {"readme.txt": b"x"})
    return r"hold no image"


def tar_of_tars(path: Path, image: bytes) -> str:
    write_tar(path, {"n01440764.tar": b"x"})
    return r"holds tar files, as ILSVRC2012_img_train\.tar does"


def truncated_tfrecord(path: Path, image: bytes) -> str:
    write_tfrecord(path, [example(image, 0), example(image, 1)])
    path.write_bytes(path.read_bytes()[:-100])
    return r"is truncated or not a TFRecord file \(the record at byte \d+ goes beyond its \d+ bytes\); download"


def tfrecord_cut_in_a_length(path: Path, image: bytes) -> str:
    write_tfrecord(path, [example(image, 0)])
    path.write_bytes(path.read_bytes() + b"abc")
    return r"is truncated or not a TFRecord file"


def empty_tfrecord(path: Path, image: bytes) -> str:
    path.write_bytes(b"")
    return r"is empty; write it anew"


def compressed_tfrecord(path: Path, image: bytes) -> str:
    path.write_bytes(gzip.compress(example(image, 0)))
    return r"is compressed with gzip"


def foreign_features(path: Path, image: bytes) -> str:
    write_tfrecord(path, [example(image, 0, ("picture", "kind"))])
    return r"has the features image/class/text, image/object/bbox/xmin, kind, picture; it needs an image .* or image,"


def label_of_another_type(path: Path, image: bytes) -> str:
    write_tfrecord(path, [example(image, 0).replace(b"image/class/text", b"image/class/labe_").replace(
        b"image/class/label", b"image/class/texts").replace(b"image/class/labe_", b"image/class/text")])
    return r"a class number \(int64\) as image/class/label or label"


def no_label(path: Path, image: bytes) -> str:
    write_tfrecord(path, [example(image, -1, ("image", "label"))])
    return r"has the label -1"


def huge_label(path: Path, image: bytes) -> str:
    write_tfrecord(path, [example(image, 1, ("image", "label")), example(image, 10**12, ("image", "label"))])
    return r"the record at byte \d{3,}: label 1000000000000 is not a class number \(0 to 999,999\); correct it"


def no_example(path: Path, image: bytes) -> str:
    write_tfrecord(path, [b"\xff" * 40])
    return r"the record at byte 0 holds no tf\.train\.Example"



TAR_MISTAKES = [truncated_tar, tar_cut_in_a_header, no_tar, tar_without_a_label, tar_without_an_image,
                tar_with_a_word_for_a_label, tar_with_a_huge_label, tar_with_a_sample_twice,
                tar_with_two_images_of_a_sample, tar_without_samples, tar_of_tars]
TFRECORD_MISTAKES = [truncated_tfrecord, tfrecord_cut_in_a_length, empty_tfrecord, compressed_tfrecord,
                     foreign_features, label_of_another_type, no_label, huge_label, no_example]


@pytest.mark.parametrize("mistake", TAR_MISTAKES + TFRECORD_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_get_one_sentence(make_images, tmp_path, mistake):
    path = tmp_path / ("train-0.tar" if mistake in TAR_MISTAKES else "train-00000-of-00001")
    message = mistake(path, make_images(1)[0][0])
    with pytest.raises(DataError, match=message) as caught:
        open_source(tmp_path, "train")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_compressed_tar(tmp_path):
    """A compressed tar file is recognised under any name."""
    for name, compressed in (("train-0.tar.gz", gzip.compress(b"x")), ("train-0.tar", gzip.compress(b"x")),
                             ("train-0.tar", bz2.compress(b"x")), ("train-0.tar", lzma.compress(b"x"))):
        path = tmp_path / name
        path.write_bytes(compressed)
        with pytest.raises(DataError, match=rf"{name}: is compressed with (gzip|bzip2|xz), but images"):
            open_source(path, "train")
        with pytest.raises(DataError, match=rf"{name}: is compressed with (gzip|bzip2|xz), but images"):
            tar_kind(path)
        path.unlink()
    (tmp_path / "train-0.tar.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(DataError, match=r"train-0\.tar\.gz: is compressed with gzip, but images"):
        open_source(tmp_path, "train")


def test_a_tar_whose_first_name_begins_as_a_compressed_file_does(make_images, tmp_path):
    images = make_images(2)
    write_tar(tmp_path / "train.tar", {f"BZh{name}": content for name, content in samples(images).items()})
    assert len(open_source(tmp_path / "train.tar", "train")) == 2


def test_label_outside_the_classes(make_images, tmp_path):
    write_tar(tmp_path / "train.tar", samples(make_images(3)))
    (tmp_path / "classes.txt").write_text("a\nb\n")
    source = open_source(tmp_path, "train")
    assert source.class_names == ["a", "b"] and source.label(1) == 1
    with pytest.raises(DataError, match=r"train\.tar/0002\.jpg: label 2 is outside the 2 classes \(0 to 1\)"):
        source.label(2)


@pytest.mark.parametrize("name", ["train-%05d-of-00003", "a-train.tfrecord-%05d-of-00003", "train-%05d-of-00003.tar"])
def test_missing_shards_are_named(make_images, tmp_path, name):
    """Shards may count from 0 or from 1; a single given shard is read alone."""
    def write(folder: str, number: int, images: Images) -> None:
        path = tmp_path / folder / (name % number)
        if path.suffix == ".tar":
            write_tar(path, samples(images))
        else:
            write_tfrecord(path, [example(image, label, ("image", "label")) for image, label in images])

    images = make_images(5)
    write("some", 1, images)
    missing = (f"{tmp_path}/some: {name % 0}, {name % 2} should be there by the numbers in the names of the other "
               "shards; add")
    with pytest.raises(DataError, match=re.escape(missing)):
        open_source(tmp_path / "some", "train")
    assert content(tmp_path / "some" / (name % 1)) == images
    for first in (0, 1):
        for number in range(first, first + 3):
            write(str(first), number, images)
        assert content(tmp_path / str(first)) == 3 * images


def test_missing_shards_of_the_other_split_do_not_matter(make_images, tmp_path):
    images = make_images(3)
    write_tar(tmp_path / "train-00000-of-00001.tar", samples(images))
    write_tar(tmp_path / "val-00000-of-00002.tar", samples(images))
    assert content(tmp_path) == images
    with pytest.raises(DataError, match=r"val-00001-of-00002\.tar should be there by the numbers"):
        open_source(tmp_path, "val")


def test_verify_names_the_folder_of_several_shards(make_images, tmp_path, capsys):
    for i, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001")):
        write_tfrecord(tmp_path / name, [example(image, label + 1) for image, label in make_images(3 + i)])
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}: labels (image/class/label) count from 1 (--first-label)",
        f"{tmp_path} (train): 7 images, 0 unusable", f"{tmp_path}/validation-00000-of-00001: 5 images, 0 unusable"]


@pytest.mark.parametrize("names", [("train-data-train-000", "train-data-val-000"), ("my_val_train-0", "my_val_val-0")])
def test_a_shard_whose_name_holds_several_splits_is_refused(tmp_path, names):
    """Formerly such a shard was read in training and in validation."""
    for number, name in enumerate(names):
        write_tar(tmp_path / f"{name}.tar", samples([(encode(smooth_image(np.random.default_rng(number), 40, 30)), 0)]))
    for split in ("train", "val"):
        with pytest.raises(DataError, match=rf"{names[0]}|{names[1]}.*holds the words of several splits") as error:
            open_source(tmp_path, split)
        assert f"move the shards into {tmp_path}/train" in str(error.value)


@pytest.mark.parametrize("train, other", [("TRAIN-000", "VAL-000"), ("training-000", "testing-000")])
def test_splits_in_capitals_and_training_are_known(tmp_path, train, other):
    """Formerly all shards were read in training if no name had the word in small letters."""
    for number, name in enumerate((train, other)):
        write_tar(tmp_path / f"{name}.tar", samples([(encode(smooth_image(np.random.default_rng(number), 40, 30)), 0)]))
    source = open_source(tmp_path, "train")
    assert len(source) == 1 and train in source.name(0)


@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_a_copy_of_a_shard_is_told(make_images, tmp_path, kind):
    images, others = make_images(5), make_images(5)
    for name, those in ((f"train-0.{kind}", images), (f"train-0 (1).{kind}", images), (f"train-1.{kind}", others)):
        if kind == "tar":
            write_tar(tmp_path / name, samples(those))
        else:
            write_tfrecord(tmp_path / name, [example(image, label, ("image", "label")) for image, label in those])
    told = [remark for remark in open_source(tmp_path, "train").remarks if "twice" in remark]
    assert told == [f"{tmp_path}/train-0.{kind}: has the same images as train-0 (1).{kind}, which come twice (remove "
                    "one of them)"]


@pytest.mark.parametrize("left_out", ["train-1.tar.part", "train-1.tar.crdownload", "train-1.tar.tmp.gz",
                                      "train-1.tfrecord.gz"])
def test_shards_that_are_no_whole_files_are_told(make_images, tmp_path, left_out):
    write_tar(tmp_path / "train-0.tar", samples(make_images(4)))
    write_tar(tmp_path / left_out, samples(make_images(4)))
    (remark,) = open_source(tmp_path, "train").remarks
    assert remark.endswith(f"belong to no split and are not read: {left_out}")


def test_endings_of_shards_in_capitals(make_images, tmp_path):
    write_tar(tmp_path / "train-0.tar", samples(make_images(4)))
    write_tar(tmp_path / "train-1.TAR", samples(make_images(3), 4))
    assert len(open_source(tmp_path, "train")) == 7
