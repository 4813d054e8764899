"""Which files and folders of a data set count as images and classes: by content if the suffix does not tell; files and
folders that systems make do not count."""

import os
import socket

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_folder

from pipelines.sources import open_source
from pipelines.sources.folders import LeftOut, image_files
from pipelines.sources.system_files import FILES, FOLDERS
from pipelines.verify import verify_split
from train.image_paths import image_paths

JPEG = encode(smooth_image(np.random.default_rng(1), 40, 30))
OF_FORMATS = {kind: encode(smooth_image(np.random.default_rng(1), 40, 30), kind)
              for kind in ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "PPM", "MPO")}
OF_FORMATS["PGM"] = encode(smooth_image(np.random.default_rng(1), 40, 30).convert("L"), "PPM")
NAMES = ("a.jfif", "a.jpe", "a.pjpeg", "a.JPG_large", "a.jpg.1", "a", "IMG.0001", "a.image", "photo.jpg?size=large",
         "2024.05.01", "a.JPG", "a.pgm", "a.", "ä.bild")


def write(place, files: dict[str, bytes]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (place / name).write_bytes(content)


def names(folder) -> list[str]:
    return [path.name for path in image_files(folder, LeftOut())]


@pytest.mark.parametrize("kind", OF_FORMATS)
def test_images_whatever_they_are_called(tmp_path, kind):
    write(tmp_path, dict.fromkeys(NAMES, OF_FORMATS[kind]))
    assert names(tmp_path) == sorted(NAMES)
    assert [path.name for path in image_paths([tmp_path])] == sorted(NAMES)


def test_a_class_of_files_without_an_ending_is_one(tmp_path):
    write(tmp_path / "a", {f"{i}.jfif": JPEG for i in range(3)})
    write(tmp_path / "b", {f"{i}": JPEG for i in range(2)})
    source = open_source(tmp_path, "train")
    assert source.class_names == ["a", "b"] and len(source) == 5 and not source.remarks
    report = verify_split(str(tmp_path), "train")
    assert (report.num_images, report.num_unusable) == (5, 0)


def test_what_is_no_image_is_counted_and_named(tmp_path, capsys):
    """Files that only look like images, files that cannot be opened, and copies are counted and named, too."""
    write(tmp_path / "a", {"1.jpg": JPEG, "notes": b"P5 is a city", "Readme.md": b"x", "BMW": b"BMW is a company, too",
                           "raw.nef": OF_FORMATS["TIFF"], "x.dat": b"", "y.dat": b"\xff\xd8", "1.jpg~": JPEG,
                           "2.jpg.crdownload": JPEG, "3.jpg.bak": JPEG, "1.xml": b"<a/>", "2.xml": b"<a/>"})
    write_folder(tmp_path, 2, 2, seed=1)
    os.mkfifo(tmp_path / "a/pipe")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(tmp_path / "a/socket"))
    source = open_source(tmp_path, "train")
    assert source.name(0) == f"{tmp_path}/a/1.jpg" and len(source) == 3
    copies = ", ".join(f"{tmp_path}/a/{name}" for name in ("1.jpg~", "2.jpg.crdownload", "3.jpg.bak"))
    remarks = [f"{tmp_path}: copies and unfinished files are left out: {copies}",
               f"{tmp_path}: files of formats that are not read are left out: 1 .nef (convert them to JPEG or PNG)",
               f"{tmp_path}: files that are not images, by their suffix or content, are left out: 4 without an ending, "
               "2 .dat, 2 .xml, 1 .md"]
    assert list(source.remarks) == verify_split(str(tmp_path), "train").remarks == remarks
    capsys.readouterr()
    image_paths([tmp_path])
    assert capsys.readouterr().err.splitlines() == remarks


def test_images_beside_the_classes_are_counted_by_content(tmp_path):
    write_folder(tmp_path, 2, 2, seed=1)
    write(tmp_path, {"loose": JPEG, "README": b"text", "x.jfif": JPEG})
    (told,) = open_source(tmp_path, "train").remarks
    assert told == f"{tmp_path}: 2 images outside the class folders are left out"


@pytest.mark.parametrize("name", [*FOLDERS, "@eaDir", "$RECYCLE.BIN", "System Volume Information"])
def test_folders_that_systems_make_are_no_classes(tmp_path, name):
    """Folders made by systems may lie beside the classes, in a class, or in a folder of a class."""
    write_folder(tmp_path, 4, 2, seed=1)
    for place in ("", "c00", "c01/more"):
        write(tmp_path / place / name / "photo.jpg", {"SYNOPHOTO_THUMB_M.jpg": JPEG})
    source = open_source(tmp_path, "train")
    assert source.class_names == ["c00", "c01"] and len(source) == 4
    all_of_them = ", ".join(f"{tmp_path}/{place}{name}" for place in ("c00/", "c01/more/", ""))
    assert list(source.remarks) == [f"{tmp_path}: folders and files that systems make are left out: {all_of_them}"]
    assert len(image_paths([tmp_path])) == 4


@pytest.mark.parametrize("name", [*FILES, "Thumbs.db"])
def test_files_that_systems_make_are_no_images(tmp_path, name):
    write_folder(tmp_path, 2, 2, seed=1)
    write(tmp_path / "c00", {name: JPEG})
    source = open_source(tmp_path, "train")
    assert len(source) == 2 and "that systems make" in source.remarks[0]


def test_an_unreadable_lost_and_found_refuses_nothing(tmp_path, monkeypatch):
    """Works even if the tests run as root, who may read everything."""
    write_folder(tmp_path, 2, 2, seed=1)
    (tmp_path / "lost+found").mkdir()
    scandir = os.scandir

    def refuse(path="."):
        if os.path.basename(path) == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert open_source(tmp_path, "train").class_names == ["c00", "c01"]


def test_classes_whose_names_only_resemble_those_stay(tmp_path):
    for name in ("recycled", "lost", "tmp", "trash", "snapshot", "temporary"):
        write(tmp_path / name, {"1.jpg": JPEG})
    assert open_source(tmp_path, "train").class_names == sorted(
        ("recycled", "lost", "tmp", "trash", "snapshot", "temporary"))
