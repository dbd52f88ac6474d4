/* process_calls.c -- system calls of a whole process, which may be interrupted.
 *
 * Preloaded, it takes the place of libc's functions for the interpreter and the
 * modules. Those of the C library go through tests/faults first. Compiled without
 * _GNU_SOURCE, so that the headers do not declare these functions. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>

#ifndef RTLD_NEXT /* before glibc 2.34 it takes _GNU_SOURCE */
#define RTLD_NEXT ((void *)-1l)
#endif

/* Asked before each call; nvmeio_fault_interrupt(), once a test has set it. */
__attribute__((visibility("default"))) bool (*process_calls_interrupt)(
    const char *call);

/* Integers and pointers are passed in the same registers, whether or not a function is
 * variadic, so that one type does for all. */
typedef long function(long, long, long, long, long, long);

/* A call that fails with EINTR, if it can wait and is interrupted. */
#define CALL(name, waits)                                                              \
    __attribute__((visibility("default"))) long name(long a, long b, long c, long d,   \
                                                     long e, long f)                   \
    {                                                                                  \
        static function *real;                                                         \
        bool (*interrupt)(const char *) = process_calls_interrupt;                     \
        if (!real)                                                                     \
            real = (function *)dlsym(RTLD_NEXT, #name);                                \
        if (interrupt && interrupt(#name) && (waits)) {                                \
            errno = EINTR;                                                             \
            return -1;                                                                 \
        }                                                                              \
        return real(a, b, c, d, e, f);                                                 \
    }

CALL(open64, true)
CALL(read, true)
CALL(write, true)
CALL(pread64, true)
CALL(pwrite64, true)
CALL(flock, true)
CALL(fcntl64, b == F_SETLK || b == F_SETLKW)
CALL(ftruncate64, true)
CALL(fallocate64, true)
CALL(fsync, true)
CALL(fdatasync, true)
CALL(close, false)
CALL(stat64, false)
CALL(lstat64, false)
CALL(fstat64, false)
CALL(fstatat64, false)
CALL(statvfs64, false)
CALL(fstatvfs64, false)
CALL(faccessat, false)
CALL(readlink, false)
CALL(lseek64, false)
CALL(ioctl, false)
CALL(opendir, false)
CALL(fdopendir, false)
CALL(readdir64, false)
CALL(closedir, false)
CALL(mkdir, false)
CALL(rmdir, false)
CALL(link, false)
CALL(linkat, false)
CALL(rename, false)
CALL(unlink, false)
CALL(fchmod, false)
CALL(fchown, false)
CALL(listxattr, false)
CALL(getxattr, false)
CALL(fsetxattr, false)
CALL(mmap64, false)
CALL(munmap, false)
CALL(eventfd, false)
CALL(pthread_create, false)
