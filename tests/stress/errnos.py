"""Which errnos a system call may return, and what is left of each when it does.

By section 2 of the Linux manual pages; by the kernel's sources for io_uring.
"""

import errno
import random

ERRNOS = {
    "brk": "ENOMEM",
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
    # Eventfds alone are written to: EAGAIN would say that wake-ups wait there already.
    "write": "EINTR",
}

LEFT_OUT = {
    "exit": "never returns",
    "exit_group": "never returns",
    "flock": "is the workload's own",
    "futex": "a wake-up that strace suppresses is lost, as no kernel loses one; and glibc "
    "ends the process",
    "geteuid": "cannot fail",
    "getpid": "cannot fail",
    "gettid": "cannot fail",
    "preadv": "is the workload's own",
    "preadv2": "is the workload's own",
    "readv": "is the workload's own",
    "restart_syscall": "is made by the kernel",
    "rseq": "glibc ends the process where it fails in a new thread",
    "sched_yield": "cannot fail",
    "sigaltstack": "is Python's, at its end",
    "unlink": "is the workload's own",
    "writev": "is the workload's own",
}

# What must go well all the same: that help only, that are asked again, whose failure
# another way makes up for.
HARMLESS = {
    "close",
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
    ("fdatasync", "EINTR"),
    ("fsync", "EINTR"),
    ("ftruncate", "EINTR"),
    ("pread64", "EINTR"),
    ("pwrite64", "EINTR"),
    ("io_submit", "EAGAIN"),
    ("pread64", "EAGAIN"),
    ("pwrite64", "EAGAIN"),
}
# What no bytes show, nor another way makes up for: it must be told.
TOLD = {"fdatasync", "fsync"}
# pthread_create() and malloc() have errnos of their own for want of memory.
MEMORY = {"brk", "clone", "clone3", "mmap", "mprotect", "mremap"}

# A thread makes no call more often.
INDEX_MAX = 100


def every_case():
    """Return each call, index and errno, in an order that depends on this file alone."""
    cases = [
        (call, index, name)
        for call, names in ERRNOS.items()
        for index in range(INDEX_MAX)
        for name in names.split()
    ]
    random.Random(0).shuffle(cases)
    return cases


CASES = every_case()


def may_report(call, name):
    """Return the errnos that a step may end with when a call has failed with this one."""
    if call in HARMLESS or (call, name) in PASSING:
        return set()
    names = {name}
    if call in MEMORY:
        names |= {"EAGAIN", "ENOMEM"}
    if (call, name) == ("openat", "ENXIO"):
        # Of a pipe or a socket, which are refused.
        names |= {"EINVAL"}
    return {getattr(errno, name) for name in names}
