"""The transfers of DeepSpeed's op on top of gather.pyx: names, arguments, statuses.

Each one comes down to Submitter.begin(), and then is waited for at once or by wait().
"""

import inspect
import logging

cimport cython

from nvmeio._core cimport OP_READ, OP_WRITE
from nvmeio.arguments cimport flag, integer
from nvmeio.gather cimport Gatherer
from nvmeio.request cimport Request, wait_or_cancel
from nvmeio.submitter cimport Submitter

from nvmeio._contract import pread_arguments

_log = logging.getLogger("nvmeio")

# A default that inspect takes for none.  Cython would say only how many arguments there
# must be where one is missing.
_REQUIRED = inspect.Parameter.empty


# A cycle collector would empty the attributes before __dealloc__ drains the workers.
@cython.no_gc_clear
cdef class Transfers(Gatherer):
    """A Gatherer with the transfers of DeepSpeed's op: their names and their statuses."""

    def read(
        self, buffer, filename=_REQUIRED, validate=False, file_offset=0
    ) -> int:
        """Read a file into ``buffer``, and wait.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Is filled; of any dtype, shape and strides.
        filename : str, bytes, os.PathLike, int or File
            The file, which must hold ``file_offset`` plus the buffer's size bytes.
        validate : bool, default False
            Compare with an ordinary read of the file afterwards.
        file_offset : int, default 0
            Where in the file to begin, in bytes.

        Returns
        -------
        int
            0, or -1 with ``errors="status"``.

        Raises
        ------
        OSError
            With errno and path: ENODATA past the end of the file, EIO where validation
            finds a difference, and what the system says.  With ``errors="status"`` it is
            logged and kept in ``last_error``.
        TypeError, ValueError
            The buffer cannot be read into, an argument is of the wrong type or out of
            range, or the handle or the file is closed; whatever ``errors`` says.
        KeyboardInterrupt
            Ctrl-C, which cancels the transfer, once the device has answered to what it has
            been given.  A second one within 0.1 s: then the memory is still in use, and
            stays held.

        Notes
        -----
        Releases the GIL while it waits.
        """
        return self._now(OP_READ, buffer, filename, file_offset, validate, 0)

    def write(
        self, buffer, filename=_REQUIRED, validate=False, file_offset=0
    ) -> int:
        """Write ``buffer`` to a file, and wait.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Written in C order.
        filename : str, bytes, os.PathLike, int or File
            The file; created where it does not exist, never truncated.
        validate : bool, default False
            Compare with an ordinary read of the file afterwards.  The file is opened once
            more for that, so it takes the permission to read it.
        file_offset : int, default 0
            Where in the file to begin, in bytes.

        Returns
        -------
        int
            0, or -1 with ``errors="status"``.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``read``; ENOSPC or EFBIG where the file cannot become so long.

        Notes
        -----
        Releases the GIL while it waits.  The bytes are durable when ``fsync`` has
        returned.
        """
        return self._now(OP_WRITE, buffer, filename, file_offset, validate, 0)

    def sync_pread(self, buffer, filename=_REQUIRED, file_offset=0) -> int:
        """Read as ``read`` does, with another status.

        Parameters
        ----------
        buffer, filename, file_offset
            As for ``read``.

        Returns
        -------
        int
            1, or -1 with ``errors="status"``.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``read``.
        """
        return self._now(OP_READ, buffer, filename, file_offset, False, 1)

    def sync_pwrite(self, buffer, filename=_REQUIRED, file_offset=0) -> int:
        """Write as ``write`` does, with another status.

        Parameters
        ----------
        buffer, filename, file_offset
            As for ``write``.

        Returns
        -------
        int
            1, or -1 with ``errors="status"``.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``write``.
        """
        return self._now(OP_WRITE, buffer, filename, file_offset, False, 1)

    def async_pread(self, buffer, filename=_REQUIRED, file_offset=0) -> int:
        """Start a read that ``wait()`` waits for.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Is filled by the time ``wait()`` returns; held until then.
        filename, file_offset
            As for ``read``.

        Returns
        -------
        int
            0, or -1 with ``errors="status"`` where the file cannot be opened.

        Raises
        ------
        OSError
            The file cannot be opened.  What fails later is raised by ``wait()``, or by
            ``close()``.
        TypeError, ValueError
            As ``read``.

        Notes
        -----
        Not ordered after other requests: a read of what a write in flight is about to
        change may see the old bytes.  ``wait()`` for the write first.
        """
        return self._later(OP_READ, buffer, filename, file_offset, False)

    def async_pwrite(self, buffer, filename=None, file_offset=0, *, fd=None) -> int:
        """Start a write that ``wait()`` waits for.

        Parameters
        ----------
        buffer : array, tensor or object with the buffer protocol
            Written in C order; must not change until ``wait()`` has returned.
        filename, file_offset
            As for ``write``.
        fd : int, optional
            An open descriptor, in place of ``filename``.

        Returns
        -------
        int
            0, or -1 with ``errors="status"`` where the file cannot be opened.

        Raises
        ------
        OSError
            The file cannot be opened.  What fails later is raised by ``wait()``, or by
            ``close()``.
        TypeError, ValueError
            As ``write``, and for both or neither of ``filename`` and ``fd``.

        Notes
        -----
        Not ordered after other requests: of two writes in flight to the same place either
        may be the last.  ``fsync`` alone waits for the writes before it.
        """
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite() takes either filename or fd")
        file = filename if fd is None else integer("fd", fd)
        return self._later(OP_WRITE, buffer, file, file_offset, False)

    def pread(self, *args, **kwargs) -> int:
        """Read: ``pread(buffer, filename, validate, async, file_offset=0)``.

        Parameters
        ----------
        buffer, filename, validate, file_offset
            As for ``read``.
        async : bool
            Start the read only, as ``async_pread`` does.  The name is a keyword of Python:
            pass it by position, or as ``**{"async": True}``.

        Returns
        -------
        int
            0 where it is asynchronous (``wait()`` waits for it), else 1; -1 for an error
            with ``errors="status"``.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``read`` or ``async_pread``.
        """
        return self._either(OP_READ, "pread", args, kwargs)

    def pwrite(self, *args, **kwargs) -> int:
        """Write: ``pwrite(buffer, filename, validate, async, file_offset=0)``.

        Parameters
        ----------
        buffer, filename, validate, file_offset
            As for ``write``.
        async : bool
            Start the write only, as ``async_pwrite`` does; see ``pread``.

        Returns
        -------
        int
            As ``pread``.

        Raises
        ------
        OSError, TypeError, ValueError, KeyboardInterrupt
            As ``write`` or ``async_pwrite``.
        """
        return self._either(OP_WRITE, "pwrite", args, kwargs)

    def wait(self) -> int:
        """Wait for the operations of ``async_*`` and of ``p*`` with ``async``.

        Returns
        -------
        int
            How many have completed since the last wait; 0 when none was pending; -1 with
            ``errors="status"`` if one failed.

        Raises
        ------
        OSError
            The first failure, in order of submission, after all have been waited for.
        ValueError
            The handle was never opened.
        KeyboardInterrupt
            Ctrl-C, within 0.1 s; the operations are still to be waited for.

        Notes
        -----
        Releases the GIL.  Requests of ``submit_*`` are not waited for.
        """
        self.own()
        with cython.critical_section(self):
            tracked = self.tracked
            self.tracked = []
        try:
            # The last one first: the others are mostly done by then, and wake nobody.
            for request in reversed(tracked):
                (<Request> request).poll_for(None)
        except BaseException:
            # Interrupted: they are still to be waited for.
            with cython.critical_section(self):
                self.tracked = tracked + self.tracked
            raise
        self.collect()
        return self._ended(tracked)

    def close(self) -> None:
        """Refuse what comes, wait for everything in flight and stop the workers.

        Raises
        ------
        OSError
            The first failure of an ``async_*`` operation that nobody waited for, once the
            handle is closed.  With ``errors="status"`` it is logged and kept in
            ``last_error``.
        ValueError
            The handle was never opened.
        KeyboardInterrupt
            Ctrl-C while waiting.  The handle is closed, and a second call waits on.

        Notes
        -----
        Releases the GIL while it waits.  A second call does nothing.

        A ``with`` block closes the handle at its end, however it is left: also after an
        exception or Ctrl-C, and where Ctrl-C comes while it waits, it waits for what is in
        flight (a second Ctrl-C ends that).  That exception goes on, and of the failures
        there are warnings instead.
        """
        Submitter.close(self)
        with cython.critical_section(self):
            tracked = self.tracked
            self.tracked = []
        self._ended(tracked)

    def __exit__(self, kind=None, error=None, trace=None):
        # An exception on its way is not to be hidden: failures are warned of instead.
        try:
            Submitter.close(self) if kind else self.close()
        except BaseException:
            # Nobody else could close it: Ctrl-C is raised when nothing is in flight any
            # more, and a second one at once.
            Submitter.close(self)
            raise

    def _now(self, op, buffer, filename, file_offset, validate, done):
        """Transfer and wait; returns ``done``, or what an error comes to."""
        cdef Request request
        c_validate = flag("validate", validate)
        check_given(filename)
        try:
            request = self.begin(op, buffer, filename, file_offset, c_validate, True, None)
            wait_or_cancel(request)
        except OSError as error:
            return self._failed(error)
        finally:
            self.collect()
        return done

    def _later(self, op, buffer, filename, file_offset, validate):
        """Start what wait() waits for; returns 0, or what an error comes to."""
        c_validate = flag("validate", validate)
        check_given(filename)
        try:
            request = self.begin(op, buffer, filename, file_offset, c_validate, False, None)
        except OSError as error:
            return self._failed(error)
        with cython.critical_section(self):
            self.tracked.append(request)
        return 0

    def _either(self, op, name, args, kwargs):
        """pread and pwrite."""
        buffer, filename, validate, later, file_offset = pread_arguments(name, args, kwargs)
        if flag("async", later):
            return self._later(op, buffer, filename, file_offset, validate)
        return self._now(op, buffer, filename, file_offset, validate, 1)

    def _ended(self, tracked):
        """Return how many operations have ended, or what the first failure comes to."""
        first = None
        for request in tracked:
            (<Request> request).told = True
            error = (<Request> request).error
            if error is None:
                continue
            if first is None:
                first = error
            else:
                _log.error("another operation has failed as well: %s", error)
        return len(tracked) if first is None else self._failed(first)

    def _failed(self, error):
        """Raise an error, or return the status that stands for it."""
        if not self.status or not isinstance(error, OSError):
            raise error
        self.last_error = error
        _log.error("%s", error)
        return -1


cdef int check_given(object filename) except -1:
    if filename is _REQUIRED:
        raise TypeError(
            "the argument 'filename' is missing: a path, a descriptor or a File"
        )
    return 0
