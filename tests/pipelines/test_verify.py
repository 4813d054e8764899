"""verify finds every kind of damage, and the data that it writes as clean are clean."""

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_folder, write_records

from pipelines import DataError, LoaderConfig, open_loader
from pipelines.sources import open_source
from pipelines.verify import Usable, leave_out_duplicates, verify_split, write_clean


def kinds(report):
    """The findings as {last part of the name: kind}."""
    return {name.replace(" ", "/").rsplit("/", 1)[1]: finding.kind for name, finding in report.findings}


def images(count: int) -> list[bytes]:
    rng = np.random.default_rng(count)
    return [encode(smooth_image(rng, 60, 50)) for _ in range(count)]


def test_records(tmp_path):
    path = tmp_path / "train.rec"
    encoded = images(10)
    encoded[2] = encoded[2][:-200]
    encoded[3] = b""
    encoded[5] = b"no image"
    encoded[6] = encode(smooth_image(np.random.default_rng(1), 60, 50).convert("CMYK"))
    write_records(path, encoded, [0.0, 1.0, 0.0, 1.0, 7.0, 1.0, 0.0, float("nan"), 0.5, 1.0])
    (tmp_path / "classes.txt").write_text("a\nb\n")
    report = verify_split(str(path), "train", num_threads=2)
    assert kinds(report) == {
        "2": "truncated", "3": "empty", "4": "label", "5": "not an image", "6": "CMYK", "7": "label", "8": "label",
    }
    assert (report.num_images, report.num_unusable) == (10, 6)
    before = path.with_suffix(".idx").read_text()
    write_clean(report)
    assert (tmp_path / "train.idx.orig").read_text() == before
    again = verify_split(str(path), "train")
    assert (again.num_images, again.num_unusable) == (4, 0)
    loader = open_loader(LoaderConfig(data=str(path), split="val", batch_size=4, image_size=16))
    assert next(iter(loader)).num_valid == 4 and not loader.bad_images


@pytest.mark.parametrize("index", [None, "0\t0\n1\t52\n", "rubbish"])
def test_a_missing_or_wrong_index_is_made_anew(tmp_path, index):
    path = tmp_path / "train.rec"
    write_records(path, images(6), [0.0] * 6)
    good = path.with_suffix(".idx").read_text()
    path.with_suffix(".idx").unlink()
    if index is not None:
        path.with_suffix(".idx").write_text(index)
    report = verify_split(str(path), "train")
    assert [finding.kind for _, finding in report.findings] == ["index"]
    write_clean(report)
    assert path.with_suffix(".idx").read_text() == good


def test_folders(tmp_path):
    files = write_folder(tmp_path / "train", 9, 3, seed=2)
    write_folder(tmp_path / "val", 3, 3, seed=3)
    files[1].write_bytes(b"")
    files[3].write_bytes(files[3].read_bytes()[:-100])
    (tmp_path / "classes.txt").write_text("c00\nc01\n")  # without c02
    report = verify_split(str(tmp_path), "train")
    expected = {files[1].name: "empty", files[3].name: "truncated"} | {file.name: "label" for file in files[6:]}
    assert kinds(report) == expected
    with pytest.raises(DataError, match="c02"):
        open_source(tmp_path, "train")
    write_clean(report)
    source = open_source(tmp_path, "train")
    assert [(source.name(i), source.label(i)) for i in range(len(source))] == [
        (str(files[i]), i // 3) for i in (0, 2, 4, 5)
    ]
    assert verify_split(str(tmp_path), "train").num_unusable == 0
    # Once more, now from the list, with new damage.
    files[0].unlink()
    report = verify_split(str(tmp_path), "train")
    assert kinds(report) == {files[0].name: "unreadable"}
    write_clean(report)
    assert len(open_source(tmp_path, "train")) == 3


@pytest.mark.parametrize("name", ["a\ttab.jpg", "two\nlines.jpg", "line\u2028separator.jpg", "carriage\rreturn.jpg"])
def test_a_name_that_a_list_cannot_hold_is_refused(tmp_path, name):
    """The line in the list would name a file that does not exist, and a good image would be lost."""
    files = write_folder(tmp_path / "train", 4, 2, seed=2)
    files[0].rename(files[0].with_name(name))
    report = verify_split(str(tmp_path), "train")
    assert report.num_unusable == 0
    with pytest.raises(DataError, match=r"train\.lst: a line cannot hold the name ") as error:
        write_clean(report)
    assert f"{name!a}"[1:] in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "train.lst").exists()


def test_labels_that_no_data_set_has(tmp_path):
    """Impossible labels are found in a .lst file and in records, also without a list of classes."""
    files = write_folder(tmp_path / "images", 2, 2, seed=2)
    (tmp_path / "train.lst").write_text(f"0\t0\t{files[0]}\n1\t5000000000\t{files[1]}\n2\t0\t1\t{files[1]}\n")
    report = verify_split(str(tmp_path), "train")
    assert [finding.kind for _, finding in report.findings] == ["label", "label"]
    write_records(tmp_path / "train.rec", images(2), [0.0, 5e9])
    assert kinds(verify_split(str(tmp_path / "train.rec"), "train")) == {"1": "label"}


def test_nothing_usable(tmp_path):
    path = tmp_path / "train.rec"
    write_records(path, [b"x"] * 3, [0.0] * 3)
    report = verify_split(str(path), "train")
    assert report.num_unusable == 3
    with pytest.raises(DataError, match="none of its 3 images is usable; nothing is written"):
        write_clean(report)


def test_classes_of_which_nothing_is_left(tmp_path):
    """Classes without a usable image are named by their folders, or by their numbers if nothing else is known; also if
    only training loses them.
    """
    files = write_folder(tmp_path / "train", 6, 3, seed=2)
    for file in files[2:4]:
        file.write_bytes(b"")
    report = verify_split(str(tmp_path), "train")
    assert report.lost_classes == ["c01"]
    in_val = [Usable("val", "", 0, image.digest) for image in report.usable[:2]]
    assert leave_out_duplicates(report, in_val, report.classes, is_part=True).lost_classes == ["c00", "c01"]
    write_clean(report)
    assert verify_split(str(tmp_path), "train").lost_classes == []
    files[5].unlink(), files[4].unlink()
    assert verify_split(str(tmp_path), "train").lost_classes == ["2"]
    path = tmp_path / "records/train.rec"
    write_records(path, [*images(2), b"x"], [0.0, 1.0, 4.0])
    assert verify_split(str(path), "train").lost_classes == ["4"]
    (path.parent / "classes.txt").write_text("n1\tcat\nn2\ncow\ndog\nn5\towl\n")
    assert verify_split(str(path), "train").lost_classes == ["n5"]
