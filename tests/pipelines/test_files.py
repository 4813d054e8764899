"""Pipes, sockets, devices and folders in place of files: they are named, and reading never waits for them."""

import io
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_records

from pipelines import DataError, LoaderConfig, make_records, open_loader
from pipelines.dali_loader import DaliLoader
from pipelines.files import check_is_file, open_file, understood
from pipelines.make_records import Options, plan_files
from pipelines.recordio import RecordFile
from pipelines.sources import open_source
from pipelines.verify import verify_split


def image() -> bytes:
    return encode(smooth_image(np.random.default_rng(4), 80, 60))


def config(path, **options):
    return LoaderConfig(data=str(path), batch_size=4, image_size=16, num_threads=2, prefetch=1, **options)


def pipe(path):
    os.mkfifo(path)
    return "a named pipe"


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return "a socket"


def device(path):
    path.symlink_to("/dev/zero")
    return "a device"


@pytest.mark.parametrize("make", [pipe, unix_socket, device])
@pytest.mark.parametrize("mid_run", [False, True])
def test_what_is_no_file_is_never_waited_for(folder, tmp_path, monkeypatch, make, mid_run):
    """A pipe or device may have an image's name from the start, or replace an image in the middle of a run."""
    monkeypatch.chdir(folder)  # the path of a socket has at most 108 bytes
    file = folder / "c01/004.JPEG"
    path = file.relative_to(folder)
    path.unlink()
    words = f"cannot be read ({make(path)}, not a file)"
    if mid_run:
        path.rename("kept")
        path.write_bytes(image())
    errors = open_loader(config(folder))
    with open_loader(config(folder, on_bad_image="skip")) as skips, errors:
        if mid_run:
            next(iter(skips))
            path.unlink()
            os.rename("kept", path)
        with pytest.raises(DataError, match=re.escape(f"{file}: {words}; replace it")):
            list(errors)
        assert len(list(skips)) == 3 - mid_run
        assert skips.bad_images == [(str(file), words)]
    report = verify_split(str(folder), "train")
    assert [(name, finding.detail, finding.usable) for name, finding in report.findings] == [
        (str(file), words.removeprefix("cannot be read (").removesuffix(")"), False)
    ]
    plan = plan_files(folder, "train")
    _, skipped = make_records.write_records(plan, tmp_path / "out", "train", Options(skip_bad=True))
    assert skipped == [(str(file), words)]


@pytest.mark.parametrize("name", ["train.idx", "train.rec", "classes.txt", "train.lst", "x.tar", "x.tfrecord"])
def test_a_pipe_in_place_of_a_data_file(tmp_path, name):
    write_records(tmp_path / "train.rec", [image()], [0.0])
    if name.startswith("x."):
        (tmp_path / "train.rec").unlink()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if name in ("classes.txt", "train.lst"):  # ignored as if it did not exist
        assert len(open_source(tmp_path, "train")) == 1
    else:
        with pytest.raises(DataError, match="a named pipe, not a file|in none of the known formats|no class folders"):
            open_source(tmp_path, "train")


@pytest.mark.parametrize("name", [".train.rec.partial", ".train.journal", "classes.txt"])
def test_a_pipe_in_place_of_a_file_that_is_written(folder, tmp_path, name):
    plan, path = plan_files(folder, "train"), tmp_path / "out" / name
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(DataError, match=rf"{path}: cannot be written \(a named pipe, not a file\); fix that, then"):
        make_records.write_records(plan, path.parent, "train", Options())
    path.unlink()
    assert make_records.write_records(plan, path.parent, "train", Options()) == (12, [])
    assert (path.parent / "train.rec").stat().st_mode & 0o111 == 0


def numbered_records(folder):
    """40 records; the first half of the file holds about twenty of them."""
    write_records(folder / "train.rec", [image() for _ in range(40)], [0.0] * 40)
    return folder / "train.rec"


def shard(folder):
    """The images of `numbered_records` as a WebDataset shard."""
    with tarfile.open(folder / "train.tar", "w") as tar:
        for i in range(40):
            for ending, content in (("jpg", image()), ("cls", b"0")):
                member = tarfile.TarInfo(f"{i:02}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return folder / "train.tar"


def cut_in_half(path):
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return rf"{path}: had {size:,} bytes when it was opened and has {size // 2:,} now; put the whole file back"


@pytest.mark.parametrize("make", [numbered_records, shard])
@pytest.mark.parametrize("device, on_bad_image", [
    ("cpu", "error"), ("cpu", "skip"), pytest.param("gpu", "error", marks=pytest.mark.gpu),
])
def test_a_mapped_file_is_cut_short(tmp_path, make, device, on_bad_image):
    path = make(tmp_path)
    with open_loader(config(path, device=device, on_bad_image=on_bad_image)) as loader:
        batches = iter(loader)
        next(batches)
        sentence = cut_in_half(path)
        with pytest.raises(DataError, match=sentence):
            list(batches)
        assert not loader.bad_images


def test_a_mapped_file_is_cut_short_while_it_is_decoded(tmp_path, monkeypatch):
    """DALI's threads already had the images when the file was cut: they read zeros, and the process lives."""
    path = numbered_records(tmp_path)
    read = RecordFile.read
    cut = []

    def cut_after_reading(file, offset):
        record = read(file, offset)
        if offset > file.size * 0.8 and not cut:
            cut.append(cut_in_half(path))
        return record

    source = open_source(path, "train")
    loader = DaliLoader(config(path), (0, 1), source)
    source._record.cache_clear()
    monkeypatch.setattr(RecordFile, "read", cut_after_reading)
    with loader, pytest.raises(DataError) as caught:
        list(loader)
    assert re.match(cut[0], str(caught.value)) and source._file.is_damaged


@pytest.mark.parametrize("make", [numbered_records, shard])
def test_a_mapped_file_is_cut_short_under_verify(tmp_path, monkeypatch, make):
    path = make(tmp_path)
    cut = []

    def cut_first(*_):
        if not cut:
            cut.append(cut_in_half(path))

    monkeypatch.setattr("pipelines.verify.inspect_image", cut_first)
    with pytest.raises(DataError) as caught:
        verify_split(str(path), "train", num_threads=1)
    assert re.match(cut[0], str(caught.value))


def test_bus_errors_of_others_are_theirs(tmp_path):
    program = """
import mmap, os, sys
from pathlib import Path
from pipelines.files import MappedFile
path = Path(sys.argv[1])
path.write_bytes(bytes(3 * mmap.PAGESIZE))
ours = MappedFile(path)
with path.open("rb") as file:
    theirs = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(path, 10)
print(sum(ours.bytes), ours.is_damaged, flush=True)
theirs[mmap.PAGESIZE]
"""
    found = subprocess.run([sys.executable, "-c", program, str(tmp_path / "file")], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (-signal.SIGBUS, "0 True\n")


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'numqy'"), LookupError("unknown encoding: b"),
                                   KeyError("x"), MemoryError(), RecursionError("too deep"), struct.error("a\nb \x1b")])
def test_whatever_a_library_raises_is_one_sentence(tmp_path, error):
    with pytest.raises(DataError) as caught, understood(tmp_path / "a", "is no picture", "draw it again"):
        raise error
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/a: is no picture (") and text.endswith("); draw it again")
    assert "\n" not in text and "\x1b" not in text and not text.endswith("(); draw it again")


def test_what_is_of_the_disk_and_what_is_a_sentence_is_passed_on(tmp_path):
    for error in (OSError(5, "Input/output error"), DataError("a sentence")):
        with pytest.raises(type(error)) as caught, understood(tmp_path, "is no picture", "draw it again"):
            raise error
        assert caught.value is error


def test_a_nul_in_a_list_or_a_name(tmp_path):
    (tmp_path / "train.lst").write_bytes(b"0\t0\ta.jpg\n1\t0\tb\0.jpg\n")
    with pytest.raises(DataError, match=r"train\.lst line 2: holds a NUL, so the file is damaged; restore it"):
        open_source(tmp_path, "train")
    for call in (check_is_file, open_file):
        with pytest.raises(OSError, match="its name holds a NUL"):
            call(Path(f"{tmp_path}/a\0b"))
