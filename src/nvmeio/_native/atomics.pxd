"""Types of fields that threads read without a lock: C11 atomics, sequentially consistent.

Without the GIL, what a thread wrote before it sets such a field is visible to a thread that
has read the new value.
"""

cdef extern from *:
    """
    typedef _Atomic int nvmeio_atomic_flag;
    typedef _Atomic unsigned nvmeio_atomic_unsigned;
    typedef _Atomic unsigned long nvmeio_atomic_thread;
    """
    ctypedef bint atomic_flag "nvmeio_atomic_flag"
    ctypedef unsigned atomic_unsigned "nvmeio_atomic_unsigned"
    # What PyThread_get_thread_ident() returns.
    ctypedef unsigned long atomic_thread "nvmeio_atomic_thread"
