"""Folders and shards that are splits by their names, in any spelling, and those that are classes."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from image_helpers import encode, samples, smooth_image, write_tar

from pipelines import DataError
from pipelines.__main__ import main
from pipelines.sources import open_source, splits_of
from pipelines.sources.split_names import is_whole, split_of

_NUMBER = itertools.count()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))


def images(data: Path, *folders: str) -> Path:
    """Write two images into each folder; returns the data path."""
    rng = np.random.default_rng(1)
    for folder in folders:
        (data / folder).mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            (data / folder / f"{next(_NUMBER)}.jpg").write_bytes(encode(smooth_image(rng, 20, 20)))
    return data


def below(*splits: str) -> list[str]:
    return [f"{split}/{name}" for split in splits for name in ("cat", "dog")]


@pytest.mark.parametrize("name, split", [
    ("train", "train"), ("Train", "train"), ("TRAINING", "train"), ("seg_train", "train"), ("train_images", "train"),
    ("train-2", "train"), ("pets.train", "train"), ("my train", "train"), ("train2017", "train"), ("val2017", "val"),
    ("Valid", "val"), ("validation", "val"), ("dev", "val"), ("eval_set", "val"), ("test1", "test"),
    ("Testing", "test"), ("trainer", ""), ("value", ""), ("contest", ""), ("train_val", ""), ("cat", ""),
    ("strain", ""), ("train_labels", ""), ("TrainImages", "train"), ("trainA", "train"), ("imagesVal", "val"),
    ("TRAINED", ""), ("McTrainer", ""),
])
def test_what_a_name_says(name, split):
    assert split_of(name) == split


def test_a_name_that_is_only_a_split():
    assert all(map(is_whole, ("Train", "val2017", "test-1", "DEV")))
    assert not any(map(is_whole, ("seg_train", "cat", "")))


@pytest.mark.parametrize("train, val, others", [
    ("Train", "Valid", ["labels"]), ("training", "validation", []), ("TRAIN", "VAL", ["test"]), ("train", "dev", []),
    ("seg_train", "seg_val", ["seg_pred", "seg_test"]), ("train2017", "val2017", []), ("Train", "Val", ["raw"]),
])
def test_splits_in_any_spelling(tmp_path, capsys, train, val, others):
    data = images(tmp_path / "data", *below(train, val), f"{train}/bird", *others)
    for split, count in (("train", 6), ("val", 4)):
        source = open_source(data, split)
        assert source.class_names == ["bird", "cat", "dog"] and len(source) == count
    assert [open_source(data, "val").label(i) for i in range(4)] == [1, 1, 2, 2]
    spelled = [f"{name} is read as {split}" for name, split in ((train, "train"), (val, "val")) if name != split]
    said, *left = open_source(data, "train").remarks
    assert said == f"{data}: by the names of its folders, {' and '.join(spelled)}"
    assert [remark.rpartition(": ")[2] for remark in left] == [", ".join(others)] * bool(others)
    assert splits_of(data) == ["train", "val"]
    (data / "classes.txt").write_text("dog\ncat\nbird\n")
    assert [open_source(data, split).class_names for split in ("train", "val")] == [["dog", "cat", "bird"]] * 2
    assert main(["verify", str(data)]) == 0 and said in capsys.readouterr().out
    assert main(["verify", str(data), "--write-clean"]) == 0
    assert len(open_source(data, "train")) == 6 and open_source(data, "train").path.parent == data


def test_splits_in_folders_of_their_own_names(tmp_path):
    """Kaggle's archives of Intel's images: seg_train/seg_train/CLASS, seg_test/seg_test/CLASS, seg_pred/seg_pred."""
    data = images(tmp_path / "data", *below("seg_train/seg_train", "seg_test/seg_test"), "seg_pred/seg_pred")
    source = open_source(data, "train")
    assert source.class_names == ["cat", "dog"] and len(source) == 4
    assert list(source.remarks) == [
        f"{data}: by the names of its folders, seg_train/seg_train is read as train",
        f"{data}: 2 of its shards, records, lists and folders of images belong to no split and are not read: seg_pred, "
        "seg_test"]
    with pytest.raises(DataError, match="has train but no val; .*, rename seg_test to val to validate with its images, "
                                        "set part of the training images aside"):
        open_source(data, "val")
    (data / "seg_test").rename(data / "val")  # the way out
    (data / "val/seg_test").rename(data / "val/val")
    (data / "classes.txt").write_text("dog\ncat\n")
    for split in ("train", "val"):
        assert open_source(data, split).class_names == ["dog", "cat"] and len(open_source(data, split)) == 4


def test_splits_without_class_folders_are_no_classes(tmp_path):
    data = images(tmp_path / "data", "train_images", "test_images")
    with pytest.raises(DataError, match="data/train_images holds only files, no class folders; put the images of each "
                                        "class into a folder of its own, or, if train_images is a class, list all "):
        open_source(data, "train")
    (data / "classes.txt").write_text("test_images\ntrain_images\n")  # the second way out
    assert open_source(data, "train").class_names == ["test_images", "train_images"]


def test_files_of_data_beside_class_folders_are_told(tmp_path):
    """A list that is not called val.lst is not read, and a remark says so; the class folders serve both splits."""
    data = images(tmp_path / "data", "cat", "dog")
    (data / "valid.lst").write_text("")
    assert list(open_source(data, "train").remarks) == [
        f"{data}: 1 of its shards, records, lists and folders of images belong to no split and are not read: valid.lst"]


@pytest.mark.parametrize("splits", [("Train", "Test"), ("training", "testing"), ("train", "val"), ("TRAIN", "dev")])
def test_splits_inside_the_classes_are_refused(tmp_path, splits):
    data = images(tmp_path / "data", *[f"{name}/{split}" for name in ("cat", "dog") for split in splits])
    with pytest.raises(DataError, match=rf"holds the splits inside the classes \({data}/cat/\w+, {data}/cat/\w+\), but "
                                        rf"they must be outside: move {data}/cat/(\w+) to {data}/(\w+)/cat, and so on"
                       ) as caught:
        open_source(data, "train")
    name, to = re.search(r"move \S*/(\w+) to \S*/(\w+)/cat", str(caught.value)).groups()
    assert split_of(name) == to


def test_two_folders_for_one_split_are_refused(tmp_path):
    data = images(tmp_path / "data", *below("Train", "training", "val"))
    with pytest.raises(DataError, match="holds Train, training, which are several folders for one split: rename "
                                        "the one to use to train, or, if all are classes, list them in "):
        open_source(data, "train")
    (data / "training").rename(data / "train")
    assert open_source(data, "train").path == data / "train"


@pytest.mark.parametrize("folders", [
    ("train", "car"), ("train", "car", "dog"), ("Train", "car", "dog"), ("bullet_train", "car", "test_tube"),
    ("bullet_train", "steam_train"), ("valid", "invalid"), ("vehicles/train", "vehicles/car", "dog"),
])
def test_a_class_of_such_a_name(tmp_path, folders):
    data = images(tmp_path / "data", *folders)
    (data / f"{split_of(folders[0]) or 'train'}.csv").write_text("")
    classes = sorted({folder.split("/")[0] for folder in folders})
    for split in ("train", "val"):
        assert open_source(data, split).class_names == classes


@pytest.mark.parametrize("folders", [
    [*below("train_images", "val_images"), "raw"], [*below("seg_train", "seg_test"), "raw/x"],
    ["train", "test_images", "car"], [*below("Train"), "car", "dog"],
])
def test_what_may_be_splits_or_classes_is_refused(tmp_path, folders):
    data = images(tmp_path / "data", *folders)
    with pytest.raises(DataError, match=rf"may be a split or another class: if all are classes, list them in {data}/"
                                        "classes.txt; for .* alone, give"):
        open_source(data, "train")
    classes = sorted({folder.split("/")[0] for folder in folders})
    (data / "classes.txt").write_text("\n".join(classes))
    assert open_source(data, "train").class_names == classes


def test_folders_of_the_same_names_in_all_classes_are_told(tmp_path):
    """If all class folders hold folders of the same names, these may be the real classes: a remark says so."""
    data = images(tmp_path / "data", *below("site_a", "site_b"))
    assert list(open_source(data, "train").remarks) == [
        f"{data}: several class folders have the same subfolders, with most images (cat, dog): if these are the "
        "classes, and site_a, site_b are not, put all images of a class into one folder"]


@pytest.mark.parametrize("folders, shared", [
    ([*below("trn", "vld"), "vld/bird"], "cat, dog"), ([*below("trn", "vld"), "trn"], "cat, dog"),
    (below("trn/images", "vld/images"), "images/cat, images/dog"), (["trn/cat", "trn/dog", "vld/cat"], None),
    ([*below("cat", "dog"), "cat", "cat", "dog", "dog", "dog"], None), (["cat/images", "dog/images"], None),
    (["cat/a", "cat/b", "dog/c", "dog/d"], None), ([*below("car", "bus"), "bike"], None),
    (["cat/video_1", "dog/video_1", "cat/video_2", "dog"], None),
])
def test_folders_that_most_images_of_several_classes_lie_in_are_told(tmp_path, folders, shared):
    data = images(tmp_path / "data", *folders)
    told = [remark for remark in open_source(data, "train").remarks if "have the same subfolders" in remark]
    assert len(told) == bool(shared) and all(f"({shared})" in remark for remark in told)


def test_letters_behind_a_split_are_several_folders_of_it(tmp_path):
    data = images(tmp_path / "data", "trainA", "trainB", "testA", "testB")
    with pytest.raises(DataError, match="holds trainA, trainB, which are several folders for one split"):
        open_source(data, "train")


@pytest.mark.parametrize("name", ["dev", "imagenet_val"])
def test_a_data_folder_that_is_called_like_a_split(tmp_path, name):
    """Folders and lists beside the data folder belong to other data, and are not read."""
    data = images(tmp_path / name, *below("train", "val"))
    images(tmp_path, "train/bird")
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    for split in ("train", "val"):
        assert open_source(data, split).class_names == ["cat", "dog"]


@pytest.mark.parametrize("train, val", [("Train/0", "Valid/0"), ("training-0", "eval-0"), ("a.TRAIN", "a_dev_1")])
def test_shards(tmp_path, train, val):
    data = tmp_path / "data"
    for name, count in ((train, 3), (val, 2)):
        write_tar(data / f"{name}.tar", samples([(b"image", i) for i in range(count)]))
    assert [len(open_source(data, split)) for split in ("train", "val")] == [3, 2]
    if "/" in train:
        assert list(open_source(data, "train").remarks) == [
            f"{data}: by the names of its folders, Train is read as train and Valid is read as val"]
        write_tar(data / "training/0.tar", samples([(b"image", 0)]))
        with pytest.raises(DataError, match="Train, training are several folders of shards for one split; move all"):
            open_source(data, "train")


@pytest.mark.parametrize("inside", ["more", "train/more", "val/more/most"])
def test_shards_one_folder_deeper_are_told(tmp_path, inside):
    data = tmp_path / "data"
    for name in ("train/0", "val/0", f"{inside}/1"):
        write_tar(data / f"{name}.tar", samples([(b"image", 0)]))
    told = inside.removesuffix("/most")
    assert [remark.rpartition(": ")[2] for remark in open_source(data, "train").remarks] == [told]
