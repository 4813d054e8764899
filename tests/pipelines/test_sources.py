"""Where data are searched, and the messages about data that are missing or wrong."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_folder, write_records

from pipelines import DataError, sources
from pipelines.make_records import plan_files
from pipelines.sources import open_source, same_images
from pipelines.verify import verify_split, write_clean


def found(data, split):
    source = open_source(data, split)
    return [(os.path.basename(source.name(i)), source.label(i)) for i in range(len(source))], source.class_names


def test_layouts_of_folders(tmp_path):
    write_folder(tmp_path / "all/train", 6, 3, seed=1)
    write_folder(tmp_path / "all/val", 2, 1, seed=2)
    shutil.move(tmp_path / "all/val/c00", tmp_path / "all/val/c01")  # validation has only the second class
    (tmp_path / "all/train/.hidden").mkdir()
    (tmp_path / "all/train/c00/notes.txt").write_text("no image")
    images, names = found(tmp_path / "all", "train")
    expected = [("000.JPEG", 0), ("003.JPEG", 0), ("001.JPEG", 1), ("004.JPEG", 1), ("002.JPEG", 2), ("005.JPEG", 2)]
    assert images == expected
    assert names == ["c00", "c01", "c02"]
    assert found(tmp_path / "all", "val") == ([("000.JPEG", 1), ("001.JPEG", 1)], names)
    # Class folders without splits serve both.
    assert found(tmp_path / "all/train", "train") == found(tmp_path / "all/train", "val") == (expected, names)
    # classes.txt decides on numbers and names.
    (tmp_path / "all/classes.txt").write_bytes(b"\xef\xbb\xbfc02\tthird\r\nc01\r\nc00\tfirst, of all")  # Windows
    images, names = found(tmp_path / "all", "train")
    assert dict(images)["000.JPEG"] == 2
    assert names == ["third", "c01", "first, of all"]
    # A list takes precedence over the folder.
    (tmp_path / "all/train.lst").write_text("7\t1\ttrain/c01/001.JPEG\n8\t0.0\ttrain/c02/002.JPEG\n")
    assert found(tmp_path / "all", "train")[0] == [("001.JPEG", 1), ("002.JPEG", 0)]


def test_words_for_imagenets_folders(tmp_path):
    """Folders named by WordNet ids have words as class names; names that a user gave stay unchanged."""
    write_folder(tmp_path / "train", 4, 4, seed=1)
    for number, name in enumerate(("n01440764", "n04553703", "n99999999")):
        shutil.move(tmp_path / f"train/c{number:02}", tmp_path / "train" / name)
    assert open_source(tmp_path, "train").classes == [
        ("c03", "c03"), ("n01440764", "tench"), ("n04553703", "washbasin"), ("n99999999", "n99999999")]
    (tmp_path / "classes.txt").write_text("n04553703\tour sink\nn01440764\nn99999999\nc03\n")
    assert open_source(tmp_path, "train").class_names == ["our sink", "tench", "n99999999", "c03"]


def test_layouts_of_records(tmp_path, numbered):
    for target in ("a/train.rec", "b/train/train.rec", "c/anything.rec"):
        path = tmp_path / target
        path.parent.mkdir(parents=True)
        for end in (".rec", ".idx"):
            shutil.copy(numbered.with_suffix(end), path.with_suffix(end))
    for data in ("a", "b", "c/anything.rec"):
        source = open_source(tmp_path / data, "train")
        assert len(source) == 37
        assert source.class_names == [str(i) for i in range(37)]
        assert source.label(11) == 11


def test_folders_within_class_folders(tmp_path):
    """Images may lie in folders within class folders, as in Tiny ImageNet. A list of such files still names the
    classes."""
    files = write_folder(tmp_path / "train", 6, 3, seed=1)
    for file in files[1:]:
        (file.parent / "images").mkdir(exist_ok=True)
        file.rename(file.parent / "images" / file.name)
    (tmp_path / "train/c01/.cache").mkdir()
    shutil.copy(files[0], tmp_path / "train/c01/.cache/a.jpg")
    images, names = found(tmp_path, "train")
    assert images == [(file.name, i // 2) for i, file in enumerate(files)]
    write_clean(verify_split(str(tmp_path), "train"))
    assert (tmp_path / "train.lst").exists()
    assert found(tmp_path, "train") == (images, names)


def test_images_beside_the_folders_of_classes_are_told(tmp_path):
    write_folder(tmp_path, 4, 2, seed=1)
    (tmp_path / ".hidden.jpg").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    for number, words in ((1, "1 image outside the class folders is left out"),
                          (2, "2 images outside the class folders are left out")):
        (tmp_path / f"{number}.JPG").write_bytes(b"")
        source = open_source(tmp_path, "train")
        assert list(source.remarks) == [f"{tmp_path}: {words}"] and len(source) == 4


def test_links_that_lead_to_no_class_folder_are_told(tmp_path):
    """A link to a class folder is a class; a link to a file with a suffix is a file beside the classes."""
    train = tmp_path / "train"
    first, *_ = write_folder(train, 4, 2, seed=1)
    (tmp_path / "names.txt").write_text("")
    for name, target in (("good", train / "c00"), ("gone", tmp_path / "nowhere"), ("file", first), (".x", "nowhere"),
                         ("circle", "circle"), ("notes.txt", tmp_path / "names.txt"), ("v1.0", "nowhere")):
        (train / name).symlink_to(target)
    source = open_source(tmp_path, "train")
    broken = ", ".join(f"{train}/{name}" for name in ("circle", "file", "gone", "v1.0"))
    expected = [f"{train}: links that lead to no folder are left out: {broken}",
                f"{train}: these class folders lead, by links, to others, so the same images have two labels: "
                "good = c00 (remove the links)"]
    assert source.class_names == ["c00", "c01", "good"] and list(source.remarks) == expected
    assert verify_split(str(tmp_path), "train").remarks == expected
    assert plan_files(tmp_path, "train").remarks == expected


def test_links_to_class_folders_and_into_them_are_told(tmp_path):
    """Links to folders elsewhere are classes of their own, unless two lead to one place."""
    write_folder(tmp_path / "data", 4, 2, seed=1)
    write_folder(tmp_path / "data/c01/part", 2, 1, seed=2)
    write_folder(tmp_path / "elsewhere", 2, 1, seed=3)
    for name, target in (("a", "../elsewhere/c00"), ("b", "c01/part"), ("c00-too", "c00"), ("d", "../elsewhere/c00")):
        (tmp_path / "data" / name).symlink_to(target)
    source = open_source(tmp_path / "data", "train")
    assert source.class_names == ["a", "b", "c00", "c00-too", "c01", "d"] and list(source.remarks) == [
        f"{tmp_path}/data: these class folders lead, by links, to others, so the same images have two labels: b = c01, "
        "c00-too = c00, d = a (remove the links)"]


def test_hidden_folders_in_the_place_of_classes_are_told(tmp_path):
    """Hidden folders beside the classes are reported together with hidden folders inside classes. No hidden folder is a
    class.
    """
    for name in (".tail", ".git", "c01/.cache"):
        write_folder(tmp_path / name, 1, 1, seed=1)
    write_folder(tmp_path, 4, 2, seed=1)
    source = open_source(tmp_path, "train")
    hidden = ", ".join(f"{tmp_path}/{name}" for name in ("c01/.cache", ".git", ".tail"))
    assert source.class_names == ["c00", "c01"] and len(source) == 4
    assert list(source.remarks) == [f"{tmp_path}: hidden folders are left out: {hidden}"]
    assert verify_split(str(tmp_path), "train").remarks == plan_files(tmp_path, "train").remarks == source.remarks


def test_validation_that_is_training_by_links_is_told(tmp_path):
    """The links may lead to some classes, to all of them, or to the whole training folder."""
    train, val = tmp_path / "train", tmp_path / "val"
    write_folder(train, 6, 3, seed=1)
    write_folder(val / "c02", 1, 1, seed=2)
    (val / "c02/c00").rename(val / "c02/images")

    def told() -> tuple[list[str], bool]:
        return list(open_source(tmp_path, "val").remarks), same_images(tmp_path)

    assert told() == ([], False)
    sentence = (f"{val}: these class folders are the same as those in {train}, so validation has training images: "
                "%s (give it images of its own)")
    for name in ("c00", "c01"):
        (val / name).symlink_to(f"../train/{name}")
    assert told() == ([sentence % "c00, c01"], False)
    shutil.rmtree(val / "c02")
    (val / "c02").symlink_to(train / "c02")
    assert told() == ([sentence % "c00, c01, c02"], True)
    assert list(open_source(tmp_path, "train").remarks) == []
    shutil.rmtree(val)
    val.symlink_to("train")
    assert told() == ([sentence % "c00, c01, c02"], True)


def test_folders_without_an_image_are_no_classes(tmp_path, capsys):
    """But classes of a classes.txt count without images, and so does an empty validation folder of a training class."""
    write_folder(tmp_path / "train", 6, 3, seed=1)
    write_folder(tmp_path / "val", 2, 2, seed=1)
    for name in ("train/a", "train/b/c", "train/__MACOSX/x", "val/c02"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "train/b/notes.txt").write_text("")
    (tmp_path / "train/__MACOSX/x/1.jpg").write_bytes(b"no image")
    (tmp_path / "train/c01/1.gif").write_bytes(b"GIF89a")
    empty = f"{tmp_path}/train: folders without an image do not count as classes: a, b"
    unread = f"{tmp_path}/train: files of formats that are not read are left out: 1 .gif (convert them to JPEG or PNG)"
    system = f"{tmp_path}/train: folders and files that systems make are left out: {tmp_path}/train/__MACOSX"
    text = f"{tmp_path}/train: files that are not images, by their suffix or content, are left out: 1 .txt"
    train, val = (open_source(tmp_path, split) for split in ("train", "val"))
    assert train.class_names == val.class_names == ["c00", "c01", "c02"]
    assert (list(train.remarks), list(val.remarks)) == ([empty, system, unread, text], [])
    assert verify_split(str(tmp_path), "train").remarks == [empty, system, unread, text]
    (tmp_path / "classes.txt").write_text("a\nb\nc00\nc01\nc02\n")
    source = open_source(tmp_path, "train")
    assert source.class_names == ["a", "b", "c00", "c01", "c02"] and list(source.remarks) == [system, unread, text]
    assert [source.label(i) for i in range(len(source))] == [2, 2, 3, 3, 4, 4]


def test_names_of_classes_in_a_list(tmp_path):
    """Classes are named by their folders if these identify them, and otherwise by numbers. Paths may be absolute, or
    relative to the list."""
    image, *_ = write_folder(tmp_path / "images", 1, 1, seed=1)
    for files, names in (
        (("a/1.jpg", "b/2.jpg"), ["a", "b"]),
        (("a/images/1.jpg", f"{tmp_path}/b/images/2.jpg"), ["a", "b"]),
        (("1.jpg", "2.jpg"), ["0", "1"]),
        (("images/1.jpg", "b/images/2.jpg", "images/3.jpg"), ["0", "1", "2"]),
    ):
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(image, tmp_path / file)
        (tmp_path / "train.lst").write_text("".join(f"{i}\t{i}\t{file}\n" for i, file in enumerate(files)))
        assert open_source(os.path.relpath(tmp_path), "train").class_names == names


def records(tmp_path, labels=(0.0, 1.0), classes="a\nb\n"):
    rng = np.random.default_rng(0)
    path = tmp_path / "train.rec"
    write_records(path, [encode(smooth_image(rng, 20, 30)) for _ in labels], list(labels))
    if classes:
        (tmp_path / "classes.txt").write_text(classes)
    return path


def test_a_broken_record_does_not_hide_the_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.records, "_NUM_SPOT_CHECKS", 1)  # so that opening the file does not notice it
    path = records(tmp_path, labels=(0.0, 4.0, 2.0), classes="")
    offset = int(path.with_suffix(".idx").read_text().split()[5])
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"????")
    assert open_source(path, "train").class_names == ["0", "1", "2", "3", "4"]


def missing(tmp_path):
    return tmp_path / "nowhere", r"nowhere does not exist; give"


def in_the_home_of_nobody(tmp_path):
    return "~no-such-user/images", r"~no-such-user/images does not exist; give"


def no_data_file(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    return tmp_path / "a.txt", r"a\.txt is in none of the known formats; give a"


def empty_folder(tmp_path):
    return tmp_path, r"holds nothing, no class folders; put"


def files_only(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"x")
    return tmp_path, r"holds only files, no class folders; put"


def links_to_nothing(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/cat").symlink_to("nowhere")
    return tmp_path, r"holds only links that lead to no folder \(.*/train/cat\) and files, no class folders; put"


def link_to_nothing_for_a_split(tmp_path):
    (tmp_path / "train").symlink_to("nowhere")
    return tmp_path, r"holds only links that lead to no folder \(.*/train\) and files, no class folders; put"


def empty_class_folders(tmp_path):
    (tmp_path / "cat").mkdir()
    return tmp_path, r"has class folders but no image in them"


def other_split_only(tmp_path):
    (tmp_path / "val/cat").mkdir(parents=True)
    return tmp_path, r"has val but no train; add train/"


def test_what_to_do_without_validation_images(numbered):
    with pytest.raises(DataError, match=r"has train but no val; add val/, .* or .*--validate-every 0"):
        open_source(numbered.parent, "val")


def splits_for_tests_alone(tmp_path):
    write_folder(tmp_path / "test", 2, 2, seed=1)
    write_folder(tmp_path / "Testing", 2, 2, seed=1)
    return tmp_path, r"holds Testing, test, which are splits and not classes; rename the training folder to train"


def formats_that_are_not_read(tmp_path):
    for name in ("a/1.gif", "a/2.GIF", "b/c/3.avif"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"an image")
    return tmp_path, r"no image in them; files of formats that are not read are left out: 2 \.gif, 1 \.avif \(convert"


def file_of_a_splits_name(tmp_path):
    (tmp_path / "train").write_text("no folder")
    return tmp_path, r"holds only files, no class folders; put"


def one_folder_too_high(tmp_path):
    write_folder(tmp_path / "imagenet/train", 2, 2, seed=1)
    return tmp_path, r"has no train and val, but .*/imagenet has; give that"


def fractional_label_in_a_list(tmp_path):
    (tmp_path / "train.lst").write_text("0\t0.5\ta.jpg\n")
    return tmp_path, r"train\.lst line 1: '0\\t0\.5\\ta\.jpg' is not"


def unknown_class_folder(tmp_path):
    write_folder(tmp_path / "train", 2, 2, seed=1)
    (tmp_path / "classes.txt").write_text("c00\n")
    return tmp_path, r"c01: class 'c01' is not among the 1 known classes"


def no_index(tmp_path):
    path = records(tmp_path)
    path.with_suffix(".idx").unlink()
    return path, r"train\.idx: the index of train\.rec is missing; put"


def wrong_index(tmp_path):
    path = records(tmp_path)
    path.with_suffix(".idx").write_text("0\t0\n1\t12\n")
    return path, r"train\.idx: does not fit train\.rec \(key 1: no record begins at offset 12\); put"


def index_of_a_longer_file(tmp_path):
    path = records(tmp_path)
    path.with_suffix(".idx").write_text("0\t0\n1\t99999992\n")
    return path, r"does not fit train\.rec \(key 1: offset 99999992 is outside the file"


def truncated_records(tmp_path):
    path = records(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    return path, r"does not fit train\.rec \(key 1: the record at offset \d+ is cut off"


def empty_records(tmp_path):
    path = records(tmp_path)
    path.write_bytes(b"")
    return path, r"train\.rec: is empty; write it anew"


def label_outside_classes(tmp_path):
    return records(tmp_path, labels=(0.0, 2.0)), r"record 1: label 2 is outside the 2 classes \(0 to 1\)"


def fractional_label(tmp_path):
    return records(tmp_path, labels=(0.5, 1.0)), r"record 0: label 0\.5 is outside"


def empty_class_list(tmp_path):
    return records(tmp_path, classes="\n"), r"classes\.txt: the list of classes is empty"


def doubled_class(tmp_path):
    return records(tmp_path, classes="a\na\n"), r"classes\.txt: a class name occurs twice"


def class_list_in_latin1(tmp_path):
    path = records(tmp_path)
    (path.parent / "classes.txt").write_bytes("a\ncafé\n".encode("latin-1"))
    return path, r"classes\.txt: is not UTF-8 text \(byte 5\); save it as UTF-8"


def broken_list(tmp_path):
    (tmp_path / "train.lst").write_text("0\t0\ta.jpg\n1 1 b.jpg\n")
    return tmp_path, r"train\.lst line 2: '1 1 b\.jpg' is not"


def several_labels_in_a_list(tmp_path):
    (tmp_path / "train.lst").write_text("0\t0\ta.jpg\n1\t1\t0\tb.jpg\n")
    return tmp_path, r"train\.lst line 2: '1\\t1\\t0\\tb\.jpg' is not `.*` but has 4 columns; correct it"


def huge_label_in_a_list(tmp_path):
    (tmp_path / "train.lst").write_text("0\t0\ta.jpg\n1\t5000000000\tb.jpg\n")
    return tmp_path, r"train\.lst line 2: label 5000000000 is not a class number \(0 to 999,999\); correct it"


def negative_label_in_a_list(tmp_path):
    (tmp_path / "train.lst").write_text("0\t-1\ta.jpg\n")
    return tmp_path, r"train\.lst line 1: label -1 is not a class number"


def huge_label_in_records(tmp_path):
    return records(tmp_path, labels=(0.0, 5e9), classes=""), r"train\.rec record 1: label 5000000000 is not a class"


def label_that_is_no_number(tmp_path):
    return records(tmp_path, labels=(0.0, np.nan), classes=""), r"train\.rec record 1: label nan is not a class number"


def empty_list(tmp_path):
    (tmp_path / "train.lst").write_text("\n")
    return tmp_path, r"train\.lst: the list names no files"


MISTAKES = [
    missing,
    in_the_home_of_nobody,
    no_data_file,
    empty_folder,
    files_only,
    links_to_nothing,
    link_to_nothing_for_a_split,
    empty_class_folders,
    other_split_only,
    file_of_a_splits_name,
    splits_for_tests_alone,
    formats_that_are_not_read,
    one_folder_too_high,
    fractional_label_in_a_list,
    unknown_class_folder,
    no_index,
    wrong_index,
    index_of_a_longer_file,
    truncated_records,
    empty_records,
    label_outside_classes,
    fractional_label,
    empty_class_list,
    doubled_class,
    class_list_in_latin1,
    broken_list,
    several_labels_in_a_list,
    huge_label_in_a_list,
    negative_label_in_a_list,
    huge_label_in_records,
    label_that_is_no_number,
    empty_list,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_get_one_sentence(tmp_path, mistake):
    data, message = mistake(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        open_source(data, "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("folder", ["train", "train/c01"])
def test_unreadable_folders(tmp_path, monkeypatch, folder):
    """Works even if the tests run as root, who may read everything."""
    write_folder(tmp_path / "train", 4, 2, seed=1)
    scandir = os.scandir

    def refuse(path="."):
        if Path(path) == tmp_path / folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=f"{folder}: cannot be read .Permission denied.; check"):
        open_source(tmp_path, "train")
