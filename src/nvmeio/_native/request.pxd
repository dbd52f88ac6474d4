cimport cython
from libc.stdint cimport int64_t, uint32_t

from nvmeio._libnvmeio.c_base cimport nvmeio_op
from nvmeio._libnvmeio.c_request cimport (
    nvmeio_after,
    nvmeio_handle,
    nvmeio_outcome,
    nvmeio_request,
    nvmeio_transfer,
)
from nvmeio._native.atomics cimport atomic_flag, atomic_thread
from nvmeio._native.buffer cimport Buffer
from nvmeio._native.file cimport File


cdef class Request:
    """One transfer: what it holds until it is done, and its outcome."""

    cdef object __weakref__
    cdef nvmeio_request *c     # NULL before start()
    cdef bint performed        # the outcome is c_outcome, not the library's
    cdef nvmeio_outcome c_outcome
    cdef nvmeio_op op
    cdef Buffer buffer         # the memory; None for an fsync
    cdef File file             # None once finished
    cdef readonly object path  # the path of the file
    cdef int64_t offset
    cdef bint data_only        # for an fsync: use fdatasync
    cdef bint is_copied        # the buffer is a copy of the caller's memory
    cdef readonly Py_ssize_t nbytes

    cdef cython.pymutex lock   # guards the fields below while the request is finished
    cdef atomic_thread finisher  # the thread that holds the lock, or 0
    cdef atomic_flag finished  # the Python work is done too; the outcome is final
    cdef object outcome        # the number of bytes, or `value` if that is set
    cdef object value          # the result after success; None: the number of bytes
    cdef object error          # the exception, or None
    cdef str words             # the warning if nobody looks at the error, or None
    cdef atomic_flag error_seen  # somebody has looked at the error
    cdef uint32_t generation   # fork_generation() of the process that made it
    cdef readonly object _workers  # the Workers that execute it; waiters watch them
    cdef list callbacks        # not yet called, or None; see _listen()
    cdef int callers           # how many threads are in call_all()
    cdef list before           # the Requests of `after=`; None once finished: predecessor()

    # Submit to the handle, which holds this object until handle_pop() returns it.
    cdef int start(self, nvmeio_handle *handle) except -1

    # Call the library's function for that.  Return its result, and in `offender` the index
    # of the part at fault, if any.
    cdef int submit(
        self, nvmeio_handle *handle, const nvmeio_after *after, size_t *offender
    ) except? -1

    # Raise the exception for a negative result of submit().
    cdef int raise_refusal(self, int result, size_t offender) except -1

    # Execute in this thread if the library can; False: call start() instead.
    cdef bint perform(self, nvmeio_handle *handle) except -1

    # If a request of `after=` has failed in Python, finish this one with that error.
    cdef bint is_blocked_already(self) except -1

    # Wait for other requests, of `workers`, before this one begins: the argument `after=`.
    cdef int come_after(self, object after, object workers) except -1

    # Return one of `before`; None if the request is finished, or just being so.
    cdef Request predecessor(self, size_t index)

    # Do the Python work after the library is done, with the lock held.  Sets `finished` if
    # that was all.  Returns the Exception that a signal handler raised meanwhile, or None.
    # Any other BaseException (Ctrl-C) is raised, and the next caller does the work.
    cdef object go_on(self)

    # Land what was transferred, and return the error.  May be called again after an
    # interruption.
    cdef object settle(self, object error)

    # Release the memory; tell the pool that no request uses it; or keep it for ever,
    # because the kernel may still write to it.
    cdef int release_memory(self) except -1
    cdef int disuse_memory(self) noexcept
    cdef int abandon_memory(self) except -1

    # Return the exception for an outcome, or None.
    cdef object judge(self, const nvmeio_outcome *outcome)

    # Return the bytes of files and memory that it touches, for overlap.py.
    cdef list parts(self)

    # Return whether the engine uses the caller's own memory.
    cdef bint lies_in_place(self) noexcept

    # Return whether the bytes are in the caller's memory as soon as the library is done.
    cdef bint lands_by_itself(self) noexcept

    # Describe the request, for repr() and for errors.
    cdef str subject(self)
    cdef str doing(self)

    # Wait without the GIL, at most timeout_ns (negative: no limit), finish the request, and
    # return whether it is finished.  An error of the transfer is kept, not raised.
    cdef bint poll(self, int64_t timeout_ns) except -1

    # Raise if it was submitted before a fork, by this process's parent.
    cdef int check_process(self) except -1

    # Return whether this thread is finishing the request further up its stack.  Releasing a
    # buffer may run any Python code, which may come back here.
    cdef bint is_being_finished_here(self) noexcept

    # poll() in slices, between which signals are handled.  timeout: seconds, or None.
    cdef bint poll_for(self, object timeout) except -1


cdef Request new_request(
    nvmeio_op op, Buffer buffer, File file, int64_t offset
)

# Finish a request whose transfer is done; then release the memory and call back.
cdef int finish_and_release(Request request) except -1

# Wait as Request.wait() does; after an interruption, cancel the request and wait for it.
cpdef object wait_or_cancel(Request request)

# Wait for a request whose caller gets an exception in its place.
cdef int finish_interrupted(Request request) except -1

# Initialize a new object of Request or of a subclass.
cdef Request fill_request(
    Request request, nvmeio_op op, Buffer buffer, File file, int64_t offset
)

# Fill in the library's description of the transfer, which takes over a reference.
cdef int fill_transfer(Request request, nvmeio_transfer *transfer) except -1
