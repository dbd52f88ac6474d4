from libc.stdint cimport int64_t


# Return a path, or the number of a descriptor; raise TypeError for anything else.
cdef object path_or_descriptor(object file)

# Check an offset in a file, or a file's size, in bytes, and return it.
cdef int64_t file_position(str name, object value) except -1

# Check an integer from 0 to `most`, and return it.
cdef int64_t up_to(int64_t most, str name, object value) except -1

# Return the monotonic time, in nanoseconds, at which a timeout in seconds ends; -1: never.
cpdef int64_t deadline_ns(object timeout) except -2
