"""Report what was built, which engines work here, and the resources of this process."""

from nvmeio._libnvmeio cimport c_base, c_system
from nvmeio._libnvmeio.c_base cimport nvmeio_engine_info

from nvmeio._native.copy import has_threads

from nvmeio._config.build import build_record


def engines() -> dict:
    """Try every engine in this process.

    Returns
    -------
    dict of str to dict
        For each engine, in order of preference, a dict with

        ``built`` : bool
            Whether it was compiled in.
        ``works`` : bool
            Whether this process can use it.
        ``errno`` : int
            The error of the attempt; 0 if it works.
        ``reason`` : str
            Why it does not work and what would help; "" if it works.

    Examples
    --------
    >>> nvmeio.engines()["sync"]["works"]
    True
    """
    cdef nvmeio_engine_info info
    found = {}
    for index in range(c_base.engine_count()):
        with nogil:
            c_base.engine_probe(index, &info)
        found[info.name.decode()] = {
            "built": bool(info.built),
            "works": info.error == 0,
            "errno": -info.error,
            "reason": info.reason.decode(),
        }
    return found


def version() -> str:
    """Return the version of the C library, which is that of the package."""
    return c_base.version().decode()


def build_info() -> dict:
    """Return how this installation of nvmeio was built, and which engines work.

    Returns
    -------
    dict
        ``version``; ``engines``, as ``engines()`` returns them; and what setup.py recorded:
        ``compiler``, ``cython``, ``flags``, ``link_flags``, ``ldflags``, ``debug``,
        ``features`` (for each optional library whether it was built in, and why not) and
        ``test_build`` (whether tests can inject faults).  A wheel has the feature
        ``openmp`` if this process or system has a libgomp.

    Examples
    --------
    >>> sorted(nvmeio.build_info()["engines"])
    ['io_uring', 'libaio', 'sync', 'threads']
    """
    record = build_record()
    openmp = record["features"]["openmp"]
    if openmp["built"] and not has_threads():
        openmp["built"] = False
        openmp["reason"] = (
            "libgomp.so.1 was not found: install libgomp1 (Debian, Ubuntu) or libgomp "
            "(Fedora)"
        )
    return {**record, "engines": engines()}


def resources() -> dict[str, int]:
    """Return the processors and the memory that this process may use.

    ``processors`` is limited by the affinity of this thread and the CPU quota of its
    control group; ``memory_bytes`` is the machine's memory or the control group's limit,
    whichever is less.
    """
    return {"processors": c_system.cpu_count(), "memory_bytes": c_system.memory_bytes()}
