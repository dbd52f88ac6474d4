/* fault_calls.c -- the library's calls into the system, which may fail on purpose.
 *
 * Each stands for the call that fault_calls.h names on the left.  A call that fails
 * here was not made; which errno it fails with is what its manual page, or the kernel,
 * may say.  Compiled into the test build alone. */
#include <errno.h>
#include <fcntl.h>
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
#ifdef NVMEIO_HAVE_LIBAIO
#include <libaio.h>
#endif

#include "fault.h"

/* Nobody includes fault_calls.h, so each name is declared by its definition. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

/* Whether a call fails, and then sets errno to the lot's choice. */
static bool fails(enum nvmeio_fault kind, const int *errors, unsigned count)
{
    uint64_t lot;

    if (!nvmeio_fault_strikes(kind, &lot))
        return false;
    errno = errors[lot % count];
    return true;
}

static bool fails_with(enum nvmeio_fault kind, int error)
{
    return fails(kind, &error, 1);
}

/* Whether a transfer by a system call fails in passing. */
static bool stumbles(void)
{
    return fails_with(NVMEIO_FAULT_EINTR, EINTR) ||
           fails_with(NVMEIO_FAULT_EAGAIN, EAGAIN);
}

/* How much of `size` is taken. */
static size_t part_of(size_t size)
{
    uint64_t lot;

    if (size < 2 || !nvmeio_fault_strikes(NVMEIO_FAULT_PARTLY, &lot))
        return size;
    return (size_t)(1 + lot % (size - 1));
}

/* The same for what may be read or written past the page cache: whole sectors. */
static size_t sectors_of(size_t size)
{
    return size > 4096 ? part_of((size + 4095) / 4096) * 4096 : size;
}

ssize_t nvmeio_faulty_pread(int fd, void *address, size_t size, off_t offset)
{
    size_t part = sectors_of(size);
    return stumbles() ? -1 : pread(fd, address, part < size ? part : size, offset);
}

ssize_t nvmeio_faulty_pwrite(int fd, const void *address, size_t size, off_t offset)
{
    size_t part = sectors_of(size);
    return stumbles() ? -1 : pwrite(fd, address, part < size ? part : size, offset);
}

int nvmeio_faulty_fsync(int fd)
{
    return fails_with(NVMEIO_FAULT_EINTR, EINTR) ? -1 : fsync(fd);
}

ssize_t nvmeio_faulty_read(int fd, void *address, size_t size)
{
    return fails_with(NVMEIO_FAULT_EINTR, EINTR) ? -1 : read(fd, address, size);
}

ssize_t nvmeio_faulty_write(int fd, const void *address, size_t size)
{
    return fails_with(NVMEIO_FAULT_EINTR, EINTR) ? -1 : write(fd, address, size);
}

int nvmeio_faulty_ppoll(struct pollfd *fds, nfds_t count, const struct timespec *limit,
                        const sigset_t *signals)
{
    return fails_with(NVMEIO_FAULT_EINTR, EINTR) ? -1
                                                 : ppoll(fds, count, limit, signals);
}

int nvmeio_faulty_sem_wait(sem_t *semaphore)
{
    return fails_with(NVMEIO_FAULT_EINTR, EINTR) ? -1 : sem_wait(semaphore);
}

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

int nvmeio_faulty_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
{
    return wakes_for_nothing(mutex) ? 0 : pthread_cond_wait(condition, mutex);
}

int nvmeio_faulty_pthread_cond_timedwait(pthread_cond_t *condition,
                                         pthread_mutex_t *mutex,
                                         const struct timespec *end)
{
    return wakes_for_nothing(mutex) ? 0 : pthread_cond_timedwait(condition, mutex, end);
}

#ifdef NVMEIO_HAVE_LIBURING
/* What io_uring_enter(2) says where it can do nothing now; ENOMEM, which its page
 * lacks, of a thread's first call (io_uring_alloc_task_context() in Linux 6.18).  0: it
 * can. */
static int entry_error(void)
{
    if (stumbles() || fails_with(NVMEIO_FAULT_EBUSY, EBUSY) ||
        fails_with(NVMEIO_FAULT_ENOMEM, ENOMEM))
        return -errno;
    return 0;
}

/* Blocks that have come back, as those do that the kernel has not begun: ECANCELED
 * where it could start no thread for them, EFAULT where the thread has ended that
 * handed them over, which a lane's own does not.  To carry them out twice is right. */
static void leave_behind(struct io_uring *ring)
{
    struct io_uring_cqe *entry;
    unsigned head;
    uint64_t lot;

    io_uring_for_each_cqe(ring, head, entry)
    {
        if (entry->res >= 0 && entry->user_data != LIBURING_UDATA_TIMEOUT &&
            nvmeio_fault_strikes(NVMEIO_FAULT_BEHIND, &lot))
            entry->res = nvmeio_fault_in_shared && lot & 1 ? -EFAULT : -ECANCELED;
    }
}

int nvmeio_faulty_io_uring_submit(struct io_uring *ring)
{
    int error = entry_error();
    return error ? error : io_uring_submit(ring);
}

int nvmeio_faulty_io_uring_submit_and_wait(struct io_uring *ring, unsigned count)
{
    int error = entry_error();
    int result = error ? error : io_uring_submit_and_wait(ring, count);

    leave_behind(ring);
    return result;
}

int nvmeio_faulty_io_uring_wait_cqes(struct io_uring *ring, struct io_uring_cqe **entry,
                                     unsigned count, struct __kernel_timespec *limit,
                                     sigset_t *signals)
{
    int error = entry_error();
    int result = error ? error : io_uring_wait_cqes(ring, entry, count, limit, signals);

    leave_behind(ring);
    return result;
}

/* EINVAL is what kernels say to flags that they do not know. */
int nvmeio_faulty_io_uring_queue_init_params(unsigned entries, struct io_uring *ring,
                                             struct io_uring_params *params)
{
    static const int errors[] = {ENOMEM, EINVAL, EPERM, ENOSYS, EMFILE};

    if (fails(NVMEIO_FAULT_SETUP, errors, 5))
        return -errno;
    return io_uring_queue_init_params(entries, ring, params);
}

static bool refuses_to_register(void)
{
    static const int errors[] = {ENOMEM, EBUSY, EINVAL};
    return fails(NVMEIO_FAULT_REGISTER, errors, 3);
}

#ifdef IORING_RSRC_REGISTER_SPARSE
int nvmeio_faulty_io_uring_register_buffers_sparse(struct io_uring *ring,
                                                   unsigned count)
{
    return refuses_to_register() ? -errno
                                 : io_uring_register_buffers_sparse(ring, count);
}

/* What is let go of is always taken: the kernel needs nothing for it. */
int nvmeio_faulty_io_uring_register_buffers_update_tag(struct io_uring *ring,
                                                       unsigned first,
                                                       const struct iovec *memory,
                                                       const __u64 *tags,
                                                       unsigned count)
{
    return memory[0].iov_base && refuses_to_register()
               ? -errno
               : io_uring_register_buffers_update_tag(ring, first, memory, tags, count);
}
#endif

int nvmeio_faulty_io_uring_register_files(struct io_uring *ring, const int *files,
                                          unsigned count)
{
    return refuses_to_register() ? -errno : io_uring_register_files(ring, files, count);
}

int nvmeio_faulty_io_uring_register_files_update(struct io_uring *ring, unsigned first,
                                                 const int *files, unsigned count)
{
    return files[0] >= 0 && refuses_to_register()
               ? -errno
               : io_uring_register_files_update(ring, first, files, count);
}
#endif

#ifdef NVMEIO_HAVE_LIBAIO
int nvmeio_faulty_io_setup(int count, io_context_t *context)
{
    static const int errors[] = {EAGAIN, ENOMEM, ENOSYS, EPERM};
    return fails(NVMEIO_FAULT_SETUP, errors, 4) ? -errno : io_setup(count, context);
}

int nvmeio_faulty_io_submit(io_context_t context, long count, struct iocb **controls)
{
    return fails_with(NVMEIO_FAULT_EAGAIN, EAGAIN)
               ? -EAGAIN
               : io_submit(context, (long)part_of((size_t)count), controls);
}

int nvmeio_faulty_io_getevents(io_context_t context, long count_min, long count_max,
                               struct io_event *events, struct timespec *limit)
{
    return fails_with(NVMEIO_FAULT_EINTR, EINTR)
               ? -EINTR
               : io_getevents(context, count_min, count_max, events, limit);
}
#endif

int nvmeio_faulty_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                                 void *(*function)(void *), void *argument)
{
    if (fails_with(NVMEIO_FAULT_THREADS, EAGAIN))
        return EAGAIN;
    return pthread_create(thread, attributes, function, argument);
}

static bool lacks_memory(void)
{
    return fails_with(NVMEIO_FAULT_MEMORY, ENOMEM);
}

void *nvmeio_faulty_malloc(size_t size)
{
    return lacks_memory() ? NULL : malloc(size);
}

void *nvmeio_faulty_calloc(size_t count, size_t size)
{
    return lacks_memory() ? NULL : calloc(count, size);
}

char *nvmeio_faulty_strdup(const char *text)
{
    return lacks_memory() ? NULL : strdup(text);
}

void *nvmeio_faulty_tsearch(const void *key, void **root,
                            int (*compare)(const void *, const void *))
{
    return lacks_memory() ? NULL : tsearch(key, root, compare);
}

int nvmeio_faulty_posix_memalign(void **memory, size_t alignment, size_t size)
{
    return lacks_memory() ? ENOMEM : posix_memalign(memory, alignment, size);
}

void *nvmeio_faulty_mmap(void *address, size_t size, int protection, int flags, int fd,
                         off_t offset)
{
    return lacks_memory() ? MAP_FAILED
                          : mmap(address, size, protection, flags, fd, offset);
}

/* It may have to cut a mapping in two. */
int nvmeio_faulty_munmap(void *address, size_t size)
{
    return lacks_memory() ? -1 : munmap(address, size);
}

int nvmeio_faulty_mlock(const void *address, size_t size)
{
    return lacks_memory() ? -1 : mlock(address, size);
}

/* EINVAL: the kernel is older than the advice. */
int nvmeio_faulty_madvise(void *address, size_t size, int advice)
{
    static const int errors[] = {ENOMEM, EAGAIN, EINVAL};
    return fails(NVMEIO_FAULT_MEMORY, errors, 3) ? -1 : madvise(address, size, advice);
}

int nvmeio_faulty_mlock2(const void *address, size_t size, unsigned flags)
{
    return lacks_memory() ? -1 : mlock2(address, size, flags);
}

int nvmeio_faulty_mincore(void *address, size_t size, unsigned char *resident)
{
    static const int errors[] = {ENOMEM, EAGAIN};
    return fails(NVMEIO_FAULT_MEMORY, errors, 2) ? -1
                                                 : mincore(address, size, resident);
}

/* mbind(2) alone, which takes six words. */
long nvmeio_faulty_syscall(long number, ...)
{
    long words[6];
    va_list rest;

    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(rest, long);
    va_end(rest);
    if (lacks_memory())
        return -1;
    return syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

static bool lacks_descriptors(void)
{
    static const int errors[] = {EMFILE, ENFILE};
    return fails(NVMEIO_FAULT_DESCRIPTORS, errors, 2);
}

int nvmeio_faulty_open(const char *path, int flags, ...)
{
    va_list rest;

    va_start(rest, flags);
    bool makes = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;
    mode_t mode = makes ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (lacks_descriptors() || fails_with(NVMEIO_FAULT_SIGNAL, EINTR))
        return -1;
    return open(path, flags, mode);
}

int nvmeio_faulty_fcntl(int fd, int command, ...)
{
    va_list rest;

    va_start(rest, command);
    long value = command == F_GETFL ? 0 : va_arg(rest, int);
    va_end(rest);
    if (command == F_DUPFD_CLOEXEC && lacks_descriptors())
        return -1;
    return fcntl(fd, command, value);
}

int nvmeio_faulty_eventfd(unsigned value, int flags)
{
    return lacks_descriptors() ? -1 : eventfd(value, flags);
}

FILE *nvmeio_faulty_fopen(const char *path, const char *mode)
{
    return lacks_descriptors() ? NULL : fopen(path, mode);
}

int nvmeio_faulty_fstat(int fd, struct stat *status)
{
    return fails_with(NVMEIO_FAULT_STAT, EIO) ? -1 : fstat(fd, status);
}

int nvmeio_faulty_stat(const char *path, struct stat *status)
{
    return fails_with(NVMEIO_FAULT_STAT, EIO) ? -1 : stat(path, status);
}

int nvmeio_faulty_lstat(const char *path, struct stat *status)
{
    return fails_with(NVMEIO_FAULT_STAT, EIO) ? -1 : lstat(path, status);
}

int nvmeio_faulty_fstatfs(int fd, struct statfs *status)
{
    return fails_with(NVMEIO_FAULT_STAT, ENOSYS) ? -1 : fstatfs(fd, status);
}

int nvmeio_faulty_statx(int fd, const char *path, int flags, unsigned mask,
                        struct statx *status)
{
    return fails_with(NVMEIO_FAULT_STAT, ENOSYS) ? -1
                                                 : statx(fd, path, flags, mask, status);
}

int nvmeio_faulty_fallocate(int fd, int mode, off_t offset, off_t size)
{
    static const int errors[] = {ENOSPC, EOPNOTSUPP, EDQUOT, EINTR};
    return fails(NVMEIO_FAULT_FALLOCATE, errors, 4) ? -1
                                                    : fallocate(fd, mode, offset, size);
}

int nvmeio_faulty_ftruncate(int fd, off_t size)
{
    static const int errors[] = {EIO, EINTR};
    return fails(NVMEIO_FAULT_TRUNCATE, errors, 2) ? -1 : ftruncate(fd, size);
}

/* ENOTTY: this kernel, or this file, knows nothing of it. */
int nvmeio_faulty_ioctl(int fd, unsigned long request, ...)
{
    va_list rest;

    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return fails_with(NVMEIO_FAULT_STAT, ENOTTY) ? -1 : ioctl(fd, request, argument);
}

int nvmeio_faulty_getrlimit(int resource, struct rlimit *limit)
{
    return fails_with(NVMEIO_FAULT_STAT, EPERM) ? -1 : getrlimit(resource, limit);
}

/* EINVAL: there are more processors than bits. */
int nvmeio_faulty_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *cpus)
{
    return fails_with(NVMEIO_FAULT_STAT, EINVAL) ? -1
                                                 : sched_getaffinity(pid, size, cpus);
}
