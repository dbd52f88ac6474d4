cdef class NewBytes:
    """Bytes objects whose contents are still to be read."""

    cdef readonly list values
    cdef object sizes           # int64 array
    cdef object addresses       # of the contents; an int64 array

    # Return where records belong that fill the objects at these positions; None: all.
    cdef object places(self, object positions, object sizes)
