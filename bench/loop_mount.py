"""ext4 on a loop device over tmpfs: a disk so fast that the software's cost shows."""

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

# On tmpfs. The number is the id of the process that made it.
FOLDER_NAME = re.compile(r"nvmeio-bench-loop-(\d+)-\w+")
SHARED_MEMORY = Path("/dev/shm")


def remove_leftovers() -> None:
    """Unmount and remove the leftovers of killed benchmarks."""
    for folder in SHARED_MEMORY.glob("nvmeio-bench-loop-*"):
        found = FOLDER_NAME.fullmatch(folder.name)
        if found and not Path("/proc", found[1]).exists():
            unmount = ["umount", "--lazy", folder / "mount"]
            subprocess.run(unmount, stderr=subprocess.DEVNULL)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def loop_mount(size: int) -> Iterator[Path]:
    """Mount ext4 on a loop device over tmpfs, which needs root.

    Unmounting also removes the device, and frees its memory.
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
            # The device is detached now, or as soon as it is no longer mounted.
            output("losetup", "--detach", device)
        try:
            yield mount
        finally:
            # A lazy unmount, because files may still be open.
            output("umount", "--lazy", str(mount))


def try_loop_mount(stack: contextlib.ExitStack, size: int, peers: Peers) -> Path | None:
    """Mount as `loop_mount` does, until the stack unwinds. Return None if that fails."""
    reason = "it needs root"
    if os.geteuid() == 0:
        try:
            return stack.enter_context(loop_mount(size))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = str(error)
    peers.leave_out("a loop device over tmpfs", reason)
    return None
