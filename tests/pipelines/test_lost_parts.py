"""Files that lost a part, or have one twice, and look whole: refused or told, never fewer images in silence."""

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


DAMAGES = {zero_a_header: r"goes on behind its end mark at byte \d+", cut_at_a_member: "has no end mark",
           join: r"joined with cat and not with tar -A", spoil_a_checksum: r"no header of a file at byte \d+"}


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
    """A synset's tar file within the one of training, that one itself, and that of validation."""
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
    assert "\n" not in str(error.value) and ("n01440764.tar in it" in str(error.value)) == (place == "inner")


@pytest.mark.parametrize("num_spots", [1024, 3])
@pytest.mark.parametrize("is_small", [True, False])
def test_an_index_cut_or_doubled_at_the_end_of_a_line(tmp_path, monkeypatch, is_small, num_spots):
    monkeypatch.setattr(records, "_SMALL_FILE", 1 << 28 if is_small else 0)
    monkeypatch.setattr(records, "_NUM_SPOT_CHECKS", num_spots)
    path, index = tmp_path / "train.rec", tmp_path / "train.idx"
    write_records(path, images(9), [0.0] * 9)
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
        assert f"lacks records of the file, as that at byte {int(lines[6].split()[1]):,};" in told
    assert len(source) == 6 and "remove train.idx and let" in told
    (in_verify,) = verify_split(str(path), "train").remarks
    assert known in in_verify
    index.write_text("".join(lines + lines[2:4]))
    twice = f"{index}: 2 of its 11 lines name a record that another line names too"
    for remarks in (open_source(path, "train").remarks, verify_split(str(path), "train").remarks):
        assert len(remarks) == 1 and remarks[0].startswith(twice)
    index.write_text("".join(lines[2:]))  # at its beginning, and shuffled
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
    assert told(*lines[:8]) == [f"{tmp_path}/train.lst: 1 image beside the 8 that it names is in no list, and left out"]
    assert told(*lines[:7])[0].endswith(": 2 images beside the 7 that it names are in no list, and left out")
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
    """What is refused is remembered for no other file."""
    write_tar(tmp_path / "a/train-0.tar", samples([(image, 0) for image in images(2)]))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert len(open_source(tmp_path / "b", "train")) == 2
