from libc.stdint cimport int64_t


# A path, or the number of a descriptor; raises TypeError for anything else.
cdef object path_or_descriptor(object file)

# A place in a file, or its size, in bytes.
cdef int64_t file_position(str name, object value) except -1

# The monotonic time at which a timeout in seconds is over; -1: never.
cpdef int64_t deadline_ns(object timeout) except -2
