"""Arrays in pickles: every version of Python and every protocol is read, and no other object."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import numpy as np
import pytest

from pipelines.sources import pickles

DTYPES = ["u1", "<i8", ">i8", "<i4", "<f4", ">f8"]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_as_numpy_writes_them(rng, protocol, dtype, order):
    array = np.asarray(rng.integers(0, 100, (5, 7)).astype(dtype), order=order)
    found = pickles.load(pickle.dumps({"a": array, "b": [1, 2.5, None, True, ("x", b"y")]}, protocol=protocol))
    read = np.asarray(found["a"])
    np.testing.assert_array_equal(read, array)
    assert read.dtype == array.dtype and found["b"] == [1, 2.5, None, True, ("x", b"y")]


def of_python_2(array: np.ndarray) -> bytes:
    """A pickle as Python 2's cPickle wrote the original files, with strings as bytes."""
    number = b"J" + struct.pack("<i", -1)
    shape = b"".join(b"J" + struct.pack("<i", length) for length in array.shape)
    order, code, content = array.dtype.str[:1].encode(), array.dtype.str[1:].encode(), array.tobytes()
    return (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
            b"(K\x01" + shape + b"\x86cnumpy\ndtype\nq\x04U\x02" + code + b"K\x00K\x01\x87Rq\x05"
            b"(K\x03U\x01" + order + b"NNN" + number + number + b"K\x00tb"
            b"\x89T" + struct.pack("<i", len(content)) + content + b"tb.")


def test_arrays_of_python_2(rng):
    for dtype in DTYPES:
        array = rng.integers(0, 100, (3, 4)).astype(dtype)
        np.testing.assert_array_equal(np.asarray(pickles.load(of_python_2(array))), array)


def test_a_state_that_crashes_numpy():
    """With six values in the state, NumPy 1.26 takes a number for the type's fields, and follows it as a pointer."""
    content = of_python_2(np.zeros((3, 4), np.uint8))
    assert b"NNNJ" in content
    pickles.load(content.replace(b"NNNJ", b"NJ"))


@pytest.mark.parametrize(("value", "problem"), [
    (np.array(["a", None]), "an array of 'O8'"), (np.array(["ab"]), "an array of 'U2'"),
    (np.zeros(2, [("a", "i4")]), "an array of 'V4'"), (np.int64(3), "asks for numpy.*scalar"),
    (np.ma.zeros(3), "asks for numpy.ma"), (np.random.default_rng(0), "asks for numpy.random"),
    (np.load, "asks for numpy"), (print, "asks for __builtin__.print"),
    (complex(1, 2), "asks for __builtin__.complex"),
])
def test_what_is_refused(value: Any, problem: str):
    with pytest.raises(pickle.UnpicklingError, match=problem):
        pickles.load(pickle.dumps(value, protocol=2))


def test_bytes_that_do_not_fit_the_shape():
    content = of_python_2(np.zeros((3, 4), np.uint8))
    for length in (5, -4, 2**31 - 1):
        changed = content.replace(b"J" + struct.pack("<i", 4), b"J" + struct.pack("<i", length))
        with pytest.raises(ValueError, match="do not fit its shape"):
            pickles.load(changed)


def test_numbers_that_would_take_all_memory():
    """A memo index, and the length of a bytearray: each would allocate its memory before anything else is read."""
    with pytest.raises(pickle.UnpicklingError, match="it has an impossible number, 1,560,593,167"):
        pickles.load(b"\x80\x02]r" + struct.pack("<I", 1560593167) + b".")
    with pytest.raises(ValueError, match="expected 8000000000000 bytes in a bytearray8, but only 2 remain"):
        pickles.load(b"\x80\x05\x96" + struct.pack("<Q", 8 * 10**12) + b"a.")
