"""Which errnos each system call may return, and what must follow.

Sources: section 2 of the Linux manual pages; the kernel's sources for io_uring.
"""

import dataclasses
import errno
import random

ERRNOS = {
    "clone": "EAGAIN ENOMEM ENOSPC EPERM",
    "clone3": "EAGAIN ENOMEM ENOSPC EPERM",
    "close": "EBADF EDQUOT EINTR EIO ENOSPC",
    "eventfd2": "EINVAL EMFILE ENFILE ENODEV ENOMEM",
    "fchmod": "EBADF EIO ENOTDIR EPERM EROFS",
    "fdatasync": "EBADF EDQUOT EINTR EINVAL EIO ENOSPC EROFS",
    "fcntl": "EACCES EAGAIN EBADF EBUSY EDEADLK EFAULT EINTR EINVAL EMFILE ENOLCK EPERM",
    "fstatfs": "EBADF EFAULT EINTR EIO ENOMEM ENOSYS EOVERFLOW",
    "fsync": "EBADF EDQUOT EINTR EINVAL EIO ENOSPC EROFS",
    "ftruncate": "EACCES EBADF EFBIG EINTR EINVAL EIO EPERM EROFS ETXTBSY",
    "io_destroy": "EFAULT EINVAL ENOSYS",
    "io_getevents": "EFAULT EINTR EINVAL ENOSYS",
    "io_setup": "EAGAIN EFAULT EINVAL ENOMEM ENOSYS EPERM",
    "io_submit": "EAGAIN EBADF EFAULT EINVAL ENOSYS",
    "io_uring_enter": "EAGAIN EBADF EBADFD EBADR EBUSY EEXIST EFAULT EINTR EINVAL EIO "
    "ENOMEM ENXIO EOPNOTSUPP ETIME",
    "io_uring_register": "EACCES EBADF EBADFD EBUSY EEXIST EFAULT EINVAL EMFILE ENOMEM "
    "ENXIO EOPNOTSUPP EOVERFLOW EPERM",
    "io_uring_setup": "EFAULT EINVAL EMFILE ENFILE ENOMEM ENOSYS EPERM",
    "ioctl": "EBADF EFAULT EINVAL ENOMEM ENOTTY EPERM",
    "lseek": "EBADF EINVAL ENXIO EOVERFLOW ESPIPE",
    "madvise": "EACCES EAGAIN EBADF EINVAL EIO ENOMEM EPERM",
    "mmap": "EACCES EAGAIN EBADF EEXIST EINVAL ENFILE ENODEV ENOMEM EOVERFLOW EPERM "
    "ETXTBSY",
    "mprotect": "EACCES EINVAL ENOMEM",
    "mremap": "EAGAIN EFAULT EINVAL ENOMEM",
    "munmap": "EINVAL ENOMEM",
    "newfstatat": "EACCES EBADF EFAULT EINVAL ELOOP ENAMETOOLONG ENOENT ENOMEM ENOTDIR "
    "EOVERFLOW",
    "openat": "EACCES EAGAIN EBADF EBUSY EDQUOT EEXIST EFAULT EFBIG EINTR EINVAL EIO "
    "EISDIR ELOOP EMFILE ENAMETOOLONG ENFILE ENODEV ENOENT ENOMEM ENOSPC "
    "ENOTDIR ENXIO EOPNOTSUPP EOVERFLOW EPERM EROFS ETXTBSY",
    "ppoll": "EFAULT EINTR EINVAL ENOMEM",
    "pread64": "EAGAIN EBADF EFAULT EINTR EINVAL EIO EISDIR ENXIO EOVERFLOW ESPIPE",
    "prlimit64": "EFAULT EINVAL EPERM ESRCH",
    "pwrite64": "EAGAIN EBADF EDQUOT EFAULT EFBIG EINTR EINVAL EIO ENOSPC ENXIO EOVERFLOW "
    "EPERM EPIPE ESPIPE",
    "read": "EAGAIN EBADF EFAULT EINTR EINVAL EIO EISDIR",
    "rt_sigaction": "EFAULT EINVAL",
    "rt_sigprocmask": "EFAULT EINVAL",
    "sched_getaffinity": "EFAULT EINVAL ESRCH",
    "set_robust_list": "EINVAL",
    "statx": "EACCES EBADF EFAULT EINVAL ELOOP ENAMETOOLONG ENOENT ENOMEM ENOSYS ENOTDIR",
    "sysinfo": "EFAULT",
    # Only eventfds are written to: EAGAIN would mean that a wake-up is pending already.
    "write": "EINTR",
}

LEFT_OUT = {
    "brk": "returns the end of the heap; glibc would take an errno for an address",
    "exit": "never returns",
    "exit_group": "never returns",
    "cachestat": "is only a hint; its failure has no effect",
    "flock": "is the workload's own",
    "futex": "strace would lose the wake-up, which no kernel does; and glibc "
    "ends the process",
    "geteuid": "cannot fail",
    "getpid": "cannot fail",
    "gettid": "cannot fail",
    "poll": "is the workload's own",
    "preadv": "is the workload's own",
    "preadv2": "is the workload's own",
    "readv": "is the workload's own",
    "restart_syscall": "is made by the kernel",
    "rseq": "glibc ends the process where it fails in a new thread",
    "sched_yield": "cannot fail",
    "sigaltstack": "is Python's, at its end",
    "syscall_0x1c3": "is cachestat to an strace that has no name for it",
    "unlink": "is the workload's own",
    "writev": "is the workload's own",
}

# Calls whose failure must not show: they only help, are repeated, or have a substitute.
HARMLESS = {
    "fstatfs",
    "io_destroy",
    "io_getevents",
    "io_uring_enter",
    "io_uring_register",
    "ioctl",
    "lseek",
    "madvise",
    "munmap",
    "ppoll",
    "prlimit64",
    "read",
    "rt_sigaction",
    "rt_sigprocmask",
    "sched_getaffinity",
    "set_robust_list",
    "statx",
    "sysinfo",
    "write",
}
PASSING = {
    # Linux closes the descriptor all the same.
    ("close", "EINTR"),
    ("fdatasync", "EINTR"),
    ("fsync", "EINTR"),
    ("ftruncate", "EINTR"),
    ("pread64", "EINTR"),
    ("pwrite64", "EINTR"),
    ("io_submit", "EAGAIN"),
    ("pread64", "EAGAIN"),
    ("pwrite64", "EAGAIN"),
    # Returned by file systems without RENAME_NOREPLACE.
    ("renameat2", "EINVAL"),
}
# Calls whose failure must be reported, because no bytes show it and nothing replaces them.
MUST_BE_REPORTED = {"fdatasync", "fsync"}
# pthread_create() and malloc() report a lack of memory with errnos of their own.
MEMORY = {"clone", "clone3", "mmap", "mprotect", "mremap"}

# More calls that checkpoints make: files and folders by Python.
_NAMES = "EACCES ELOOP ENAMETOOLONG ENOENT ENOMEM ENOTDIR EPERM EROFS"
OF_CHECKPOINTS = {
    "access": f"{_NAMES} EFAULT EINVAL EIO",
    "faccessat2": f"{_NAMES} EFAULT EINVAL EIO EROFS",
    "fallocate": "EBADF EFBIG EINTR EINVAL EIO ENODEV ENOSPC ENOSYS EOPNOTSUPP EPERM",
    "flock": "EBADF EINTR EINVAL ENOLCK EAGAIN",
    "getcwd": "EACCES ENOENT ENOMEM",
    "getdents64": "EBADF EFAULT EINVAL EIO ENOENT ENOTDIR",
    "getrandom": "EAGAIN EFAULT EINTR EINVAL",
    "link": f"{_NAMES} EDQUOT EEXIST EINVAL EIO EMLINK ENOSPC EXDEV",
    "linkat": f"{_NAMES} EDQUOT EEXIST EINVAL EIO EMLINK ENOSPC EPERM EXDEV",
    "listxattr": "E2BIG EACCES EFAULT EIO ENOTSUP ERANGE",
    "mkdir": f"{_NAMES} EDQUOT EEXIST EINVAL EIO EMLINK ENOSPC",
    # Regular files never return EAGAIN.
    "pread64": "EBADF EFAULT EINTR EINVAL EIO EISDIR ENXIO EOVERFLOW ESPIPE",
    "pwrite64": "EBADF EDQUOT EFAULT EFBIG EINTR EINVAL EIO ENOSPC EOVERFLOW EPERM",
    "read": "EBADF EFAULT EINTR EINVAL EIO EISDIR",
    "rename": f"{_NAMES} EBUSY EDQUOT EINVAL EIO EISDIR EMLINK ENOSPC ENOTEMPTY EXDEV",
    "renameat2": f"{_NAMES} EBUSY EDQUOT EEXIST EINVAL EIO EMLINK ENOSPC EXDEV",
    "rmdir": f"{_NAMES} EBUSY EINVAL EIO ENOTEMPTY",
    "statfs": "EACCES EFAULT EINTR EIO ENOMEM ENOSYS EOVERFLOW",
    "uname": "EFAULT",
    "unlinkat": f"{_NAMES} EBADF EBUSY EINVAL EIO EISDIR",
    "write": "EBADF EDQUOT EFAULT EFBIG EINTR EINVAL EIO ENOSPC EPERM",
}


@dataclasses.dataclass(frozen=True)
class Calls:
    """The system calls of a workload, and how each may fail.

    Attributes
    ----------
    errnos : dict of str
        The errnos of each call.
    left_out : dict of str
        Why other calls are not failed.
    must_be_reported : set of str
        Calls whose failure some step must report.
    strict : bool
        Whether a step may end only with the errno of the call that failed.
    index_max : int
        An upper bound of how often a thread makes one call.
    """

    errnos: dict
    left_out: dict
    must_be_reported: set
    strict: bool
    index_max: int = 100

    def every_case(self):
        """Return each call, index and errno, in an order that depends on this file only."""
        cases = [
            (call, index, name)
            for call, names in self.errnos.items()
            for index in range(self.index_max)
            for name in names.split()
        ]
        random.Random(0).shuffle(cases)
        return cases

    def may_report(self, call, name):
        """Return the errnos with which a step may end after a call failed with this one."""
        if not self.strict:
            return set() if (call, name) in PASSING else set(errno.errorcode)
        if call in HARMLESS or (call, name) in PASSING:
            return set()
        names = {name}
        if call in MEMORY:
            names |= {"EAGAIN", "ENOMEM"}
        if (call, name) == ("openat", "ENXIO"):
            # ENXIO stands for a pipe or a socket, which are refused.
            names |= {"EINVAL"}
        return {getattr(errno, name) for name in names}


TRANSFERS = Calls(ERRNOS, LEFT_OUT, MUST_BE_REPORTED, strict=True)
CHECKPOINTS = Calls(
    {call: names for call, names in (ERRNOS | OF_CHECKPOINTS).items() if call != "mmap"},
    {call: why for call, why in LEFT_OUT.items() if call not in OF_CHECKPOINTS}
    | {"mmap": "threading.Thread.start() hangs if the new thread has no memory"},
    {"fsync", "mkdir", "renameat2"},
    strict=False,
    index_max=250,
)
DRAINS = dataclasses.replace(
    CHECKPOINTS,
    errnos={**CHECKPOINTS.errnos, "fadvise64": "EBADF EINVAL ESPIPE"},
    must_be_reported={"fsync", "rename"},
)
