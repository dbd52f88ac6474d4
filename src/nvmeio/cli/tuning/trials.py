"""What ``nvmeio tune`` measures: one tensor, read and written with given settings."""

import contextlib
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio.cli.measuring.buffers import Buffers
from nvmeio.cli.measuring.ground import forget_cached
from nvmeio.cli.tuning.candidates import DEFAULT, Options
from nvmeio.file import File
from nvmeio.handle import aio_handle

__all__ = ["Trials", "small_pages"]

# Long enough that to begin and to end does not matter, short enough for many.
TRIAL_SECONDS = 0.05
TRIAL_BYTES_MIN = 32 << 20
PAGE_BYTES = 4096

Array = npt.NDArray[np.uint8]


def small_pages(nbytes: int) -> Array:
    """Make a buffer whose pages of 4 KiB lie anywhere, as in a process that runs for long.

    Parameters
    ----------
    nbytes : int
        How large, in whole pages.

    Returns
    -------
    numpy.ndarray
        Of bytes, touched.
    """
    mapped = mmap.mmap(-1, nbytes)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    pages = memory.reshape(-1, PAGE_BYTES)
    pages[np.random.default_rng().permutation(len(pages)), 0] = 1
    return memory


class Trials:
    """A file on the disk, and a buffer that is moved.

    Parameters
    ----------
    folder : Path
        Where the file is made; somebody else takes it away.
    size : int
        Of the file, in bytes; whole MiB.
    engine : str
        What stands for "auto", whatever the environment makes of that.
    """

    def __init__(self, folder: Path, size: int, engine: str) -> None:
        self._size, self._engine = size, engine
        self._handles: dict[str, aio_handle] = {}
        self._path = folder / "file"
        self._offset = 0
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(File(self._path, "w"))
            stack.callback(self.rest)
            self.direct: bool = self._file.direct
            self._fill()
            # In huge pages, as swapped tensors have it.
            make = Buffers("pool").make
            self._memory: Array = make(min(size, TRIAL_BYTES_MIN))
            slower = min(self.measure(DEFAULT).values())
            nbytes = max(TRIAL_BYTES_MIN, int(slower * TRIAL_SECONDS))
            self.nbytes = min(size, nbytes - nbytes % (1 << 20))
            self.use(make)
            self._stack = stack.pop_all()

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def use(self, make: Callable[[int], Array]) -> None:
        """Move another kind of memory from now on.

        Parameters
        ----------
        make : callable
            Makes it, of so many bytes.
        """
        self._memory = make(self.nbytes)

    def measure(self, options: Options) -> dict[str, float]:
        """Read and write once.

        Parameters
        ----------
        options : dict
            Of a handle, which is kept for the next time.

        Returns
        -------
        dict
            For "read" and "write" the bytes a second.
        """
        key = repr(options)
        if key not in self._handles:
            self._handles[key] = self._made(options)
        handle = self._handles[key]
        nbytes = len(self._memory)
        # All of the file in turn, each piece read before it is written: what the device has
        # just had in its hands is no measure.
        offset = self._offset if self._offset + nbytes <= self._size else 0
        self._offset = offset + nbytes
        speeds = {}
        for op in ("read", "write"):
            submit = handle.submit_write if op == "write" else handle.submit_read
            if not self.direct:
                forget_cached(self._path)
            begin = time.perf_counter()
            submit(self._memory, self._file, offset).wait()
            speeds[op] = nbytes / (time.perf_counter() - begin)
        return speeds

    def rest(self) -> None:
        """Close the handles of what was measured."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def _made(self, options: Options) -> aio_handle:
        """Make a handle of options that are complete, so that no others have a say."""
        engine = options["engine"]
        return aio_handle(
            **{**options, "engine": self._engine if engine == "auto" else engine}
        )

    def _fill(self) -> None:
        """Write all of the file, of bytes that no device can make smaller."""
        piece = np.frombuffer(np.random.default_rng().bytes(TRIAL_BYTES_MIN), np.uint8)
        with self._made(DEFAULT) as handle:
            for offset in range(0, self._size, len(piece)):
                part: Any = piece[: self._size - offset]
                handle.submit_write(part, self._file, offset).wait()
            handle.fsync(self._file)
