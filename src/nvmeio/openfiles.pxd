from nvmeio._core cimport nvmeio_direct
from nvmeio.file cimport File
from nvmeio.lanes cimport Lanes


cdef class OpenFiles:
    """The files that a handle has opened for requests which name a path."""

    cdef Lanes lanes
    cdef nvmeio_direct direct
    # (path, writing) -> File, for as long as a request has it.
    cdef object shared

    # An open file for a path, a descriptor or a File.
    cdef File find(self, object file, bint writing)


cdef OpenFiles new_open_files(Lanes lanes, nvmeio_direct direct)
