/* fault_calls.c -- the library's system calls, with injected faults.
 *
 * Each replaces the call on the left in fault_calls.h.  A call that fails here is not
 * made; its errno is one of its manual page or of the kernel.  The thread may pause
 * before and after each, because races can be on both sides.  Only in the test build.
 * */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <search.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifdef NVMEIO_HAVE_LIBURING
#include <liburing.h>
#endif

#include "fault.h"

/* No file includes fault_calls.h, so each name is declared by its definition. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

static const char *pause_before(const char *function)
{
    const char *call = function + strlen("nvmeio_faulty_");

    nvmeio_fault_pause(call, false);
    return call;
}

static void pause_after(const char *const *call)
{
    nvmeio_fault_pause(*call, true);
}

/* The first line of each replacement: the thread may pause here, and at the return. */
#define PAUSES                                                                         \
    const char *const call __attribute__((cleanup(pause_after))) =                     \
        pause_before(__func__)

/* Whether SIGINT has come to this thread, at its last system call. */
static _Thread_local bool signalled;

/* That of a system call, where SIGINT may come too. */
#define ENTERS                                                                         \
    PAUSES;                                                                            \
    signalled = nvmeio_fault_interrupt(call)

#define REPLACEMENT(first, type, name, parameters, arguments, fails, failure)          \
    type nvmeio_faulty_##name parameters                                               \
    {                                                                                  \
        first;                                                                         \
        return (fails) ? (failure) : name arguments;                                   \
    }

/* A system call that may fail; then it returns `failure`. */
#define CALL(...) REPLACEMENT(ENTERS, __VA_ARGS__)

/* One that does not fail. */
#define SURE_CALL(name, parameters, arguments)                                         \
    CALL(int, name, parameters, arguments, false, 0)

/* A call that seldom enters the kernel, and is not interrupted there. */
#define LOCAL_CALL(...) REPLACEMENT(PAUSES, __VA_ARGS__)
#define PAUSED_CALL(name, parameters, arguments)                                       \
    LOCAL_CALL(int, name, parameters, arguments, false, 0)

/* Whether a call fails, and then sets errno to one of these, at random. */
static bool fails(enum nvmeio_fault kind, const int *errors, unsigned count)
{
    uint64_t number;

    if (!nvmeio_fault_strikes(kind, &number))
        return false;
    errno = errors[number % count];
    return true;
}

static bool fails_with(enum nvmeio_fault kind, int error)
{
    return fails(kind, &error, 1);
}

static bool is_signalled(void)
{
    if (signalled)
        errno = EINTR;
    return signalled;
}

static bool is_interrupted(void)
{
    return is_signalled() || fails_with(NVMEIO_FAULT_EINTR, EINTR);
}

/* Whether a transfer has a passing error. */
static bool stumbles(void)
{
    return is_interrupted() || fails_with(NVMEIO_FAULT_EAGAIN, EAGAIN);
}

/* How much of `size` is accepted. */
static size_t part_of(size_t size)
{
    uint64_t number;

    if (size < 2 || !nvmeio_fault_strikes(NVMEIO_FAULT_PARTLY, &number))
        return size;
    return (size_t)(1 + number % (size - 1));
}

/* The same for direct I/O: whole sectors. */
static size_t sectors_of(size_t size)
{
    size_t part = size > 4096 ? part_of((size + 4095) / 4096) * 4096 : size;
    return part < size ? part : size;
}

CALL(ssize_t, pread, (int fd, void *address, size_t size, off_t offset),
     (fd, address, sectors_of(size), offset), stumbles(), -1)
CALL(ssize_t, pwrite, (int fd, const void *address, size_t size, off_t offset),
     (fd, address, sectors_of(size), offset), stumbles(), -1)
CALL(int, fsync, (int fd), (fd), is_interrupted(), -1)
CALL(int, fdatasync, (int fd), (fd), is_interrupted(), -1)
CALL(ssize_t, read, (int fd, void *address, size_t size), (fd, address, size),
     is_interrupted(), -1)
CALL(ssize_t, write, (int fd, const void *address, size_t size), (fd, address, size),
     is_interrupted(), -1)
CALL(int, ppoll,
     (struct pollfd * fds, nfds_t count, const struct timespec *limit,
      const sigset_t *signals),
     (fds, count, limit, signals), is_interrupted(), -1)
CALL(int, sem_wait, (sem_t * semaphore), (semaphore), is_interrupted(), -1)

PAUSED_CALL(pthread_mutex_lock, (pthread_mutex_t * mutex), (mutex))
PAUSED_CALL(pthread_mutex_unlock, (pthread_mutex_t * mutex), (mutex))
PAUSED_CALL(pthread_cond_broadcast, (pthread_cond_t * condition), (condition))
SURE_CALL(pthread_join, (pthread_t thread, void **result), (thread, result))
PAUSED_CALL(sem_post, (sem_t * semaphore), (semaphore))
SURE_CALL(eventfd_write, (int fd, eventfd_t value), (fd, value))
SURE_CALL(close, (int fd), (fd))
SURE_CALL(unlink, (const char *path), (path))
SURE_CALL(munlock, (const void *address, size_t size), (address, size))

/* A wait that ends for nothing, which POSIX allows. */
static bool wakes_for_nothing(pthread_mutex_t *mutex)
{
    if (!nvmeio_fault_strikes(NVMEIO_FAULT_SPURIOUS, NULL))
        return false;
    pthread_mutex_unlock(mutex);
    sched_yield();
    pthread_mutex_lock(mutex);
    return true;
}

CALL(int, pthread_cond_wait, (pthread_cond_t * condition, pthread_mutex_t *mutex),
     (condition, mutex), wakes_for_nothing(mutex), 0)

#ifdef NVMEIO_HAVE_LIBURING
/* The errno of an io_uring_enter(2) that can do nothing now, or 0.  ENOMEM, which its
 * manual page lacks, can come from a thread's first call (io_uring_alloc_task_context()
 * in Linux 6.18). */
static int entry_error(void)
{
    if (stumbles() || fails_with(NVMEIO_FAULT_EBUSY, EBUSY) ||
        fails_with(NVMEIO_FAULT_ENOMEM, ENOMEM))
        return -errno;
    return 0;
}

/* Report finished blocks as ones that the kernel did not begin, as when it cannot start
 * a thread for them.  Running them twice is harmless. */
static void leave_behind(struct io_uring *ring)
{
    struct io_uring_cqe *entry;
    unsigned head;

    io_uring_for_each_cqe(ring, head, entry)
    {
        if (entry->res >= 0 && nvmeio_fault_strikes(NVMEIO_FAULT_BEHIND, NULL))
            entry->res = -ECANCELED;
    }
}

CALL(int, io_uring_submit, (struct io_uring * ring), (ring), entry_error(), -errno)

int nvmeio_faulty_io_uring_submit_and_wait(struct io_uring *ring, unsigned count)
{
    ENTERS;
    int error = entry_error();
    int result = error ? error : io_uring_submit_and_wait(ring, count);

    leave_behind(ring);
    return result;
}

/* Kernels return EINVAL for unknown flags. */
static bool refuses_to_set_up(void)
{
    static const int errors[] = {ENOMEM, EINVAL, EPERM, ENOSYS, EMFILE};
    return fails(NVMEIO_FAULT_SETUP, errors, 5);
}

CALL(int, io_uring_queue_init_params,
     (unsigned entries, struct io_uring *ring, struct io_uring_params *params),
     (entries, ring, params), refuses_to_set_up(), -errno)

void nvmeio_faulty_io_uring_queue_exit(struct io_uring *ring)
{
    ENTERS;
    io_uring_queue_exit(ring);
}
#endif

CALL(int, pthread_create,
     (pthread_t * thread, const pthread_attr_t *attributes, void *(*function)(void *),
      void *argument),
     (thread, attributes, function, argument), fails_with(NVMEIO_FAULT_THREADS, EAGAIN),
     EAGAIN)

static bool lacks_memory(void)
{
    return fails_with(NVMEIO_FAULT_MEMORY, ENOMEM);
}

/* EINVAL: the kernel is older than the advice. */
static bool takes_no_advice(void)
{
    static const int errors[] = {ENOMEM, EAGAIN, EINVAL};
    return fails(NVMEIO_FAULT_MEMORY, errors, 3);
}

static bool tells_no_residence(void)
{
    static const int errors[] = {ENOMEM, EAGAIN};
    return fails(NVMEIO_FAULT_MEMORY, errors, 2);
}

LOCAL_CALL(void *, malloc, (size_t size), (size), lacks_memory(), NULL)
LOCAL_CALL(void *, calloc, (size_t count, size_t size), (count, size), lacks_memory(),
           NULL)
LOCAL_CALL(char *, strdup, (const char *text), (text), lacks_memory(), NULL)
LOCAL_CALL(void *, tsearch,
           (const void *key, void **root, int (*compare)(const void *, const void *)),
           (key, root, compare), lacks_memory(), NULL)
LOCAL_CALL(int, posix_memalign, (void **memory, size_t alignment, size_t size),
           (memory, alignment, size), lacks_memory(), ENOMEM)
CALL(void *, mmap,
     (void *address, size_t size, int protection, int flags, int fd, off_t offset),
     (address, size, protection, flags, fd, offset), lacks_memory(), MAP_FAILED)
/* It may have to cut a mapping in two. */
CALL(int, munmap, (void *address, size_t size), (address, size), lacks_memory(), -1)
CALL(int, mlock, (const void *address, size_t size), (address, size), lacks_memory(),
     -1)
CALL(int, madvise, (void *address, size_t size, int advice), (address, size, advice),
     takes_no_advice(), -1)
CALL(int, mincore, (void *address, size_t size, unsigned char *resident),
     (address, size, resident), tells_no_residence(), -1)

/* Ways in which a futex wait may end early; wake-ups are never lost. */
static bool ends_wait(int command)
{
    if ((command & FUTEX_CMD_MASK) != FUTEX_WAIT_BITSET)
        return false;
    errno = 0;
    return nvmeio_fault_strikes(NVMEIO_FAULT_SPURIOUS, NULL) || is_interrupted();
}

static bool refuses_a_context(void)
{
    static const int errors[] = {EAGAIN, ENOMEM, ENOSYS, EPERM};
    return fails(NVMEIO_FAULT_SETUP, errors, 4);
}

static long call_kernel(long number, const long *words)
{
    return syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

/* The calls of AIO. */
#define AIO_CALL(name, fails)                                                          \
    static long nvmeio_faulty_##name(long *words)                                      \
    {                                                                                  \
        ENTERS;                                                                        \
        return (fails) ? -1 : call_kernel(SYS_##name, words);                          \
    }

/* The kernel accepts only some of the blocks. */
static bool is_shortened(long *count)
{
    *count = (long)part_of((size_t)*count);
    return false;
}

AIO_CALL(io_setup, refuses_a_context())
AIO_CALL(io_destroy, false)
AIO_CALL(io_submit, fails_with(NVMEIO_FAULT_EAGAIN, EAGAIN) || is_shortened(&words[1]))
AIO_CALL(io_getevents, is_interrupted())

/* Those of AIO, mbind(2), futex(2) and cachestat(2), with six arguments. */
long nvmeio_faulty_syscall(long number, ...)
{
    long words[6];
    va_list rest;

    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(rest, long);
    va_end(rest);
    switch (number) {
    case SYS_io_setup:
        return nvmeio_faulty_io_setup(words);
    case SYS_io_destroy:
        return nvmeio_faulty_io_destroy(words);
    case SYS_io_submit:
        return nvmeio_faulty_io_submit(words);
    case SYS_io_getevents:
        return nvmeio_faulty_io_getevents(words);
    default:
        break;
    }
    ENTERS;
    if (number == SYS_futex && ends_wait((int)words[1]))
        return errno ? -1 : 0;
    if (number != SYS_futex && lacks_memory())
        return -1;
    return call_kernel(number, words);
}

static bool lacks_descriptors(void)
{
    static const int errors[] = {EMFILE, ENFILE};
    return fails(NVMEIO_FAULT_DESCRIPTORS, errors, 2);
}

int nvmeio_faulty_open(const char *path, int flags, ...)
{
    ENTERS;
    va_list rest;

    va_start(rest, flags);
    bool makes = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;
    mode_t mode = makes ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (lacks_descriptors() || is_signalled() || fails_with(NVMEIO_FAULT_SIGNAL, EINTR))
        return -1;
    return open(path, flags, mode);
}

int nvmeio_faulty_fcntl(int fd, int command, ...)
{
    ENTERS;
    va_list rest;

    va_start(rest, command);
    long value = command == F_GETFL ? 0 : va_arg(rest, int);
    va_end(rest);
    if (command == F_DUPFD_CLOEXEC && lacks_descriptors())
        return -1;
    return fcntl(fd, command, value);
}

CALL(int, eventfd, (unsigned value, int flags), (value, flags), lacks_descriptors(), -1)
CALL(FILE *, fopen, (const char *path, const char *mode), (path, mode),
     lacks_descriptors(), NULL)

static bool lacks_information(int error)
{
    return fails_with(NVMEIO_FAULT_STAT, error);
}

CALL(int, fstat, (int fd, struct stat *status), (fd, status), lacks_information(EIO),
     -1)
CALL(int, fchmod, (int fd, mode_t mode), (fd, mode), lacks_information(EPERM), -1)
CALL(int, stat, (const char *path, struct stat *status), (path, status),
     lacks_information(EIO), -1)
CALL(int, lstat, (const char *path, struct stat *status), (path, status),
     lacks_information(EIO), -1)
CALL(int, fstatfs, (int fd, struct statfs *status), (fd, status),
     lacks_information(ENOSYS), -1)
CALL(int, statx,
     (int fd, const char *path, int flags, unsigned mask, struct statx *status),
     (fd, path, flags, mask, status), lacks_information(ENOSYS), -1)
CALL(int, getrlimit, (int resource, struct rlimit *limit), (resource, limit),
     lacks_information(EPERM), -1)
/* EINVAL: there are more processors than bits. */
CALL(int, sched_getaffinity, (pid_t pid, size_t size, cpu_set_t *cpus),
     (pid, size, cpus), lacks_information(EINVAL), -1)

/* ENOTTY: this kernel or file lacks the request. */
int nvmeio_faulty_ioctl(int fd, unsigned long request, ...)
{
    ENTERS;
    va_list rest;

    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return lacks_information(ENOTTY) ? -1 : ioctl(fd, request, argument);
}

static bool cannot_truncate(void)
{
    static const int errors[] = {EIO, EINTR};
    return fails(NVMEIO_FAULT_TRUNCATE, errors, 2);
}

CALL(int, ftruncate, (int fd, off_t size), (fd, size),
     is_signalled() || cannot_truncate(), -1)
