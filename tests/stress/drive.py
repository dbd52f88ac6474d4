"""A drive whose power is cut, and what it may hold afterwards.

Writes reach it through a loop device; ``drivefs.py`` logs them.  Everything before the last
flush is kept.  Any page written after it may be lost, in any order, as from the cache of a
real drive.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from children import run_tool
from drivelog import read_log
from fuse_mounts import fuse_server
from mounts import SIZES_MIN, image_name, mount_new, set_up, take_down

# The unit that a drive writes wholly or not at all.
PAGE = 4096
# The pieces in which images are copied.
CHUNK = 256 << 10


@dataclass
class Drive:
    """A file system mounted at `folder`, and the drive below it."""

    kind: str
    folder: Path
    image: Path
    log: Path

    def entries(self):
        """Return the number of entries in the log."""
        return int(os.getxattr(self.image, "user.entries"))


@contextlib.contextmanager
def mounted_drive(kind, folder):
    """Make a drive with a file system; everything but the log is taken down at the end."""
    served, log, name = folder / "drive", folder / "log", image_name("drive")
    served.mkdir()
    script = Path(__file__).parents[1] / "drivefs.py"
    with fuse_server(script, served, log, name, SIZES_MIN[kind]):
        device = set_up(served / name)
        try:
            mount_new(kind, device, folder / "mounted")
            yield Drive(kind, folder / "mounted", served / name, log)
        finally:
            take_down(device)


class PowerCuts:
    """Makes images of a drive as left by power cuts, each later than the one before."""

    def __init__(self, drive):
        self.kind = drive.kind
        self.entries = read_log(drive.log)
        self.safe = np.zeros(SIZES_MIN[drive.kind], np.uint8)
        self.applied = 0
        self.chunks = set()

    def flushes_after(self, start):
        """Return the entries of flushes that had something to flush."""
        moments = range(max(1, start), len(self.entries))
        return [i for i in moments if not self.entries[i] and self.entries[i - 1]]

    def cut(self, entries, kept_share, rng, image):
        """Write the image as left by a cut after a number of entries; count lost pages.

        About `kept_share` of the cache is kept.
        """
        flushes = (i for i in range(entries, self.applied, -1) if not self.entries[i - 1])
        flushed = next(flushes, self.applied)
        for entry in filter(None, self.entries[self.applied : flushed]):
            self._keep(*entry)
        self.applied = flushed
        lost = 0
        with open(image, "wb") as file:
            file.truncate(len(self.safe))
            for chunk in self.chunks:
                part = self.safe[chunk * CHUNK : (chunk + 1) * CHUNK]
                if part.any():
                    os.pwrite(file.fileno(), part, chunk * CHUNK)
            for offset, data in filter(None, self.entries[flushed:entries]):
                for at in range(0, len(data), PAGE):
                    if rng.random() < kept_share:
                        os.pwrite(file.fileno(), data[at : at + PAGE], offset + at)
                    else:
                        lost += 1
        return lost

    def _keep(self, offset, data):
        self.safe[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self.chunks.update(range(offset // CHUNK, (offset + len(data) - 1) // CHUNK + 1))


@contextlib.contextmanager
def mounted_image(kind, image, folder):
    """Mount an image for reading; the file system repairs it from its journal."""
    device = set_up(image)
    try:
        run_tool("mount", "-t", kind, "-o", "ro", device, folder)
        yield
    finally:
        take_down(device)
