"""The peers that nvmeio is compared with: optional, and told of where they are missing."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duels import Sample, device_bytes

__all__ = ["Peers", "deepspeed_op", "fio", "huge_pages"]

HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


class Peers:
    """Which peers are here, and why the others are left out.

    Attributes
    ----------
    left_out : list of str
        The others, each with the reason.
    """

    def __init__(self) -> None:
        self.left_out: list[str] = []

    def leave_out(self, name: str, reason: str) -> None:
        """Tell that there is no comparison with a peer."""
        self.left_out.append(f"{name} ({reason})")
        print(f"left out: {name} ({reason})", file=sys.stderr, flush=True)

    def module(self, name: str) -> Any:
        """Return a module, or None and tell of it."""
        try:
            return importlib.import_module(name)
        except ImportError as error:
            self.leave_out(name.partition(".")[0], f"pip install nvmeio[bench]: {error}")
            return None

    def has_fio(self) -> bool:
        """Return whether fio is here, or tell of it."""
        found = shutil.which("fio") is not None
        if not found:
            self.leave_out("fio", "on Debian and Ubuntu: apt-get install fio")
        return found


def deepspeed_op() -> Any:
    """Return DeepSpeed's op; it is compiled if it never was.

    Raises
    ------
    ImportError, RuntimeError, AttributeError
        DeepSpeed is not here, or its op does not build or does not load.
    """
    # Who has nvmeio in DeepSpeed's place would see it beside itself.
    os.environ.pop("NVMEIO_DEEPSPEED", None)
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import get_default_build_root

    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    for lock in Path(folder).glob("**/async_io/lock"):
        # torch would wait for it, and for ever where its process was killed.
        raise RuntimeError(f"its op is being compiled, or {lock.name} is left in {folder}")
    return AsyncIOBuilder().load(verbose=False)


@contextlib.contextmanager
def huge_pages(wanted: int) -> Iterator[bool]:
    """Reserve huge pages for fio while inside; gives whether that was possible."""

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
        # Not back to what it was: another benchmark may have come or gone meanwhile.
        change(-reserved)


def fio(
    path: Path, size: int, kind: str, options: tuple[str, ...], has_huge_pages: bool
) -> Sample:
    """Let fio read or overwrite a file, past the page cache.

    Parameters
    ----------
    path : Path
        The file.
    size : int
        Its size in bytes.
    kind : {"read", "write", "randread"}
        As fio has it.
    options : tuple of str
        Block size and depth, and what else there is to say.
    has_huge_pages : bool
        Whether there are some for its buffers.

    Returns
    -------
    Sample
        Time and CPU time as fio gives them for its job, without its start and its other
        threads.  The kernel adds the device bytes of a child to those of the process that
        reaps it, so ours say what fio's reads fetched.
    """
    command = [
        "fio",
        "--name=bench",
        f"--filename={path}",
        f"--size={size}",
        f"--rw={kind}",
        "--ioengine=io_uring",
        "--direct=1",
        "--allow_file_create=0",
        "--output-format=json",
        *options,
    ]
    if has_huge_pages:
        command += ["--iomem=mmaphuge", "--hugepage-size=2m"]
    device = device_bytes()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    moved = job[kind.removeprefix("rand")]
    seconds = moved["runtime"] / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Sample(moved["io_bytes"], seconds, cpu, device_bytes() - device)
