"""PyTorch's files: files of torch.save are read to the bit, and nothing in them is executed."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from train.errors import TrainError
from train.weights import torch_file

SMALL = Path(__file__).with_name("resnet18_small.pth")
NUMBERS = np.arange(12, dtype=np.float32)


def test_tensors_of_every_kind():
    """tensors.pth was written by PyTorch 2.5 (benchmarks/peer_weights.py): strides, offsets, a shared storage, types,
    and a wrapper's names."""
    wanted = {
        "transposed": NUMBERS.reshape(3, 4).T, "part": NUMBERS[2:9:3], "shared": NUMBERS, "scalar": np.array(7),
        "none": np.zeros((0, 3), np.float32), "parameter": NUMBERS[:2], "half": NUMBERS.astype(np.float16),
        "bfloat16": NUMBERS / 4, "double": np.arange(12.0) / 3, "bool": NUMBERS > 5, "byte": NUMBERS.astype(np.uint8),
        "channels_last": NUMBERS.reshape(1, 3, 2, 2),
    }
    found = torch_file.read(Path(__file__).with_name("tensors.pth"))
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


def test_what_is_written_is_read_again(tmp_path):
    arrays = torch_file.read(SMALL)
    arrays |= {"half": NUMBERS.astype(np.float16), "steps": np.array(2**40), "none": np.zeros((0, 2), np.float32)}
    file = tmp_path / "w.pth"
    file.write_bytes(torch_file.content(arrays))
    found = torch_file.read(file)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    with zipfile.ZipFile(file) as archive, file.open("rb") as raw:
        for info in archive.infolist():
            raw.seek(info.header_offset)
            header = raw.read(30)
            start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
            assert start % 64 == 0, f"{info.filename} cannot be mapped"


@pytest.mark.skipif("PEER_PYTHON" not in os.environ, reason="PEER_PYTHON is not set")
def test_pytorch_reads_what_is_written(tmp_path):
    arrays = torch_file.read(SMALL) | {"half": NUMBERS.astype(np.float16)}
    file = tmp_path / "w.pth"
    file.write_bytes(torch_file.content(arrays))
    script = """if True:
        import sys, numpy as np, torch
        found = torch.load(sys.argv[1], weights_only=True, mmap=True)
        np.savez(sys.argv[2], **{name: tensor.numpy() for name, tensor in found.items()})
    """
    subprocess.run([os.environ["PEER_PYTHON"], "-c", script, file, tmp_path / "w.npz"], check=True)
    with np.load(tmp_path / "w.npz") as found:
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array, strict=True)


LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + pickle.dumps(1001, 2)  # the magic number and the version


def legacy(path: Path, machine: object = None, keys: object = ("0",), count: int = 12, data: bytes = b"") -> Path:
    """A file as PyTorch 0.4 to 1.5 wrote it: the matrix `w` and its transpose, of one storage."""
    wanted = torch_file._pickle({"w": NUMBERS.reshape(3, 4), "t": NUMBERS.reshape(3, 4)})
    strides = torch_file._numbers((3, 4)) + torch_file._numbers((4, 1))
    turned = torch_file._numbers((4, 3)) + torch_file._numbers((1, 4))
    first, last = wanted.rsplit(strides, 1)
    wanted = (first + turned + last).replace(torch_file._text("1"), torch_file._text("0"))
    wanted = wanted.replace(pickle.TUPLE + pickle.BINPERSID, pickle.NONE + pickle.TUPLE + pickle.BINPERSID)
    pickles = pickle.dumps(machine or {"little_endian": True}, 2) + wanted + pickle.dumps([*keys], 2)  # type: ignore[misc]
    path.write_bytes(LEGACY + pickles + struct.pack("<q", count) + (data or NUMBERS.tobytes()))
    return path


def test_files_of_before_1_6(tmp_path):
    found = torch_file.read(legacy(tmp_path / "w.pth"))
    np.testing.assert_array_equal(found["w"], NUMBERS.reshape(3, 4), strict=True)
    np.testing.assert_array_equal(found["t"], NUMBERS.reshape(3, 4).T, strict=True)


@pytest.mark.skipif("PEER_PYTHON" not in os.environ, reason="PEER_PYTHON is not set")
def test_pytorchs_own_files_of_before_1_6(tmp_path):
    script = """if True:
        import sys, torch
        numbers = torch.arange(12.0)
        state = {"half": numbers.half(), "part": numbers[2:9:3], "bfloat16": (numbers / 4).bfloat16(), "whole": numbers}
        torch.save(state, sys.argv[1], _use_new_zipfile_serialization=False)
    """
    subprocess.run([os.environ["PEER_PYTHON"], "-c", script, tmp_path / "w.pth"], check=True)
    found = torch_file.read(tmp_path / "w.pth")
    wanted = {"half": NUMBERS.astype(np.float16), "part": NUMBERS[2:9:3], "bfloat16": NUMBERS / 4, "whole": NUMBERS}
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


# --- files that are not what they seem ---


def archive(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in {"data.pkl": content, **members}.items():
            file.writestr(f"archive/{name}", data)
    return path


def sentence(path: Path) -> str:
    with pytest.raises(TrainError) as error:
        torch_file.read(path)
    text = str(error.value)
    assert text.startswith(str(path)) and "\n" not in text
    return text


class Command:
    """An object whose pickle is a call: pickle.load of a file with this object creates `victim`."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self):
        function, *arguments = self.call
        return function, tuple(arguments)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: {"state_dict": {"conv1.weight": evil}}])
def test_a_malicious_pickle_is_not_executed(protocol, wrap, tmp_path):
    victim = tmp_path / "victim"
    for call in ((os.system, f"touch {victim}"), (eval, f"open({str(victim)!r}, 'w')"), (Path.touch, victim)):
        content = pickle.dumps(wrap(Command(*call)), protocol)
        text = sentence(archive(tmp_path / "evil.pth", content))
        assert "holds more than tensors and plain containers (" in text and "nothing of it was executed" in text
        assert not victim.exists()
        pickle.loads(content)  # this shows that the pickle is harmful
        assert victim.exists()
        victim.unlink()


def test_a_pickle_cannot_change_what_it_gets(tmp_path):
    """BUILD sets attributes, for example of the functions that replace PyTorch's, so that the next tensor would call
    another function."""
    name = b"ctorch._utils\n_rebuild_tensor_v2\n"
    for state in (b"}X\x04\x00\x00\x00callc__builtin__\neval\ns", b"}X\x04\x00\x00\x00callK\x01s"):
        content = b"\x80\x02" + name + state + b"b."
        sentence(archive(tmp_path / "evil.pth", content))
    assert torch_file.read(SMALL)


def tensor(count: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """The pickle of a dictionary with one tensor of a storage of `count` numbers."""
    right = torch_file._pickle({"w": np.zeros(count, np.float32)})
    before = torch_file._number(0) + torch_file._numbers((count,)) + torch_file._numbers((1,))
    assert before in right
    return right.replace(before, torch_file._number(offset) + torch_file._numbers(size) + torch_file._numbers(stride))


def doubled(nested: bytes = pickle.EMPTY_TUPLE, times: int = 60) -> bytes:
    """The pickle opcodes of t = (t, t), repeated `times` times: hashing, comparing or printing it takes 2 ** times
    steps."""
    return nested + times * (pickle.DUP + pickle.TUPLE2)


STORAGE = torch_file._named("torch", "FloatStorage")
REBUILD = torch_file._named("torch._utils", "_rebuild_tensor_v2")
REFERENCE = [torch_file._text("storage"), STORAGE, torch_file._text("0"), torch_file._text("cpu"),
             torch_file._number(4)]


def reference(place: int = 0, part: bytes = REFERENCE[0]) -> bytes:
    parts = [*REFERENCE[:place], part, *REFERENCE[place + 1:]]
    return pickle.MARK + b"".join(parts) + pickle.TUPLE + pickle.BINPERSID


def rebuilt(storage: bytes, *arguments: bytes) -> bytes:
    return REBUILD + pickle.MARK + storage + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


ZERO, ONE_AXIS = torch_file._number(0), torch_file._numbers((1,))


ENDLESS = [
    pickle.EMPTY_DICT + doubled() + pickle.NONE + pickle.SETITEM,
    pickle.EMPTY_DICT + pickle.MARK + doubled() + pickle.NONE + doubled() + pickle.NONE + pickle.SETITEMS,
    pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + 200_000 * pickle.TUPLE1 + pickle.NONE + pickle.SETITEM,
    torch_file._named("collections", "OrderedDict") + pickle.EMPTY_LIST + doubled() + pickle.NONE + pickle.TUPLE2
    + pickle.APPEND + pickle.TUPLE1 + pickle.REDUCE,
    *(reference(place, doubled()) for place in range(5)),
    doubled() + pickle.BINPERSID,
    rebuilt(doubled(), ZERO, ONE_AXIS, ONE_AXIS),
    rebuilt(reference(), doubled(), ONE_AXIS, ONE_AXIS),
    rebuilt(reference(), ZERO, doubled(), ONE_AXIS),
    rebuilt(reference(), ZERO, ONE_AXIS, doubled()),
    rebuilt(reference(), ZERO, *2 * (torch_file._numbers([1] * 33),)),
    rebuilt(reference(), ZERO, torch_file._numbers([10**300]), ONE_AXIS),
    pickle.EMPTY_SET + pickle.MARK + doubled() + pickle.ADDITEMS,
    pickle.MARK + doubled() + pickle.FROZENSET,
    pickle.BYTEARRAY8 + struct.pack("<Q", 2**40),
    pickle.NONE + pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1),
]


@pytest.mark.long
def test_a_few_bytes_take_no_endless_time(tmp_path):
    """In a separate process, because hanging C code cannot be interrupted."""
    for number, content in enumerate(ENDLESS):
        archive(tmp_path / f"{number}.pth", b"\x80\x04" + content + pickle.STOP, **{"data/0": bytes(16)})
    script = """if True:
        import pathlib, sys
        from train.errors import TrainError
        from train.weights import torch_file
        for number in range(int(sys.argv[2])):
            path = pathlib.Path(sys.argv[1], f"{number}.pth")
            try:
                torch_file.read(path)
            except TrainError as error:
                assert str(error).startswith(str(path)) and len(str(error)) < 500, error
                print(number, flush=True)
    """
    done = subprocess.run([sys.executable, "-c", script, tmp_path, str(len(ENDLESS))], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.stdout.split() == [str(number) for number in range(len(ENDLESS))], done.stderr


def test_tuples_that_are_no_harm(tmp_path):
    """A training program's dictionary may contain tuples, also as keys."""
    state = torch_file._pickle({"w": NUMBERS[:4]})[2:-1]
    betas = pickle.BINFLOAT + struct.pack(">d", 0.9) + pickle.TUPLE1
    content = (b"\x80\x02" + pickle.EMPTY_DICT + pickle.MARK + betas + pickle.DUP + torch_file._text("state_dict")
               + state + pickle.SETITEMS + pickle.STOP)
    found = torch_file.read(archive(tmp_path / "w.pth", content, **{"data/0": NUMBERS[:4].tobytes()}))
    np.testing.assert_array_equal(found["w"], NUMBERS[:4])


@pytest.mark.parametrize("offset, size, stride", [
    (3, (2,), (1,)), (0, (5,), (1,)), (0, (2, 2), (3, 1)), (-1, (2,), (1,)), (0, (2,), (-1,)), (0, (-1,), (1,)),
    (0, (2**40, 2**40), (0, 0)), (0, (3, 3), (0, 1)), (0, (2, 2), (1,)), (2**70, (1,), (1,)),
])
def test_tensors_beyond_their_storage(offset, size, stride, tmp_path):
    file = archive(tmp_path / "w.pth", tensor(4, offset, size, stride), **{"data/0": bytes(16)})
    assert "is not a complete PyTorch file (" in sentence(file)


def test_truncated_files(tmp_path):
    content, file = SMALL.read_bytes(), tmp_path / "w.pth"
    for size in (0, 4, 100, 600, 5000, len(content) // 2, len(content) - 30, len(content) - 1):
        file.write_bytes(content[:size])
        assert "fetch or write it again" in sentence(file)


@pytest.mark.long
def test_damaged_files(tmp_path, rng):
    content, file = bytearray(SMALL.read_bytes()), tmp_path / "w.pth"
    reads = 0
    for place in rng.integers(0, len(content), 60):
        damaged = content.copy()
        damaged[place] ^= 0xFF
        file.write_bytes(damaged)
        try:
            torch_file.read(file)
            reads += 1
        except TrainError as error:
            assert "\n" not in str(error)
    assert reads < 30  # nobody reads the bytes between the members


@pytest.mark.parametrize("content, words", [
    (b"", "is empty"),
    (b"<!DOCTYPE html><html>", "is not a PyTorch file, as it begins with b'<!DOCTYP'"),
    (LEGACY, "is not a complete PyTorch file"),
    (b"\x89HDF\r\n\x1a\n", "is not a PyTorch file"),
])
def test_files_of_another_form(content, words, tmp_path):
    file = tmp_path / "w.pth"
    file.write_bytes(content)
    assert words in sentence(file)


@pytest.mark.parametrize("changes, words", [
    ({"machine": {"little_endian": False}}, "little-endian"),
    ({"keys": ()}, "its list of storages"),
    ({"keys": ("0", "1")}, "its list of storages"),
    ({"count": 13}, "a storage for 12 numbers has the wrong length"),
    ({"data": bytes(40)}, "is not a complete PyTorch file"),
    ({"machine": Command(os.system, "touch victim")}, "nothing of it was executed"),
])
def test_damaged_files_of_before_1_6(changes, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in sentence(legacy(tmp_path / "w.pth", **changes))
    assert not Path("victim").exists()


def test_a_tar_of_long_ago(tmp_path):
    with tarfile.open(tmp_path / "w.pth", "w") as file:
        for name in ("sys_info", "pickle", "tensors"):
            file.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert "of PyTorch before version 0.1.10: write it anew with PyTorch" in sentence(tmp_path / "w.pth")


def object_of(**values: bytes) -> bytes:
    """The pickle of a dictionary of pickles."""
    items = (torch_file._text(name) + each.removeprefix(b"\x80\x02").removesuffix(b".") + pickle.SETITEM
             for name, each in values.items())
    return b"\x80\x02" + pickle.EMPTY_DICT + b"".join(items) + pickle.STOP


ARRAYS = torch_file._pickle({"w": np.zeros(4, np.float32)})


@pytest.mark.parametrize("key", ["state_dict", "net", "params"])
def test_a_state_dict_beside_other_things(key: str, tmp_path: Path) -> None:
    """Whatever the key, if it is the only one."""
    content = object_of(epoch=pickle.dumps(3, 2), **{key: ARRAYS}, optimizer=object_of(state=pickle.dumps({}, 2)))
    assert [*torch_file.read(archive(tmp_path / "w.pth", content, **{"data/0": bytes(16)}))] == ["w"]


def test_averages_come_with_their_number(tmp_path: Path) -> None:
    """As torch.optim.swa_utils.AveragedModel has them, in checkpoints of torchvision's programs."""
    path = tmp_path / "w.pth"
    path.write_bytes(torch_file.content({"n_averaged": np.array(3), "module.w": np.zeros(4, np.float32)}))
    assert [*torch_file.read(path)] == ["w"]


def test_several_state_dicts(tmp_path: Path) -> None:
    path = archive(tmp_path / "w.pth", object_of(student=ARRAYS, teacher=ARRAYS), **{"data/0": bytes(16)})
    assert "has no state_dict (names with tensors), but student, teacher: save it with" in sentence(path)


@pytest.mark.parametrize("make, words", [
    (lambda path: archive(path, b"", **{"constants.pkl": b"", "code/x.py": b""}), "it is a program of TorchScript"),
    (lambda path: archive(path, pickle.dumps({}), zipfile.ZIP_DEFLATED), "its data.pkl is compressed"),
    (lambda path: archive(path, pickle.dumps({"lr": 0.1})), "has no state_dict"),
    (lambda path: archive(path, pickle.dumps([1, 2])), "has no state_dict"),
    (lambda path: archive(path, tensor(4, 0, (4,), (1,))), "data/0"),
    (lambda path: archive(path, tensor(4, 0, (4,), (1,)), **{"data/0": bytes(12)}), "4 numbers has 3"),
    (lambda path: archive(path, tensor(4, 0, (4,), (1,)), **{"data/0": bytes(16), "byteorder": b"middle"}),
     "its byteorder is 'middle', and neither little nor big"),
    (lambda path: archive(path, b"not a pickle"), "is not a complete PyTorch file"),
    (lambda path: np.savez(path.open("wb"), w=NUMBERS), "it has no data.pkl"),
])
def test_zips_of_another_kind(make, words, tmp_path):
    make(tmp_path / "w.pth")
    assert words in sentence(tmp_path / "w.pth")
