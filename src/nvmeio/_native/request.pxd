cimport cython
from libc.stdint cimport int64_t, uint32_t

from nvmeio.libnvmeio cimport nvmeio_after, nvmeio_handle, nvmeio_op, nvmeio_outcome
from nvmeio.libnvmeio cimport nvmeio_request
from nvmeio._native.buffer cimport Buffer
from nvmeio._native.file cimport File


cdef class Request:
    """One transfer: what it needs until it is done, and what became of it."""

    cdef object __weakref__
    cdef nvmeio_request *c     # NULL before start()
    cdef bint performed        # by perform(), with this outcome
    cdef nvmeio_outcome c_outcome
    cdef nvmeio_op op
    cdef Buffer buffer         # the memory; None for an fsync
    cdef File file             # kept open for validation; None once finished
    cdef readonly object path  # of the file
    cdef int64_t offset
    cdef bint validate
    cdef bint data_only        # an fsync: of the data alone
    cdef bint is_copied        # the buffer is a copy of the caller's memory
    cdef readonly Py_ssize_t nbytes

    cdef cython.pymutex lock   # of what follows, while it is being finished
    cdef unsigned long finisher  # the thread that holds the lock, or 0
    cdef bint finished         # the Python work is done too; the outcome stands
    cdef object outcome        # bytes, or `value` where there is one
    cdef object value          # the result of a transfer that goes well, or None: bytes
    cdef object error          # the exception, or None
    cdef str words             # of an error that should not go unseen, or None
    cdef bint told             # somebody has seen the error
    cdef uint32_t generation   # of the process that made it
    cdef readonly object _workers  # Workers, that carry it out: who waits listens to them
    cdef list callbacks        # not yet called, or None; see callbacks.pyx
    cdef list before           # Requests that it comes after; None once finished

    # Hand over to the handle, which holds this object until handle_pop() gives it back.
    cdef int start(self, nvmeio_handle *handle) except -1

    # The library's own call for that; its answer, and which part is at fault if any is.
    cdef int submit(
        self, nvmeio_handle *handle, const nvmeio_after *after, size_t *offender
    ) except? -1

    # Raise what such an answer stands for.
    cdef int raise_refusal(self, int result, size_t offender) except -1

    # Carry it out in this thread, where the library can; False: it is to be started.
    cdef bint perform(self, nvmeio_handle *handle) except -1

    # Come after other requests, of `workers`; what `after=` may be.
    # Where a request that it comes after has failed in Python: it is done, with that error.
    cdef bint is_blocked_already(self) except -1
    cdef int come_after(self, object after, object workers) except -1

    # Do the Python work of what the library is done with; `finished` tells whether that was
    # all.  The lock is held.  Returns what the handler of a signal has raised meanwhile, or
    # None.  Where that is no Exception (Ctrl-C), it is raised, and the work is done by who
    # asks next.
    cdef object go_on(self, int64_t timeout_ns)

    # Bring what was transferred to where it belongs, and return the error.  May be called
    # again after it was interrupted.
    cdef object settle(self, object error)

    # Let go of the memory; or keep it for ever, which the kernel may still write to.
    cdef int release_memory(self) except -1
    cdef int disuse_memory(self) noexcept
    cdef int abandon_memory(self) except -1

    # The exception that an outcome stands for, or None.
    cdef object judge(self, const nvmeio_outcome *outcome)

    # What it touches, for overlap.py.
    cdef list parts(self)

    # Whether the engine has the caller's own memory.
    cdef bint lies_in_place(self) noexcept

    # Whether its bytes are in the caller's memory as soon as the library is done.
    cdef bint lands_by_itself(self) noexcept

    # What it does, for repr() and for errors.
    cdef str subject(self)
    cdef str doing(self)

    # Wait without the GIL, at most timeout_ns (negative: no limit), and finish.  Whether it
    # is finished.  What went wrong with the transfer is kept, not raised.
    cdef bint poll(self, int64_t timeout_ns) except -1

    # Raise where another process made it, of which this one is a child.
    cdef int check_process(self) except -1

    # Whether this very thread is finishing the request further up its stack: letting go of
    # a buffer may free a handle, or run anything, and so come back here.
    cdef bint is_being_finished_here(self) noexcept

    # poll() in slices, between which signals are looked at.  timeout: None or seconds.
    cdef bint poll_for(self, object timeout) except -1


cdef Request new_request(
    nvmeio_op op, Buffer buffer, File file, int64_t offset, bint validate
)

# Go on with a request in this thread, and once it is finished, report that.
cdef int see_to_it(Request request, int64_t timeout_ns) except -1

# Wait as Request.wait() does; who is interrupted cancels the request, and waits on.
cpdef object wait_or_cancel(Request request)

# The same for an object that was just made, of a subclass.
cdef Request fill_request(
    Request request, nvmeio_op op, Buffer buffer, File file, int64_t offset, bint validate
)
