from libc.stdint cimport int64_t

from nvmeio.libnvmeio cimport nvmeio_op, nvmeio_outcome


# An answer of the library that is none of its errors, which are negative; raises OSError.
cdef inline int64_t check(int64_t result, object path=None) except -1:
    return result if result >= 0 else raise_because(-result, None, path)

# Raise OSError with a reason beside the words of errno, or None.
cdef int raise_because(int error, str reason, object path) except -1

# The same, with these words alone.
cdef int raise_saying(int error, str words, object path) except -1

# The words of errno.
cdef str reason_of(int error)

# OSError of something that was done with a file, in words behind those of errno.
cdef object error_in_words(int error, str words, object path)

# The error, of a kind that takes `found` too, of a request of which parts have failed: the
# index and errno of each; `first` says what the first one was to do.
cdef object error_of_parts(
    object kind, int error, str name, str part, str first, tuple found, Py_ssize_t count,
    object path
)

# What can read a file of the kernel, which claims to have no bytes, or "".
cdef str hint_for(object path)

# "read", "write" or "fsync".
cdef str verb_of(nvmeio_op op)

# The exception that the outcome of a transfer, which has failed, stands for.
cdef object error_of(
    nvmeio_op op, Py_ssize_t nbytes, int64_t offset, object path,
    const nvmeio_outcome *outcome
)

# The same of a request that was not started, for one that it was to come after has failed:
# what that was to do, and its exception, or None.
cdef object error_of_blocked(
    str doing, object path, str before, object cause, const nvmeio_outcome *outcome
)

# Raise what a refused submission means.
cdef int raise_refused(nvmeio_op op, object path, int result) except -1

# What to tell of an error if nobody looks at it; None where it was to be expected.
cdef str words_of(object error)

# Tell of an error that nobody has looked at and nobody will.
cdef int warn_of(str words) except -1
