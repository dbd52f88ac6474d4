"""Open the files that requests name by path, once for all requests in flight.

Each request checks that the path still leads to the file that is open: the file may have
been replaced meanwhile.

A request that may write takes over the reference to its file.  So the library closes the
file before the last of these requests is done, and that one gets the error, if closing
fails.
"""

import errno
import os

cimport cython
from posix.fcntl cimport O_CREAT, O_RDONLY, O_WRONLY

from nvmeio._libnvmeio cimport c_base, c_file
from nvmeio._libnvmeio.c_base cimport nvmeio_direct
from nvmeio._libnvmeio.c_file cimport nvmeio_file_info
from nvmeio._native.arguments cimport path_or_descriptor
from nvmeio._native.file cimport File, open_descriptor, open_page_cache, open_path
from nvmeio._native.workers cimport Workers


@cython.final
cdef class Known:
    """A file that was opened for a request, and may be closed by now."""

    def __dealloc__(self):
        c_file.file_forget(self.c)

    cdef bint is_open(self) noexcept:
        return c_file.file_is_open(self.c)

    cdef File again(self):
        """Return the file for another request; None if it is closed or was replaced."""
        cdef int result
        cdef File file
        if not self.is_open():
            return None
        name = os.fsencode(self.path)
        cdef const char *c_name = name
        with nogil:
            result = c_file.file_is_at(self.c, c_name)
        if result != 1 or not c_file.file_try_retain(self.c):
            return None
        file = File.__new__(File)
        file.c = self.c
        file.path = self.path
        file.mode = self.mode
        return pass_on(file)


cdef Known new_known(File file):
    cdef Known known = Known.__new__(Known)
    known.path = file.path
    known.mode = file.mode
    known.c = file.c
    c_file.file_remember(known.c)
    return known


cdef File pass_on(File file):
    """Let the request take over the file, unless it cannot write."""
    cdef nvmeio_file_info info
    c_file.file_get_info(file.c, &info)
    file.passing = info.writable
    return file


@cython.final
cdef class OpenFiles:
    """The files that a handle has opened for requests that name a path or descriptor."""

    cdef File find(self, object file, bint writing, bint ragged):
        cdef File found = self.find_open(file, writing)
        cdef bint again = True
        while ragged and not found.page_cache_open:
            try:
                open_page_cache(found)
            except OSError as error:
                # The request may not need it; if it does, the library reports the error.
                if not lacks_descriptors(error) or not again:
                    break
                again = release_some(self)
        return found

    cdef File find_open(self, object file, bint writing):
        if isinstance(file, File):
            return file
        path = path_or_descriptor(file)
        cdef unsigned generation = c_base.fork_generation()
        if self.generation != generation:
            with cython.critical_section(self):
                if self.generation != generation:
                    self.shared = {}
                    # Last, because other threads look at it without the lock.
                    self.generation = generation
        # A descriptor gets a File of its own, listed so that release_some() counts it.
        key = object() if isinstance(path, int) else (path, writing)
        cdef Known known = self.shared.get(key)
        cdef File shared = None if known is None else known.again()
        if shared is None:
            shared = pass_on(open_patiently(self, path, writing))
            self.keep(key, new_known(shared))
        return shared

    cdef int keep(self, object key, Known known) except -1:
        """Remember a file; drop those that are closed now and then."""
        with cython.critical_section(self):
            if len(self.shared) >= self.forget_at:
                for other, old in list(self.shared.items()):
                    if not (<Known> old).is_open():
                        self.shared.pop(other, None)
                self.forget_at = 2 * len(self.shared) + 64
            self.shared[key] = known
        return 0


cdef OpenFiles new_open_files(Workers workers, nvmeio_direct direct):
    cdef OpenFiles files = OpenFiles.__new__(OpenFiles)
    files.workers = workers
    files.direct = direct
    files.shared = {}
    files.generation = c_base.fork_generation()
    return files


cdef File open_patiently(OpenFiles files, object file, bint writing):
    """Open a path or descriptor; if descriptors run out, wait for completions and retry."""
    cdef bint again = True
    while True:
        try:
            if isinstance(file, int):
                return open_descriptor(file, files.direct)
            flags = O_WRONLY | O_CREAT if writing else O_RDONLY
            return open_path(file, flags, "wb" if writing else "rb", files.direct)
        except OSError as error:
            if not lacks_descriptors(error) or not again:
                raise
            again = release_some(files)


cdef bint lacks_descriptors(object error) except -1:
    if error.errno is None:
        # A signal handler raised it.
        raise error
    return error.errno in (errno.EMFILE, errno.ENFILE)


cdef bint release_some(OpenFiles files) except -1:
    """Wait until a file is closed; return False if nothing in flight holds one.

    Even then one may have been closed between the failure and this call: try once more.
    """
    before = count_open(files)
    while True:
        busy = files.workers.pending() > 0
        files.workers.collect()
        if count_open(files) < before:
            return True
        if not busy:
            return False
        files.workers.pause()


cdef Py_ssize_t count_open(OpenFiles files) except -1:
    """Count the files that are still open."""
    return sum((<Known> known).is_open() for known in list(files.shared.values()))
