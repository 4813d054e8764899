"""Reads PyTorch's .pth and .pt files without PyTorch, and without executing their content.

Since PyTorch 1.6 a file is an uncompressed zip:

    NAME/data.pkl     a pickle of the object; each tensor in it refers to a storage by its key
    NAME/data/KEY     the bytes of a storage
    NAME/byteorder    little or big; little if it is missing

From PyTorch 0.4 on a file was a sequence of pickles: a magic number, the version of the form, the machine's properties,
the object, and the list of the keys. The storages follow in the order of the keys, each with its length.

A pickle is a program: it names functions, which are imported and called. This reader accepts only the names of tensors
and plain containers. These names are bound to substitutes that make arrays and dictionaries, and that the pickle cannot
change. Nested objects are never compared, hashed or printed, so that a small file cannot consume unlimited time or
memory. References have the form of torch/serialization.py and `torch._utils._rebuild_tensor_v2`.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from train.content import content_of_file
from train.errors import TrainError

HOW_TO_SAVE = "save it with torch.save(model.state_dict(), FILE)"
_ZIP = b"PK\x03\x04"
# Files of PyTorch before 1.6 begin with this pickle of a number. Files from before 0.1.10 are tar files.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY_VERSION = 1001

BFLOAT16 = "BFloat16Storage"  # not a NumPy type: its bits are the upper half of a float32
STORAGES: Mapping[str, np.dtype[Any]] = {
    "DoubleStorage": np.dtype("f8"), "FloatStorage": np.dtype("f4"), "HalfStorage": np.dtype("f2"),
    "LongStorage": np.dtype("i8"), "IntStorage": np.dtype("i4"), "ShortStorage": np.dtype("i2"),
    "CharStorage": np.dtype("i1"), "ByteStorage": np.dtype("u1"), "BoolStorage": np.dtype("?"),
    BFLOAT16: np.dtype("u2"),
}
_BYTE_ORDERS: Mapping[str, Literal["<", ">"]] = {"little": "<", "big": ">"}
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}
_MOST_AXES = 32  # NumPy's limit before version 2
# Keys under which training programs store a state_dict. Averaged weights come first, because training programs validate
# the averaged weights.
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
_PREFIX = re.compile(r"^(?:module\.|_orig_mod\.)+")
_COUNT = "n_averaged"  # of torch.optim.swa_utils.AveragedModel, beside the network in `module`


class _Forbidden(Exception):
    """The pickle names something that is neither a tensor nor a plain container."""


class _Inert:
    """Base of the objects that a pickle can reach; it has no attributes that a pickle could set."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        """Ignore the attributes that PyTorch stores with some dictionaries."""


class _Dict(dict[Any, Any], _Inert):
    __slots__ = ()

    def __init__(self) -> None:
        """Accept no content here; the content follows in the pickle. Copies of copies could otherwise use unlimited
        memory.
        """


class _Tuple(tuple[Any, ...], _Inert):
    """A tuple that is equal only to itself. As a key, t = (t, t), repeated sixty times, would otherwise take years to
    hash."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Tensor(_Inert):
    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


class _Function(_Inert):
    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)


class _Storage(NamedTuple):
    values: np.ndarray  # one-dimensional


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a state_dict, by name; bfloat16 becomes float32.

    The state_dict is the file's object itself, or is stored in it under one of the usual keys, or is the only one there
    under another key. Prefixes of names from DistributedDataParallel and torch.compile are removed.

    Raises:
        OSError: the file cannot be read.
        TrainError: the file is not a PyTorch file, is damaged, has an old format, holds more than tensors and plain
            containers, or has no state_dict.
    """
    with path.open("rb") as file:
        start = file.read(512)
    if not start.startswith((_ZIP, _LEGACY)):
        raise TrainError(_not_pytorchs(path, start))
    with content_of_file(lambda reason: f"{path} is not a complete PyTorch file ({reason}): fetch or write it "
                                        "again"):
        try:
            if start.startswith(_LEGACY):
                value = _read_legacy(path.read_bytes())
            else:
                with zipfile.ZipFile(path) as archive:
                    value = _read(archive)
        except _Forbidden as error:
            raise TrainError(f"{path} holds more than tensors and plain containers ({error}), and nothing of it was "
                             f"executed: {HOW_TO_SAVE}") from None
    wrapped = [value.get(key) for key in _WRAPPERS] if isinstance(value, dict) else []
    found = next(filter(_is_state_dict, (value, *wrapped)), None)
    if not found:
        inside = {key: each for key, each in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}
        under = [key for key, each in inside.items() if _is_state_dict(each)]
        if len(under) != 1:
            has = f", but {', '.join(inside)[:100]}" if inside else ""
            raise TrainError(f"{path} has no state_dict (names with tensors){has}: {HOW_TO_SAVE}")
        found = inside[under[0]]
    return without_prefixes(path, {name: tensor.array for name, tensor in found.items()})


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(
        isinstance(name, str) and isinstance(tensor, _Tensor) for name, tensor in value.items())


def without_prefixes(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Remove the prefixes of DistributedDataParallel and torch.compile from the names, and the count of averages.

    Raises TrainError if two names become equal.
    """
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name == _COUNT:
            continue
        short = _PREFIX.sub("", name)
        if short in found:
            raise TrainError(f"{path} has {short} twice, with and without module. or _orig_mod. before it: save the "
                             "state_dict of one network")
        found[short] = array
    return found


def _not_pytorchs(path: Path, start: bytes) -> str:
    if not start:
        return f"{path} is empty: fetch or write it again"
    if start[257:262] == b"ustar":
        return (f"{path} has the format of PyTorch before version 0.1.10: write it anew with PyTorch, "
                "torch.save(torch.load(FILE, weights_only=True), NEW)")
    return f"{path} is not a PyTorch file, as it begins with {start[:8]!r}: give one that torch.save wrote"


def _read(archive: zipfile.ZipFile) -> Any:
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "data.pkl" not in members:
        raise ValueError("it has no data.pkl")
    if "constants.pkl" in members:
        raise _Forbidden("it is a program of TorchScript")
    # Uncompressed members need no more memory than the file; compressed ones could need any amount.
    if packed := next((name for name, info in members.items() if info.compress_type != zipfile.ZIP_STORED), ""):
        raise ValueError(f"its {packed} is compressed")
    order = archive.read(members["byteorder"]).decode() if "byteorder" in members else "little"
    if order not in _BYTE_ORDERS:
        raise ValueError(f"its byteorder is {order[:20]!r}, and neither little nor big")

    def load(key: str, kind: str, count: int) -> np.ndarray:
        dtype = STORAGES[kind]
        stored = dtype.newbyteorder(_BYTE_ORDERS[order])
        values = np.frombuffer(archive.read(members[f"data/{key}"]), stored)
        if len(values) != count:
            raise ValueError(f"a storage of {count} numbers has {len(values)}")
        values = values.astype(dtype)
        return from_bfloat16(values) if kind == BFLOAT16 else values

    return _Unpickler(io.BytesIO(archive.read(members["data.pkl"])), load).load()


def _read_legacy(content: bytes) -> Any:
    """The object of a file of PyTorch 0.4 to 1.5. Its tensors refer to storages, which are filled later, in the order
    of the file.
    """
    stream = io.BytesIO(content[len(_LEGACY):])
    storages: dict[str, tuple[str, np.ndarray]] = {}
    expected = 0  # bytes

    def load(key: str, kind: str, count: int) -> np.ndarray:
        nonlocal expected
        expected += count * STORAGES[kind].itemsize
        if count < 0 or expected > len(content):
            raise ValueError(f"its storages need more than its {len(content):,} bytes")
        storages[key] = kind, np.zeros(count, np.float32 if kind == BFLOAT16 else STORAGES[kind])
        return storages[key][1]

    version, machine, value, keys = (_Unpickler(stream, load).load() for _ in range(4))
    if version != _LEGACY_VERSION or not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise ValueError(f"it is not of version {_LEGACY_VERSION} with little-endian numbers")
    if not isinstance(keys, list) or any(not isinstance(key, str) or key not in storages for key in keys) or len(
            set(keys)) < len(storages):
        raise ValueError("its list of storages does not match its tensors")
    for key in keys:
        kind, values = storages[key]
        length = stream.read(8)
        if int.from_bytes(length, "little") != len(values):
            raise ValueError(f"a storage for {len(values)} numbers has the wrong length")
        stored = np.frombuffer(stream.read(len(values) * STORAGES[kind].itemsize), STORAGES[kind].newbyteorder("<"))
        values[:] = from_bfloat16(stored) if kind == BFLOAT16 else stored
    return value


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers whose upper halves are these 16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _load_tuple(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def load_tuple(unpickler: Any) -> None:
        load(unpickler)
        unpickler.stack[-1] = _Tuple(unpickler.stack[-1])

    return load_tuple


def _forbid(unpickler: Any) -> None:
    """Forbid sets, which compare their elements, and bytearrays, which allocate memory in advance. torch.save writes
    neither sets nor bytearrays.
    """
    raise _Forbidden("a set or a bytearray")


class _Unpickler(pickle._Unpickler):
    """An unpickler that imports nothing; the few names that it accepts are bound to substitutes in this file. The class
    extends the pure-Python unpickler, because its opcodes can be overridden.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        **{code[0]: _load_tuple(pickle._Unpickler.dispatch[code[0]])
           for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)},
        **{code[0]: _forbid for code in (pickle.EMPTY_SET, pickle.FROZENSET, pickle.BYTEARRAY8)},
    }

    def __init__(self, stream: io.BytesIO, load_storage: Callable[[str, str, int], np.ndarray]) -> None:
        super().__init__(stream)
        self._load_storage = load_storage
        self._storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        if module == "torch._utils" and name in _REBUILD:
            return _Function(_REBUILD[name])
        raise _Forbidden(f"{module}.{name}"[:80].replace("\n", " "))

    def persistent_load(self, reference: Any) -> _Storage:
        # `view`: only before PyTorch 1.6; None unless the storage is a part of another storage
        what, kind, key, _, count, *view = reference
        if not (what == "storage" and isinstance(kind, str) and isinstance(key, str) and type(count) is int
                and view in ([], [None])):
            raise ValueError("it refers to something other than a storage")
        if key not in self._storages:
            self._storages[key] = _Storage(self._load_storage(key, kind, count))
        return self._storages[key]


def _tensor(storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> _Tensor:
    """Like `torch._utils._rebuild_tensor_v2`: a view of a storage; `offset` and `stride` count numbers."""
    if not all(isinstance(numbers, tuple) and len(numbers) <= _MOST_AXES for numbers in (size, stride)) or any(
            type(number) is not int or number >= 2**63 for number in (offset, *size, *stride)):
        raise ValueError(f"a tensor's offset, shape and strides are not whole numbers for up to {_MOST_AXES} axes")
    values = storage.values
    if len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise ValueError(f"a tensor has the shape {size} and the strides {stride}")
    count = math.prod(size)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    # A tensor that repeats its numbers (stride 0) could be of any size.
    if count and (last >= len(values) or count > len(values)):
        raise ValueError(f"a tensor of the shape {size} reaches beyond its {len(values)} numbers")
    if not count:
        return _Tensor(np.zeros(size, values.dtype))
    strides = [step * values.itemsize for step in stride]
    return _Tensor(np.lib.stride_tricks.as_strided(values[offset:], size, strides, writeable=False))


def _parameter(tensor: _Tensor, *_: object) -> _Tensor:
    """Like `torch._utils._rebuild_parameter`."""
    return _Tensor(tensor.array)


_REBUILD: Mapping[str, Callable[..., _Tensor]] = {"_rebuild_tensor_v2": _tensor, "_rebuild_parameter": _parameter}


# --- writing ---


def content(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a file that `torch.load(FILE, weights_only=True)` reads as a state_dict: an OrderedDict of the
    tensors, in this order. The arrays' types are those of STORAGES."""
    arrays = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in tensors.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        write = partial(_write_aligned, archive, buffer)
        write("data.pkl", _pickle(arrays))
        write("byteorder", b"little")
        for key, array in enumerate(arrays.values()):
            write(f"data/{key}", array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        write("version", b"3\n")
    return buffer.getvalue()


def _write_aligned(archive: zipfile.ZipFile, buffer: io.BytesIO, name: str, data: bytes) -> None:
    """Write a member whose bytes begin at a multiple of 64, as in PyTorch, so that the file can be mapped into memory.
    The date of the member is fixed.
    """
    info = zipfile.ZipInfo(f"archive/{name}")
    header = buffer.tell() + 30 + len(info.filename)  # beginning of the extra field
    padding = -(header + 4) % 64
    info.extra = b"FB" + struct.pack("<H", padding) + padding * b"Z"
    archive.writestr(info, data)


def _pickle(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The pickle of the dictionary in protocol 2, written opcode by opcode, because Python's pickler would import
    PyTorch."""
    ordered_dict = _named("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    parts = [pickle.PROTO + b"\x02", ordered_dict, pickle.MARK]
    for key, (name, array) in enumerate(arrays.items()):
        storage = pickle.MARK + _text("storage") + _named("torch", _STORAGE_OF[array.dtype]) + _text(str(key)) + _text(
            "cpu") + _number(array.size) + pickle.TUPLE + pickle.BINPERSID
        strides = [step // array.itemsize for step in array.strides]
        parts += [
            _text(name), _named("torch._utils", "_rebuild_tensor_v2"), pickle.MARK, storage, _number(0),
            _numbers(array.shape), _numbers(strides), pickle.NEWFALSE, ordered_dict, pickle.TUPLE, pickle.REDUCE,
        ]
    return b"".join([*parts, pickle.SETITEMS, pickle.STOP])


def _named(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    encoded = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _number(value: int) -> bytes:
    encoded = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return pickle.LONG1 + bytes([len(encoded)]) + encoded


def _numbers(values: Any) -> bytes:
    return pickle.MARK + b"".join(map(_number, values)) + pickle.TUPLE
