"""What callers pass: numbers, booleans, words and paths, checked.

What is refused is named, with its value and with what it may be.  What may be inside of a
buffer is buffer.pyx's.
"""

import operator
import os
import time

import numpy

from libc.stdint cimport INT64_MAX, int64_t

from nvmeio._core cimport BLOCK_BYTES_MAX, WORKERS_MAX, QUEUE_DEPTH_MAX

_numpy_bool = numpy.bool_
# Of these a message shows the value, of others, which may be large, the type.
_shown_types = (bool, int, float, str, bytes, numpy.bool_, numpy.number)

# The most that numbers among a handle's options may be; the least is 1.
LIMITS = {
    "block_size": BLOCK_BYTES_MAX,
    "queue_depth": QUEUE_DEPTH_MAX,
    "intra_op_parallelism": WORKERS_MAX,
}


cdef str shown(object value):
    if value is None or isinstance(value, _shown_types):
        return repr(value)
    return f"of type {type(value).__qualname__}"


cpdef object integer(str name, object value):
    """Return an integer of any type but bool, or raise TypeError.

    Parameters
    ----------
    name : str
        Of the argument, for the message.
    value : object
        What was passed.

    Returns
    -------
    int
        The value.
    """
    if not isinstance(value, (bool, _numpy_bool)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} is {shown(value)}; it must be an integer")


cpdef object whole(str name, object value, object least, object most):
    """Return an integer within limits, or raise TypeError or ValueError.

    Parameters
    ----------
    name, value
        As for ``integer``.
    least, most : int
        What it may be, both included.

    Returns
    -------
    int
        The value.
    """
    value = integer(name, value)
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must be from {least} to {most}")
    return value


cdef int64_t file_position(str name, object value) except -1:
    value = integer(name, value)
    if not 0 <= value <= 2**63 - 1:
        raise ValueError(f"{name} is {value}; it must be from 0 to 2**63 - 1")
    return value


cpdef bint flag(str name, object value, str choices="True or False") except -1:
    """Return a boolean, or raise: a word such as "no" would count as true.

    Parameters
    ----------
    name, value
        As for ``integer``; the value may be a bool, numpy's bool, 0 or 1.
    choices : str, default "True or False"
        What may be passed, for the message.

    Returns
    -------
    bool
        The value.
    """
    if value is True or value is False:
        return value
    if isinstance(value, _numpy_bool):
        return bool(value)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; it must be {choices}") from None
    if number not in (0, 1):
        raise ValueError(f"{name} is {number}; it must be {choices}")
    return number


cpdef object word(str name, object value, object choices):
    """Return a word that is one of several, or raise ValueError.

    Parameters
    ----------
    name, value
        As for ``integer``.
    choices : iterable of str
        The words.

    Returns
    -------
    str
        The value.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{name} is {shown(value)}; it must be one of {', '.join(choices)}"
        )
    return value


cpdef object path_of(object path):
    """Return a path as text or bytes, or raise TypeError.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        What was passed.

    Returns
    -------
    str or bytes
        As ``os.fspath`` has it.
    """
    try:
        return os.fspath(path)
    except TypeError:
        raise TypeError(
            f"path is {shown(path)}; it must be a str, bytes or os.PathLike"
        ) from None


cdef object path_or_descriptor(object file):
    if isinstance(file, (str, bytes)) or type(file) is int:
        return file
    if not isinstance(file, (bool, _numpy_bool)):
        for convert in (os.fspath, operator.index):
            try:
                return convert(file)
            except TypeError:
                continue
    raise TypeError(f"file is {shown(file)}; it must be a path, a descriptor or a File")


cpdef object refuse_path(object buffer):
    """Raise TypeError for a path in a buffer's place: the two are easily swapped.

    Parameters
    ----------
    buffer : object
        What was passed as a buffer and has no memory to lend.
    """
    if isinstance(buffer, (str, os.PathLike)):
        raise TypeError(
            f"buffer is the path {os.fspath(buffer)!r}; it must be an array, a tensor or "
            "another object with the buffer protocol: are the two arguments swapped?"
        )


cpdef int64_t deadline_ns(object timeout_s) except -2:
    """Return the monotonic time at which a timeout is over.

    Parameters
    ----------
    timeout_s : float or None
        How long from now on, in seconds.

    Returns
    -------
    int
        In nanoseconds; -1 for never.

    Raises
    ------
    TypeError, ValueError
        It is no number, or negative.
    """
    if timeout_s is None:
        return -1
    if isinstance(timeout_s, (bool, _numpy_bool)):
        raise TypeError(f"timeout_s is {timeout_s}; it must be seconds, or None")
    cdef double seconds = timeout_s
    if not seconds >= 0:
        raise ValueError(f"timeout_s is {timeout_s}; it must be 0 or more, or None")
    if seconds > 1e9:
        return -1
    return min(INT64_MAX, <int64_t> (seconds * 1e9) + <int64_t> time.monotonic_ns())
