"""The tools that nvmeio is compared with. Missing ones are left out and reported."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comparisons import Sample, device_bytes

from nvmeio._cli.fio import Fio, fio_version

__all__ = ["Peers", "deepspeed_op", "fio", "huge_pages"]

HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


class Peers:
    """Which tools are installed, and why the others are left out.

    Attributes
    ----------
    left_out : list of str
        The missing ones, each with the reason.
    """

    def __init__(self) -> None:
        self.left_out: list[str] = []

    def leave_out(self, name: str, reason: str) -> None:
        """Report that a tool is left out."""
        self.left_out.append(f"{name} ({reason})")
        print(f"left out: {name} ({reason})", file=sys.stderr, flush=True)

    def module(self, name: str) -> Any:
        """Return a module; or return None and report it as missing."""
        try:
            return importlib.import_module(name)
        except ImportError as error:
            self.leave_out(name.partition(".")[0], f"pip install nvmeio[bench]: {error}")
            return None

    def has_fio(self) -> bool:
        """Return whether fio is installed; if not, report it as missing."""
        found = fio_version() != ""
        if not found:
            self.leave_out("fio", "on Debian and Ubuntu: apt-get install fio")
        return found


def deepspeed_op() -> Any:
    """Return DeepSpeed's op. Compiles it if necessary."""
    # If nvmeio replaced DeepSpeed's op, it would be compared with itself.
    os.environ.pop("NVMEIO_DEEPSPEED", None)
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import get_default_build_root

    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    for lock in Path(folder).glob("**/async_io/lock"):
        # torch would wait for the lock: for ever, if the process that held it was
        # killed.
        raise RuntimeError(f"its op is being compiled, or {lock.name} is left in {folder}")
    return AsyncIOBuilder().load(verbose=False)


@contextlib.contextmanager
def huge_pages(wanted: int) -> Iterator[bool]:
    """Reserve huge pages for fio inside the block. Yields whether that was possible."""

    def change(pages: int) -> int:
        before = int(HUGE_PAGES.read_text(encoding="ascii"))
        HUGE_PAGES.write_text(str(max(0, before + pages)), encoding="ascii")
        return int(HUGE_PAGES.read_text(encoding="ascii")) - before

    try:
        reserved = change(wanted)
    except OSError:
        yield False
        return
    try:
        yield reserved == wanted
    finally:
        # Subtract instead of restoring, because another benchmark may have changed
        # the number meanwhile.
        change(-reserved)


def fio(path: Path, size: int, rw: str, nbytes: int, depth: int, **more: Any) -> Sample:
    """Run fio, which reads or overwrites a file by io_uring, past the page cache."""
    device = device_bytes()
    job = Fio(path, size, "io_uring", direct=True, queue_depth=depth)
    done = job.run(rw, nbytes, lambda _: None, **more)
    return Sample(done.nbytes, done.seconds, done.cpu_seconds, device_bytes() - device)
