"""What was built, what works here and why the rest does not, and what may be used."""

from nvmeio cimport libnvmeio
from nvmeio.libnvmeio cimport nvmeio_engine_info

from nvmeio._config.build import build_record


def engines() -> dict:
    """Try every engine here and now.

    Returns
    -------
    dict
        For each engine by name, in order of preference, a dict: ``built``, whether it was
        compiled in; ``works``, whether it can be used in this process; ``errno``, of the
        attempt, 0 where it works; ``reason``, why it does not and what would help, or "".

    Examples
    --------
    >>> nvmeio.engines()["sync"]["works"]
    True
    """
    cdef nvmeio_engine_info info
    found = {}
    for index in range(libnvmeio.engine_count()):
        with nogil:
            libnvmeio.engine_probe(index, &info)
        found[info.name.decode()] = {
            "built": bool(info.built),
            "works": info.error == 0,
            "errno": -info.error,
            "reason": info.reason.decode(),
        }
    return found


def version() -> str:
    """Return the version of the library, which is the package's."""
    return libnvmeio.version().decode()


def build_info() -> dict:
    """Tell what this installation of nvmeio consists of.

    Returns
    -------
    dict
        ``version``; what setup.py recorded (``compiler``, ``cython``, ``flags``,
        ``link_flags``, ``ldflags``, ``features``: for each optional library whether it was
        built in and why not, ``debug``, ``test_build``: whether faults can be made in it);
        and ``engines`` as ``engines()`` gives them.

    Examples
    --------
    >>> sorted(nvmeio.build_info()["engines"])
    ['io_uring', 'libaio', 'sync', 'threads']
    """
    return {**build_record(), "engines": engines()}


def resources() -> dict[str, int]:
    """Tell how much of the machine this process may use.

    ``processors`` are what the affinity of this thread and the quota of its control group
    leave; ``memory_bytes`` is the machine's or the control group's, whichever is less.
    """
    return {"processors": libnvmeio.cpu_count(), "memory_bytes": libnvmeio.memory_bytes()}
