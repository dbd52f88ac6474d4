from nvmeio._core cimport nvmeio_direct
from nvmeio.file cimport File
from nvmeio.lanes cimport Lanes
from nvmeio.request cimport Request


cdef class OpenFiles:
    """The files that a handle has opened for requests which name a path."""

    cdef Lanes lanes
    cdef nvmeio_direct direct
    cdef dict shared  # (path, writing) -> File

    # An open file for a path, a descriptor or a File.
    cdef File find(self, object file, bint writing)

    # Close the file of a request that is done, unless others use it.
    cdef int forget(self, Request request) except -1


cdef OpenFiles new_open_files(Lanes lanes, nvmeio_direct direct)
