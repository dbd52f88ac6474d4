"""Requests: from submission to bytes or an exception.

The library carries a transfer out; here its memory and file are held, and once it is done
what is left for Python is done by whoever observes it first: landing in strided memory,
validation, letting go.
"""

import errno
import logging
import time
from concurrent.futures import CancelledError
from types import GenericAlias

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport SIZE_MAX, int64_t

from nvmeio cimport libnvmeio
from nvmeio.libnvmeio cimport OP_FSYNC, OP_READ, OP_WRITE, nvmeio_handle, nvmeio_op
from nvmeio.libnvmeio cimport nvmeio_after, nvmeio_outcome, nvmeio_request, nvmeio_transfer
from nvmeio._native.arguments cimport deadline_ns
from nvmeio._native.buffer cimport Buffer
from nvmeio._native.callbacks cimport call_all, forget
from nvmeio._native.file cimport File, check_against_file, identity_of
from nvmeio._native.errors cimport check, error_of, error_of_blocked
from nvmeio._native.errors cimport raise_refused, verb_of, warn_of, words_of

from nvmeio._events.caller import CALLER
from nvmeio._memory.overlap import footprint_of
from nvmeio._arguments.keywords import hide_unknown, refuse_unknown

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(PyObject *)
    void PyObject_GC_Track(PyObject *)
    bint is_tracked "PyObject_GC_IsTracked"(object)

_log = logging.getLogger("nvmeio")

# Between two slices of a wait signals are handled: Ctrl-C works within 0.1 s.
cdef int64_t SLICE_NS = 50_000_000


# A cycle collector would empty the attributes before __dealloc__ runs, and so free memory
# that the device is still writing to.
@cython.no_gc_clear
cdef class Request:
    """Request()
--

    One transfer in flight, or what became of it.

    Made by the ``submit_*`` of a ``Handle``.

    Attributes
    ----------
    nbytes : int
        How many bytes are to be transferred.
    path : str, bytes or int
        The path or descriptor of the file.

    Notes
    -----
    Thread-safe.  The request holds buffer and file until it is done, and the handle holds
    the request, so the caller may drop everything.  An error that nobody asked for gives a
    RuntimeWarning when the request is dropped.

    Examples
    --------
    >>> with nvmeio.Handle() as handle:
    ...     request = handle.submit_write(np.arange(1000), "data.bin")
    ...     request.wait()
    8000
    >>> isinstance(request, nvmeio.Request), request.done()
    (True, True)
    """

    def __init__(self):
        raise TypeError("a Request is made by submit_read() and submit_write()")

    def __dealloc__(self):
        # A cycle collector may have emptied the error by now, but never its words.
        if self.words is not None and not self.told:
            warn_of(self.words)
        libnvmeio.request_release(self.c)

    cdef int start(self, nvmeio_handle *handle) except -1:
        cdef nvmeio_after after
        cdef nvmeio_request **before = fill_after(self, &after)
        cdef size_t offender = SIZE_MAX
        cdef int result
        # For `user`, until handle_pop() or request_wait() reports it.  Held by the library,
        # it is no part of any garbage: the cycle collector need not look at it.
        Py_INCREF(self)
        PyObject_GC_UnTrack(<PyObject *> self)
        try:
            result = self.submit(handle, &after, &offender)
            if result < 0:
                self.raise_refusal(result, offender)
        except BaseException:
            self.finished = True
            Py_DECREF(self)
            raise
        finally:
            PyMem_Free(before)
        return 0

    cdef int submit(
        self, nvmeio_handle *handle, const nvmeio_after *after, size_t *offender
    ) except? -1:
        cdef nvmeio_transfer transfer
        cdef int result
        fill_transfer(self, &transfer)
        transfer.after = after[0]
        with nogil:
            result = libnvmeio.submit(handle, &transfer, &self.c)
            libnvmeio.file_release(transfer.file)
        return result

    cdef int raise_refusal(self, int result, size_t offender) except -1:
        raise_refused(self.op, self.path, result)

    cdef bint perform(self, nvmeio_handle *handle) except -1:
        cdef nvmeio_transfer transfer
        cdef int result
        fill_transfer(self, &transfer)
        with nogil:
            result = libnvmeio.perform(handle, &transfer, &self.c_outcome)
            libnvmeio.file_release(transfer.file)
        if result < 0:
            self.finished = True
            self.raise_refusal(result, SIZE_MAX)
        self.performed = result == 1
        return self.performed

    cdef int come_after(self, object after, object workers) except -1:
        if after is None:
            return 0
        cdef Request one
        named = predecessors(after, workers)
        if named and self.op == OP_WRITE and not self.lies_in_place():
            raise TypeError(
                "after= takes no write of strided memory or of a device's, which is copied "
                "at submission and may change until it begins; wait for what it comes "
                "after, and submit it then"
            )
        # Of those that went well there is nothing to wait for.
        self.before = [
            one for one in named if not one.finished or one.error is not None
        ]
        return 0

    cdef bint is_blocked_already(self) except -1:
        """Fail at once after what has failed in Python, which the library does not know."""
        cdef nvmeio_outcome outcome
        cdef Request one
        for index, one in enumerate(self.before or ()):
            if not one.finished or one.error is None:
                continue
            if one.c != NULL:
                libnvmeio.request_outcome(one.c, &outcome)
                if outcome.result < 0:
                    continue
            error = one.error
            cancelled = isinstance(error, CancelledError)
            number = getattr(error, "errno", None) or errno.EIO
            self.c_outcome.result = -(errno.ECANCELED if cancelled else number)
            self.c_outcome.got = 0
            self.c_outcome.abandoned = False
            self.c_outcome.blocker = index
            self.performed = True
            self.poll(0)
            return True
        return False

    cdef object go_on(self, int64_t timeout_ns):
        cdef nvmeio_outcome outcome = self.c_outcome
        cdef Request before
        interruption = None
        if not self.performed:
            check(libnvmeio.request_outcome(self.c, &outcome), self.path)
        error = None
        if outcome.result < 0 and outcome.blocker == SIZE_MAX:
            error = self.judge(&outcome)
        elif outcome.result < 0:
            before = self.before[outcome.blocker]
            error = error_of_blocked(
                self.doing(),
                self.path,
                f"{before.doing()} of {before.path!r}",
                cause_of(self, outcome.blocker),
                &outcome,
            )
            # Who looks at this error has seen the other one too.
            before.told = True
        if outcome.abandoned:
            _log.critical("%s; its memory is never freed", error)
            self.abandon_memory()
        else:
            try:
                error = self.settle(error)
            except Exception as first:
                # The work's own error comes again; that of a signal's handler does not.
                try:
                    error, interruption = self.settle(error), first
                except Exception as second:
                    error = second
            self.disuse_memory()
        self.before = None
        self.error = error
        self.outcome = outcome.result if self.value is None else self.value
        self.value = None
        self.words = None if error is None else words_of(error)
        # An error holds frames, a result may be anything: both may hold this request.
        if (error is not None or type(self.outcome) is not int) and not is_tracked(self):
            PyObject_GC_Track(<PyObject *> self)
        self.finished = True
        return interruption

    cdef object judge(self, const nvmeio_outcome *outcome):
        return error_of(self.op, self.nbytes, self.offset, self.path, outcome)

    cdef object settle(self, object error):
        if self.buffer is None:
            return error
        if error is None and self.validate:
            error = check_against_file(
                self.op, self.file, self.buffer.address, self.nbytes, self.offset, self.path
            )
        # Of a read that failed, part may be in the caller's memory, and autograd must know.
        if self.op == OP_READ and (error is None or self.buffer.is_in_place()):
            self.buffer.land()
        return error

    cdef bint lands_by_itself(self) noexcept:
        return not self.validate and (self.op != OP_READ or self.lies_in_place())

    cdef list parts(self):
        if self.buffer is None:
            return [(identity_of(self.file), self.path, None, 0, (), ())]
        found = identity_of(self.file), self.path, self.offset, self.nbytes
        return [found + self.buffer.memory_in_use()]

    cdef bint lies_in_place(self) noexcept:
        cdef Buffer buffer = self.buffer
        if self.is_copied:
            return False
        return buffer is None or buffer.nbytes == 0 or buffer.is_in_place()

    cdef int release_memory(self) except -1:
        cdef Buffer buffer = self.buffer
        if buffer is not None:
            buffer.release()
        return 0

    cdef int disuse_memory(self) noexcept:
        if self.buffer is not None:
            self.buffer.disuse()
        return 0

    cdef int abandon_memory(self) except -1:
        Py_INCREF(self.buffer)
        self.buffer = None
        return 0

    cdef bint poll(self, int64_t timeout_ns) except -1:
        cdef int result = 0
        if self.finished:
            return True
        self.check_process()
        if self.is_being_finished_here():
            return False
        if self.c != NULL:
            with nogil:
                result = libnvmeio.request_wait(self.c, timeout_ns)
        elif not self.performed:
            raise ValueError("the request was never submitted")
        if result < 0:
            return False
        try:
            see_to_it(self, timeout_ns)
        except BaseException:
            # Its completion was reported, so that the library will not do so again.
            if not self.finished:
                self._workers.keep(self)
            raise
        finally:
            # The reference that start() took.
            if result == 1:
                Py_DECREF(self)
        return True

    cdef int check_process(self) except -1:
        # Also if it was done by then: a thread that the child does not have may have held
        # the lock.
        if self.generation != libnvmeio.fork_generation():
            raise OSError(
                errno.EOWNERDEAD,
                "the request was submitted before a fork(); only the parent has it",
                self.path,
            )
        return 0

    cdef bint is_being_finished_here(self) noexcept:
        return self.finisher == <unsigned long> PyThread_get_thread_ident()

    cdef bint poll_for(self, object timeout) except -1:
        cdef int64_t end = deadline_ns(timeout)
        cdef int64_t left = SLICE_NS
        while True:
            if end >= 0:
                left = min(SLICE_NS, max(0, end - <int64_t> time.monotonic_ns()))
            if self.poll(left):
                return True
            if self.is_being_finished_here():
                raise RuntimeError(
                    f"{self!r} is waited for within its own completion, by a signal "
                    "handler or a destructor"
                )
            PyErr_CheckSignals()
            if left == 0:
                return False

    def wait(self, timeout=None, **unknown):
        """Wait until the transfer is done.

        Parameters
        ----------
        timeout : float, optional
            How long, in seconds; None waits as long as it takes.

        Returns
        -------
        int
            The number of bytes transferred: ``nbytes``.  Where the request was given a
            ``result``, that.

        Raises
        ------
        OSError
            The transfer failed; with errno and path.  ENODATA: a read past the end of the
            file.  EOWNERDEAD: it was submitted before a fork().  GatherError: some records
            of a gather or scatter, or some of many items, have failed.
        TimeoutError
            The time is over; the request goes on.
        concurrent.futures.CancelledError
            It was cancelled.
        KeyboardInterrupt
            Ctrl-C, within 0.1 s; the request goes on.

        Notes
        -----
        Releases the GIL.
        """
        if unknown:
            refuse_unknown(Request.wait, unknown)
        if not self.poll_for(timeout):
            raise TimeoutError(f"{self!r} was not done within {timeout} s; it goes on")
        self.told = True
        if self.error is not None:
            raise self.error
        return self.outcome

    def result(self, timeout=None, **unknown):
        """Wait until the transfer is done; the name that futures have for ``wait``."""
        return self.wait(timeout, **unknown)

    def exception(self, timeout=None, **unknown):
        """Wait until the transfer is done, and return what went wrong.

        Parameters
        ----------
        timeout : float, optional
            As for ``wait``.

        Returns
        -------
        Exception or None
            None where all went well; an OSError of the transfer, or what torch has raised
            on the way to the tensor.

        Raises
        ------
        TimeoutError, concurrent.futures.CancelledError
            As ``wait``.
        """
        if unknown:
            refuse_unknown(Request.exception, unknown)
        if not self.poll_for(timeout):
            raise TimeoutError(f"{self!r} was not done within {timeout} s; it goes on")
        self.told = True
        if isinstance(self.error, CancelledError):
            raise self.error
        return self.error

    def done(self) -> bool:
        """Tell whether the transfer is done: read bytes are where they belong."""
        return self.poll(0)

    def cancel(self) -> bool:
        """Drop what has not yet been handed to the kernel.

        Returns
        -------
        bool
            True if anything was dropped: ``wait()`` will raise CancelledError.  Bytes that
            were on their way may still arrive until then.  False if there was nothing to
            drop, or the request was submitted before a fork().

        Notes
        -----
        Does not block.  What a cancelled write has left of a file is undefined.
        """
        cdef int dropped
        if self.finished or self.c == NULL:
            return False
        with nogil:
            dropped = libnvmeio.request_cancel(self.c)
        return dropped == 1

    def add_done_callback(self, fn) -> None:
        """Have a function called when the request is done.

        Parameters
        ----------
        fn : callable
            Is called with the request, once; at once if the request is done already.

        Raises
        ------
        OSError
            EOWNERDEAD: the request was submitted before a fork(), and was not done then.
        TypeError
            ``asyncio.wait`` calls: it takes tasks and futures of asyncio alone.

        Notes
        -----
        It is called in the thread that is the first to see the completion: one that waits
        for the request, asks whether it is done or calls the handle, or else a thread of
        nvmeio's own, "nvmeio-callbacks", in which all callbacks of the process take turns:
        it should return soon.  Several are called in order.  What one raises is logged by
        the logger ``nvmeio``; an exception that is no Exception, as Ctrl-C is, is raised in
        that thread when all were called, but for nvmeio's own, which logs it too.
        """
        if not callable(fn):
            raise TypeError(f"fn is {fn!r}; it must be callable")
        refuse_asyncio(fn)
        self._listen(fn)
        if not self.finished:
            CALLER.call_when_done(self)

    def _listen(self, fn):
        """Have a function called by whoever sees that the request is done."""
        self.poll(0)
        with cython.critical_section(self):
            if self.callbacks is None:
                self.callbacks = []
        self.callbacks.append(fn)
        # It may have been finished in between, by a thread that has not seen this one.
        if self.finished:
            call_all(self.callbacks, self)

    def _remove_done_callback(self, fn):
        if self.callbacks is not None:
            forget(self.callbacks, fn)

    @property
    def _condition(self):
        # What concurrent.futures.wait() and as_completed() ask of their own futures.
        raise _NoFuture(
            f"{self!r} is no concurrent.futures.Future; use nvmeio.wait() or "
            "nvmeio.as_completed()"
        )

    def _is_over(self):
        """Tell whether it touches nothing any more, without finishing it."""
        if self.finished:
            return True
        return self.c != NULL and self.lands_by_itself() and libnvmeio.request_done(self.c)

    def _footprint(self):
        """What it touches; see overlap.py."""
        return footprint_of(self.parts(), self.op == OP_WRITE)

    def _predecessors(self):
        return self.before or []

    @property
    def _failed(self):
        return self.error is not None and not isinstance(self.error, CancelledError)

    def __await__(self):
        """Wait until the transfer is done, while an asyncio event loop goes on.

        Returns
        -------
        int
            As ``wait``.

        Raises
        ------
        OSError
            As ``wait``.
        asyncio.CancelledError
            The request was cancelled, by ``cancel`` or because the task was.  A task that
            is cancelled cancels its request, and this is raised when the request is done,
            also if the task is cancelled again meanwhile: no memory is written to any
            more.

        Notes
        -----
        Any number of tasks, of any event loops, may await the same request.  A task that
        is cancelled before it has begun to await cancels no request.  No thread is started:
        the loop reads an eventfd (``loop.add_reader``), one for each handle and loop,
        closed with the handle or with the loop.
        """
        # Not at the top: asyncio takes longer to import than nvmeio.
        from nvmeio._events.event_loop import as_coroutine
        return as_coroutine(self).__await__()

    def as_coroutine(self):
        """Return a coroutine that does what ``await request`` does.

        Returns
        -------
        coroutine
            For ``asyncio.create_task``, ``TaskGroup.create_task`` and ``asyncio.wait``,
            which take no other awaitable.

        Notes
        -----
        The transfer goes on whether the coroutine is awaited or not.
        """
        from nvmeio._events.event_loop import as_coroutine
        return as_coroutine(self)

    @classmethod
    def __class_getitem__(cls, result):
        """Name the type of the result, in annotations: ``Request[int]``."""
        return GenericAlias(cls, result)

    def __reduce__(self):
        raise TypeError("a Request cannot be pickled; it belongs to this process")

    def __repr__(self):
        state = "in flight"
        if self.finished:
            state = "done" if self.error is None else f"failed: {self.error}"
        return f"<nvmeio.Request {self.subject()} of {self.path!r}, {state}>"

    cdef str doing(self):
        if self.op == OP_FSYNC:
            return verb_of(self.op)
        return f"{verb_of(self.op)} of {self.nbytes} bytes at offset {self.offset}"

    cdef str subject(self):
        if self.op == OP_FSYNC:
            return verb_of(self.op)
        return f"{verb_of(self.op)} {self.nbytes} bytes at offset {self.offset}"


hide_unknown(Request)


cdef int refuse_asyncio(object fn) except -1:
    """Refuse the callback of asyncio.wait(), which no other thread may call."""
    if getattr(fn, "__module__", None) == "asyncio.tasks":
        raise TypeError(
            "asyncio.wait() takes tasks and futures of asyncio; pass "
            "asyncio.create_task(request.as_coroutine()), or use nvmeio.as_completed()"
        )
    return 0


cpdef object wait_or_cancel(Request request):
    """Wait for a request that nobody but the caller knows of.

    What interrupts it, as Ctrl-C does, cancels the request first, and is raised when that
    is done: then no memory is written to any more.  A second interruption is raised at
    once.
    """
    try:
        return request.wait()
    except BaseException:
        if request.finished:
            raise
        request.cancel()
        try:
            request.poll_for(None)
        except BaseException as second:
            if not request.finished:
                _log.error("%r goes on, and its memory is in use until it is done", request)
                if hasattr(second, "add_note"):
                    second.add_note(f"{request!r} goes on, and its memory is in use")
            raise
        # Of an error beside the interruption nobody can be told.
        request.told = True
        raise


cdef Request new_request(
    nvmeio_op op, Buffer buffer, File file, int64_t offset, bint validate
):
    return fill_request(Request.__new__(Request), op, buffer, file, offset, validate)


cdef Request fill_request(
    Request request, nvmeio_op op, Buffer buffer, File file, int64_t offset, bint validate
):
    """Note what a request that was just made is to do."""
    request.generation = libnvmeio.fork_generation()
    request.op = op
    request.buffer = buffer
    request.file = file
    request.path = file.path
    request.offset = offset
    request.validate = validate
    request.nbytes = 0 if buffer is None else buffer.nbytes
    request.outcome = 0
    return request


cdef nvmeio_request **fill_after(Request request, nvmeio_after *after) except? NULL:
    cdef nvmeio_request **requests
    cdef Request before
    cdef size_t i
    after.requests = NULL
    after.count = 0 if request.before is None else len(request.before)
    if after.count == 0:
        return NULL
    requests = <nvmeio_request **> PyMem_Malloc(after.count * sizeof(nvmeio_request *))
    if requests == NULL:
        raise MemoryError()
    for i in range(after.count):
        before = request.before[i]
        requests[i] = before.c
    after.requests = requests
    return requests


class _NoFuture(TypeError, AttributeError):
    """A Request was taken for a Future; hasattr() and inspect hear that it is none."""


cdef object cause_of(Request request, size_t blocker):
    """Return the error of a predecessor, which may not be finished yet."""
    cdef Request before = request.before[blocker]
    cdef nvmeio_outcome outcome
    cdef list chain = [before]
    # From the first of the chain on, and not by recursion, for it may be long.
    while not before.finished and before.c != NULL and libnvmeio.request_done(before.c):
        libnvmeio.request_outcome(before.c, &outcome)
        if outcome.blocker == SIZE_MAX:
            break
        before = before.before[outcome.blocker]
        chain.append(before)
    for before in reversed(chain):
        before.poll(0)
    before = chain[0]
    if before.error is None:
        # It is being cancelled, and the kernel still has a part of it.
        return CancelledError(f"the {before.doing()} of {before.path!r} was cancelled")
    return before.error


cdef list predecessors(object after, object workers):
    """Return what ``after=`` names as a list of Requests, or say what cannot be meant."""
    cdef Request one
    if isinstance(after, Request):
        after, single = [after], True
    else:
        single = False
        try:
            if isinstance(after, (str, bytes)):
                raise TypeError
            after = list(after)
        except TypeError:
            raise TypeError(
                f"after is {after!r}; it must be a Request or an iterable of them"
            ) from None
    requests = []
    for index, request in enumerate(after):
        name = "after" if single else f"after[{index}]"
        if not isinstance(request, Request):
            raise TypeError(f"{name} is {request!r}; it must be a Request")
        one = request
        if one._workers is not workers:
            raise ValueError(f"{name} is {request!r}, of another handle")
        one.check_process()
        one.poll(0)
        if not one.finished and (one.c == NULL or not one.lands_by_itself()):
            raise TypeError(
                f"{name} is {request!r}, whose bytes pass through Python, as those of "
                "strided arrays and tensors on devices do; wait for it first"
            )
        requests.append(one)
    return requests


cdef int fill_transfer(Request request, nvmeio_transfer *transfer) except -1:
    """Fill in what the library is asked for, with a reference of the file."""
    transfer.op = request.op
    transfer.file = request.file.retain()
    transfer.address = NULL if request.buffer is None else request.buffer.address
    transfer.size = request.nbytes
    transfer.offset = request.offset
    transfer.data_only = request.data_only
    transfer.user = <void *> request
    transfer.after.count = 0
    return 0


cdef int see_to_it(Request request, int64_t timeout_ns) except -1:
    """Go on with a request in this thread, and once it is finished, report that."""
    cdef bint finished_here = False
    file = interruption = None
    with request.lock:
        request.finisher = PyThread_get_thread_ident()
        try:
            if not request.finished:
                interruption = request.go_on(timeout_ns)
                finished_here = request.finished
            if finished_here:
                file, request.file = request.file, None
        finally:
            request.finisher = 0
    # Letting go may run anything, and so has no lock.
    if finished_here:
        request.release_memory()
    del file
    if request.finished and request.callbacks is not None:
        call_all(request.callbacks, request)
    if interruption is not None:
        raise interruption
    return 0
