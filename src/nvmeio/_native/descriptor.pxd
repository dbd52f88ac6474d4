cdef class Descriptor:
    """A file descriptor, or none, which is closed with its object."""

    cdef readonly int number  # -1: none

    cdef int close_number(self) noexcept
