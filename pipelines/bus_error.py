"""Keeps the process alive when a memory-mapped file loses bytes: a SIGBUS handler replaces the lost bytes by zeros.

Linux sends SIGBUS to a thread that reads a page which the file no longer has or the disk cannot deliver. By default
SIGBUS ends the process without a message, and the reading thread is most often one of DALI's. The handler replaces the
page by zeros and marks the file as damaged; a reader of the file must call `MappedFile.check`, which reports the loss.
systemd reads its journals in this way, too (src/basic/sigbus.c).
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import weakref
from typing import Any, Protocol

_ADDRESS_OFFSET = 16  # bytes from the start of siginfo_t to si_addr on 64-bit Linux
_MAP_FIXED, _SA_SIGINFO = 0x10, 4  # Linux constants for which Python has no names


class Mapped(Protocol):
    """A file in memory."""

    address: int  # address of the first byte
    size: int  # size in bytes
    is_damaged: bool  # set once bytes have been lost


class _SigAction(ctypes.Structure):
    """glibc's struct sigaction on 64-bit Linux."""

    _fields_ = (("handler", ctypes.c_void_p), ("mask", ctypes.c_ulong * 16), ("flags", ctypes.c_int),
                ("restorer", ctypes.c_void_p))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_files: weakref.WeakSet[Any] = weakref.WeakSet()
_before = _SigAction()  # the SIGBUS handler that ours replaced


def survive(file: Mapped) -> None:
    """From now on, lost bytes of this file are read as zeros, and mark the file as damaged."""
    _files.add(file)
    found = _SigAction()
    _libc.sigaction(signal.SIGBUS, None, ctypes.byref(found))
    if found.handler != _ours.handler:  # a library may have installed its own handler meanwhile
        _libc.sigaction(signal.SIGBUS, ctypes.byref(_ours), ctypes.byref(_before))


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def _handle(_number: int, info: int, _context: int) -> None:
    address = ctypes.c_size_t.from_address(info + _ADDRESS_OFFSET).value
    for file in list(_files):
        if file.address <= address < file.address + file.size:
            file.is_damaged = True
            page = address - address % mmap.PAGESIZE
            flags = _MAP_FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            _libc.mmap(page, file.address + file.size - page, mmap.PROT_READ, flags, -1, 0)
            return
    _libc.sigaction(signal.SIGBUS, ctypes.byref(_before), None)  # the read is then repeated, and calls the old handler


_ours = _SigAction(ctypes.cast(_handle, ctypes.c_void_p).value, (ctypes.c_ulong * 16)(), _SA_SIGINFO, None)
