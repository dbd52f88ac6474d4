"""Check the arguments of every transfer: files, offsets and timeouts.

They are in Cython because they are on the fast path; _arguments/checks.py has the others.
"""

import io
import operator
import os
import time

import numpy

from libc.stdint cimport INT64_MAX, int64_t

from nvmeio._arguments.checks import integer, shown

_numpy_bool = numpy.bool_

# How many wrappers of a file object to follow: one may wrap itself.
cdef int WRAPPERS_MAX = 8


cdef object path_or_descriptor(object file):
    if isinstance(file, (str, bytes)) or type(file) is int:
        return file
    # With both in one tuple, Cython 3.3 does not check whether isinstance() raises.
    if not (isinstance(file, bool) or isinstance(file, _numpy_bool)):
        for convert in (os.fspath, operator.index):
            try:
                return convert(file)
            except TypeError:
                continue
        if hasattr(file, "fileno"):
            return descriptor_of(file)
    raise TypeError(
        f"file is {shown(file)}; it must be a path, a descriptor, a File or another file "
        "with a descriptor"
    )


cdef object descriptor_of(object file):
    """Return the descriptor of a file object, after flushing the object's buffer."""
    if is_compressed(file):
        raise TypeError(
            f"file is {shown(file)}, whose descriptor leads to compressed bytes; nvmeio "
            "transfers the bytes of the file itself"
        )
    try:
        descriptor = integer("fileno()", file.fileno())
    except (AttributeError, io.UnsupportedOperation):
        # io.BytesIO raises UnsupportedOperation, a member of a tar archive AttributeError.
        raise TypeError(
            f"file is {shown(file)}, which has no descriptor; it must be a path, a "
            "descriptor, a File or another file with a descriptor"
        ) from None
    if hasattr(file, "flush"):
        file.flush()
    return descriptor


cdef bint is_compressed(object file) except -1:
    """Return whether a file object is of gzip, bz2, lzma or zstd, or wraps one that is."""
    for _ in range(WRAPPERS_MAX):
        if any("compression" in kind.__module__ for kind in type(file).__mro__):
            return True
        # Attributes of io's buffers, of text wrappers, and of codecs' readers and writers.
        for name in ("raw", "buffer", "stream"):
            if hasattr(file, name):
                file = getattr(file, name)
                break
        else:
            return False
    return False


cdef int64_t file_position(str name, object value) except -1:
    return up_to(INT64_MAX, name, value)


cdef int64_t up_to(int64_t most, str name, object value) except -1:
    if type(value) is not int:
        value = integer(name, value)
    if not 0 <= value <= most:
        limit = "2**63 - 1" if most == INT64_MAX else most
        raise ValueError(f"{name} is {value}; it must be from 0 to {limit}")
    return value


cpdef int64_t deadline_ns(object timeout) except -2:
    """Return the monotonic time, in ns, at which a timeout in seconds ends; -1: never."""
    if timeout is None:
        return -1
    if isinstance(timeout, bool) or isinstance(timeout, _numpy_bool):
        raise TypeError(f"timeout is {timeout}; it must be seconds, or None")
    cdef double seconds
    try:
        seconds = timeout
    except TypeError:
        raise TypeError(
            f"timeout is {shown(timeout)}; it must be seconds, or None"
        ) from None
    if not seconds >= 0:
        raise ValueError(f"timeout is {timeout}; it must be 0 or more, or None")
    if seconds > 1e9:
        return -1
    return min(INT64_MAX, <int64_t> (seconds * 1e9) + <int64_t> time.monotonic_ns())
