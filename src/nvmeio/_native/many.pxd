from nvmeio._libnvmeio.c_base cimport nvmeio_op
from nvmeio._native.buffer cimport Buffer
from nvmeio._native.request cimport Request


cdef class ManyRequest(Request):
    """A request of many transfers, of one file or several."""

    cdef list buffers  # of Buffer, until it is finished
    cdef list files    # paths, descriptors or Files; only Files once they are opened
    cdef list offsets
    cdef tuple paths   # each item's path, for errors

    cdef Buffer borrow(self, Py_ssize_t index, object memory)

    # Acquire the memory of an item, add it and its file to the lists, and return its
    # offset.
    cdef object add(self, Py_ssize_t index, object item)


# Make a request from (buffer, file, offset) items.  The files are not opened yet.
cdef ManyRequest new_many(nvmeio_op op, object items)
