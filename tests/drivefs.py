"""A drive that logs its writes, by FUSE: ``drivefs.py MOUNTPOINT LOG NAME SIZE``.

Its only file NAME holds SIZE bytes in memory.  Each write to it and each fsync is appended
to LOG in order of arrival, in the format of ``drivelog.py``; a loop device turns a flush
into an fsync.  The attribute ``user.entries`` is the number of entries.  The process ends
at the end of its standard input.
"""

import errno
import os
import stat
import sys
import threading

import fuse

from drivelog import FLUSH, HEADER
from faultyfs import end_with_input


class DriveFS(fuse.Operations):
    """One file, and the log of it."""

    def __init__(self, log, name, size):
        self.path = f"/{name}"
        self.content = bytearray(size)
        self.log = open(log, "ab", buffering=0)  # noqa: SIM115
        self.entries = 0

    def note(self, *parts):
        """Append an entry to the log."""
        entry = b"".join(parts)
        if self.log.write(entry) != len(entry):
            os._exit(1)
        self.entries += 1

    def getattr(self, path, fh=None):
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path != self.path:
            raise fuse.FuseOSError(errno.ENOENT)
        size = len(self.content)
        return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": size}

    def read(self, path, size, offset, fh):
        return bytes(self.content[offset : offset + size])

    def write(self, path, data, offset, fh):
        self.content[offset : offset + len(data)] = data
        self.note(HEADER.pack(offset, len(data)), data)
        return len(data)

    def fsync(self, path, datasync, fh):
        self.note(FLUSH)
        return 0

    def getxattr(self, path, name, position=0):
        if name == "user.entries":
            return str(self.entries).encode()
        raise fuse.FuseOSError(errno.ENODATA)


def main(mountpoint, log, name, size):
    """Serve until standard input ends."""
    threading.Thread(target=end_with_input, args=[mountpoint], daemon=True).start()
    # One thread, so that the log is in order of arrival.
    fuse.FUSE(
        DriveFS(log, name, int(size)),
        mountpoint,
        foreground=True,
        nothreads=True,
        direct_io=True,
        big_writes=True,
        max_write=128 << 10,
        fsname="nvmeio-drivefs",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
