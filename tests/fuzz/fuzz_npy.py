"""Fuzz the headers of .npy files with libFuzzer (atheris), and compare with numpy.

``python tests/fuzz/fuzz_npy.py CORPUS -runs=N -seed=N`` or ``... FILE``, as any target of
libFuzzer.  An input that begins like a .npy file is read as one.  In any other, the first
byte chooses the version, and the rest is the text of a header: the whole, or its three
values, one a line.  A finding is an undocumented error, memory out of proportion to the
size of the file, a hang, or another answer than numpy's.
"""

import os
import re
import sys
import tracemalloc
import warnings
import zlib

import atheris

# atheris does not instrument modules that were imported before.
with atheris.instrument_imports(
    include=["numpy.lib", "nvmeio._arrays.npy_header", "nvmeio.memory"]
):
    from numpy.lib import format as npy

    from nvmeio._arrays.npy_header import read_layout
    from nvmeio._native.file import File
    from nvmeio.npy import load

# Parsing any header takes some hundred times its length.
MEMORY_BYTES_MAX = 16 << 20
LOADED_BYTES_MAX = 1 << 16
LOADED_ONE_IN = 16
VERSIONS = ((1, 0), (2, 0), (3, 0))

# nvmeio refuses these because numpy misreads the header, or crashes.
REFUSED = (
    "has a shape; give it to the array",
    "text of length 0; give it a length",
    "a unit of time is divided by",
)


def file_of(data):
    """Return the file that an input describes."""
    if data[:1] in (b"", npy.MAGIC_PREFIX[:1]):
        return data
    version, text = VERSIONS[data[0] % 3], data[1:]
    lines = text.split(b"\n")
    if len(lines) == 3:
        text = b"{'descr': %s, 'fortran_order': %s, 'shape': %s, }" % (*lines,)
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    return npy.magic(*version) + length + text + bytes(range(256))


def read_by_numpy(path):
    """Return the array in the file, or None if numpy refuses it."""
    try:
        return npy.open_memmap(path, mode="r")
    except Exception:  # any error is a refusal
        return None


def read_by_nvmeio(path):
    """Return the layout, or the documented error."""
    with File(path) as file:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            return read_layout(file, shared=True), None
        except ValueError as error:
            return None, str(error)
        finally:
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < MEMORY_BYTES_MAX, f"{taken} bytes of memory were taken"


def is_forgiven(content):
    """Return whether a header of version 3 has integers as Python 2 wrote them."""
    return content[6:8] == bytes(VERSIONS[2]) and re.search(rb"\dL", content)


def check(path, content):
    """Read a file in both ways, and compare."""
    layout, error = read_by_nvmeio(path)
    if layout is None and any(words in error for words in REFUSED):
        return
    expected = read_by_numpy(path)
    if expected is None and is_forgiven(content):
        return
    assert (layout is None) == (expected is None), (layout, error, expected)
    if layout is None:
        return
    assert layout.dtype == expected.dtype
    assert layout.shape == expected.shape
    assert layout.offset == expected.offset
    order = expected.flags.f_contiguous if layout.fortran else expected.flags.c_contiguous
    assert order, (layout, expected.flags)


def check_load(path, content):
    """Check that load() returns numpy's array, or raises a documented error."""
    try:
        array = load(path)
    except ValueError:
        return
    expected = read_by_numpy(path)
    if expected is None and is_forgiven(content):
        return
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    if expected.nbytes <= LOADED_BYTES_MAX:
        assert array.tobytes() == expected.tobytes()


class Target:
    """The function that libFuzzer calls; it reuses one file in memory for all inputs."""

    def __init__(self):
        self._fd = os.memfd_create("nvmeio-fuzz")
        self._path = f"/proc/self/fd/{self._fd}"

    def __call__(self, data):
        content = file_of(data)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, content, 0)
        check(self._path, content)
        if zlib.crc32(content) % LOADED_ONE_IN == 0:
            check_load(self._path, content)


def main():
    warnings.simplefilter("ignore")
    tracemalloc.start()
    atheris.Setup(sys.argv, Target())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
