"""Reads pickles of NumPy arrays in plain containers, without running any code that a pickle asks for.

A pickle can call any function to which its reader gives it access. NumPy's own functions are blocked, too: they do not
check the state in a pickle, and a damaged state crashes the process (NumPy 1.26: `dtype.__setstate__` with six values).
Instead, classes of this module keep the bytes, and NumPy reads these with a checked type and shape. All sizes in a
pickle are checked first, so that a damaged number cannot allocate a huge amount of memory.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np


def load(content: bytes) -> Any:
    """Unpickle dictionaries, lists, text, numbers, and arrays, which become objects that `np.asarray` accepts.

    Text written by Python 2 becomes bytes. Raises UnpicklingError; a damaged pickle may raise other exceptions, too.
    """
    _check_sizes(content)
    return _Unpickler(io.BytesIO(content), encoding="bytes").load()


def _check_sizes(content: bytes) -> None:
    """Raise ValueError (from `genops`) for a length beyond the content's end, and UnpicklingError for an impossible
    memo index, because the unpickler would allocate memory for all lower indices.
    """
    for code, argument, _ in pickletools.genops(content):
        if code.name.endswith("PUT") and isinstance(argument, int) and argument > len(content):
            raise pickle.UnpicklingError(f"it has an impossible number, {argument:,}")


def text_of(value: object) -> str:
    """A text from a pickle; Python 2 wrote it as bytes. Raises TypeError for a value that is not text."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"it has a {type(value).__name__} instead of a text")
    return value


class _Dtype:
    """Stands in for numpy.dtype: integers and floats."""

    def __init__(self, code: object, *_: object) -> None:
        if not re.fullmatch("[<>|=]?[iuf][1248]", name := text_of(code)):
            raise pickle.UnpicklingError(f"it holds an array of {name[:20]!r}, not of numbers")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Sequence[object]) -> None:
        order = text_of(state[1])
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"it has {order[:20]!r} instead of a byte order")
        self.dtype = np.dtype(order + self.dtype.str[1:])


class _Array:
    """Stands in for numpy.ndarray; a pickle delivers its bytes in a second step."""

    value: np.ndarray

    def __setstate__(self, state: Sequence[Any]) -> None:
        _, shape, dtype, is_fortran, content = state
        self.value = _array(content, dtype, shape, "F" if is_fortran else "C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)


def _array(content: bytes | bytearray, dtype: _Dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    if not isinstance(content, bytes | bytearray):
        raise TypeError(f"it has a {type(content).__name__} instead of the bytes of an array")
    if math.prod(shape) * dtype.dtype.itemsize != len(content):
        raise ValueError(f"an array in it has {len(content)} bytes, which do not fit its shape")
    return np.frombuffer(content, dtype.dtype).reshape(shape, order=order)


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """Stands in for codecs.encode, because Python 3 stores bytes as text in protocol 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding[:20]!r}")
    return text.encode("latin1")


_STAND_INS: Mapping[tuple[str, str], Callable[..., Any]] = MappingProxyType({
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array for core in ("core", "_core")},
})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None
