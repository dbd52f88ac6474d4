"""Memory between two inaccessible pages, with canaries in the space that is left."""

import contextlib
import ctypes
import mmap
import os

import numpy as np

import nvmeio
from helpers import PAGE, Guarded

# Where the borrowed bytes are: at either fence, between the two, as every other byte, or in
# the pool, which has no fences.
KINDS = ("front", "back", "floating", "strided", "pool")

PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _check(result):
    if result in (-1, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Field:
    """Whole pages with a fence on either side; their array keeps this object alive.

    When the last reference goes, `parting` is called with the bytes, and the pages are
    unmapped, so that later writes are faults.
    """

    def __init__(self, size):
        self.parting = None
        self.size = max(PAGE, -size % PAGE + size)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.begin = _check(
            _libc.mmap(None, self.size + 2 * PAGE, protection, flags, -1, 0)
        )
        for fence in (self.begin, self.begin + PAGE + self.size):
            _check(_libc.mprotect(fence, PAGE, PROT_NONE))

    @property
    def __array_interface__(self):
        address = self.begin + PAGE
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    def __del__(self):
        if self.parting is not None:
            pages = (ctypes.c_ubyte * self.size).from_address(self.begin + PAGE)
            self.parting(np.frombuffer(pages, np.uint8))
        _libc.munmap(self.begin, self.size + 2 * PAGE)


class Memory:
    """Memory for a transfer, which gets `buffer`; all of `whole` is watched.

    `expected` is what `buffer` should hold at the end: canaries until the caller changes
    it.
    """

    def __init__(self, size, kind, residue):
        extent = 2 * size if kind == "strided" else size
        self.field = self.whole = None
        if kind == "pool":
            # A small pool may have nothing left.
            with contextlib.suppress(MemoryError):
                self.whole = nvmeio.empty(extent + residue + PAGE, np.uint8)
        if self.whole is None:
            self.field = Field(extent if kind in ("front", "back") else extent + residue)
            self.whole = np.asarray(self.field)
        begin = {"front": 0, "back": len(self.whole) - extent}.get(kind, residue)
        self.part = slice(begin, begin + extent, 2 if kind == "strided" else 1)
        self.whole[:] = Guarded.CANARY
        self.buffer = self.whole[self.part]
        self.expected_whole = self.whole.copy()
        self.expected = self.expected_whole[self.part]

    def fill(self, content):
        """Fill it with bytes, which must stay."""
        self.buffer[:] = content
        self.expected[:] = content

    def leave(self, parting):
        """Release the memory but keep `expected`; `parting` sees the bytes last."""
        self.field.parting = parting
        self.field = self.whole = self.buffer = None
