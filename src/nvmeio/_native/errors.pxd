from libc.stdint cimport int64_t

from nvmeio._libnvmeio.c_base cimport nvmeio_op
from nvmeio._libnvmeio.c_request cimport nvmeio_outcome


# Return a result of the library; raise OSError if it is negative (an error).
cdef inline int64_t check(int64_t result, object path=None) except -1:
    return result if result >= 0 else raise_because(-result, None, path)

# Raise OSError: the system's text for `error`, then the reason unless it is None.
cdef int raise_because(int error, str reason, object path) except -1

# Raise OSError with `words` in place of the system's text.
cdef int raise_saying(int error, str words, object path) except -1

# Return a concurrent.futures.CancelledError, and whether an exception is one.
cdef object cancelled_error(str words)
cdef bint is_cancelled(object error) except -1

# Return the system's text for an errno.
cdef str reason_of(int error)

# Return an OSError: the system's text for `error`, then `words`, which say what was done.
cdef object error_in_words(int error, str words, object path)

# Return the error of a request some of whose parts failed.  `found` has the index and errno
# of each failed part, and `kind` takes it as an argument; `first` describes the first one.
cdef object error_of_parts(
    object kind, int error, str name, str part, str first, tuple found, Py_ssize_t count,
    object path
)

# Raise an OSError, TypeError or ValueError again; its message names the item at fault.
cdef int raise_of_item(Py_ssize_t index, object error) except -1

# Return a hint for a file of /proc or /sys, which reports size 0; else "".
cdef str hint_for(object path)

# Return "read", "write" or "fsync".
cdef str verb_of(nvmeio_op op)

# Return the exception for a transfer that failed.
cdef object error_of(
    nvmeio_op op, Py_ssize_t nbytes, int64_t offset, object path,
    const nvmeio_outcome *outcome
)

# Return the exception for a request that was not started because one in its `after` failed.
# `before` describes that one; `cause` is its exception, or None.
cdef object error_of_blocked(
    str doing, object path, str before, object cause, const nvmeio_outcome *outcome
)

# Raise the exception for a submission that the library refused.
cdef int raise_refused(nvmeio_op op, object path, int result) except -1

# Raise the error of closing a file that was written.
cdef int raise_unclosed(int result, object path) except -1

# Return the text to warn with if nobody looks at the error; None for a cancellation, unless
# closing the file failed after it.
cdef str words_of(object error)

# Warn of an error that nobody looked at before its request was freed.
cdef int warn_of(str words) except -1

# Warn of an error of closing a file that nobody closed before it was freed.
cdef int warn_open(str what, object source) noexcept
cdef int warn_unclosed(int result, object path) except -1
