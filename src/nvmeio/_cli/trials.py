"""The trials of ``nvmeio tune``: read and write one tensor with given settings."""

import contextlib
import mmap
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvmeio._arguments.units import in_binary
from nvmeio._cli.measuring import forget_cached
from nvmeio._config.constants import DEFAULTS, TUNABLE
from nvmeio._native.file import File
from nvmeio._native.handle import Handle
from nvmeio.memory import empty

# Arguments for Handle(**options).
Options = dict[str, Any]

DEFAULT: Options = {name: DEFAULTS[name] for name in TUNABLE}

GRID_BLOCKS = (128 << 10, 512 << 10, 1 << 20, 4 << 20)
GRID_DEPTHS = (8, 32, 128)

# Long enough that start and end do not matter, and short enough for many trials.
TRIAL_SECONDS = 0.05
TRIAL_BYTES_MIN = 32 << 20
PAGE_BYTES = 4096

Array = npt.NDArray[np.uint8]


def described(options: Options) -> str:
    """Describe settings, without defaults, such as "1 MiB x 32, workers 2"."""
    words = f"{in_binary(options['block_size'])} x {options['queue_depth']}"
    for name in ("workers", "engine", "bounce"):
        if options[name] != DEFAULT[name]:
            words += f", {name} {options[name]}"
    return words


def small_pages(nbytes: int) -> Array:
    """Allocate a buffer in scattered 4 KiB pages, as in a long-running process."""
    mapped = mmap.mmap(-1, nbytes)
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    pages = memory.reshape(-1, PAGE_BYTES)
    pages[np.random.default_rng().permutation(len(pages)), 0] = 1
    return memory


class Trials:
    """A file on the drive, and a buffer to transfer.

    `size` is a multiple of 1 MiB.  `engine` replaces "auto", so that the environment has no
    influence.
    """

    def __init__(self, folder: Path, size: int, engine: str) -> None:
        self._size, self._engine = size, engine
        self._handles: dict[str, Handle] = {}
        self._path = folder / "file"
        self._offset = 0
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(File(self._path, "w"))
            stack.callback(self.close_handles)
            self.direct: bool = self._file.direct
            self._fill()
            # In huge pages, like the memory of tensors that DeepSpeed swaps.
            self.memory: Array = empty(min(size, TRIAL_BYTES_MIN), np.uint8)
            slower = min(self.measure(DEFAULT).values())
            nbytes = max(TRIAL_BYTES_MIN, int(slower * TRIAL_SECONDS))
            self.memory = empty(min(size, nbytes - nbytes % (1 << 20)), np.uint8)
            self._stack = stack.pop_all()

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def measure(self, options: Options) -> dict[str, float]:
        """Read and write once; return the bytes per second of each."""
        key = repr(options)
        if key not in self._handles:
            self._handles[key] = self._made(options)
        nbytes = len(self.memory)
        # Go through the whole file, and read each piece before writing it: otherwise the
        # device's cache would have it.
        offset = self._offset if self._offset + nbytes <= self._size else 0
        self._offset = offset + nbytes
        speeds = {}
        for op in ("read", "write"):
            move = getattr(self._handles[key], op)
            if not self.direct:
                forget_cached(self._path)
            begin = time.perf_counter()
            move(self.memory, self._file, offset)
            speeds[op] = nbytes / (time.perf_counter() - begin)
        return speeds

    def close_handles(self) -> None:
        """Close the handles of the trials."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def _made(self, options: Options) -> Handle:
        """Make a handle with all options given, so that the environment has no effect."""
        engine = options["engine"]
        return Handle(**{**options, "engine": self._engine if engine == "auto" else engine})

    def _fill(self) -> None:
        """Fill the file with random bytes, which no device can compress."""
        piece = np.frombuffer(np.random.default_rng().bytes(TRIAL_BYTES_MIN), np.uint8)
        with self._made(DEFAULT) as handle:
            for offset in range(0, self._size, len(piece)):
                part: Any = piece[: self._size - offset]
                handle.write(part, self._file, offset)
            handle.fsync(self._file)
