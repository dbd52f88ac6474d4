"""Requests: from submission to the number of bytes or an exception.

The library executes a transfer, while the Request holds its memory and file.  The thread
that first observes the completion does the rest in Python: landing in strided memory,
releasing the memory.
"""

import errno
import time
from types import GenericAlias

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport SIZE_MAX, int64_t

from nvmeio._libnvmeio cimport c_base, c_request
from nvmeio._libnvmeio.c_base cimport OP_FSYNC, OP_READ, OP_WRITE, nvmeio_op
from nvmeio._libnvmeio.c_request cimport (
    nvmeio_after,
    nvmeio_handle,
    nvmeio_outcome,
    nvmeio_request,
    nvmeio_transfer,
)
from nvmeio._native.arguments cimport deadline_ns
from nvmeio._native.buffer cimport Buffer
from nvmeio._native.file cimport File, identity_of
from nvmeio._native.errors cimport cancelled_error, check, error_in_words, error_of
from nvmeio._native.errors cimport error_of_blocked, is_cancelled
from nvmeio._native.errors cimport raise_refused, verb_of, warn_of, words_of

from nvmeio._events.caller import CALLER
from nvmeio._events.log import log
from nvmeio._memory.overlap import footprint_of

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(PyObject *)
    void PyObject_GC_Track(PyObject *)
    bint is_tracked "PyObject_GC_IsTracked"(object)

# Signals are handled between two slices of a wait, so Ctrl-C works within 0.1 s.
cdef int64_t SLICE_NS = 50_000_000


# A cycle collector would empty the attributes before __dealloc__ runs, and so free memory
# that the device is still writing to.
@cython.no_gc_clear
cdef class Request:
    """Request()
--

    A transfer in flight, and later its result.

    The ``submit_*`` methods of a ``Handle`` return requests.

    Attributes
    ----------
    nbytes : int
        The number of bytes to transfer.
    path : str, bytes or int
        The path or descriptor of the file.

    Notes
    -----
    Thread-safe.  The request holds the buffer and the file until it is done, and the handle
    holds the request, so the caller may drop all references.  If a request fails and is
    freed before anybody looked at its error, it warns with a RuntimeWarning.

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
        # Before the warning, which may be an error.
        c_request.request_release(self.c)
        # A cycle collector may have cleared `error`, but never `words`.
        if self.words is not None and not self.error_seen:
            warn_of(self.words)

    cdef int start(self, nvmeio_handle *handle) except -1:
        cdef nvmeio_after after
        cdef nvmeio_request **before = fill_after(self, &after)
        cdef size_t offender = SIZE_MAX
        cdef int result
        # The library's reference (`user`), until handle_pop() or request_wait() reports the
        # request.  Until then it cannot be garbage, so the cycle collector may skip it.
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
            result = c_request.submit(handle, &transfer, &self.c)
        if result < 0:
            self.file.take_back(transfer.file)
        return result

    cdef int raise_refusal(self, int result, size_t offender) except -1:
        raise_refused(self.op, self.path, result)

    cdef bint perform(self, nvmeio_handle *handle) except -1:
        cdef nvmeio_transfer transfer
        cdef int result
        fill_transfer(self, &transfer)
        with nogil:
            result = c_request.perform(handle, &transfer, &self.c_outcome)
        if result <= 0:
            self.file.take_back(transfer.file)
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
                "after= cannot be used for a write of strided or device memory: its bytes "
                "are copied at submission, and would be stale when it begins; wait for the "
                "requests of after= first"
            )
        # Requests that have succeeded need no waiting.
        self.before = [
            one for one in named if not one.finished or one.error is not None
        ]
        return 0

    cdef bint is_blocked_already(self) except -1:
        """Fail at once if a predecessor failed in Python, unknown to the library."""
        cdef nvmeio_outcome outcome
        cdef Request one
        for index, one in enumerate(self.before or ()):
            if not one.finished or one.error is None:
                continue
            if one.c != NULL:
                c_request.request_outcome(one.c, &outcome)
                if outcome.result < 0:
                    continue
            error = one.error
            cancelled = is_cancelled(error)
            number = getattr(error, "errno", None) or errno.EIO
            self.c_outcome.result = -(errno.ECANCELED if cancelled else number)
            self.c_outcome.got = 0
            self.c_outcome.abandoned = False
            self.c_outcome.blocker = index
            self.performed = True
            self.poll(0)
            return True
        return False

    cdef Request predecessor(self, size_t index):
        with cython.critical_section(self):
            return None if self.before is None else self.before[index]

    cdef object go_on(self):
        cdef nvmeio_outcome outcome = self.c_outcome
        cdef Request before
        interruption = None
        if not self.performed:
            check(c_request.request_outcome(self.c, &outcome), self.path)
        error = None
        if outcome.result < 0 and outcome.blocker == SIZE_MAX:
            error = self.judge(&outcome)
        elif outcome.result < 0:
            before = self.predecessor(outcome.blocker)
            error = error_of_blocked(
                self.doing(),
                self.path,
                f"{before.doing()} of {before.path!r}",
                cause_of(self, outcome.blocker),
                &outcome,
            )
            # This error includes the other one as its cause.
            before.error_seen = True
        if outcome.close_error < 0 and not outcome.closing:
            add_close_error(error, outcome.close_error, self)
        if outcome.abandoned:
            log.critical("%s; its memory is never freed", error)
            self.abandon_memory()
        else:
            try:
                error = self.settle(error)
            except Exception as first:
                # Try again: an error of the work repeats itself, one that a signal handler
                # raised does not.
                try:
                    error, interruption = self.settle(error), first
                except Exception as second:
                    error = second
            self.disuse_memory()
        self.error = error
        self.outcome = outcome.result if self.value is None else self.value
        self.value = None
        self.words = None if error is None else words_of(error)
        # An error holds frames, and a result may be any object: either may refer to this
        # request and make a cycle.
        if (error is not None or type(self.outcome) is not int) and not is_tracked(self):
            PyObject_GC_Track(<PyObject *> self)
        # Freed on return, because that may run any Python code, which must see the outcome.
        with cython.critical_section(self):
            _befores, self.before = self.before, None
        self.finished = True
        return interruption

    cdef object judge(self, const nvmeio_outcome *outcome):
        return error_of(self.op, self.nbytes, self.offset, self.path, outcome)

    cdef object settle(self, object error):
        if self.buffer is None:
            return error
        self.buffer.check_storage(error)
        # A failed read may have changed part of the caller's memory: autograd must know.
        if self.op == OP_READ and (error is None or self.buffer.is_in_place()):
            self.buffer.land()
        return error

    cdef bint lands_by_itself(self) noexcept:
        return self.op != OP_READ or self.lies_in_place()

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
                result = c_request.request_wait(self.c, timeout_ns)
        elif not self.performed:
            raise ValueError("the request was never submitted")
        if result < 0:
            return False
        try:
            finish_and_release(self)
        except BaseException:
            # The library reports a completion once, and has done so: keep the request.
            if not self.finished:
                self._workers.keep(self)
            raise
        finally:
            # Drop the reference that start() took.
            if result == 1:
                Py_DECREF(self)
        return True

    cdef int check_process(self) except -1:
        # Even if it was done before the fork: a thread of the parent, which the child does
        # not have, may have held the lock.
        if self.generation != c_base.fork_generation():
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
                    f"{self!r} is being completed by this very thread, so a signal handler "
                    "or destructor in it cannot wait for the request"
                )
            PyErr_CheckSignals()
            if left == 0:
                return False

    def wait(self, timeout=None):
        """Wait until the transfer is done.

        Parameters
        ----------
        timeout : float, optional
            The longest time to wait, in seconds; default: no limit.

        Returns
        -------
        int
            The number of bytes transferred, ``nbytes``; or the ``result`` that
            ``submit_gather`` was given.

        Raises
        ------
        OSError
            The transfer failed; has errno and path.  ENODATA: the file ends before the
            buffer is full.  EOWNERDEAD: the request was submitted before a fork().
        GatherError
            Some records of a gather or scatter, or some of many items, failed.
        RuntimeError
            torch freed or moved the memory of a tensor meanwhile; see
            ``Handle.submit_read``.
        TimeoutError
            The time is over; the request is still running.
        concurrent.futures.CancelledError
            The request was cancelled.
        KeyboardInterrupt
            Ctrl-C, within 0.1 s; the request is still running.

        Notes
        -----
        Releases the GIL.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     request = handle.submit_write(np.arange(1000), "data.bin")
        ...     request.wait(timeout=60)
        8000
        """
        if not self.poll_for(timeout):
            raise TimeoutError(f"{self!r} was not done within {timeout} s; it goes on")
        self.error_seen = True
        if self.error is not None:
            raise self.error
        return self.outcome

    def result(self, timeout=None):
        """Wait until the transfer is done: ``wait`` by the name that futures use.

        Parameters
        ----------
        timeout : float, optional
            As for ``wait``.

        Returns
        -------
        int
            As ``wait``, which also lists the errors.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     handle.submit_write(np.arange(1000), "data.bin").result()
        8000
        """
        return self.wait(timeout)

    def exception(self, timeout=None):
        """Wait until the transfer is done, and return its error.

        Parameters
        ----------
        timeout : float, optional
            As for ``wait``.

        Returns
        -------
        Exception or None
            None after success; else the OSError of the transfer, or what torch raised while
            it copied to the tensor.

        Raises
        ------
        TimeoutError, concurrent.futures.CancelledError
            As ``wait``.

        Examples
        --------
        >>> nvmeio.write_file(np.arange(10), "short.bin")
        80
        >>> with nvmeio.Handle() as handle:
        ...     error = handle.submit_read(np.empty(1000), "short.bin").exception()
        >>> error.strerror
        'read past the end of the file: wanted 8000 bytes at offset 0, got 80'
        """
        if not self.poll_for(timeout):
            raise TimeoutError(f"{self!r} was not done within {timeout} s; it goes on")
        self.error_seen = True
        if is_cancelled(self.error):
            raise self.error
        return self.error

    def done(self) -> bool:
        """Return whether the transfer is done, and for a read its bytes are in the buffer.

        Returns
        -------
        bool
            True also if it failed or was cancelled.

        Raises
        ------
        OSError
            EOWNERDEAD: the request was submitted before a fork(), and was not done then.

        Notes
        -----
        Does not wait for I/O, but may copy into a strided buffer or to a device.
        """
        return self.poll(0)

    def cancel(self) -> bool:
        """Cancel the blocks that the kernel has not received yet.

        Returns
        -------
        bool
            True if any block was cancelled: ``wait()`` will raise CancelledError.  False if
            there was nothing to cancel, or the request was submitted before a fork().

        Notes
        -----
        Does not block.  The kernel may still transfer the blocks that it has, so the memory
        may be reused when ``wait()`` has raised, and not before.  After a cancelled read,
        each byte of the buffer is either the file's or the one from before, and nothing
        tells which.  A cancelled write leaves its part of the file undefined.

        Examples
        --------
        >>> import contextlib
        >>> from concurrent.futures import CancelledError
        >>> with nvmeio.Handle() as handle:
        ...     request = handle.submit_write(np.arange(1000), "data.bin")
        ...     if request.cancel():
        ...         with contextlib.suppress(CancelledError):
        ...             request.wait()
        >>> request.done()
        True
        """
        cdef int dropped
        if self.finished or self.c == NULL:
            return False
        with nogil:
            dropped = c_request.request_cancel(self.c)
        return dropped == 1

    def add_done_callback(self, fn) -> None:
        """Call a function when the request is done.

        Parameters
        ----------
        fn : callable
            Called once, with the request as its argument; immediately if the request is
            done already.

        Raises
        ------
        OSError
            EOWNERDEAD: the request was submitted before a fork(), and was not done then.
        TypeError
            ``fn`` is not callable, or is a callback of ``asyncio.wait``, which accepts
            only tasks and futures of asyncio.

        Notes
        -----
        The thread that first observes the completion calls the function: one that waits for
        the request, asks whether it is done or calls the handle; otherwise the thread
        "nvmeio-callbacks".  That thread calls all callbacks of the process, so a callback
        should return soon.  Several callbacks of a request are called in order.

        An Exception that a callback raises is logged by the logger ``nvmeio``.  Any other
        BaseException, such as KeyboardInterrupt, is raised in the calling thread after the
        last callback; "nvmeio-callbacks" logs it instead.

        Examples
        --------
        >>> with nvmeio.Handle() as handle:
        ...     request = handle.submit_write(np.arange(1000), "data.bin")
        ...     request.add_done_callback(lambda request: print(request.result(), "bytes"))
        8000 bytes
        """
        if not callable(fn):
            raise TypeError(f"fn is {fn!r}; it must be callable")
        refuse_asyncio(fn)
        self._listen(fn)
        if not self.finished:
            CALLER.call_when_done(self)
            if self.finished:
                # Another thread may have called it meanwhile.
                forget_if_called(self)

    def _listen(self, fn):
        """Call a function in the thread that sees that the request is done."""
        self.poll(0)
        # With the lock of callbacks_of(): of two threads, one sees what the other has done.
        with cython.critical_section(self):
            if self.callbacks is None:
                self.callbacks = []
            self.callbacks.append(fn)
        # Another thread may have finished it meanwhile, before `fn` was in the list.
        if self.finished:
            call_all(self)

    def _remove_done_callback(self, fn):
        callbacks = callbacks_of(self)
        if callbacks is not None:
            forget(callbacks, fn)

    @property
    def _condition(self):
        # concurrent.futures.wait() and as_completed() use this attribute of futures.
        raise _NoFuture(
            f"{self!r} is not a concurrent.futures.Future; use nvmeio.wait() or "
            "nvmeio.as_completed()"
        )

    def _is_over(self):
        """Return whether it no longer touches memory or file, without finishing it."""
        if self.finished:
            return True
        return self.c != NULL and self.lands_by_itself() and c_request.request_done(self.c)

    def _footprint(self):
        """Return the bytes that it touches; see overlap.py."""
        return footprint_of(self.parts(), self.op == OP_WRITE)

    def _predecessors(self):
        return self.before or []

    @property
    def _failed(self):
        return self.error is not None and not is_cancelled(self.error)

    def __await__(self):
        """Wait until the transfer is done, without blocking the asyncio event loop.

        Returns
        -------
        int
            As ``wait``.

        Raises
        ------
        OSError
            As ``wait``.
        asyncio.CancelledError
            The request was cancelled, by ``cancel`` or because the task was.  Cancelling a
            task cancels its request.  The exception is raised when the request is done,
            even if the task is cancelled again meanwhile, so the memory is no longer in
            use.

        Notes
        -----
        Any number of tasks, in any event loops, may await the same request.  Cancelling a
        task that has not begun to await does not cancel the request.  No thread is started:
        the loop watches an eventfd (``loop.add_reader``), one for each handle and loop,
        which is closed with the handle or the loop.
        """
        # Not at the top: asyncio takes longer to import than nvmeio.
        from nvmeio._events.event_loop import as_coroutine
        return as_coroutine(self).__await__()

    def as_coroutine(self):
        """Return a coroutine equivalent to ``await request``.

        Returns
        -------
        coroutine
            For ``asyncio.create_task`` and ``TaskGroup.create_task``, which accept
            coroutines only; pass such tasks to ``asyncio.wait``.

        Notes
        -----
        The transfer runs whether or not the coroutine is awaited.

        Examples
        --------
        >>> import asyncio
        >>> async def write():
        ...     async with nvmeio.Handle() as handle:
        ...         request = handle.submit_write(np.arange(1000), "data.bin")
        ...         return await asyncio.create_task(request.as_coroutine())
        >>> asyncio.run(write())
        8000
        """
        from nvmeio._events.event_loop import as_coroutine
        return as_coroutine(self)

    @classmethod
    def __class_getitem__(cls, result):
        """Return the annotation for requests with a type of result: ``Request[int]``."""
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


cdef int refuse_asyncio(object fn) except -1:
    """Raise TypeError for a callback of asyncio.wait(), which only its loop may call."""
    if getattr(fn, "__module__", None) == "asyncio.tasks":
        raise TypeError(
            "asyncio.wait() takes tasks and futures of asyncio; pass "
            "asyncio.create_task(request.as_coroutine()), or use nvmeio.as_completed()"
        )
    return 0


cpdef object wait_or_cancel(Request request):
    """Wait for a request that only the caller knows.

    An interruption such as Ctrl-C cancels the request, and is raised once the request is
    done and no longer uses the memory.  A second interruption is raised immediately.
    """
    try:
        return request.wait()
    except BaseException:
        if request.finished:
            raise
        request.cancel()
        finish_interrupted(request)
        raise


cdef int finish_interrupted(Request request) except -1:
    """Wait for a request whose caller gets an exception in its place.

    A second interruption is raised immediately.
    """
    try:
        request.poll_for(None)
    except BaseException as second:
        if not request.finished:
            log.error("%r goes on, and its memory is in use until it is done", request)
            if hasattr(second, "add_note"):
                second.add_note(f"{request!r} goes on, and its memory is in use")
        raise
    # Nobody can look at the request's own error.
    request.error_seen = True
    return 0


cdef Request new_request(
    nvmeio_op op, Buffer buffer, File file, int64_t offset
):
    return fill_request(Request.__new__(Request), op, buffer, file, offset)


cdef Request fill_request(
    Request request, nvmeio_op op, Buffer buffer, File file, int64_t offset
):
    """Fill in a request that was just made."""
    request.generation = c_base.fork_generation()
    request.op = op
    request.buffer = buffer
    request.file = file
    request.path = file.path
    request.offset = offset
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
    """A Request was used as a Future.  An AttributeError, for hasattr() and inspect."""


cdef object cause_of(Request request, size_t blocker):
    """Return the error of a predecessor, which may not be finished yet."""
    cdef Request before = request.predecessor(blocker)
    cdef nvmeio_outcome outcome
    cdef list chain = [before]
    # A loop, not a recursion, because the chain may be long.
    while not before.finished and before.c != NULL and c_request.request_done(before.c):
        c_request.request_outcome(before.c, &outcome)
        if outcome.blocker == SIZE_MAX:
            break
        before = before.predecessor(outcome.blocker)
        if before is None:
            break
        chain.append(before)
    for before in reversed(chain):
        before.poll(0)
    before = chain[0]
    if before.error is None:
        # It is being cancelled, but the kernel still has some of its blocks.
        return cancelled_error(f"the {before.doing()} of {before.path!r} was cancelled")
    return before.error


cdef list predecessors(object after, object workers):
    """Return ``after=`` as a list of Requests; raise TypeError or ValueError."""
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
                f"{name} is {request!r}, whose bytes pass through Python because its array "
                "is strided or its tensor on a device; wait for it first"
            )
        requests.append(one)
    return requests


cdef int fill_transfer(Request request, nvmeio_transfer *transfer) except -1:
    transfer.op = request.op
    transfer.file = request.file.lend()
    transfer.pass_file = True
    transfer.address = NULL if request.buffer is None else request.buffer.address
    transfer.size = request.nbytes
    transfer.offset = request.offset
    transfer.data_only = request.data_only
    transfer.buffered = False
    transfer.more = False
    transfer.user = <void *> request
    transfer.after.count = 0
    return 0


cdef list callbacks_of(Request request):
    """Return the list of callbacks, which is always the same once there is one."""
    with cython.critical_section(request):
        return request.callbacks


cdef int call_all(Request request) except -1:
    """Call the callbacks of a request that is done, in order, each once.

    An Exception is logged; any other BaseException is raised once all were called.  The
    list needs no lock: a thread pops a callback before it calls it.
    """
    cdef list callbacks
    cdef set calling = CALLER.calling
    with cython.critical_section(request):
        callbacks = request.callbacks
        request.callers += 1
    interruption = None
    thread = PyThread_get_thread_ident()
    nested = thread in calling
    calling.add(thread)
    while callbacks:
        try:
            fn = callbacks.pop(0)
        except IndexError:
            # Another thread took the last one.
            break
        try:
            fn(request)
        except Exception:
            log.exception("a callback of %r has failed", request)
        except BaseException as error:
            interruption = error
    if not nested:
        calling.discard(thread)
    with cython.critical_section(request):
        request.callers -= 1
    forget_if_called(request)
    if interruption is not None:
        raise interruption
    return 0


cdef int forget_if_called(Request request) except -1:
    """Do so unless a thread is calling one, or is about to."""
    cdef bint called
    with cython.critical_section(request):
        called = request.callers == 0 and not request.callbacks
    return forget_call(request) if called else 0


cdef int forget_call(Request request) except -1:
    """Tell the thread for callbacks that those of a request have been called."""
    cdef set waiting = CALLER.requests.get(request._workers)
    if waiting is None:
        return 0
    waiting.discard(request)
    if not waiting and CALLER.ident != PyThread_get_thread_ident():
        # It may have looked while this thread was calling them.
        eventfd = CALLER.eventfd
        if eventfd is not None:
            eventfd.signal()
    return 0


cdef int forget(list callbacks, object fn) except -1:
    """Remove a callback from the list, if it is still there."""
    try:
        callbacks.remove(fn)
    except ValueError:
        # It was called already, or a thread is about to call it.
        pass
    return 0


def remove_callbacks(set requests, tuple callbacks):
    """Remove callbacks of requests, in Cython: a Finalizer can call it at any moment."""
    # A copy, because other threads remove what is done meanwhile.
    for request in list(requests):
        for fn in callbacks:
            (<Request>request)._remove_done_callback(fn)


cdef int add_close_error(object error, int close_error, Request request) except -1:
    """Tell of a close(2) that failed after a request that failed or was cancelled."""
    words = f"(close after the {request.doing()})"
    closing = error_in_words(-close_error, words, request.path)
    if error is not None and error.__cause__ is None:
        error.__cause__ = closing
    else:
        log.error("%s", closing)
    return 0


cdef int finish_and_release(Request request) except -1:
    """Finish a request whose transfer is done; then release and call back."""
    cdef bint finished_here = False
    file = interruption = None
    with request.lock:
        request.finisher = PyThread_get_thread_ident()
        try:
            if not request.finished:
                interruption = request.go_on()
                finished_here = request.finished
            if finished_here:
                file, request.file = request.file, None
        finally:
            request.finisher = 0
    # Releasing may run any Python code, so it happens without the lock.
    if finished_here:
        request.release_memory()
    del file
    if request.finished and callbacks_of(request) is not None:
        call_all(request)
    if interruption is not None:
        raise interruption
    return 0
