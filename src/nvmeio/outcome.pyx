"""What the library's answers mean: exceptions for outcomes and for refused submissions.

A request's life is request.pyx's; here is what is said of its end.
"""

import errno
import os
import warnings
from concurrent.futures import CancelledError

from libc.stdint cimport int64_t
from posix.fcntl cimport O_RDONLY

from nvmeio cimport _core
from nvmeio._core cimport DIRECT_NEVER, OP_FSYNC, OP_READ, OP_WRITE
from nvmeio._core cimport nvmeio_file, nvmeio_op, nvmeio_outcome
from nvmeio.file cimport File, open_path

cdef dict _verbs = {OP_READ: "read", OP_WRITE: "write", OP_FSYNC: "fsync"}


cdef str verb_of(nvmeio_op op):
    return _verbs[op]


cdef object error_of(
    nvmeio_op op, Py_ssize_t nbytes, int64_t offset, object path,
    const nvmeio_outcome *outcome
):
    if outcome.result >= 0:
        return None
    verb = _verbs[op]
    where = f"{verb} of {nbytes} bytes at offset {offset}"
    if outcome.result == -errno.ECANCELED:
        return CancelledError(f"the {where} of {path!r} was cancelled")
    if outcome.result == -errno.ENODATA:
        words = (
            f"{verb} past the end of the file: wanted {nbytes} bytes at offset "
            f"{offset}, got {outcome.got}"
        )
        return OSError(errno.ENODATA, words, path)
    return error_in_words(-outcome.result, f"({where}, {outcome.got} bytes done)", path)


cdef object error_of_blocked(
    str doing, object path, object before, object cause, const nvmeio_outcome *outcome
):
    if outcome.result == -errno.ECANCELED:
        error = CancelledError(
            f"the {doing} of {path!r} was not started: it comes after {before!r}, which "
            "was cancelled"
        )
    else:
        words = f"({doing} was not started: it comes after {before!r}, which has failed)"
        error = error_in_words(-outcome.result, words, path)
    error.__cause__ = cause
    return error


cdef object error_in_words(int error, str words, object path):
    words = f"{os.strerror(error)} {words}"
    if error == errno.ETIMEDOUT:
        # A drive's or a server's own; Python would make a TimeoutError of it, which says
        # that the request goes on.
        error = errno.EIO
    if error == errno.ENOMEM:
        words += "; NVMEIO_POOL_BYTES may leave the pool no memory for bounces"
    return OSError(error, words, path)


cdef int raise_refused(nvmeio_op op, object path, int result) except -1:
    if -result == errno.EPIPE:
        raise ValueError("the handle is closed")
    if -result == errno.EBADF:
        way = "writing" if op == OP_WRITE else "reading"
        raise OSError(errno.EBADF, f"the file is not open for {way}", path)
    _core.check(result, path)


cdef object check_against_file(
    nvmeio_op op, File file, const void *address, size_t nbytes, int64_t offset,
    object path
):
    cdef nvmeio_file *c
    cdef size_t position = 0
    cdef int result
    if op == OP_WRITE:
        # It may not be open for reading, nor still have its name.
        try:
            own = f"/proc/self/fd/{file.fileno()}"
            file = open_path(own, O_RDONLY, "r", DIRECT_NEVER)
        except OSError as error:
            return OSError(error.errno, f"cannot validate: {error.strerror}", path)
    c = file.retain()
    with nogil:
        result = _core.file_compare(c, offset, address, nbytes, &position)
        _core.file_release(c)
    if result < 0:
        return OSError(-result, f"cannot validate: {os.strerror(-result)}", path)
    if result == 1:
        return OSError(
            errno.EIO,
            f"validation failed: {_verbs[op]} of {nbytes} bytes at offset "
            f"{offset} differs from the file at byte {position}",
            path,
        )
    return None


cdef str words_of(object error):
    return str(error) if isinstance(error, OSError) else None


cdef int warn_of(str words) except -1:
    warnings.warn(
        f"the error of a request was never looked at: {words}", RuntimeWarning, stacklevel=2
    )
    return 0
