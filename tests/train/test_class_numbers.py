"""Class numbers of one split are matched with folders that are called by numbers, or with names, in the other split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tfrecord_files import example, write_tfrecord

from pipelines.errors import DataError
from pipelines.make_records import plan_files, with_classes
from pipelines.recordio import pack_record
from pipelines.verify import class_remarks, verify_split
from train import TrainError
from train.build import open_split
from train.classes import match, padded
from train.config import Config
from train.devices import Placement
from train.processes.distributed import Workers

NETWORK = "the network of runs/x"
TFDS = ("image", "label")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("image") / "0.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    return path.read_bytes()


def plain(*names):
    return [(name, name) for name in names]


def write(place: Path, stored: str, labels: list[int], image: bytes) -> None:
    """Write one image of each label as one split."""
    split = place.name
    if stored == "folders":
        for label in labels:
            (place / str(label)).mkdir(parents=True)
            (place / str(label) / "0.png").write_bytes(image)
    elif stored in ("TFRecord from 1", "TFRecord from 0"):
        keys = ("image/encoded", "image/class/label") if stored.endswith("1") else TFDS
        write_tfrecord(place / f"{split}.tfrecord", [example(image, label, keys) for label in labels])
    elif stored == "records":
        place.parent.mkdir(parents=True, exist_ok=True)
        records = [pack_record(float(label), image, i) for i, label in enumerate(labels)]
        offsets = np.cumsum([0, *map(len, records)])
        (place.parent / f"{split}.rec").write_bytes(b"".join(records))
        (place.parent / f"{split}.idx").write_text("".join(f"{i}\t{offsets[i]}\n" for i in range(len(records))))
    else:
        lines = []
        for label in labels:
            folder = str(label + 1) if stored == "list of folders from 1" else f"{split} images"
            (place.parent / folder).mkdir(parents=True, exist_ok=True)
            (place.parent / folder / f"{split}{label}.png").write_bytes(image)
            lines.append(f"{label}\t{label}\t{folder}/{split}{label}.png\n")
        (place.parent / f"{split}.lst").write_text("".join(lines))


def labels_of_both(data: Path, capsys) -> tuple[dict[str, int], dict[str, int], str]:
    """For both splits, the network's index of each class that has images, by the class's number; and the remarks."""
    config = Config(data=str(data), batch_size=1, image_size=8, cache=0)
    cpu, workers = Placement("mxnet", "cpu(0)", ""), Workers()
    with open_split(config, "train", cpu, workers) as train:
        config = Config(data=str(data), batch_size=1, image_size=8, cache=0, first_label=train.config.first_label)
        capsys.readouterr()
        with open_split(config, "val", cpu, workers, train.classes, "the training images") as val:
            found = [{loader.own_classes[label][0]: loader.labels[label] for label in loader.labels_met()}
                     for loader in (train, val)]
    return found[0], found[1], capsys.readouterr().out


@pytest.mark.parametrize("train, val, labels, expected", [
    # TFRecord labels that count from 1 are the numbers of folders from 1, even if one split lacks a class.
    (("folders", [1, 2, 3]), ("TFRecord from 1", [1, 2, 3]), {"0": 0, "1": 1, "2": 2}, "1 = 1, 2 = 2, 3 = 3"),
    (("folders", [1, 2, 3]), ("TFRecord from 1", [1, 2]), {"0": 0, "1": 1}, "1 = 1, 2 = 2"),
    (("folders", [1, 2, 3]), ("TFRecord from 1", [2, 3]), {"1": 1, "2": 2}, "1 = 1, 2 = 2, 3 = 3"),
    (("TFRecord from 1", [1, 2, 3]), ("folders", [1, 2, 3]), {"1": 0, "2": 1, "3": 2}, "1 = 1, 2 = 2, 3 = 3"),
    (("TFRecord from 1", [1, 2, 3]), ("folders", [1, 2]), {"1": 0, "2": 1}, "1 = 1, 2 = 2"),
    (("TFRecord from 1", [1, 2, 3]), ("folders", [2, 3]), {"2": 1, "3": 2}, "2 = 2, 3 = 3"),
    # Folders numbered from 0 are the classes from 0.
    (("folders", [0, 1, 2]), ("TFRecord from 1", [1, 3]), {"0": 0, "2": 2}, ""),
    (("TFRecord from 1", [1, 2, 3]), ("folders", [0, 2]), {"0": 0, "2": 2}, ""),
    (("records", [0, 1, 2]), ("TFRecord from 1", [1, 2, 3]), {"0": 0, "1": 1, "2": 2}, ""),
    # Labels from 0 and folders from 1, if both have all classes.
    (("folders", [1, 2, 3]), ("records", [0, 1, 2]), {"0": 0, "1": 1, "2": 2}, "0 = 1, 1 = 2, 2 = 3"),
    (("folders", [1, 2, 3]), ("records", [0, 2]), {"0": 0, "2": 2}, "0 = 1, 1 = 2, 2 = 3"),
    (("folders", [1, 2, 3]), ("records", [1, 3]), {"1": 0, "3": 2}, "1 = 1, 2 = 2, 3 = 3"),
    (("records", [0, 1, 2]), ("folders", [1, 2, 3]), {"1": 0, "2": 1, "3": 2}, "1 = 0, 2 = 1, 3 = 2"),
    (("TFRecord from 0", [0, 1, 2]), ("folders", [2, 3]), {"2": 1, "3": 2}, "2 = 1, 3 = 2"),
    (("folders", [1, 2, 3]), ("list", [0, 1, 2]), {"0": 0, "1": 1, "2": 2}, "0 = 1, 1 = 2, 2 = 3"),
    # Lists beside each other: a label means the same class in both.
    (("list of folders from 1", [0, 1, 2]), ("list", [0, 1, 2]), {"1": 0, "2": 1, "3": 2}, ""),
    (("list of folders from 1", [0, 1, 2]), ("list", [1]), {"2": 1}, ""),
    (("list", [0, 1, 2]), ("list of folders from 1", [0, 1, 2]), {"0": 0, "1": 1, "2": 2}, ""),
    (("list", [0, 1, 2]), ("list of folders from 1", [0, 1]), {"0": 0, "1": 1}, ""),
], ids=str)
def test_what_is_matched(tmp_path, image, capsys, train, val, labels, expected):
    for name, (stored, numbers) in (("train", train), ("val", val)):
        write(tmp_path / "data" / name, stored, numbers, image)
    in_train, in_val, said = labels_of_both(tmp_path / "data", capsys)
    assert list(in_train.values()) == [0, 1, 2]
    assert in_val == labels
    assert (f"are taken for those of the training images, {expected} (if that is wrong, list" in said) == bool(expected)


@pytest.mark.parametrize("train, val", [
    (("folders", [1, 2, 3]), ("records", [1, 2])), (("folders", [1, 2, 3]), ("list", [1])),
    (("records", [0, 1, 2]), ("folders", [1, 2])),
], ids=str)
def test_what_cannot_be_decided_is_refused(tmp_path, image, capsys, train, val):
    data = tmp_path / "data"
    for name, (stored, numbers) in (("train", train), ("val", val)):
        write(data / name, stored, numbers, image)
    with pytest.raises(TrainError, match=r"so '1' may be the number 1 or the first class: list all classes of "
                                         rf"{data}/val\S* in a classes.txt beside its images, the class with number 0"):
        labels_of_both(data, capsys)
    if val[0] != "folders":
        (data / "classes.txt").write_text("1\n2\n3\n")  # the way out
        assert labels_of_both(data, capsys)[1] == {str(label + 1): label for label in val[1]}
    else:
        (data / "val/classes.txt").write_text("1\n2\n3\n")
        assert labels_of_both(data, capsys)[1] == {"1": 0, "2": 1}
        (data / "val/classes.txt").write_text("0\n1\n2\n")
        assert labels_of_both(data, capsys)[1] == {"1": 1, "2": 2}


def test_a_network_of_numbers(tmp_path):
    """The network's checkpoint records whether the labels counted from 1."""
    assert match("DATA", plain("1", "3"), padded([], 3), NETWORK, False, first_labels=(0, 1)).labels == [0, 2]
    assert match("DATA", plain("0", "2"), padded([], 3), NETWORK, False, first_labels=(0, 1)).labels == [0, 2]
    assert match("DATA", padded([], 3), padded([], 3), NETWORK, True, first_labels=(1, 1)) == ([0, 1, 2], "")
    assert match("DATA", padded([], 3), padded([], 3), NETWORK, True, first_labels=(1, 0)) == ([0, 1, 2], "")


def test_class_folders_and_a_list_of_numbers(tmp_path, image, capsys):
    """A line says which class was taken for which number, and how to change that."""
    data = tmp_path / "data"
    for name in ("cat", "dog"):
        (data / "train" / name).mkdir(parents=True)
        (data / "train" / name / "0.png").write_bytes(image)
    write(data / "val", "list", [0, 1], image)
    _, in_val, said = labels_of_both(data, capsys)
    assert in_val == {"0": 0, "1": 1}
    assert said == (f"{data}/val.lst has no names of classes: the class numbers of {data}/val.lst are taken for those "
                    "of the training images, 0 = cat, 1 = dog (if that is wrong, list the classes in the order of "
                    "their numbers in a classes.txt beside the images)\n")
    (data / "classes.txt").write_text("dog\ncat\n")
    in_train, in_val, said = labels_of_both(data, capsys)
    assert (in_train, in_val, said) == ({"dog": 0, "cat": 1}, {"dog": 0, "cat": 1}, "")


@pytest.mark.parametrize("train, val", [
    (("folders", [1, 2, 3]), ("TFRecord from 1", [1, 2])), (("TFRecord from 1", [1, 2, 3]), ("folders", [1, 2])),
    (("folders", [1, 2, 3]), ("list", [1, 2])),
], ids=str)
def test_make_records_refuses_numbers_that_may_count_from_0_or_1(tmp_path, image, train, val):
    data = tmp_path / "data"
    for name, (stored, numbers) in (("train", train), ("val", val)):
        write(data / name, stored, numbers, image)
    assert not class_remarks(*(verify_split(str(data), split) for split in ("train", "val")))
    plans = {split: plan_files(data, split) for split in ("train", "val")}
    with pytest.raises(DataError, match="one split are numbered from 0, but the names in the other split, 1, 2"):
        with_classes(plans["val"], plans["train"].classes, f"{data}: val")
