"""The meaning of a label in a file: the class, and whether the label's bytes can be trusted."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from image_helpers import encode, samples, smooth_image, write_records, write_tar
from tfrecord_files import example, field, varint, write_tfrecord

from pipelines import DataError, LoaderConfig, open_loader
from pipelines.__main__ import main
from pipelines.crc32c import crc32c, masked_crc32c
from pipelines.sources import open_source
from pipelines.verify import verify_split

TFDS = ("image", "label")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def image() -> bytes:
    return encode(smooth_image(np.random.default_rng(0), 40, 40))


def labels(data: Path, split: str = "train", **how) -> list[int]:
    source = open_source(data, split, **how)
    return [source.label(i) for i in range(len(source))]


def shards(folder: Path, image: bytes, train: list, val: list, keys=("image/encoded", "image/class/label")) -> Path:
    for name, those in (("train-00000-of-00001", train), ("validation-00000-of-00001", val)):
        if those:
            write_tfrecord(folder / name, [example(image, label, keys) for label in those])
    return folder


# --- TFRecord: where its labels count from ---


def test_the_training_images_decide_for_validation_too(tmp_path, image):
    """The validation split has no image of class 0; by its own labels, it would be counted from 1."""
    data = shards(tmp_path, image, [0, 1, 2, 3], [1, 2, 3])
    assert labels(data) == [0, 1, 2, 3] and labels(data, "val") == [1, 2, 3]
    assert open_source(data, "val").remarks == [f"{data}: labels (image/class/label) count from 0 (--first-label)"]
    assert open_source(data, "val").remarks == open_source(data, "train").remarks


def test_an_image_of_the_background_does_not_shift_a_split(tmp_path, image):
    with_it = shards(tmp_path / "train", image, [0, 1, 2, 3, 4], [1, 2, 3, 4])
    assert labels(with_it) == [0, 1, 2, 3, 4] and labels(with_it, "val") == [1, 2, 3, 4]
    data = shards(tmp_path / "val", image, [1, 2, 3, 4], [1, 0, 4])
    assert labels(data) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"validation-.*, image at byte \d+: has the label 0, but labels count from 1 "
                                        r"in this data set: leave such images out, or give --first-label 0$"):
        open_source(data, "val")
    assert labels(data, "val", first_label="0") == [1, 0, 4] and labels(data, first_label="0") == [1, 2, 3, 4]


def test_an_option_overrides(tmp_path, image):
    data = shards(tmp_path, image, [1, 2, 3], [2, 3])
    assert labels(data) == [0, 1, 2] and labels(data, "val") == [1, 2]
    assert labels(data, first_label="0") == [1, 2, 3]
    assert labels(data / "validation-00000-of-00001", "val") == [1, 2]  # decided by its own labels
    tfds = shards(tmp_path / "tfds", image, [1, 2, 3], [2, 3], TFDS)
    assert labels(tfds) == [1, 2, 3] and not open_source(tfds, "train").remarks
    assert labels(tfds, "val", first_label="1") == [1, 2]
    with pytest.raises(DataError, match="first_label is '2'; choose 'auto' or '0' or '1'"):
        LoaderConfig(data=str(data), first_label="2")


def test_a_feature_that_is_merely_present_changes_nothing(tmp_path, image):
    """The feature image/class/label exists beside `label`, but holds no number."""
    for i, empty in enumerate((field(3, b""), field(3, field(1, b"")), field(1, field(1, b"text")))):
        other = field(1, field(1, field(1, b"image/class/label") + field(2, empty)))
        path = tmp_path / str(i) / "train.tfrecord"
        write_tfrecord(path, [example(image, label, TFDS) + other for label in (1, 2, 3)])
        assert labels(path.parent) == [1, 2, 3]


@pytest.mark.parametrize("keys", [TFDS, ("image/encoded", "image/class/label")])
def test_an_empty_list_is_no_label(tmp_path, image, keys):
    write_tfrecord(tmp_path / "train.tfrecord", [example(image, [], keys)])
    with pytest.raises(DataError, match="the record at byte 0 has the features .*; it needs an image .* as"):
        open_source(tmp_path, "train")


def test_a_list_of_classes_contradicts(tmp_path, image):
    data = shards(tmp_path, image, [1, 2, 3], [2, 3])
    for names, sentence in (
        ("a b c d", "its labels are 1 to 3, and classes.txt lists 4 classes: they may count from 0 or from 1, so give"),
        ("a b c", ""),
    ):
        (data / "classes.txt").write_text("\n".join(names.split()))
        for split in ("train", "val"):
            if sentence:
                with pytest.raises(DataError, match=sentence):
                    open_source(data, split)
                assert min(labels(data, split, first_label="0")) == 1 + (split == "val")
            else:
                assert min(labels(data, split)) == (split == "val")
    background = shards(tmp_path / "background", image, [0, 1, 2, 3], [2, 3])
    (background / "classes.txt").write_text("a\nb\nc\n")
    with pytest.raises(DataError, match="labels are 0 to 3, one more than the 3 classes of classes.txt: if 0 is"):
        open_source(background, "train")


def test_labels_of_two_kinds_are_refused(tmp_path, image):
    path = tmp_path / "mixed" / "train.tfrecord"
    write_tfrecord(path, [example(image, 1), example(image, 1, TFDS)])
    with pytest.raises(DataError, match="some of its labels are image/class/label and some label, which may"):
        open_source(path, "train")
    data = shards(tmp_path, image, [1, 2], [])
    shards(tmp_path, image, [], [0, 1], TFDS)
    with pytest.raises(DataError, match="its labels are label, but those of the training images are image/class/label"):
        open_source(data, "val")
    assert labels(data, "val", first_label="0") == [0, 1]


def test_the_loader_knows_what_was_decided(tmp_path, image):
    data = shards(tmp_path, image, [1, 2, 3, 1], [2, 3])
    for cache in (0.0, 1.0):
        with open_loader(LoaderConfig(data=str(data), batch_size=2, image_size=16, cache_gib=cache)) as loader:
            assert loader.config.first_label == "1"
            assert loader.remarks == [f"{data}: labels (image/class/label) count from 1 (--first-label)"]


def test_make_records_writes_the_classes_that_training_has(tmp_path, image):
    data = shards(tmp_path / "in", image, [0, 1, 2, 3], [3, 1, 2])
    assert main(["make-records", str(data), str(tmp_path / "out")]) == 0
    assert sorted(labels(tmp_path / "out", "val")) == [1, 2, 3] and sorted(labels(tmp_path / "out")) == [0, 1, 2, 3]


# --- TFRecord: several labels ---


def test_one_hot_vectors_are_read_as_their_class(tmp_path, image):
    data = shards(tmp_path, image, [[0, 0, 1], [1, 0, 0]], [[0, 1, 0]])
    assert labels(data) == [2, 0] and labels(data, "val") == [1]
    remark, = open_source(data, "train").remarks
    assert remark.endswith("its labels are one-hot vectors, which are read as class numbers")


@pytest.mark.parametrize("several", [[2, 5], [0, 0], [1, 1, 0], [-1, 1]])
def test_several_labels_are_refused(tmp_path, image, several):
    data = shards(tmp_path, image, [several], [])
    with pytest.raises(DataError, match=rf"the record at byte 0 has {len(several)} labels \({several[0]}, .*\), but "
                                        "training needs one class per image: write one class number for each image"):
        open_source(data, "train")


def test_two_images_in_a_record_are_refused(tmp_path, image):
    both = field(1, b"image") + field(2, field(1, field(1, image) + field(1, image)))
    label = field(1, b"label") + field(2, field(3, varint(1 << 3) + b"\1"))
    write_tfrecord(tmp_path / "train.tfrecord", [field(1, field(1, both) + field(1, label))])
    with pytest.raises(DataError, match="the record at byte 0 has 2 images"):
        open_source(tmp_path, "train")


# --- classes without images ---


def test_verify_tells_of_classes_without_images(tmp_path, image, capsys):
    write_records(tmp_path / "train.rec", [image + b"%d" % i for i in range(3)], [0.0, 1.0, 2.0])
    write_records(tmp_path / "val.rec", [image], [3.0])
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{tmp_path}/val.rec: all images are of one class, '3'",
        f"{tmp_path}/val.rec: no image is of these classes, which training has: 0, 1, 2",
        f"{tmp_path}/val.rec: has images of classes that no training image has: 3",
        f"{tmp_path}/val.rec: 1 images, 0 unusable"]


@pytest.mark.parametrize("stored", ["tar", "tfrecord", "list", "folders"])
def test_make_records_of_validation_without_a_class(tmp_path, image, stored):
    """Formerly make-records ended with "lists other classes than those of the images", after it had written
    train.rec."""
    data, out = tmp_path / "in", tmp_path / "out"
    data.mkdir()
    for split, those in (("train", [0, 1, 2, 3]), ("val", [2, 0, 1])):
        if stored == "tar":
            write_tar(data / f"{split}.tar", samples([(image, label) for label in those]))
        elif stored == "tfrecord":
            write_tfrecord(data / f"{split}.tfrecord", [example(image, label, TFDS) for label in those])
        elif stored == "list":
            (data / "one.jpg").write_bytes(image)
            (data / f"{split}.lst").write_text("".join(f"0\t{label}\tone.jpg\n" for label in those))
        else:
            for label in those:
                (data / split / str(label)).mkdir(parents=True)
                (data / split / str(label) / "one.jpg").write_bytes(image)
    assert main(["make-records", str(data), str(out)]) == 0
    assert sorted(labels(out)) == [0, 1, 2, 3] and sorted(labels(out, "val")) == [0, 1, 2]
    assert (out / "classes.txt").read_text() == "0\n1\n2\n3\n"
    for name in ("val.rec", "val.idx"):  # convert val alone, beside the training records
        (out / name).unlink()
    assert main(["make-records", str(data), str(out), "--split", "val"]) == 0
    assert sorted(labels(out, "val")) == [0, 1, 2]


def test_make_records_of_validation_with_a_class_of_its_own(tmp_path, image, capsys):
    for split, those in (("train", [0, 1]), ("val", [0, 1, 2])):
        write_tar(tmp_path / "in" / f"{split}.tar", samples([(image, label) for label in those]))
    assert main(["make-records", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "in: val has images of classes without training images: 2; remove them, or" in capsys.readouterr().err
    assert not (tmp_path / "out" / "train.rec").exists()


def test_the_label_of_kaggles_flowers(tmp_path, image):
    """The label of Kaggle's flowers has the key `class`, and counts from 0; the usual keys take precedence, and a text
    under `class` is no label.
    """
    keys = ("image", "class")
    for split, numbers in (("train", [1, 2, 3]), ("val", [3, 0])):
        path = tmp_path / split / f"00-224x224-{len(numbers)}.tfrec"
        write_tfrecord(path, [example(image, number, keys) for number in numbers])
    assert (labels(tmp_path), labels(tmp_path, "val")) == ([1, 2, 3], [3, 0])
    assert not open_source(tmp_path, "train").remarks
    text = field(1, field(1, field(1, b"class") + field(2, field(1, field(1, b"rose")))))
    both = example(image, 2, TFDS) + example(image, 1, keys)
    write_tfrecord(tmp_path / "both.tfrec", [both, example(image, 0, TFDS) + text])
    assert labels(tmp_path / "both.tfrec") == [2, 0]
    write_tfrecord(tmp_path / "text.tfrec", [text])
    with pytest.raises(DataError, match="has the features class; .*image/class/label or label or class: write"):
        open_source(tmp_path / "text.tfrec", "train")


# --- forms of Unicode ---

NFC, NFD = "caf\u00e9", "cafe\u0301"


def one_image_each(folder: Path, image: bytes, *names: str) -> None:
    for i, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{i}.jpg").write_bytes(image + bytes(i))


def test_two_forms_of_a_name_are_one_class(tmp_path, image):
    one_image_each(tmp_path, image, "bar", NFC, NFD, "zoo")
    source = open_source(tmp_path, "train")
    assert source.class_names == ["bar", NFD, "zoo"]  # the first name in sort order
    assert [source.label(i) for i in range(4)] == [0, 1, 1, 2]
    remark, = source.remarks
    assert remark.endswith(f"(NFC or NFD), and count as these classes: {NFC}")
    report = verify_split(str(tmp_path), "train")
    assert report.remarks == [remark] and not report.findings and [u.label for u in report.usable] == [0, 1, 1, 2]
    (tmp_path / "classes.txt").write_text(f"{NFC}\nzoo\nbar\n")
    assert [open_source(tmp_path, "train").label(i) for i in range(4)] == [2, 0, 0, 1]
    (tmp_path / "classes.txt").write_text(f"{NFC}\nzoo\nbar\n{NFD}\n")
    with pytest.raises(DataError, match="a class name occurs twice"):
        open_source(tmp_path, "train")


@pytest.mark.parametrize("train, val", [(NFC, NFD), (NFD, NFC)])
def test_training_and_validation_in_two_forms(tmp_path, image, train, val):
    one_image_each(tmp_path / "train", image, "bar", train, "zoo")
    one_image_each(tmp_path / "val", image, val, "zoo")
    source = open_source(tmp_path, "val")
    assert source.class_names == ["bar", train, "zoo"] and [source.label(i) for i in range(2)] == [1, 2]
    assert source.remarks[0].endswith(f"and count as these classes: {val}")
    assert not open_source(tmp_path, "train").remarks
    assert main(["make-records", str(tmp_path), str(tmp_path / "out")]) == 0
    assert sorted(labels(tmp_path / "out", "val")) == [1, 2]


# --- whose classes.txt it is ---


@pytest.mark.parametrize("stored", ["records", "tar"])
def test_a_data_folder_that_is_called_like_a_split_has_no_list_above(tmp_path, image, stored):
    data = tmp_path / "dev"
    for split in ("train", "val"):
        if stored == "records":
            write_records(data / f"{split}.rec", [image] * 2, [0.0, 1.0])
        else:
            write_tar(data / split / "0.tar", samples([(image, 0), (image, 1)]))
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    for split in ("train", "val"):
        assert open_source(data, split).class_names == ["0", "1"]


@pytest.mark.parametrize("lines, shown", [
    ("2\tc\n0\ta\n1\tb\n", "label 0 is '2 c', label 1 is '0 a'"),
    ("2 c\n0 a\n1 b\n", "label 0 is '2 c', label 1 is '0 a'"),
    ("3: c\n1: a\n2: b\n", "label 0 is '3: c', label 1 is '1: a'"), ("0 a\n1 b\n2 c\n", ""), ("c\na\nb\n", ""),
    ("7 c\n0 a\n1 b\n", ""), ("2nd\n0th\n1st\n", ""), ("".join(f"{i}\n" for i in sorted(map(str, range(12)))), ""),
])
def test_a_list_of_classes_with_numbers_of_its_own(tmp_path, image, lines, shown):
    """The place of a line is its class, whatever number the line begins with; a remark says so."""
    write_records(tmp_path / "train.rec", [image] * 3, [0.0, 1.0, 2.0])
    (tmp_path / "classes.txt").write_text(lines)
    remarks = open_source(tmp_path, "train").remarks
    assert len(remarks) == bool(shown) and all(shown in remark for remark in remarks)


def test_numbers_behind_the_names_of_classes(tmp_path, image):
    write_records(tmp_path / "train.rec", [image] * 3, [0.0, 1.0, 2.0])
    (tmp_path / "classes.txt").write_text("c\t2\na\t0\nb\t1\n")
    with pytest.raises(DataError, match=r"after the names are not in the order of the lines \(the first is c 2\)"):
        open_source(tmp_path, "train")
    (tmp_path / "classes.txt").write_text("a\t0\nb\t1\nc\t2\n")
    assert open_source(tmp_path, "train").class_names == ["0", "1", "2"]


def test_a_class_name_may_hold_a_line_separator(tmp_path, image):
    """A list has a class in each line that a text editor shows."""
    write_records(tmp_path / "train.rec", [image] * 3, [0.0, 1.0, 2.0])
    (tmp_path / "classes.txt").write_bytes("a\u2028x\x0bz\x85\rb\r\nc".encode())
    assert open_source(tmp_path, "train").class_names == ["a\u2028x\x0bz", "b", "c"]


@pytest.mark.parametrize("stored", ["records", "list", "folders", "tar", "tfrecord", "cifar"])
@pytest.mark.parametrize("split", ["", "train"])
def test_a_list_of_classes_above_the_data_is_a_neighbours(tmp_path, image, stored, split):
    """A list of classes above the data is not read, unless the data's folder has the name of a split."""
    folder = tmp_path / "all" / "mine" / split
    folder.mkdir(parents=True)
    if stored == "records":
        write_records(folder / "train.rec", [image] * 2, [0.0, 1.0])
    elif stored == "tar":
        write_tar(folder / "train.tar", samples([(image, 0), (image, 1)]))
    elif stored == "tfrecord":
        write_tfrecord(folder / "train.tfrecord", [example(image, label, TFDS) for label in (0, 1)])
    elif stored == "cifar":
        for number in range(1, 6):
            (folder / f"data_batch_{number}.bin").write_bytes(bytes(3073) + b"\1" + bytes([number]) * 3072)
    else:
        for label in "01":
            (folder / label).mkdir()
            (folder / label / "0.jpg").write_bytes(image)
        if stored == "list":
            (folder / "train.lst").write_text("0\t0\t0/0.jpg\n1\t1\t1/0.jpg\n")
    data = folder if stored in ("list", "cifar") else tmp_path / "all" / "mine"
    own = open_source(data, "train").class_names
    above = folder.parent / "classes.txt"
    above.write_text("".join(f"class {i}\n" for i in range(len(own))) if stored != "folders" else "1\n0\n")
    source = open_source(data, "train")
    if split:
        assert source.class_names != own and not source.remarks
    else:
        assert source.class_names == own
        assert source.remarks == [f"{above} is not read: it lies above {folder}, which has no list of classes (copy "
                                  "the file there if it lists the classes of these images)"]
    (folder / "classes.txt").write_text(above.read_text())
    assert open_source(data, "train").class_names != own and not open_source(data, "train").remarks


# --- RecordIO: several labels ---


def write_several(path: Path, image: bytes, labels: list[list[float]]) -> None:
    """Write records like im2rec --pack-label."""
    offset, lines, records = 0, [], []
    for key, those in enumerate(labels):
        payload = struct.pack(f"<IfQQ{len(those)}f", len(those), 0, key, 0, *those) + image
        records.append(struct.pack("<II", 0xCED7230A, len(payload)) + payload + bytes(-len(payload) % 4))
        lines.append(f"{key}\t{offset}\n")
        offset += len(records[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(records))
    path.with_suffix(".idx").write_text("".join(lines))


@pytest.mark.parametrize("several", [
    [[2, 5], [1, 0]], [[2, 6, 0, 0.1, 0.1, 0.5, 0.5, 0.0]], [[4, 5, 60, 50, 1, 0.1, 0.1, 0.5, 0.5]],
    [[1, 1, 0]], [[0, 0]], [[0.5, 0.5]], [[float("nan"), 1]],
], ids=str)
@pytest.mark.parametrize("names", ["", "a\nb\nc\n"])
def test_records_with_several_labels_are_refused(tmp_path, image, several, names):
    """Several labels may be those of detection: header width, object width, then objects."""
    path = tmp_path / "train.rec"
    write_several(path, image, several)
    if names:
        (tmp_path / "classes.txt").write_text(names)
    with pytest.raises(DataError, match=rf"train.rec record 0 has {len(several[0])} labels \(.*\), but training "
                                        r"needs one class per image: write one class number for each image, or a one"):
        open_source(path, "train")
    name, finding = verify_split(str(path), "train").findings[0]
    assert (name, finding.kind) == (f"{path} record 0", "label") and f"has {len(several[0])} labels" in finding.detail
    assert verify_split(str(path), "train").num_unusable == len(several)  # [1, 0] beside [2, 5] is no one-hot vector


def test_records_with_a_single_label_or_one_hot_vectors(tmp_path, image):
    write_several(tmp_path / "one" / "train.rec", image, [[2], [0], [], [1]])
    assert labels(tmp_path / "one") == [2, 0, 0, 1] and not open_source(tmp_path / "one", "train").remarks
    path = tmp_path / "train.rec"
    write_several(path, image, [[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]])
    source = open_source(path, "train")
    assert labels(path) == [2, 0, 1] and len(source.classes) == 4
    remark = f"{path}: its labels are one-hot vectors, which are read as class numbers"
    report = verify_split(str(path), "train")
    assert source.remarks == report.remarks == [remark]
    assert {finding.kind for _, finding in report.findings} == {"two labels"}, "of one image"
    assert [image.label for image in report.usable] == [2, 0, 1]


def test_records_of_which_some_have_several_labels(tmp_path, image):
    path = tmp_path / "train.rec"
    write_several(path, image, [[1], [0, 1], [0]])
    with pytest.raises(DataError, match="record 1 has 2 labels, where 1 is expected: write all records with one class"):
        open_source(path, "train")
    assert [name for name, _ in verify_split(str(path), "train").findings] == [f"{path} record {i}" for i in (0, 2)]


# --- TFRecord: checksums ---


def bytewise(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def test_crc32c(rng):
    def of(data: bytes) -> int:
        return int(crc32c(np.frombuffer(data, np.uint8)[None])[0])

    # Test values from RFC 3720, B.4, and the usual check value of CRC32C.
    assert (of(bytes(32)), of(b"\xff" * 32), of(bytes(range(32)))) == (0x8A9136AA, 0x62A8AB43, 0x46DD794E)
    assert of(b"123456789") == 0xE3069283
    for size in (*range(20), 1000, 1023, 1025):
        data = rng.bytes(size)
        assert of(data) == bytewise(data), size
    rows = np.frombuffer(rng.bytes(700), np.uint8).reshape(100, 7)
    assert crc32c(rows).tolist() == [bytewise(row.tobytes()) for row in rows]
    assert masked_crc32c(np.frombuffer(struct.pack("<Q", 0), np.uint8)[None]).tolist() == [
        ((bytewise(bytes(8)) >> 15 | bytewise(bytes(8)) << 17) + 0xA282EAD8) % 2**32]


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def test_a_flipped_bit_moves_no_other_label(tmp_path, image):
    """The first of the labels 1, 2, 3 becomes 0; formerly all labels were then taken to count from 0."""
    payloads = [example(image, label) for label in (1, 2, 3, 1)]
    path = tmp_path / "train.tfrecord"
    write_tfrecord(path, payloads)
    place = 12 + len(payloads[0]) - 1
    assert path.read_bytes()[place] == 1
    flip(path, place)
    source = open_source(path, "train")
    assert len(source.classes) == 3 and [source.label(i) for i in (1, 2, 3)] == [1, 2, 0]
    report = verify_split(str(path), "train")
    found = [(name, finding.kind, finding.usable) for name, finding in report.findings
             if finding.kind != "two labels"]  # of one image
    assert found == [(source.name(0), "checksum", False)]
    for skipped, cache in (("skip", 0.0), ("skip", 1.0), ("error", 0.0)):
        config = LoaderConfig(data=str(path), batch_size=4, image_size=16, on_bad_image=skipped, cache_gib=cache)
        with open_loader(config) as loader:
            if skipped == "skip":
                assert set(next(iter(loader)).label.asnumpy().tolist()) == {0.0, 1.0, 2.0}
                assert loader.bad_images == [(source.name(0), "the bytes of its record do not fit their checksum")]
            else:
                with pytest.raises(DataError, match="do not fit their checksum"):
                    next(iter(loader))
    # Formerly a damaged, too large label created classes without images.
    write_tfrecord(path, payloads)
    flip(path, place, 5)
    assert len(open_source(path, "train").classes) == 3


def test_verify_sees_every_flipped_bit(tmp_path, image, rng):
    """Training only detects flipped bits of the length; both work with an index made before the damage, too."""
    payloads = [example(image, label) for label in (0, 1, 2)]
    path = tmp_path / "train.tfrecord"
    write_tfrecord(path, payloads)
    whole, second = path.read_bytes(), 12 + len(payloads[0]) + 4
    assert verify_split(str(path), "train").num_unusable == 0
    for byte in [second, second + 9, second + 12, *rng.integers(0, len(whole), 40).tolist()]:
        path.write_bytes(whole)
        flip(path, byte, int(rng.integers(8)))
        try:
            assert verify_split(str(path), "train").num_unusable == 1, byte
        except DataError as error:
            assert "does not fit its checksum" in str(error), byte
    path.write_bytes(whole)
    flip(path, second)
    with pytest.raises(DataError, match=rf"train.tfrecord: is damaged or not a TFRecord file \(the length of the "
                                        rf"record at byte {second} does not fit its checksum\); download it again"):
        open_source(path, "train")


def test_zeros_are_no_records(tmp_path):
    (tmp_path / "train.tfrecord").write_bytes(bytes(1 << 20))
    with pytest.raises(DataError, match="the length of the record at byte 0 does not fit its checksum"):
        open_source(tmp_path, "train")


def test_a_flipped_bit_without_an_undamaged_record(tmp_path, image):
    path = tmp_path / "train.tfrecord"
    write_tfrecord(path, [example(image, 1)])
    flip(path, path.stat().st_size - 8)
    with pytest.raises(DataError, match="train.tfrecord: no record matches its checksum"):
        open_source(path, "train")


def test_folders_that_hold_several_classes_name_none_in_a_list(tmp_path):
    """Folders may be sessions of a camera. Formerly a class was named after the folder of its first file, so the lists
    of the two splits could swap classes."""
    rng = np.random.default_rng(7)
    for name in ("s1", "s2"):
        (tmp_path / "images" / name).mkdir(parents=True)
    for split, first in (("train", 0), ("val", 1)):
        lines = []
        for i in range(8):
            label, session = i % 2, "s1" if (i // 2 + i + first) % 2 else "s2"
            file = f"images/{session}/{split}{i}.jpg"
            (tmp_path / file).write_bytes(encode(smooth_image(rng, 20, 20)))
            lines.append(f"{i}\t{label}\t{file}\n")
        (tmp_path / f"{split}.lst").write_text("".join(lines))
    for split in ("train", "val"):
        source = open_source(tmp_path, split)
        assert source.class_names == ["0", "1"]
        assert [source.label(i) for i in range(8)] == [i % 2 for i in range(8)]


@pytest.mark.parametrize("files", [("a/x.jpg", "a/y.jpg", "b/x.jpg"), ("a/1/x.jpg", "a/2/y.jpg", "b/1/x.jpg")])
def test_folders_that_hold_one_class_each_name_them_in_a_list(tmp_path, files):
    image = encode(smooth_image(np.random.default_rng(8), 20, 20))
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(image)
    lines = [f"{number}\t{int(file[0] == 'b')}\t{file}\n" for number, file in enumerate(files)]
    (tmp_path / "train.lst").write_text("".join(lines))
    assert open_source(tmp_path, "train").class_names == ["a", "b"]


def test_files_that_both_lists_name_are_told(tmp_path, image, capsys):
    for name in ("a/0.jpg", "a/1.jpg", "b/0.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(image + name.encode())
    (tmp_path / "train.lst").write_text("0\t0\ta/0.jpg\n1\t0\ta/1.jpg\n2\t1\tb/0.jpg\n")
    (tmp_path / "val.lst").write_text("0\t1\tb/0.jpg\n")
    assert list(open_source(tmp_path, "val").remarks) == [
        f"{tmp_path}/val.lst: 1 of its files are in train.lst too, so validation has training images: "
        f"{tmp_path}/b/0.jpg (list each in one of them)"]
    assert main(["verify", str(tmp_path)]) == 1
    assert f"{tmp_path}/b/0.jpg: duplicate, the same image as" in capsys.readouterr().out
