"""Convert the C library's error numbers to exceptions with messages."""

import errno
import os
import warnings

from libc.stdint cimport int64_t

from nvmeio._libnvmeio.c_base cimport OP_FSYNC, OP_READ, OP_WRITE, nvmeio_op
from nvmeio._libnvmeio.c_request cimport nvmeio_outcome


# Held here, because the module's own name is gone when the interpreter ends.
cdef object warn = warnings.warn
cdef dict _verbs = {OP_READ: "read", OP_WRITE: "write", OP_FSYNC: "fsync"}


cdef int raise_because(int error, str reason, object path) except -1:
    words = os.strerror(error)
    raise_saying(error, words if reason is None else f"{words}: {reason}", path)


cdef int raise_saying(int error, str words, object path) except -1:
    raise OSError(error, words) if path is None else OSError(error, words, path)


cdef object cancelled_error(str words):
    # Imported late, because it imports logging.
    from concurrent.futures import CancelledError
    return CancelledError(words)


cdef bint is_cancelled(object error) except -1:
    if error is None:
        return False
    from concurrent.futures import CancelledError
    return isinstance(error, CancelledError)


cdef str reason_of(int error):
    return os.strerror(error)


cdef str verb_of(nvmeio_op op):
    return _verbs[op]


cdef object error_of(
    nvmeio_op op, Py_ssize_t nbytes, int64_t offset, object path,
    const nvmeio_outcome *outcome
):
    verb = where = _verbs[op]
    if op != OP_FSYNC:
        where = f"{verb} of {nbytes} bytes at offset {offset}"
    if outcome.result == -errno.ECANCELED:
        return cancelled_error(f"the {where} of {path!r} was cancelled")
    if outcome.result == -errno.ENODATA:
        words = (
            f"{verb} past the end of the file: wanted {nbytes} bytes at offset "
            f"{offset}, got {outcome.got}{hint_for(path)}"
        )
        return OSError(errno.ENODATA, words, path)
    if outcome.closing:
        return error_in_words(-outcome.result, f"(close after the {where})", path)
    done = "" if op == OP_FSYNC else f", {outcome.got} bytes done"
    return error_in_words(-outcome.result, f"({where}{done})", path)


cdef str hint_for(object path):
    """Return a hint for a file of /proc or /sys, which reports a wrong size; else ""."""
    try:
        of_kernel = os.path.realpath(path).startswith(("/proc/", "/sys/"))
    except (OSError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is None:
            # A signal handler raised it.
            raise
        return ""
    return "; nvmeio.read_file() reads the kernel's own files" if of_kernel else ""


cdef object error_of_blocked(
    str doing, object path, str before, object cause, const nvmeio_outcome *outcome
):
    if outcome.result == -errno.ECANCELED:
        error = cancelled_error(
            f"the {doing} of {path!r} was not started: it comes after the {before}, which "
            "was cancelled"
        )
    else:
        words = f"({doing} was not started: it comes after the {before}, which has failed)"
        error = error_in_words(-outcome.result, words, path)
    error.__cause__ = cause
    return error


cdef object error_in_words(int error, str words, object path):
    words = f"{os.strerror(error)} {words}"
    if error == errno.ENOMEM:
        words += "; NVMEIO_POOL_BYTES may leave no memory for bounce buffers: raise it"
    return OSError(reported_errno(error), words, path)


cdef int reported_errno(int error) except -1:
    # ETIMEDOUT comes from a drive or a server.  Python would turn it into a TimeoutError,
    # which in nvmeio means that the request is still running.
    return errno.EIO if error == errno.ETIMEDOUT else error


cdef object error_of_parts(
    object kind, int error, str name, str part, str first, tuple found, Py_ssize_t count,
    object path
):
    reason = os.strerror(error)
    if error == errno.ENODATA:
        reason = f"past the end of the file{hint_for(path)}"
    words = f"{reason} ({name}, {part} {found[0][0]}: {first}"
    if len(found) > 1:
        words += f"; {len(found)} of {count} {part}s failed"
    return kind(reported_errno(error), f"{words})", path, found)


cdef int raise_of_item(Py_ssize_t index, object error) except -1:
    # Not of the error's own class, which may take other arguments.
    cdef str item = f"items[{index}]"
    if not isinstance(error, OSError):
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{item}: {error}") from error
    if error.errno is None:
        # A signal handler raised it, and not the system.
        raise error
    raise OSError(error.errno, f"{error.strerror} ({item})", error.filename) from error


cdef int raise_refused(nvmeio_op op, object path, int result) except -1:
    if -result == errno.EPIPE:
        raise ValueError("the handle is closed")
    if -result == errno.EBADF:
        way = "writing" if op == OP_WRITE else "reading"
        raise OSError(errno.EBADF, f"the file is not open for {way}", path)
    check(result, path)


cdef int raise_unclosed(int result, object path) except -1:
    raise error_in_words(-result, "(close)", path)


cdef str words_of(object error):
    if is_cancelled(error):
        # Who cancels a request may not look at it, but closing its file may have failed.
        error = error.__cause__
    return str(error) if isinstance(error, OSError) else None


# Functions of Cython have no frame: level 1 is the line of Python that runs.
cdef int warn_of(str words) except -1:
    warn(
        f"the error of a request was never looked at: {words}", RuntimeWarning, stacklevel=1
    )
    return 0


cdef int warn_open(str what, object source) noexcept:
    # As io.FileIO does.
    warn(f"unclosed file {what}", ResourceWarning, stacklevel=1, source=source)
    return 0


cdef int warn_unclosed(int result, object path) except -1:
    warn(
        f"a file was not closed before it was freed, and then: {reason_of(-result)}: "
        f"{path!r}",
        RuntimeWarning,
        stacklevel=1,
    )
    return 0
