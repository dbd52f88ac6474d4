from nvmeio.libnvmeio cimport nvmeio_op
from nvmeio._native.buffer cimport Buffer
from nvmeio._native.request cimport Request


cdef class ManyRequest(Request):
    """A request of many transfers, of one file or several."""

    cdef list buffers  # Buffers, until it is finished
    cdef list files    # what names them; once they are opened, Files
    cdef list offsets
    cdef tuple paths   # of the files, for errors

    cdef Buffer borrow(self, Py_ssize_t index, object memory)

    # Lend the memory of an item, note its file and return its offset.
    cdef object add(self, Py_ssize_t index, object item)


# Of (buffer, file, offset) each, whose files are still to be opened.
cdef ManyRequest new_many(nvmeio_op op, object items)
