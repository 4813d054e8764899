"""Files that lost or repeat a part but look whole: they are refused or reported; images are never lost silently."""

import io
import shutil
import tarfile

import numpy as np
import pytest
from image_helpers import encode, samples, smooth_image, write_folder, write_records, write_tar

from pipelines import DataError
from pipelines.make_records import plan_train_tar, plan_val_tar, read_labels
from pipelines.sources import open_source, records
from pipelines.verify import verify_split, write_clean

BLOCK = 512
OTHERS = "shards, records, lists and folders of images belong to no split and are not read: "


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))


def images(count: int) -> list[bytes]:
    rng = np.random.default_rng(count)
    return [encode(smooth_image(rng, 40, 30)) for _ in range(count)]


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def headers(path) -> list[int]:
    with tarfile.open(path) as tar:
        return [member.offset for member in tar]


def zero_a_header(content: bytes, places: list[int]) -> bytes:
    place = places[len(places) // 3]
    return content[:place] + bytes(BLOCK) + content[place + BLOCK :]


def cut_at_a_member(content: bytes, places: list[int]) -> bytes:
    return content[: places[len(places) // 3]]


def join(content: bytes, places: list[int]) -> bytes:
    return content + content


def spoil_a_checksum(content: bytes, places: list[int]) -> bytes:
    place = places[len(places) // 3] + 150
    return content[:place] + b"77" + content[place + 2 :]


DAMAGES = {zero_a_header: r"goes on after its end mark at byte \d+", cut_at_a_member: "has no end mark",
           join: r"joined with cat instead of tar -A", spoil_a_checksum: r"no header of a file at byte \d+"}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_tar_shards(tmp_path, damage):
    path = tmp_path / "train-0.tar"
    write_tar(path, samples([(image, i % 3) for i, image in enumerate(images(9))]))
    assert len(open_source(tmp_path, "train")) == 9
    path.write_bytes(damage(path.read_bytes(), headers(path)))
    with pytest.raises(DataError, match=DAMAGES[damage]) as error:
        open_source(tmp_path, "train")
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    with pytest.raises(DataError, match=DAMAGES[damage]):
        verify_split(str(tmp_path), "train")


@pytest.mark.parametrize("zeros", [2, 20, 5000])
def test_any_number_of_zeros_ends_a_tar(tmp_path, zeros):
    path = tmp_path / "train-0.tar"
    write_tar(path, samples([(image, 0) for image in images(3)]))
    with tarfile.open(path) as tar:
        end = max(member.offset_data + -(-member.size // BLOCK) * BLOCK for member in tar)
    path.write_bytes(path.read_bytes()[:end] + bytes(zeros * BLOCK))
    assert len(open_source(tmp_path, "train")) == 3


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("place", ["inner", "outer", "val"])
def test_tar_files_of_ilsvrc(tmp_path, damage, place):
    """Damages in a synset's tar file inside the training tar, in the training tar itself, and in the validation tar."""
    inner = tar_of({f"{i}.JPEG": image for i, image in enumerate(images(6))})
    path, labels = tmp_path / "val.tar", tmp_path / "labels.txt"
    labels.write_text("n01440764\n" * 6)
    (tmp_path / "inner.tar").write_bytes(inner)
    if place == "inner":
        inner = damage(inner, headers(tmp_path / "inner.tar"))
    path.write_bytes(inner if place == "val" else tar_of({f"n0144076{i}.tar": inner for i in range(4, 7)}))
    if place != "inner":
        path.write_bytes(damage(path.read_bytes(), headers(path)))
    with pytest.raises(DataError, match=rf"val\.tar: .*{DAMAGES[damage]}") as error:
        if place == "val":
            plan_val_tar(path, labels, [("n01440764", "tench")])
        else:
            plan_train_tar(path, [])
    assert "\n" not in str(error.value) and ("in its member n01440764.tar" in str(error.value)) == (place == "inner")


@pytest.mark.parametrize("num_spots", [1024, 3])
@pytest.mark.parametrize("is_small", [True, False])
def test_an_index_cut_or_doubled_at_the_end_of_a_line(tmp_path, monkeypatch, is_small, num_spots):
    monkeypatch.setattr(records, "_SMALL_FILE", 1 << 28 if is_small else 0)
    monkeypatch.setattr(records, "_NUM_SPOT_CHECKS", num_spots)
    path, index = tmp_path / "train.rec", tmp_path / "train.idx"
    write_records(path, images(9), [float(i % 2) for i in range(9)])
    whole = index.read_text()
    lines = whole.splitlines(keepends=True)
    assert not open_source(path, "train").remarks
    index.write_text("".join(lines[:6]))
    source = open_source(path, "train")
    told, = source.remarks
    known = "the index has 6 of the file's 9 records, the others are left out"
    if is_small:
        assert known in told
    else:
        assert f"lacks records of the file, such as the one at byte {int(lines[6].split()[1]):,};" in told
    assert len(source) == 6 and "remove train.idx and let" in told
    (in_verify,) = verify_split(str(path), "train").remarks
    assert known in in_verify
    index.write_text("".join(lines + lines[2:4]))
    twice = f"{index}: 2 of its 11 lines name a record that another line names too"
    for remarks in (open_source(path, "train").remarks, verify_split(str(path), "train").remarks):
        assert len(remarks) == 1 and remarks[0].startswith(twice)
    index.write_text("".join(lines[2:]))  # the index lacks its first lines
    assert len(open_source(path, "train").remarks) == 1
    index.write_text("".join(np.random.default_rng(0).permutation(lines)))
    assert not open_source(path, "train").remarks
    index.unlink()
    write_clean(verify_split(str(path), "train"))  # the way out
    assert index.read_text() == whole and not open_source(path, "train").remarks


def test_a_cleaned_index_says_what_it_leaves_out(tmp_path):
    path = tmp_path / "train.rec"
    write_records(path, [*images(4), b"no image"], [0.0] * 5)
    write_clean(verify_split(str(path), "train"))
    assert open_source(path, "train").remarks == [
        f"{tmp_path}/train.idx: the index has 4 of the file's 5 records, the others are left out"]


def test_a_list_cut_or_doubled_at_the_end_of_a_line(tmp_path):
    files = write_folder(tmp_path / "images", 9, 3, seed=1)
    lines = [f"{i}\t{i // 3}\t{file.relative_to(tmp_path)}\n" for i, file in enumerate(files)]

    def told(*lines: str) -> list[str]:
        (tmp_path / "train.lst").write_text("".join(lines))
        remarks = open_source(tmp_path, "train").remarks
        assert remarks == verify_split(str(tmp_path), "train").remarks
        return list(remarks)

    assert told(*lines) == []
    assert told(*lines[:8]) == [f"{tmp_path}/train.lst: 1 image beside the 8 images of the list is left out, "
                                "as no list names it"]
    assert told(*lines[:7])[0].endswith(": 2 images beside the 7 images of the list are left out, as no list "
                                        "names them")
    (tmp_path / "val.lst").write_text("".join(lines[7:]))
    assert told(*lines[:7]) == []
    assert told(*lines, *lines[:2])[0].startswith(f"{tmp_path}/train.lst: 2 of its 11 lines name a file that another")
    twice = lines[0].replace("\t0\t", "\t2\t")
    _, contradiction = told(*lines, twice)
    assert contradiction == f"{tmp_path}/train.lst: names 1 file with two labels: {files[0]} (correct it)"


def test_labels_that_contradict_each_other(tmp_path):
    path = tmp_path / "labels.txt"
    path.write_text("a.JPEG 0\na.JPEG 0\nb.JPEG 1\n")
    assert read_labels(path, ["a.JPEG", "b.JPEG"], [("x", "x"), ("y", "y")]) == {"a": 0, "b": 1}
    path.write_text("a.JPEG 0\nb.JPEG 1\na.JPEG 1\n")
    with pytest.raises(DataError, match=r"a\.JPEG is in two lines, with the labels 0 and 1; correct it"):
        read_labels(path, ["a.JPEG", "b.JPEG"], [("x", "x"), ("y", "y")])


def test_a_copy_of_a_shard_is_read(tmp_path):
    """A refusal is not remembered for other files."""
    write_tar(tmp_path / "a/train-0.tar", samples([(image, 0) for image in images(2)]))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert len(open_source(tmp_path / "b", "train")) == 2


# --- what lies beside the data ---


def test_names_with_dots_in_webdataset(tmp_path):
    """Names may have dots before the last suffix; suffixes of several parts still belong to their sample."""
    one, two = images(2)
    write_tar(tmp_path / "train.tar", {
        "v1.0/photo.1.jpg": one, "v1.0/photo.1.cls": b"0", "v1.0/photo.2.jpg": two, "v1.0/photo.2.cls": b"1",
        "b.JPG": one, "b.CLS": b"2", "b.mask.png": two, "b.json": b"{}", "b.fine.cls": b"a word", "b.c.d.txt": b"x"})
    source = open_source(tmp_path, "train")
    assert [(source.read(i).tobytes(), source.label(i)) for i in range(3)] == [(one, 0), (two, 1), (one, 2)]
    assert len(source) == 3 and len(source.remarks) == 1
    assert source.remarks[0].endswith(f"images and labels 1 file is left out: {tmp_path}/train.tar/b.mask.png")


def test_sixty_samples_with_dots_are_sixty(tmp_path):
    image = images(1)[0]
    names = [f"{stem}.{i:02}" for stem in ("img", "pic.a", "x") for i in range(20)]
    write_tar(tmp_path / "train.tar", {f"{name}{end}": image if end == ".jpg" else b"1" for name in names
                                       for end in (".jpg", ".cls")})
    assert len(open_source(tmp_path, "train")) == 60


def test_what_belongs_to_no_sample_of_a_shard_is_counted(tmp_path):
    members = samples([(image, i) for i, image in enumerate(images(2))]) | {
        "readme.txt": b"x", "9.json": b"{}", "._0000.jpg": b"x", "@eaDir/0000.jpg": b"x"}
    write_tar(tmp_path / "train.tar", members)
    for _ in range(2):  # the second time from the cached index
        (told,) = open_source(tmp_path, "train").remarks
        assert "4 files are left out, " in told
    assert verify_split(str(tmp_path), "train").remarks == [told]


@pytest.mark.parametrize("names, read, others", [
    (("part-0", "part-1", "part-2-train"), 1, "part-0.tar, part-1.tar"),
    (("train-0", "train-1", "val-0", "extra-0", "extra-1"), 2, "extra-0.tar, extra-1.tar"),
    (("train-0", "test-0"), 1, "test-0.tar"),
    (("train/0", "val/0", "extra"), 1, "extra.tar"),
    (("part-0", "part-1"), 2, ""),
])
def test_shards_of_no_split_are_counted(tmp_path, names, read, others):
    for number, name in enumerate(names):
        those = images(2 + 2 * number)[2 * number :]
        write_tar(tmp_path / f"data/{name}.tar", samples([(image, i) for i, image in enumerate(those)]))
    remarks = [f"{tmp_path}/data: {others.count('.tar')} of its {OTHERS}{others}"] if others else []
    source = open_source(tmp_path / "data", "train")
    assert len(source) == 2 * read and list(source.remarks) == remarks
    assert list(verify_split(str(tmp_path / "data"), "train").remarks) == remarks


def test_records_lists_and_folders_of_no_split_are_counted(tmp_path):
    write_folder(tmp_path / "train", 4, 2, seed=1)
    write_folder(tmp_path / "test", 2, 2, seed=1)
    write_folder(tmp_path / "@eaDir", 2, 2, seed=1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("")
    (tmp_path / "old.lst").write_text("")
    told = f"{tmp_path}: 2 of its {OTHERS}"
    assert open_source(tmp_path, "train").remarks == [f"{told}old.lst, test"]
    assert verify_split(str(tmp_path), "train").remarks == [f"{told}old.lst, test"]
    write_records(tmp_path / "train.rec", images(2), [0.0] * 2)
    assert open_source(tmp_path, "train").remarks == [f"{told}old.lst, test"]
    write_records(tmp_path / "extra.rec", images(2), [0.0] * 2)
    assert open_source(tmp_path, "train").remarks[0].endswith("not read: extra.rec, old.lst, test")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_with_the_name_of_a_split(tmp_path, split):
    for name in ("airplane", "bus", "car", split):
        write_folder(tmp_path / name, 2, 1, seed=1)
        for file in (tmp_path / name / "c00").iterdir():
            file.rename(tmp_path / name / file.name)
        (tmp_path / name / "c00").rmdir()
    for each in ("train", "val"):
        assert open_source(tmp_path, each).class_names == sorted(["airplane", "bus", "car", split])
    write_folder(tmp_path / split, 2, 2, seed=1)  # now it contains folders, so it may be a split or a class
    with pytest.raises(DataError, match=f"holds airplane, bus, car beside {split}, so {split} may be a split or"):
        open_source(tmp_path, split)
    with pytest.raises(DataError, match=f"list them in {tmp_path}/classes.txt; for {split} alone, give"):
        verify_split(str(tmp_path), split)
    assert open_source(tmp_path / split, split).class_names == ["c00", "c01"]  # the first way out
    (tmp_path / "classes.txt").write_text(f"{split}\ncar\nbus\nairplane\n")
    assert open_source(tmp_path, "train").class_names == [split, "car", "bus", "airplane"]  # the second
    (tmp_path / "data/train").mkdir(parents=True)
    for name in ("airplane", "bus", "car", split):
        (tmp_path / name).rename(tmp_path / "data/train" / name)
    assert open_source(tmp_path / "data", "train").class_names == sorted(["airplane", "bus", "car", split])
    (tmp_path / "data/extra").mkdir()
    write_folder(tmp_path / "data/extra", 2, 1, seed=1)
    assert len(open_source(tmp_path / "data", "train").classes) == 4  # one other folder is reported, not refused


@pytest.mark.parametrize("other", ["test1", "val.rec", "testing", "val_annotations.txt", "train.csv"])
def test_beside_another_part_of_a_data_set_train_is_the_split(tmp_path, other):
    for name in ("train", "raw", "masks"):
        write_folder(tmp_path / name, 2, 2, seed=1)
    (tmp_path / other).write_text("") if "." in other else write_folder(tmp_path / other, 2, 2, seed=1)
    assert open_source(tmp_path, "train").class_names == ["c00", "c01"]
