"""ext4 on a loop device over tmpfs: a disk so fast that software shows."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from machine import output
from peers import Peers

__all__ = ["loop_mount", "try_loop_mount"]

# On tmpfs; the number is the process that made it.
FOLDER_NAME = re.compile(r"nvmeio-bench-loop-(\d+)-\w+")
SHARED_MEMORY = Path("/dev/shm")


def remove_leftovers() -> None:
    """Unmount and remove what killed benchmarks have left."""
    for folder in SHARED_MEMORY.glob("nvmeio-bench-loop-*"):
        found = FOLDER_NAME.fullmatch(folder.name)
        if found and not Path("/proc", found[1]).exists():
            unmount = ["umount", "--lazy", folder / "mount"]
            subprocess.run(unmount, stderr=subprocess.DEVNULL)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def loop_mount(size: int) -> Iterator[Path]:
    """Mount ext4 on a loop device over tmpfs; takes root.

    The device goes away with the mount, and its memory with the device.
    """
    remove_leftovers()
    prefix = f"nvmeio-bench-loop-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=SHARED_MEMORY) as inside:
        image, mount = Path(inside, "image"), Path(inside, "mount")
        mount.mkdir()
        with open(image, "wb") as file:
            file.truncate(size)
        device = output("losetup", "--find", "--show", "--direct-io=on", image).strip()
        try:
            image.unlink()
            output("mkfs.ext4", "-q", "-m", "0", device)
            output("mount", device, mount)
        finally:
            # Detached now, or when it is no longer mounted.
            output("losetup", "--detach", device)
        try:
            yield mount
        finally:
            # Files that are still open keep the mount until they are closed.
            output("umount", "--lazy", str(mount))


def try_loop_mount(stack: contextlib.ExitStack, size: int, peers: Peers) -> Path | None:
    """Mount as `loop_mount` does, until the stack unwinds. None if that is impossible."""
    reason = "it takes root"
    if os.geteuid() == 0:
        try:
            return stack.enter_context(loop_mount(size))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = str(error)
    peers.leave_out("a loop device over tmpfs", reason)
    return None
