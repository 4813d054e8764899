"""--val-split: a fraction of each class becomes validation, chosen by a hash of the files' names."""

import tarfile
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from image_helpers import samples, write_folder, write_records, write_tar

from pipelines import DataError, LoaderConfig, open_loader
from pipelines.sources import open_source, same_images, splits_of
from pipelines.verify import verify_split


def files(data, split, fraction, num_classes=None):
    source = open_source(data, split, num_classes, fraction)
    return {"/".join(source.name(i).split("/")[-2:]) for i in range(len(source))}


def empty_images(folder, names):
    """Write class folders with empty files, of which only the names matter."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def test_the_parts_are_all_images_and_about_the_fraction_of_each_class(tmp_path):
    names = [f"{label}/{label}-{i:04}.jpg" for label in "abc" for i in range(400)]
    empty_images(tmp_path / "data", names)
    train, val = (files(tmp_path / "data", split, 0.1) for split in ("train", "val"))
    assert train | val == set(names) and not train & val
    sizes = Counter(name[0] for name in val)
    assert all(20 <= sizes[label] <= 60 for label in "abc")  # 40, with a standard deviation of 6
    assert val < files(tmp_path / "data", "val", 0.2)


def test_an_image_stays_on_its_side_when_others_come_and_go(tmp_path):
    names = [f"{label}/{label}-{i:04}.jpg" for label in "abc" for i in range(200)]
    empty_images(tmp_path / "few", names[::3])
    empty_images(tmp_path / "elsewhere" / "many" / "train", [*names, "d/0.jpg", "d/1.jpg"])
    few, many = files(tmp_path / "few", "val", 0.1), files(tmp_path / "elsewhere" / "many", "val", 0.1)
    assert few == many & set(names[::3])


def test_small_classes(tmp_path):
    """Every class keeps a training image, and has a validation image if it has two images; the files' names do not
    matter."""
    for number in range(20):
        data = tmp_path / str(number)
        empty_images(data, [f"one/{number}.jpg", *(f"two/{number}-{i}.jpg" for i in range(2)),
                            *(f"three/{number}-{i}.jpg" for i in range(3))])
        for fraction in (0.01, 0.99):
            train, val = (Counter(name.split("/")[0] for name in files(data, split, fraction))
                          for split in ("train", "val"))
            assert train == {"one": 1, "two": 1, "three": 2 if fraction < 0.5 else 1}
            assert val == {"two": 1, "three": 1 if fraction < 0.5 else 2}


def test_one_image_a_class(tmp_path):
    empty_images(tmp_path, ["a/1.jpg", "b/1.jpg"])
    with pytest.raises(DataError, match="no class has two images, one to train on and one for --val-split 0.1: add"):
        open_source(tmp_path, "train", val_split=0.1)


def test_data_with_val_is_refused(tmp_path):
    empty_images(tmp_path / "data", [f"{split}/a/{i}.jpg" for split in ("train", "val") for i in range(9)])
    with pytest.raises(DataError, match=f"has images for validation, {tmp_path}/data/val: leave out --val-split, or"):
        open_source(tmp_path / "data", "val", val_split=0.1)
    assert len(files(tmp_path / "data" / "train", "val", 0.5)) in range(1, 9)  # the message's way out
    with pytest.raises(DataError, match="have a validation split and classes of equal size; leave out --val-split"):
        open_loader(LoaderConfig(data="synthetic", val_split=0.1))


def test_data_without_val_are_told_of_it(tmp_path):
    empty_images(tmp_path / "data", ["train/a/1.jpg"])
    with pytest.raises(DataError, match="has train but no val; add .*, set part of the training images aside .--val"):
        open_source(tmp_path / "data", "val")


@pytest.mark.parametrize("split, other", [("train", "val"), ("val", "train")])
@pytest.mark.parametrize("stored", ["list", "records", "shard"])
def test_class_folders_do_not_stand_in_for_the_other_split(tmp_path, stored, split, other):
    """If a list, records or a shard lie beside class folders, the folders may hold the same images."""
    files = write_folder(tmp_path, 24, 3, seed=1)[:20]
    if stored == "list":
        (tmp_path / f"{split}.lst").write_text("".join(f"0\t{i % 3}\t{file}\n" for i, file in enumerate(files)))
    elif stored == "records":
        write_records(tmp_path / f"{split}.rec", [b"image"] * 20, [float(i % 3) for i in range(20)])
    else:
        write_tar(tmp_path / f"{split}.tar", samples([(b"image", i % 3) for i in range(20)]))
    assert len(open_source(tmp_path, split)) == 20 and splits_of(tmp_path) == [split] and not same_images(tmp_path)
    with pytest.raises(DataError, match=f"has {split} but no {other}; add {other}/, {other}.rec or {other}.lst"):
        open_source(tmp_path, other)
    if split == "train":
        parts = [open_source(tmp_path, name, val_split=0.3) for name in ("train", "val")]
        names = [{part.name(i) for i in range(len(part))} for part in parts]
        assert sum(map(len, parts)) == len(names[0] | names[1]) == 20 and names[1]
    write_folder(tmp_path / other, 4, 2, seed=2)
    assert len(open_source(tmp_path, other)) == 4  # in its own folder


def test_shards_without_a_split_do_not_stand_in_for_the_other_one(tmp_path):
    write_tar(tmp_path / "0.tar", samples([(b"image", 0)] * 4))
    assert same_images(tmp_path)
    write_records(tmp_path / "train.rec", [b"image"] * 2, [0.0] * 2)
    with pytest.raises(DataError, match="has train but no val"):
        open_source(tmp_path, "val")


def test_a_list_and_records(tmp_path):
    """A list gives the same parts as the folder that it lists, for example after `verify --write-clean`."""
    names = [f"{label}/{label}-{i:04}.jpg" for label in "ab" for i in range(30)]
    empty_images(tmp_path / "data" / "train", names)
    from_folder = files(tmp_path / "data", "val", 0.2)
    lines = [f"0\t{'ab'.index(name[0])}\ttrain/{name}\n" for name in names]
    (tmp_path / "data" / "train.lst").write_text("".join(lines))
    assert open_source(tmp_path / "data", "train").path.name == "train.lst"
    assert files(tmp_path / "data", "val", 0.2) == from_folder

    write_records(tmp_path / "train.rec", [b"image"] * 60, [float(i % 2) for i in range(60)])
    parts = [open_source(tmp_path / "train.rec", split, val_split=0.2) for split in ("train", "val")]
    assert sum(map(len, parts)) == 60 and 4 <= len(parts[1]) <= 22
    assert {part.label(i) for part in parts for i in range(len(part))} == {0, 1}


def test_the_loader_has_each_part(tmp_path):
    data = str(tmp_path / "images")
    write_folder(tmp_path / "images", 24, 3, seed=1)
    for cache_gib in (0.0, 1.0):
        config = LoaderConfig(data=data, val_split=0.3, batch_size=4, image_size=16, cache_gib=cache_gib)
        val = LoaderConfig(data=data, val_split=0.3, batch_size=4, image_size=16, split="val", cache_gib=cache_gib)
        with open_loader(config) as train_loader, open_loader(val) as val_loader:
            assert train_loader.num_images + val_loader.num_images == 24
            labels = [label for batch in val_loader for label in batch.label.asnumpy()[: batch.num_valid].tolist()]
            source = open_source(data, "val", val_split=0.3)
            assert labels == [source.label(i) for i in range(len(source))]


def test_resuming_with_another_part_is_refused(tmp_path):
    write_folder(tmp_path / "images", 24, 3, seed=1)

    def loader(**options):
        return open_loader(LoaderConfig(data=str(tmp_path / "images"), batch_size=4, image_size=16, **options))

    with loader(val_split=0.3) as before, loader(val_split=0.3) as same, loader() as other, loader(balance=1) as drawn:
        same.restore(before.state())
        with pytest.raises(DataError, match="belongs to val_split 0.3, but this loader has 0"):
            other.restore(before.state())
        with pytest.raises(DataError, match="belongs to balance 1.*resume with the same data, seed, --labels, --v"):
            other.restore(drawn.state())


def test_a_broken_image_is_met_where_it_belongs(tmp_path):
    write_folder(tmp_path / "images", 12, 3, seed=1)
    source = open_source(tmp_path / "images", "val", val_split=0.4)
    Path(source.name(0)).write_bytes(b"")
    config = LoaderConfig(data=str(tmp_path / "images"), val_split=0.4, batch_size=3, image_size=16)
    with open_loader(config) as loader:
        assert len(list(loader)) == loader.num_batches and not loader.bad_images
    with (
        open_loader(LoaderConfig(data=str(tmp_path / "images"), split="val", val_split=0.4, batch_size=3,
                                 image_size=16)) as loader,
        pytest.raises(DataError, match=source.name(0)),
    ):
        list(loader)


@pytest.mark.parametrize("stored", ["folders", "list", "tar"])
@pytest.mark.parametrize("group_by", ["image", "folder"])
def test_a_copy_in_another_form_of_unicode_has_the_same_parts(tmp_path, stored, group_by):
    """macOS and some archives write an accent apart from its letter (NFD)."""
    names = [f"caf\u00e9/{i // 3}\u00fc/\u00f6{i:02}.jpg" for i in range(60)]
    chosen = []
    for form in ("NFC", "NFD"):
        data = tmp_path / form
        written = [unicodedata.normalize(form, name) for name in names]
        if stored == "tar":
            write_tar(data / "0.tar", {f"{name.removesuffix('.jpg')}.{ending}": b"0" for name in written
                                       for ending in ("jpg", "cls")}, tarfile.PAX_FORMAT)
        else:
            empty_images(data, written)
        if stored == "list":
            (data / "train.lst").write_text("".join(f"0\t0\t{name}\n" for name in written))
        val = sides(data, 0.3, val_group_by=group_by)
        chosen.append({unicodedata.normalize("NFC", name)[-9:] for name in val})
    assert chosen[0] == chosen[1] and 3 <= len(chosen[0]) < 60


def test_two_files_whose_names_differ_only_in_the_form_of_unicode(tmp_path):
    twice = ["\u00e9.jpg", "e\u0301.jpg"]
    empty_images(tmp_path, [f"{folder}/{name}" for folder in "ab" for name in twice] + [f"b/{i}.jpg" for i in range(9)])
    for fraction in (0.01, 0.4, 0.99):
        parts = [open_source(tmp_path, split, val_split=fraction) for split in ("train", "val")]
        names = [{part.name(i) for i in range(len(part))} for part in parts]
        assert not names[0] & names[1] and len(names[0] | names[1]) == 13
        assert sum(name.startswith(f"{tmp_path}/a/") for name in names[1]) == 1


def test_values(tmp_path):
    empty_images(tmp_path, ["a/1.jpg", "a/2.jpg"])
    for value in (1, -0.1):
        with pytest.raises(DataError, match=f"--val-split {value} must be at least 0 and below 1"):
            open_source(tmp_path, "train", val_split=value)
    with pytest.raises(DataError, match="balance is 2; it must be from 0 to 1"):
        LoaderConfig(data="here", balance=2)


def test_files_of_one_name_in_several_classes_are_not_all_on_one_side(tmp_path):
    empty_images(tmp_path, [f"{label}/{i}.jpg" for label in range(40) for i in range(3)])
    chosen = Counter(name.split("/")[1] for name in files(tmp_path, "val", 1 / 3))
    assert len(chosen) == 3


def shares(data, fraction=0.1, **how):
    """The number of images of each class on both sides."""
    parts = [open_source(data, split, val_split=fraction, **how) for split in ("train", "val")]
    return [Counter(part.class_names[part.label(i)] for i in range(len(part))) for part in parts]


def sides(data, fraction=0.1, **how):
    """The names of the validation images."""
    part = open_source(data, "val", val_split=fraction, **how)
    return {part.name(i) for i in range(len(part))}


def test_files_of_one_name_in_folders_of_their_own(tmp_path):
    """CLASS/itemNNN/photo.jpg: with a hash of the base name, all images of a class were on one side."""
    names = [f"class{label}/item{i:03}/photo.jpg" for label in range(8) for i in range(40)]
    empty_images(tmp_path / "data", names)
    train, val = shares(tmp_path / "data")
    assert all(1 <= val[f"class{label}"] <= 12 and train[f"class{label}"] + val[f"class{label}"] == 40
               for label in range(8))
    assert 16 <= sum(val.values()) <= 48  # 32, with a standard deviation of 5.4
    before = sides(tmp_path / "data")
    empty_images(tmp_path / "data", [f"class{label}/{name}/photo.jpg" for label in range(8) for name in ("a", "z")])
    assert before == sides(tmp_path / "data") & {str(tmp_path / "data" / name) for name in names}


def test_a_list_of_such_files_has_the_same_parts(tmp_path):
    names = [f"class{label}/item{i:03}/photo.jpg" for label in range(3) for i in range(20)]
    empty_images(tmp_path / "data" / "train", names)
    for fraction in (0.1, 0.4):
        from_folder = sides(tmp_path / "data", fraction)
        lines = [f"0\t{name[5]}\ttrain/{name}\n" for name in reversed(names)]
        (tmp_path / "data" / "train.lst").write_text("".join(lines))
        assert open_source(tmp_path / "data", "train").path.name == "train.lst"
        assert sides(tmp_path / "data", fraction) == from_folder
        (tmp_path / "data" / "train.lst").unlink()


def test_a_file_that_a_list_has_twice_is_on_one_side(tmp_path):
    names = [f"{label}/{i}.jpg" for label in "ab" for i in range(10)]
    empty_images(tmp_path, names)
    (tmp_path / "train.lst").write_text("".join(f"0\t{'ab'.index(name[0])}\t{name}\n" for name in names * 2))
    parts = [open_source(tmp_path, split, val_split=0.3) for split in ("train", "val")]
    train, val = ({part.name(i) for i in range(len(part))} for part in parts)
    assert not train & val and len(train | val) == 20 and sum(map(len, parts)) == 40


def test_equal_keys_in_each_shard(tmp_path):
    def write(shard: str) -> None:
        write_tar(tmp_path / "data" / f"{shard}.tar", samples([(b"x", i % 2) for i in range(4)]))

    for shard in range(40):
        write(f"{shard:02}")
    train, val = shares(tmp_path / "data", 0.2)
    assert all(6 <= val[label] <= 26 and train[label] + val[label] == 80 for label in "01")  # 16 +/- 3.6
    before = sides(tmp_path / "data", 0.2)
    write("40")
    assert before == {name for name in sides(tmp_path / "data", 0.2) if "/40.tar/" not in name}


@pytest.mark.parametrize("name", ["x" * 110, "x" * 300, "\N{SNOWMAN}" * 20, "folder" * 20 + "/\u00e9"])
def test_keys_that_no_plain_header_holds(tmp_path, name):
    """Formerly only the first hundred bytes of names counted, so all these images had equal names."""
    members = {f"{name}{i:02}.{ending}": content for i in range(40) for ending, content in
               (("cls", b"%d" % (i % 2)), ("jpg", b"x"))}
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        write_tar(tmp_path / f"{format}.tar", members, format)
        source = open_source(tmp_path / f"{format}.tar", "train")
        assert [source.name(i) for i in range(40)] == [f"{tmp_path}/{format}.tar/{name}{i:02}.jpg" for i in range(40)]
        train, val = shares(tmp_path / f"{format}.tar", 0.3)
        assert all(1 <= val[label] <= 14 and train[label] + val[label] == 20 for label in "01")
    parts = [{name.split("/")[-1] for name in sides(tmp_path / f"{format}.tar", 0.3)} for format in
             (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)]
    assert parts[0] == parts[1]


def test_an_index_whose_keys_are_all_0(tmp_path):
    path = tmp_path / "train.rec"
    write_records(path, [b"image"] * 60, [float(i % 2) for i in range(60)])
    lines = path.with_suffix(".idx").read_text().splitlines()
    path.with_suffix(".idx").write_text("".join(f"0\t{line.split()[1]}\n" for line in lines))
    train, val = shares(path, 0.2)
    assert all(1 <= val[label] <= 14 and train[label] + val[label] == 30 for label in "01")
    names = sides(path, 0.2)
    assert len(names) == sum(val.values()) and all("train.rec record 0 (byte " in name for name in names)
    report = verify_split(str(path), "train")
    assert len({image.name for image in report.usable} | {name for name, _ in report.findings}) == 60


def test_the_parts_of_names_that_were_right_before_stay(tmp_path):
    """Class folders of files, and keys of records and shards, keep their old hashes."""
    empty_images(tmp_path / "files", [f"{label}/{i}.jpg" for label in "ab" for i in range(12)])
    expected = {f"a/{i}.jpg" for i in (1, 5, 8)} | {f"b/{i}.jpg" for i in (4, 5, 6, 8, 11)}
    assert files(tmp_path / "files", "val", 0.25) == expected
    write_records(tmp_path / "train.rec", [b"image"] * 24, [float(i % 2) for i in range(24)])
    expected = {f"train.rec record {i}" for i in (1, 4, 7, 10, 19, 20, 22, 23)}
    assert {Path(name).name for name in sides(tmp_path / "train.rec", 0.25)} == expected
    write_tar(tmp_path / "train.tar", samples([(b"x", i % 2) for i in range(24)]))
    expected = {f"train.tar/{i:04}.jpg" for i in (1, 3, 6, 16, 22)}
    assert files(tmp_path / "train.tar", "val", 0.25) == expected


def test_groups_stay_together(tmp_path):
    names = [f"{label}/video{v:02}/{part}/{i}.jpg" for label in "abcd" for v in range(20) for part in "xy"
             for i in range(3)]
    empty_images(tmp_path / "data", names + [f"a/{i}.jpg" for i in range(20)])

    def groups(paths):
        return {tuple(path.removeprefix(f"{tmp_path}/data/").split("/")[:2]) for path in paths}

    val = sides(tmp_path / "data", 0.2, val_group_by="folder")
    train = {str(tmp_path / "data" / name) for name in names} - val
    assert not groups(val) & groups(train)
    assert 5 <= len([group for group in groups(val) if group[1].startswith("video")]) <= 30  # 16 +/- 3.6
    assert any(group[1] == f"{i}.jpg" for group in groups(val) for i in range(20))  # images in no folder
    every = sides(tmp_path / "data", 0.2)
    assert groups(every) & groups({str(tmp_path / "data" / name) for name in names} - every)
    lines = [f"0\t{i % 2}\tvideos/v{i // 8}/{i}.jpg\n" for i in range(160)]
    (tmp_path / "train.lst").write_text("".join(lines))
    found = {Path(name).parent.name for name in sides(tmp_path / "train.lst", 0.2, val_group_by="folder")}
    assert 1 <= len(found) <= 12
    write_tar(tmp_path / "train.tar", {f"v{i // 8}/{i}.{ending}": b"%d" % (i % 2) for i in range(160)
                                       for ending in ("cls", "jpg")})
    found = sides(tmp_path / "train.tar", 0.2, val_group_by="folder")
    assert len(found) == 8 * len({Path(name).parent.name for name in found})
    with pytest.raises(DataError, match="no class has images of two folders, one to train on"):
        empty_images(tmp_path / "one", [f"a/images/{i}.jpg" for i in range(20)])
        open_source(tmp_path / "one", "val", val_split=0.5, val_group_by="folder")


def test_shares_that_are_far_off_are_told(tmp_path):
    empty_images(tmp_path / "data", [f"{label}/{v}/{i}.jpg" for label in "ab" for v in "xy" for i in range(20)]
                 + [f"c/{i:02}.jpg" for i in range(40)] + ["d/one.jpg"])
    for split in ("train", "val"):
        remark, = open_source(tmp_path / "data", split, val_split=0.1, val_group_by="folder").remarks
        assert remark == (f"{tmp_path}/data: some classes have a validation share far from --val-split 0.1: "
                          "a 20 of 40, b 20 of 40")
        assert not open_source(tmp_path / "data", split, val_split=0.1).remarks


def test_a_group_of_several_classes(tmp_path):
    """A class gets training images before validation images."""
    (tmp_path / "train.lst").write_text("0\t0\tv/1.jpg\n1\t1\tv/2.jpg\n2\t0\tw/3.jpg\n")
    train, val = shares(tmp_path / "train.lst", 0.9, val_group_by="folder")
    assert train == {"0": 1, "1": 1} and val == {"0": 1}
