"""A file system in memory with faults, by FUSE: ``faultyfs.py MOUNTPOINT [KIND...]``.

Faults of a kind of file system are those of the mount.  A KIND is

``inodes``      each getattr gives a file another inode number
``flock=38``    flock(2) fails with this errno
``uncached``    the kernel remembers neither names nor attributes
``direct``      no file can be read that was opened with O_DIRECT, even without it later
``owner=65534`` all that is made belongs to this user, in a folder like /tmp

The attribute ``user.faults`` of any file in it sets the faults, as JSON: for each of
``read``, ``write``, ``fsync``, ``rename``, ``flush`` (each close(2), which returns its
error) and ``release`` (the last close(2) of an open file, which does not wait for it) a
dict of

``held``        wait until other faults are set, or half a minute; with ``at``, only calls
                that touch that byte
``delay_s``     wait for this time
``error``       fail with this errno; with ``at``, only calls that touch that byte
``full_at``     fail with ENOSPC if a file would grow beyond this many bytes
``short``       move at most this many bytes
``flip``        change the byte at this offset of the file
``times``       strike at most this often

With ``getattr``, ``links`` is the link count of each file, and ``error`` strikes only paths
that begin with ``under``: they cannot be looked up.  With ``open``, ``mode`` is the access
mode that fails, such as os.O_RDWR.  Names cannot be exchanged.

``user.fired`` counts how often each fault has struck, ``user.waiting`` the calls that wait.
``NAME.plain`` is the file NAME too, without faults.  The process ends at the end of its
standard input.
"""

import ctypes
import errno
import itertools
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections import Counter

import fuse

# A limit, because a process in a call that is held for ever cannot be killed.
HELD_S_MAX = 30

PLAIN = ".plain"


class Calls(ctypes.Structure):
    """struct fuse_operations with the calls behind those that fusepy knows."""

    FLOCK = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(fuse.fuse_file_info), ctypes.c_int
    )
    _fields_ = (
        *fuse.fuse_operations._fields_,
        *((name, ctypes.c_void_p) for name in ("poll", "write_buf", "read_buf")),
        ("flock", FLOCK),
    )


class Server(fuse.FUSE):
    """Passes on what fusepy drops: how a file is opened, and flock(2)."""

    def open(self, path, file):
        self.operations.opening(path.decode(), file.contents.flags)
        return super().open(path, file)

    def create(self, path, mode, file):
        self.operations.opening(path.decode(), file.contents.flags)
        return super().create(path, mode, file)

    def flock(self, path, file, operation):
        return self.operations("flock", path.decode())


class FaultyFS(fuse.Operations):
    """Files in memory."""

    def __init__(self, kinds):
        self.numbers = itertools.count(1000) if "inodes" in kinds else None
        if "flock" in kinds:
            self.flock = lambda path: self.refuse(int(kinds["flock"]))
        self.refuses_direct = "direct" in kinds
        self.owner = {"st_uid": int(kinds["owner"])} if "owner" in kinds else {}
        self.files = {}
        self.folders = {"/"}
        self.modes = {}
        self.faults = {}
        self.fired = Counter()
        self.waiting = 0
        self.changed = threading.Condition()

    def strike(self, call, path, offset=0, size=1):
        """Wait or raise as the faults say; return the other faults, for the caller.

        The path of an open file that was removed is None.
        """
        if path is None or path.endswith(PLAIN):
            return {}
        with self.changed:
            fault = self.faults.get(call, {})
            hit = offset <= fault.get("at", offset) < offset + size
            if fault.get("held") and hit:
                self.fired[f"{call}.held"] += 1
                self.waiting += 1
                self.changed.wait_for(
                    lambda: not self.faults.get(call, {}).get("held"), HELD_S_MAX
                )
                self.waiting -= 1
                fault = self.faults.get(call, {})
            if fault.get("times") == 0:
                return {}
            hit = offset <= fault.get("at", offset) < offset + size
            if "error" in fault and hit:
                self.count(call, "error")
                raise fuse.FuseOSError(fault["error"])
        if "delay_s" in fault:
            self.count(call, "delay_s")
            time.sleep(fault["delay_s"])
        return fault

    def count(self, call, kind):
        """Count a strike, which uses up one of the fault's ``times``."""
        self.fired[f"{call}.{kind}"] += 1
        fault = self.faults.get(call, {})
        if "times" in fault:
            fault["times"] -= 1

    def flip(self, call, fault, data, offset):
        """Return the bytes, one of them changed if a fault says so."""
        position = fault.get("flip", -1) - offset
        if not 0 <= position < len(data):
            return data
        self.count(call, "flip")
        return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]

    def shorten(self, call, fault, size):
        """Return how many bytes to move under a fault."""
        if size <= fault.get("short", size):
            return size
        self.count(call, "short")
        return fault["short"]

    def file(self, path):
        """Return the content of a file."""
        path = path.removesuffix(PLAIN)
        if path not in self.files:
            raise fuse.FuseOSError(errno.ENOENT)
        return self.files[path]

    def getattr(self, path, fh=None):
        if path.startswith(self.faults.get("getattr", {}).get("under", "//")):
            self.strike("getattr", path)
        if path in self.folders:
            number = {"st_ino": next(self.numbers)} if self.numbers else {}
            if self.owner and path == "/":
                return {"st_mode": stat.S_IFDIR | 0o1777, "st_nlink": 2, "st_uid": 1}
            found = {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            return found | number | self.owner
        size = len(self.file(path))
        mode = stat.S_IFREG | self.modes[path.removesuffix(PLAIN)]
        links = self.faults.get("getattr", {}).get("links", 1)
        found = {"st_mode": mode, "st_nlink": links, "st_size": size} | self.owner
        return found | ({"st_ino": next(self.numbers)} if self.numbers else {})

    def refuse(self, code):
        raise fuse.FuseOSError(code)

    def opening(self, path, flags):
        """Refuse an access mode, if a fault says so."""
        if flags & os.O_ACCMODE == self.faults.get("open", {}).get("mode"):
            self.strike("open", path)

    def open(self, path, flags):
        return int(self.refuses_direct and flags & os.O_DIRECT > 0)

    def create(self, path, mode, fi=None):
        path = path.removesuffix(PLAIN)
        self.files[path] = bytearray()
        self.modes[path] = stat.S_IMODE(mode)
        return 0

    def chmod(self, path, mode):
        self.modes[path] = stat.S_IMODE(mode)
        return 0

    def link(self, target, source):
        # FAT has no hard links either.
        raise fuse.FuseOSError(errno.EPERM)

    def rename(self, old, new):
        self.strike("rename", old)
        if old in self.folders:
            self.folders = {self.renamed(each, old, new) for each in self.folders}
        for table in (self.files, self.modes):
            for each in [*table]:
                table[self.renamed(each, old, new)] = table.pop(each)

    def renamed(self, path, old, new):
        """Return the new path of what is renamed or in it, and others unchanged."""
        return new + path[len(old) :] if f"{path}/".startswith(f"{old}/") else path

    def read(self, path, size, offset, fh):
        if fh:
            raise fuse.FuseOSError(errno.EINVAL)
        fault = self.strike("read", path, offset, size)
        size = self.shorten("read", fault, size)
        data = bytes(self.file(path)[offset : offset + size])
        return self.flip("read", fault, data, offset)

    def write(self, path, data, offset, fh):
        fault = self.strike("write", path, offset, len(data))
        size = self.shorten("write", fault, len(data))
        room = fault.get("full_at", offset + size) - offset
        if room < size:
            self.count("write", "full_at")
            if room <= 0:
                raise fuse.FuseOSError(errno.ENOSPC)
            size = room
        content = self.file(path)
        with self.changed:
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + size] = self.flip("write", fault, data[:size], offset)
        return size

    def truncate(self, path, length, fh=None):
        content = self.file(path)
        with self.changed:
            del content[length:]
            content.extend(bytes(length - len(content)))

    def fsync(self, path, datasync, fh):
        self.strike("fsync", path)
        return 0

    def flush(self, path, fh):
        self.strike("flush", path)
        return 0

    def release(self, path, fh):
        self.strike("release", path)
        return 0

    def unlink(self, path):
        del self.files[path]

    def mkdir(self, path, mode):
        self.folders.add(path)

    def rmdir(self, path):
        self.folders.remove(path)

    def readdir(self, path, fh):
        inside = [
            os.path.basename(name)
            for name in {*self.files, *self.folders} - {"/"}
            if os.path.dirname(name) == path
        ]
        return [".", "..", *inside]

    def setxattr(self, path, name, value, options, position=0):
        if name != "user.faults":
            raise fuse.FuseOSError(errno.ENOTSUP)
        with self.changed:
            self.faults = json.loads(value)
            if self.faults:
                self.fired.clear()
            self.changed.notify_all()
        return 0

    def getxattr(self, path, name, position=0):
        if name == "user.fired":
            return json.dumps(self.fired).encode()
        if name == "user.waiting":
            return str(self.waiting).encode()
        raise fuse.FuseOSError(errno.ENODATA)


def unmount_lazily(mountpoint):
    """Unmount a FUSE file system, even if it is in use or its server is dead."""
    command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount", "-u", "-z"]
    subprocess.run([*command, mountpoint], check=False)


def end_with_input(mountpoint):
    """Unmount when the process that started this one has ended."""
    sys.stdin.read()
    unmount_lazily(mountpoint)
    os._exit(0)


def main(mountpoint, *kinds):
    """Serve until standard input ends."""
    kinds = dict(kind.partition("=")[::2] for kind in kinds)
    threading.Thread(target=end_with_input, args=[mountpoint], daemon=True).start()
    fuse.fuse_operations = Calls
    # hard_remove: remove open files at once, without renaming them first.
    options = {"use_ino": True, "attr_timeout": 0} if "inodes" in kinds else {}
    if "uncached" in kinds:
        options = {"entry_timeout": 0, "attr_timeout": 0}
    Server(
        FaultyFS(kinds),
        mountpoint,
        foreground=True,
        direct_io=True,
        hard_remove=True,
        fsname="nvmeio-faultyfs",
        **options,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
