from libc.stdint cimport int64_t


# A value as a message shows it.
cdef str shown(object value)

cpdef object integer(str name, object value)
cpdef object whole(str name, object value, object least, object most)
cpdef bint flag(str name, object value, str choices=*) except -1
cpdef object word(str name, object value, object choices)
cpdef object path_of(object path)
cpdef object refuse_path(object buffer)

# A path, or the number of a descriptor; raises TypeError for anything else.
cdef object path_or_descriptor(object file)

# A place in a file, or its size, in bytes.
cdef int64_t file_position(str name, object value) except -1

# The monotonic time at which a timeout in seconds is over; -1: never.
cpdef int64_t deadline_ns(object timeout_s) except -2
