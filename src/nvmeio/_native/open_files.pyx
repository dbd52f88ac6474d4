"""Open the files that requests name by path, once for all requests in flight.

Each request checks that the path still leads to the file that is open: the file may have
been replaced meanwhile.
"""

import errno
import os
import weakref

cimport cython
from posix.fcntl cimport O_CREAT, O_RDONLY, O_WRONLY

from nvmeio cimport libnvmeio
from nvmeio.libnvmeio cimport nvmeio_direct, nvmeio_file
from nvmeio._native.arguments cimport path_or_descriptor
from nvmeio._native.file cimport File, open_descriptor, open_page_cache, open_path
from nvmeio._native.workers cimport Workers


@cython.final
cdef class OpenFiles:
    """The files that a handle has opened for requests that name a path or descriptor."""

    cdef File find(self, object file, bint writing, bint ragged):
        cdef File found = self.find_open(file, writing)
        while ragged and not found.page_cache_open:
            try:
                open_page_cache(found)
            except OSError as error:
                # The request may not need it; if it does, the library reports the error.
                if not await_descriptors(self, error):
                    break
        return found

    cdef File find_open(self, object file, bint writing):
        if isinstance(file, File):
            return file
        path = path_or_descriptor(file)
        if self.generation != libnvmeio.fork_generation():
            self.generation = libnvmeio.fork_generation()
            self.shared = {}
        # A descriptor gets a File of its own, listed so that release_some() counts it.
        key = object() if isinstance(path, int) else (path, writing)
        known = self.shared.get(key)
        cdef File shared = None if known is None else known()
        if shared is None or not is_at(shared, path):
            shared = open_patiently(self, path, writing)
            self.keep(key, shared)
        return shared

    cdef int keep(self, object key, File file) except -1:
        """Remember a file as long as a request holds it; drop dead entries now and then."""
        if len(self.shared) >= self.forget_at:
            for other, known in list(self.shared.items()):
                if known() is None:
                    self.shared.pop(other, None)
            self.forget_at = 2 * len(self.shared) + 64
        self.shared[key] = weakref.ref(file)
        return 0


cdef OpenFiles new_open_files(Workers workers, nvmeio_direct direct):
    cdef OpenFiles files = OpenFiles.__new__(OpenFiles)
    files.workers = workers
    files.direct = direct
    files.shared = {}
    files.generation = libnvmeio.fork_generation()
    return files


cdef bint is_at(File file, object path) except -1:
    """Return whether a path still leads to this open file."""
    name = os.fsencode(path)
    cdef const char *c_name = name
    cdef nvmeio_file *c = file.retain()
    cdef int result
    with nogil:
        result = libnvmeio.file_is_at(c, c_name)
        libnvmeio.file_release(c)
    return result == 1


cdef File open_patiently(OpenFiles files, object file, bint writing):
    """Open a path or descriptor; if descriptors run out, wait for completions and retry."""
    while True:
        try:
            if isinstance(file, int):
                return open_descriptor(file, files.direct)
            flags = O_WRONLY | O_CREAT if writing else O_RDONLY
            return open_path(file, flags, "wb" if writing else "rb", files.direct)
        except OSError as error:
            if not await_descriptors(files, error):
                raise


cdef bint await_descriptors(OpenFiles files, object error) except -1:
    """If descriptors ran out, wait until one may be free; return False otherwise."""
    return error.errno in (errno.EMFILE, errno.ENFILE) and release_some(files)


cdef bint release_some(OpenFiles files) except -1:
    """Wait until a file is closed; return False if nothing in flight holds one."""
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
    return sum(known() is not None for known in list(files.shared.values()))
