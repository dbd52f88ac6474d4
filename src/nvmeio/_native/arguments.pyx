"""What callers pass with each transfer, checked: places in files, paths, time limits.

What is checked less often is in _arguments/checks.py.
"""

import io
import operator
import os
import time

import numpy

from libc.stdint cimport INT64_MAX, int64_t

from nvmeio._arguments.checks import MISSING, integer, shown

_numpy_bool = numpy.bool_


cdef object path_or_descriptor(object file):
    if isinstance(file, (str, bytes)) or type(file) is int:
        return file
    if file is MISSING:
        raise TypeError("the argument 'file' is missing: a path, a descriptor or a file")
    if not isinstance(file, (bool, _numpy_bool)):
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
    """Return the descriptor of a file object, which has written out its buffer."""
    if any("compression" in kind.__module__ for kind in type(file).__mro__):
        # Of gzip, bz2, lzma and zstd.
        raise TypeError(
            f"file is {shown(file)}, whose descriptor leads to compressed bytes; nvmeio "
            "transfers the bytes of the file itself"
        )
    try:
        descriptor = integer("fileno()", file.fileno())
    except io.UnsupportedOperation:
        raise TypeError(
            f"file is {shown(file)}, which has no descriptor; it must be a path, a "
            "descriptor, a File or another file with a descriptor"
        ) from None
    if hasattr(file, "flush"):
        file.flush()
    return descriptor


cdef int64_t file_position(str name, object value) except -1:
    if type(value) is not int:
        value = integer(name, value)
    if not 0 <= value <= 2**63 - 1:
        raise ValueError(f"{name} is {value}; it must be from 0 to 2**63 - 1")
    return value


cpdef int64_t deadline_ns(object timeout) except -2:
    """Return the monotonic time at which a timeout is over."""
    if timeout is None:
        return -1
    if isinstance(timeout, (bool, _numpy_bool)):
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
