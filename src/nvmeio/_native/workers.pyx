"""The library's handle: starting workers, collecting completed requests, stopping.

Requests are in request.pyx; users call the methods in handle.pyx.
"""

import errno
import time

import numpy

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_DECREF
from libc.errno cimport errno as c_errno
from libc.stdint cimport int64_t, uint64_t

from nvmeio._libnvmeio cimport c_base, c_handle
from nvmeio._libnvmeio.c_base cimport BOUNCE_ALWAYS, BOUNCE_AUTO, BOUNCE_NEVER
from nvmeio._libnvmeio.c_handle cimport LATENCY_BUCKETS, nvmeio_config, nvmeio_stats
from nvmeio._native.descriptor cimport Descriptor
from nvmeio._native.request cimport Request
from nvmeio._native.settings cimport apply_settings
from nvmeio._native.errors cimport check, raise_saying, reason_of

from nvmeio._events.log import log
from nvmeio._native.info import engines

cdef extern from "<sys/eventfd.h>" nogil:
    ctypedef uint64_t eventfd_t
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK
    int eventfd(unsigned count, int flags)
    int eventfd_read(int fd, eventfd_t *count)
    int eventfd_write(int fd, eventfd_t count)

cdef dict _bounces = {"auto": BOUNCE_AUTO, "always": BOUNCE_ALWAYS, "never": BOUNCE_NEVER}

# Signals are handled between two slices of a wait, so Ctrl-C works within 0.1 s.
cdef int64_t SLICE_NS = 50_000_000
cdef int64_t PAUSE_NS = 1_000_000

# Resources that workers of any engine need, by the errno of their exhaustion.
_LACKING = {
    errno.EAGAIN: "no thread can be started (ulimit -u, ulimit -v, pids.max of cgroups)",
    errno.EMFILE: "this process has no descriptor left (ulimit -n)",
    errno.ENFILE: "the system has no descriptor left (sysctl fs.file-max)",
    errno.ENOMEM: "memory, or the memory that may be locked, ran out (ulimit -l)",
}

# Reasons of fallbacks that were logged already.
_logged = set()


# A cycle collector would empty the attributes before the owner's __dealloc__ stops it.
@cython.no_gc_clear
@cython.final
cdef class Workers:
    """The library's handle, which runs the workers, owned by one Python object."""

    def __cinit__(self):
        self.staged = set()
        self.event_loops = set()
        self.generation = c_base.fork_generation()

    def __dealloc__(self):
        if self.c != NULL:
            with nogil:
                c_handle.handle_close(self.c)

    cdef int own(self) except -1:
        cdef unsigned generation = c_base.fork_generation()
        if self.generation != generation:
            with cython.critical_section(self):
                if self.generation != generation:
                    self.staged = set()
                    if self.event_loops is not None:
                        self.event_loops = set()
                    self.unused = True
                    # Last, because other threads look at it without the lock.
                    self.generation = generation
        return 0

    cdef int use(self) except -1:
        self.own()
        self.unused = False
        return 0

    cpdef int collect(self, bint patient=True) except -1:
        cdef void *users[64]
        cdef unsigned count = 64, i
        cdef Request request
        self.own()
        if self.unused:
            return 0
        count = c_handle.handle_pop(self.c, users, 64)
        if count == 0 and not self.staged:
            return 0
        found = []
        while count > 0:
            for i in range(count):
                request = <Request> users[i]
                # Drop the reference that Request.start() took.
                Py_DECREF(request)
                found.append(request)
            count = c_handle.handle_pop(self.c, users, 64) if count == 64 else 0
        # There may be no other reference: finish them even if Ctrl-C interrupts.
        finish_all(found)
        # Iterate over a copy, because other threads may add to the set.
        for request in list(self.staged):
            if (patient or request.finisher == 0) and request.poll(0):
                self.staged.discard(request)
        return 0

    def keep(self, request):
        self.staged.add(request)

    cdef bint drain_until(self, int64_t end_ns) except -1:
        cdef int64_t left = SLICE_NS
        cdef int result = -1
        self.own()
        if self.unused:
            return True
        while True:
            if end_ns >= 0:
                left = min(SLICE_NS, max(0, end_ns - <int64_t> time.monotonic_ns()))
            staged = list(self.staged)
            if staged:
                # Staged requests only advance when polled.
                (<Request> staged[0]).poll(left)
                self.staged.difference_update(
                    [request for request in staged if (<Request> request).poll(0)]
                )
            else:
                with nogil:
                    result = c_handle.handle_drain(self.c, left)
            PyErr_CheckSignals()
            if not staged and result == 0:
                return True
            if left == 0:
                return False

    cdef int pause(self) except -1:
        with nogil:
            c_handle.handle_drain(self.c, PAUSE_NS)
        PyErr_CheckSignals()
        return 0

    cdef int stop(self) except -1:
        self.own()
        try:
            finish_all(list(self.staged))
        finally:
            with nogil:
                c_handle.handle_stop(self.c)
            with cython.critical_section(self):
                loops, self.event_loops = self.event_loops, None
            try:
                self.collect()
            finally:
                dismiss(loops)
        return 0

    @property
    def watchers(self):
        self.own()
        with cython.critical_section(self):
            return self.event_loops

    def new_eventfd(self):
        return Eventfd.__new__(Eventfd)

    def is_idle(self):
        return self.pending() == 0 and not self.staged

    cdef unsigned pending(self) except *:
        self.own()
        return 0 if self.unused else c_handle.handle_pending(self.c)

    cdef str engine(self):
        return c_handle.handle_engine(self.c).decode()

    cdef dict stats(self):
        cdef nvmeio_stats stats
        c_handle.handle_stats(self.c, &stats)
        return stats

    cdef tuple latencies(self):
        cdef uint64_t counts[LATENCY_BUCKETS]
        cdef int64_t bounds_ns[LATENCY_BUCKETS]
        cdef int bucket
        c_handle.handle_latencies(self.c, counts)
        for bucket in range(LATENCY_BUCKETS):
            bounds_ns[bucket] = c_handle.latency_ns(bucket)
        return (
            numpy.frombuffer((<char *> counts)[:sizeof(counts)], numpy.uint64),
            numpy.frombuffer((<char *> bounds_ns)[:sizeof(bounds_ns)], numpy.int64),
        )


# A cycle collector would empty `watched` before __dealloc__ needs it.
@cython.no_gc_clear
@cython.final
cdef class Eventfd(Descriptor):
    """An eventfd(2), which no worker signals any more once it is closed."""

    cdef set watched  # the Workers that may signal it

    def __cinit__(self):
        self.watched = set()
        self.number = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.number < 0:
            check(-c_errno)

    def __dealloc__(self):
        self.unwatch_all()

    def watch(self, Workers workers):
        cdef int result, fd = self.number
        workers.own()
        self.watched.add(workers)
        with nogil:
            result = c_handle.handle_watch(workers.c, fd)
        if result != -errno.ENOMEM:
            check(result)
        return result == 0

    def unwatch(self, Workers workers):
        cdef int fd = self.number
        with nogil:
            c_handle.handle_unwatch(workers.c, fd)
        self.watched.discard(workers)

    cdef int unwatch_all(self) except -1:
        cdef Workers workers
        cdef int fd = self.number
        for workers in list(self.watched):
            with nogil:
                c_handle.handle_unwatch(workers.c, fd)
        self.watched.clear()
        return 0

    def signal(self):
        # With the lock of close_number(), so that no other thread closes it meanwhile.
        with cython.critical_section(self):
            if self.number >= 0:
                eventfd_write(self.number, 1)

    def clear(self):
        cdef eventfd_t count
        eventfd_read(self.number, &count)

    def close(self):
        self.unwatch_all()
        self.close_number()


cdef int finish_all(list requests) except -1:
    """Wait for requests even if interrupted by Ctrl-C, which is raised at the end."""
    cdef Request request
    interruption = None
    for request in requests:
        while not request.finished and not request.is_being_finished_here():
            try:
                request.poll(-1)
            except BaseException as error:
                interruption = error
    if interruption is not None:
        raise interruption
    return 0


cdef int dismiss(object loops) except -1:
    """Tell event loops to stop watching workers; `loops` is None if they have."""
    for known in list(loops or ()):
        watcher = known()
        if watcher is not None:
            watcher.close()
    return 0


cdef Workers start_workers(dict options):
    cdef Workers workers = Workers.__new__(Workers)
    cdef nvmeio_config config
    cdef int result
    engine = options["engine"]
    name = engine.encode()
    apply_settings()
    config.block_bytes = options["block_size"]
    config.queue_depth = options["queue_depth"]
    config.workers = options["workers"]
    config.single_submit = options.get("single_submit", False)
    config.bounce = _bounces[options["bounce"]]
    config.engine = name
    with nogil:
        result = c_handle.handle_open(&config, &workers.c)
    if result < 0:
        raise_unusable(engine, result)
    fallback = c_handle.handle_fallback(workers.c).decode()
    if fallback and fallback not in _logged:
        _logged.add(fallback)
        log.warning(
            "using the engine %s, because others do not work here: %s",
            workers.engine(),
            fallback,
        )
    return workers


cdef int raise_unusable(str engine, int result) except -1:
    """Raise OSError with the reason why no worker could be started."""
    reason = engines().get(engine, {}).get("reason")
    if reason:
        raise_saying(-result, f"the engine {engine} cannot be used: {reason}", None)
    # The engine works, or "auto" was asked for: some other resource is missing.
    lacking = _LACKING.get(-result) or reason_of(-result)
    raise_saying(-result, f"cannot open a handle: {lacking}", None)
