from libc.stdint cimport int64_t

from nvmeio._core cimport nvmeio_op, nvmeio_outcome
from nvmeio.file cimport File


# "read", "write" or "fsync".
cdef str verb_of(nvmeio_op op)

# The exception that the outcome of a transfer stands for, or None.
cdef object error_of(
    nvmeio_op op, Py_ssize_t nbytes, int64_t offset, object path,
    const nvmeio_outcome *outcome
)

# The same of a request that was not started, for one that it was to come after has failed;
# `cause` is that one's exception, or None.
cdef object error_of_blocked(
    str doing, object path, object before, object cause, const nvmeio_outcome *outcome
)

# The exception for one errno and what it came to, with what would help.
cdef object error_in_words(int error, str words, object path)

# Raise what a refused submission means.
cdef int raise_refused(nvmeio_op op, object path, int result) except -1

# Compare memory with an ordinary read of the file; return the error, or None.
cdef object check_against_file(
    nvmeio_op op, File file, const void *address, size_t nbytes, int64_t offset,
    object path
)

# What to tell of an error if nobody looks at it; None where it was to be expected.
cdef str words_of(object error)

# Tell of an error that nobody has looked at and nobody will.
cdef int warn_of(str words) except -1
