/* file.c -- opening, alignment and size of files.
 *
 * A file has two descriptors: one through the page cache, and one with O_DIRECT where
 * the file system has that, opened anew so that no flag of anyone's is changed.  What
 * is transferred, and by which of them, is decided elsewhere. */
#include "file_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "fork.h"

/* Linux 6.1, statx(2).  Older headers lack the two fields, so they are read by their
 * place in the structure, which is the kernel's ABI. */
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000u
#endif
#define STATX_DIO_MEM_ALIGN_AT 0x98
#define STATX_DIO_OFFSET_ALIGN_AT 0x9c

/* linux/magic.h has it from Linux 5.11 on. */
#ifndef FUSE_SUPER_MAGIC
#define FUSE_SUPER_MAGIC 0x65735546
#endif

#define COMPARE_BYTES (256u << 10)

/* What a descriptor opened anew has in common with the one it stands for.  O_SYNC
 * includes O_DSYNC: who asked for either relies on it. */
#define KEPT_FLAGS (O_ACCMODE | O_SYNC)

/* Open the file behind `fd` anew, with other flags: a description of our own. */
static int reopen(int fd, int flags)
{
    char path[32];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int result = open(path, flags | O_CLOEXEC);
    return result < 0 ? -errno : result;
}

/* Tell whether it was us who made the file, also without O_EXCL.  O_EXCL alone makes
 * none. */
static int open_or_create(const char *path, int flags, bool *made)
{
    *made = false;
    if (flags & O_CREAT) {
        int fd = open(path, flags | O_EXCL, 0666);
        *made = fd >= 0;
        if (fd >= 0 || errno != EEXIST || (flags & O_EXCL))
            return fd < 0 ? -errno : fd;
    }
    int fd = open(path, flags, 0666);
    return fd < 0 ? -errno : fd;
}

/* Take back a file that was just made, unless its name leads elsewhere by now. */
static void unmake(const char *path, int fd)
{
    struct stat here, there;

    if (fstat(fd, &here) == 0 && lstat(path, &there) == 0 &&
        here.st_dev == there.st_dev && here.st_ino == there.st_ino)
        unlink(path);
}

/* Refuse what cannot be read and written at offsets. */
static int check_kind(const struct stat *status)
{
    if (S_ISDIR(status->st_mode))
        return -EISDIR;
    if (!S_ISREG(status->st_mode) && !S_ISBLK(status->st_mode))
        return -EINVAL;
    return 0;
}

static void describe(struct nvmeio_file *file, const struct stat *status, int flags)
{
    struct statfs system;
    uint64_t bytes;
    int access = flags & O_ACCMODE;

    int error;
    do
        error = fstatfs(file->fd, &system);
    while (error && errno == EINTR);
    /* A server of FUSE may fail to answer; no other file system does. */
    file->fuse = error || system.f_type == FUSE_SUPER_MAGIC;
    file->in_memory = !error && system.f_type == TMPFS_MAGIC;

    file->info.readable = access != O_WRONLY;
    file->info.writable = access != O_RDONLY;
    file->info.memory_align = 1;
    file->info.offset_align = 1;
    file->info.device = status->st_dev;
    file->info.inode = status->st_ino;
    file->device_bytes = -1;
    if (S_ISBLK(status->st_mode)) {
        /* Whichever node leads to it. */
        file->info.device = status->st_rdev;
        file->info.inode = 0;
        file->device_bytes = ioctl(file->fd, BLKGETSIZE64, &bytes) ? 0 : (int64_t)bytes;
    }
}

/* Share what is noted of writes with the other opens of a file that was described. */
static int join_ends(struct nvmeio_file *file)
{
    if (file->device_bytes >= 0 || !file->info.writable)
        return 0;
    file->ends = nvmeio_ends_join(file->info.device, file->info.inode);
    return file->ends ? 0 : -ENOMEM;
}

static bool power_of_two(uint32_t value)
{
    return value && (value & (value - 1)) == 0;
}

/* The kernel says 0 where it does not know (btrfs, tmpfs, Linux before 6.1).  Whole
 * pages suit every file system then, if it takes direct reads at all: try one.  A file
 * that cannot be read here shows it at the first transfer. */
static int probe_direct(const struct nvmeio_file *file)
{
    void *page;
    int error = posix_memalign(&page, 4096, 4096);

    if (error)
        return 0;
    if (file->info.readable && pread(file->direct_fd, page, 4096, 0) < 0)
        error = -errno;
    free(page);
    /* Nothing else says anything of O_DIRECT, which would be lost for as long as the
     * file is open: not what passes, nor a bad sector. */
    return error == -EINVAL || error == -EOPNOTSUPP ? error : 0;
}

static int find_alignment(struct nvmeio_file *file)
{
    struct statx status = {0};
    uint32_t memory, offset;

    /* Where it fails all stays 0. */
    (void)statx(file->direct_fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status);
    memcpy(&memory, (char *)&status + STATX_DIO_MEM_ALIGN_AT, sizeof(memory));
    memcpy(&offset, (char *)&status + STATX_DIO_OFFSET_ALIGN_AT, sizeof(offset));
    if (memory == 0 && offset == 0) {
        memory = offset = 4096;
        int error = probe_direct(file);
        if (error)
            return error;
    }
    if (!power_of_two(memory) || !power_of_two(offset) ||
        memory > NVMEIO_MEMORY_ALIGN_MAX || offset > NVMEIO_OFFSET_ALIGN_MAX)
        return -EINVAL;
    file->info.memory_align = memory;
    file->info.offset_align = offset;
    return 0;
}

/* Find a descriptor with O_DIRECT, if it is wanted and to be had.  `flags` are those of
 * file->fd. */
static int find_direct(struct nvmeio_file *file, enum nvmeio_direct direct, int flags)
{
    int error = 0;

    if (direct == NVMEIO_DIRECT_NEVER)
        return 0;
    if (file->direct_fd < 0) {
        int fd = reopen(file->fd, (flags & KEPT_FLAGS) | O_DIRECT);
        if (fd < 0)
            error = fd;
        else
            file->direct_fd = fd;
    }
    if (error == 0)
        error = find_alignment(file);
    file->info.direct = error == 0;
    file->demanded = direct == NVMEIO_DIRECT_ALWAYS;
    /* Out of descriptors or memory is the caller's to solve, and so is a signal: no
     * reason to be slow. */
    if (error == -EMFILE || error == -ENFILE || error == -ENOMEM || error == -EINTR)
        return error;
    return error && file->demanded ? -EINVAL : 0;
}

static struct nvmeio_file *file_new(int fd)
{
    struct nvmeio_file *file = calloc(1, sizeof(*file));

    if (!file)
        return NULL;
    atomic_init(&file->references, 1);
    file->generation = nvmeio_fork_generation();
    file->fd = fd;
    file->direct_fd = -1;
    return file;
}

static void file_free(struct nvmeio_file *file)
{
    if (file->direct_fd >= 0 && file->direct_fd != file->fd)
        close(file->direct_fd);
    if (file->fd >= 0)
        close(file->fd);
    if (file->ends)
        nvmeio_ends_leave(file->ends);
    free(file);
}

int nvmeio_file_open(const char *path, int flags, enum nvmeio_direct direct,
                     struct nvmeio_file **result)
{
    /* O_NONBLOCK: opening a FIFO must not hang.  It is taken off again, or io_uring
     * would answer EAGAIN instead of waiting for the disk.  O_NOCTTY: a terminal that
     * is opened by mistake must not become ours.  O_TRUNC comes last: an open that
     * fails must not have emptied the file. */
    int first_flags = (flags & ~O_TRUNC) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    struct nvmeio_file *file = NULL;
    struct stat status;
    bool made;

    int fd = open_or_create(path, first_flags, &made);
    if (fd < 0)
        return fd == -ENXIO ? -EINVAL : fd;
    int error = fstat(fd, &status) ? -errno : check_kind(&status);
    if (error == 0 && fcntl(fd, F_SETFL, 0))
        error = -errno;
    if (error == 0) {
        file = file_new(fd);
        error = file ? 0 : -ENOMEM;
    }
    if (error)
        goto fail;
    describe(file, &status, flags);
    file->info.created = made || (flags & O_TRUNC);
    error = join_ends(file);
    if (error == 0)
        error = find_direct(file, direct, flags);
    if (error == 0 && (flags & O_TRUNC) && file->device_bytes < 0)
        error = nvmeio_file_truncate(file, 0);
    if (error)
        goto fail;
    *result = file;
    return 0;
fail:
    if (made)
        unmake(path, fd);
    if (file)
        file_free(file);
    else
        close(fd);
    return error;
}

/* Sort a duplicate of a caller's descriptor into fd and direct_fd.  Its description is
 * shared with the caller, so a flag that disturbs is avoided by opening anew. */
static int adopt(struct nvmeio_file *file, enum nvmeio_direct direct, int flags)
{
    if (!(flags & (O_DIRECT | O_NONBLOCK)))
        return 0;
    int fd = reopen(file->fd, flags & KEPT_FLAGS);
    if (fd < 0)
        return fd;
    if ((flags & O_DIRECT) && !(flags & O_NONBLOCK) && direct != NVMEIO_DIRECT_NEVER)
        file->direct_fd = file->fd;
    else
        close(file->fd);
    file->fd = fd;
    return 0;
}

int nvmeio_file_dup(int fd, enum nvmeio_direct direct, struct nvmeio_file **result)
{
    struct stat status;
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return -errno;
    if (flags & O_PATH)
        return -EBADF;
    if (flags & O_APPEND)
        return -EINVAL;
    int error = fstat(fd, &status) ? -errno : check_kind(&status);
    if (error)
        return error;
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return -errno;
    struct nvmeio_file *file = file_new(copy);
    if (!file) {
        close(copy);
        return -ENOMEM;
    }
    describe(file, &status, flags);
    error = join_ends(file);
    if (error == 0)
        error = adopt(file, direct, flags);
    if (error == 0)
        error = find_direct(file, direct, flags);
    if (error) {
        file_free(file);
        return error;
    }
    *result = file;
    return 0;
}

void nvmeio_file_retain(struct nvmeio_file *file)
{
    atomic_fetch_add_explicit(&file->references, 1, memory_order_relaxed);
}

void nvmeio_file_release(struct nvmeio_file *file)
{
    /* Acquire and release: the last holder sees all that the others did. */
    if (file &&
        atomic_fetch_sub_explicit(&file->references, 1, memory_order_acq_rel) == 1)
        file_free(file);
}

void nvmeio_file_get_info(const struct nvmeio_file *file, struct nvmeio_file_info *info)
{
    *info = file->info;
    if (atomic_load_explicit(&file->direct_refused, memory_order_relaxed))
        info->direct = false;
}

int nvmeio_file_fd(const struct nvmeio_file *file)
{
    return file->fd;
}

int nvmeio_file_is_at(const struct nvmeio_file *file, const char *path)
{
    struct stat status;

    if (stat(path, &status))
        return -errno;
    if (S_ISBLK(status.st_mode))
        return file->device_bytes >= 0 && status.st_rdev == file->info.device;
    return status.st_dev == file->info.device && status.st_ino == file->info.inode;
}

int64_t nvmeio_file_size(const struct nvmeio_file *file)
{
    struct stat status;

    if (file->device_bytes >= 0)
        return file->device_bytes;
    if (fstat(file->fd, &status))
        return -errno;
    return status.st_size;
}

int nvmeio_file_truncate(struct nvmeio_file *file, int64_t size)
{
    int result;
    do
        result = ftruncate(file->fd, size);
    while (result && errno == EINTR);
    return result ? -errno : 0;
}

void nvmeio_file_geometry(const struct nvmeio_file *file,
                          struct nvmeio_geometry *geometry)
{
    geometry->direct = file->info.direct && !atomic_load_explicit(&file->direct_refused,
                                                                  memory_order_relaxed);
    geometry->memory_align = file->info.memory_align;
    geometry->offset_align = file->info.offset_align;
}

int nvmeio_file_preallocate(struct nvmeio_file *file, int64_t offset, int64_t size)
{
    /* fallocate(2), for posix_fallocate(3) may write zeros instead. */
    if (fallocate(file->fd, 0, offset, size) == 0)
        return 0;
    /* A signal ends it: tmpfs begins anew each time, and might never be done. */
    return errno == EOPNOTSUPP || errno == ENOSYS || errno == EINTR ? 0 : -errno;
}

bool nvmeio_file_is_ours(const struct nvmeio_file *file)
{
    return file->info.created && file->generation == nvmeio_fork_generation();
}

void nvmeio_file_note_end(struct nvmeio_file *file, int64_t end)
{
    /* In a child the parent's may look as if they were held. */
    if (file->ends && file->generation == nvmeio_fork_generation())
        nvmeio_ends_note(file->ends, end);
}

void nvmeio_file_cut_back(struct nvmeio_file *file, int64_t kept, int64_t end)
{
    if (!file->ends)
        return;
    int64_t others = nvmeio_ends_hold(file->ends, end);
    int64_t wanted = kept > others ? kept : others;
    int64_t size = nvmeio_file_size(file);
    if (size > wanted && size <= end)
        /* If this fails too, the error of the write is still the one to tell. */
        (void)nvmeio_file_truncate(file, wanted);
    nvmeio_ends_release(file->ends);
}

static size_t first_difference(const char *a, const char *b, size_t size)
{
    size_t i = 0;
    while (i < size && a[i] == b[i])
        i++;
    return i;
}

/* Sleep a little where an error passes, for a second in all; false: it is to be told.
 */
static bool waits_for(int error, unsigned *tries)
{
    static const struct timespec pause = {0, 1000000};

    if (error == EINTR)
        return true;
    if ((error != EAGAIN && error != EBUSY) || ++*tries > 1000)
        return false;
    nanosleep(&pause, NULL);
    return true;
}

int nvmeio_file_compare(struct nvmeio_file *file, int64_t offset, const void *address,
                        size_t size, size_t *position)
{
    char *memory = malloc(COMPARE_BYTES);
    size_t done = 0;
    unsigned tries = 0;
    int result = 0;

    if (!memory)
        return -ENOMEM;
    while (done < size && result == 0) {
        size_t left = size - done;
        ssize_t got =
            pread(file->fd, memory, left < COMPARE_BYTES ? left : COMPARE_BYTES,
                  offset + (int64_t)done);
        if (got < 0 && waits_for(errno, &tries))
            continue;
        if (got <= 0) {
            result = got ? -errno : -ENODATA;
        } else if (memcmp(memory, (const char *)address + done, (size_t)got)) {
            done += first_difference(memory, (const char *)address + done, (size_t)got);
            result = 1;
        } else {
            done += (size_t)got;
        }
    }
    free(memory);
    *position = done;
    return result;
}
