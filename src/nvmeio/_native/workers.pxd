from libc.stdint cimport int64_t

from nvmeio._libnvmeio.c_request cimport nvmeio_handle
from nvmeio._native.atomics cimport atomic_flag, atomic_unsigned


cdef class Workers:
    """The library's handle, which runs the workers, owned by one Python object."""

    cdef nvmeio_handle *c     # never NULL once made
    cdef set staged           # StagedRequests, which only advance when polled
    cdef object event_loops   # weak references to event loops' watchers; None once stopped
    # fork_generation() of the process that both belong to.
    cdef atomic_unsigned generation
    cdef atomic_flag unused   # in a forked child, until it submits: no worker has started

    # In a forked child, forget the parent's staged requests and event loops.
    cdef int own(self) except -1

    # Do the same before a submission, which starts the workers of a forked child.
    cdef int use(self) except -1

    # Advance staged requests, and finish all requests that are done, observed or not.  If
    # not `patient`, skip a request whose bytes another thread is copying.
    cpdef int collect(self, bint patient=*) except -1

    # Wait until nothing is in flight, and return True; or until a monotonic time (-1: no
    # limit), and return False.  Handles signals meanwhile.
    cdef bint drain_until(self, int64_t end_ns) except -1

    # Wait a moment (PAUSE_NS) for completions, when another resource has run out.
    cdef int pause(self) except -1

    # Refuse new requests, and wait for those in flight.  May be called again.
    cdef int stop(self) except -1
    cdef unsigned pending(self) except *
    cdef str engine(self)
    cdef dict stats(self)

    # Return the number of blocks in each bucket of the histogram, and each bucket's longest
    # latency in nanoseconds.
    cdef tuple latencies(self)


# Start workers with the options of a Handle, all of which must be given.
cdef Workers start_workers(dict options)
