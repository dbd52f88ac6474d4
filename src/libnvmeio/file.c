/* file.c -- opens files, and finds out their alignment and size.
 *
 * A file has one descriptor, with O_DIRECT if the file system supports it. A second
 * one, for the page cache, is opened when it is first needed. It is a new open file
 * description, so that the flags of the first do not change. transfer.c and gather.c
 * decide which bytes use which descriptor. */
#include "file_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "fork.h"
#include "inode.h"
#include "waiter.h"

/* Linux 6.1, statx(2). Older headers lack these two fields, so they are read by their
 * offset in the structure, which is part of the kernel's ABI. */
#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000u
#endif
#define STATX_DIO_MEM_ALIGN_AT 0x98
#define STATX_DIO_OFFSET_ALIGN_AT 0x9c

/* Linux 6.5, cachestat(2).  Its number is the same everywhere but on alpha. */
#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

struct cachestat_range {
    uint64_t offset, length;
};

struct cachestat_result {
    uint64_t pages, dirty, writeback, evicted, recently_evicted;
};

/* One sample per this many bytes tells whether the page cache has a range. */
#define WARMTH_BYTES ((size_t)1 << 20)
#define WARMTH_SAMPLES 16u

/* After so many small ranges in a row that were cold, one of a few is looked up. */
#define COLD_RANGES 16u
#define COLD_RANGES_A_LOOK 8u

/* For so long after a byte was missing, no other one is tried. */
#define COLD_NS 100000000

#define COMPARE_BYTES (256u << 10)

/* Freeing as many bytes of a file takes milliseconds. */
#define FREED_AT_ONCE_BYTES (INT64_C(64) << 20)

/* The flags that a reopened descriptor shares with the first. O_SYNC includes O_DSYNC,
 * and callers that asked for either rely on it. */
#define KEPT_FLAGS (O_ACCMODE | O_SYNC)

/* Open the file behind `fd` again, with one more flag, as a new open file
 * description. */
static int reopen(int fd, int flag)
{
    char path[32];
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return -errno;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int result = open(path, (flags & KEPT_FLAGS) | flag | O_CLOEXEC);
    return result < 0 ? -errno : result;
}

/* Open an existing file. If the file system refuses O_DIRECT, clear that flag in *flags
 * and open it without. */
static int open_existing(const char *path, int *flags)
{
    /* The mode is for O_TMPFILE, which creates a file without a name. */
    int fd = open(path, *flags, 0666);

    if (fd < 0 && errno == EINVAL && *flags & O_DIRECT) {
        *flags &= ~O_DIRECT;
        fd = open(path, *flags, 0666);
    }
    return fd < 0 ? -errno : fd;
}

/* Open a file with O_CREAT. *made is true only if this call created it, which open(2)
 * without O_EXCL does not report. */
static int create(const char *path, int flags, bool *made)
{
    int fd = open(path, flags | O_EXCL, 0666);

    *made = fd >= 0;
    if (fd < 0 && errno == EEXIST && !(flags & O_EXCL))
        fd = open(path, flags, 0666);
    return fd < 0 ? -errno : fd;
}

/* Remove a file that we have just created, unless its name refers to another file by
 * now. */
static void remove_created(const char *path, int fd)
{
    struct stat here, there;

    if (fstat(fd, &here) == 0 && lstat(path, &there) == 0 &&
        here.st_dev == there.st_dev && here.st_ino == there.st_ino)
        unlink(path);
}

/* Call statx(2). If it is refused, call fstat(2), which does not report the alignment
 * for O_DIRECT. */
static int look_at(int fd, struct statx *status)
{
    struct stat plain;

    if (statx(fd, "", AT_EMPTY_PATH,
              STATX_TYPE | STATX_MODE | STATX_UID | STATX_INO | STATX_SIZE |
                  STATX_DIOALIGN,
              status) == 0)
        return 0;
    if (fstat(fd, &plain))
        return -errno;
    *status = (struct statx){
        .stx_mode = (uint16_t)plain.st_mode,
        .stx_uid = plain.st_uid,
        .stx_ino = plain.st_ino,
        .stx_size = (uint64_t)plain.st_size,
        .stx_dev_major = major(plain.st_dev),
        .stx_dev_minor = minor(plain.st_dev),
        .stx_rdev_major = major(plain.st_rdev),
        .stx_rdev_minor = minor(plain.st_rdev),
    };
    return 0;
}

static bool power_of_two(uint64_t value)
{
    return value && (value & (value - 1)) == 0;
}

/* Note the size of a block, if it is larger than a page. Our bounces suit blocks up to
 * NVMEIO_OFFSET_ALIGN_MAX, which is the largest of ext4, xfs and btrfs. */
static void note_block(struct nvmeio_file *file, uint64_t bytes)
{
    if (bytes > NVMEIO_OFFSET_ALIGN_MAX)
        bytes = NVMEIO_OFFSET_ALIGN_MAX;
    if (power_of_two(bytes) && bytes > file->block_bytes)
        file->block_bytes = (uint32_t)bytes;
}

/* Note whether the kernel carries out a direct write to a hole as a buffered one: on
 * ext4, for files without extents. */
static void note_holes(struct nvmeio_file *file)
{
    long flags = FS_EXTENT_FL;

    file->fills_holes = file->info.writable &&
                        ioctl(nvmeio_file_any_fd(file), FS_IOC_GETFLAGS, &flags) == 0 &&
                        !(flags & FS_EXTENT_FL);
}

/* Find out the file system by its number (statfs(2)). linux/magic.h lacks some of the
 * numbers. */
static void describe_system(struct nvmeio_file *file)
{
    struct statfs system;
    int error;

    do
        error = fstatfs(nvmeio_file_any_fd(file), &system);
    while (error && errno == EINTR);
    /* Only on FUSE, of which virtiofs is a kind, can statfs(2) fail: if the server does
     * not answer. */
    file->aside = error || system.f_type == 0x65735546 || system.f_type == 0x01021997;
    if (error)
        return;
    if (system.f_type == 0xef53)
        note_holes(file);
    switch ((uint32_t)system.f_type) {
    case 0x01021994: /* tmpfs */
        file->in_memory = true;
        __attribute__((fallthrough));
    case 0x858458f6: /* ramfs */
    case 0x0000ef53: /* ext2, ext3, ext4 */
    case 0x58465342: /* xfs */
    case 0x9123683e: /* btrfs */
    case 0xf2f52010: /* f2fs */
    case 0x2fc12fc1: /* zfs */
    case 0xca451a4e: /* bcachefs */
        file->local = true;
        note_block(file, (uint64_t)system.f_bsize);
    }
}

/* Find out the size of a block device, and of its blocks in the page cache. */
static int describe_device(struct nvmeio_file *file)
{
    int fd = nvmeio_file_any_fd(file), block = 0;
    uint64_t bytes;

    if (ioctl(fd, BLKGETSIZE64, &bytes))
        return -errno;
    file->device_bytes = (int64_t)bytes;
    file->local = true;
    if (ioctl(fd, BLKBSZGET, &block) == 0 && block > 0)
        note_block(file, (uint64_t)block);
    return 0;
}

/* Note the properties of a file. Files without offsets, such as pipes, are refused. */
static int describe(struct nvmeio_file *file, const struct statx *status, int flags)
{
    int access = flags & O_ACCMODE, error = 0;

    file->info.readable = access != O_WRONLY;
    file->info.writable = access != O_RDONLY;
    file->info.memory_align = 1;
    file->info.offset_align = 1;
    file->device_bytes = -1;
    file->block_bytes = NVMEIO_EDGE_BYTES;
    note_block(file, (uint64_t)sysconf(_SC_PAGESIZE));
    if (S_ISBLK(status->stx_mode)) {
        /* No inode here: one device may have several nodes. */
        file->info.device = makedev(status->stx_rdev_major, status->stx_rdev_minor);
        error = describe_device(file);
    } else if (S_ISREG(status->stx_mode)) {
        file->info.device = makedev(status->stx_dev_major, status->stx_dev_minor);
        file->info.inode = status->stx_ino;
        file->size_seen = (int64_t)status->stx_size;
        file->bytes_max = file->size_seen;
        describe_system(file);
    } else {
        error = S_ISDIR(status->stx_mode) ? -EISDIR : -EINVAL;
    }
    if (error)
        return error;
    file->inode = nvmeio_inode_get(file->info.device, file->info.inode);
    if (!file->inode)
        return -ENOMEM;
    file->losses = nvmeio_inode_losses(file->inode);
    return 0;
}

/* Find out whether O_DIRECT works where the kernel does not say so (btrfs, tmpfs, Linux
 * before 6.1). Every file system with O_DIRECT accepts whole pages, so try to read one.
 * If the file is open only for writing, the first transfer will show it. */
static int probe_direct(const struct nvmeio_file *file)
{
    void *page;
    int error = posix_memalign(&page, 4096, 4096);

    if (error)
        return 0;
    if (file->info.readable && pread(file->direct_fd, page, 4096, 0) < 0)
        error = -errno;
    free(page);
    /* Only these two errors mean that there is no O_DIRECT. Others may be transient, or
     * come from a bad sector, and must not disable it for as long as the file is
     * open. */
    return error == -EINVAL || error == -EOPNOTSUPP ? -EINVAL : 0;
}

/* Set the alignments for O_DIRECT. Returns an error if O_DIRECT does not work, or if
 * they are larger than those of our bounces. The kernel says by zeros that it would
 * accept the flag and use the page cache (ext4 with encryption or data=journal). A file
 * of which it says nothing may still use the page cache in part. */
static int find_alignment(struct nvmeio_file *file, const struct statx *status)
{
    uint32_t memory, offset;

    if (file->fills_holes)
        return -EINVAL;
    memcpy(&memory, (const char *)status + STATX_DIO_MEM_ALIGN_AT, sizeof(memory));
    memcpy(&offset, (const char *)status + STATX_DIO_OFFSET_ALIGN_AT, sizeof(offset));
    if (!(status->stx_mask & STATX_DIOALIGN)) {
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

/* Whether to fall back to the page cache after this error. If descriptors or memory ran
 * out, or a signal came, the error has nothing to do with O_DIRECT, so the caller must
 * get it. */
static bool may_fall_back(const struct nvmeio_file *file, int error)
{
    return !file->demanded && error != -EMFILE && error != -ENFILE &&
           error != -ENOMEM && error != -EINTR;
}

/* Make `fd`, which the file then closes, its descriptor with O_DIRECT. If that fails,
 * or if `fd` is the -errno of opening it, fall back to the page cache and return 0, or
 * return the error if may_fall_back() forbids that. */
static int use_direct(struct nvmeio_file *file, const struct statx *status, int fd)
{
    int error = fd;

    if (fd >= 0) {
        file->direct_fd = fd;
        error = find_alignment(file, status);
    }
    file->info.direct = error == 0;
    if (error == 0 || !may_fall_back(file, error))
        return error;
    if (fd < 0)
        return 0;
    if (atomic_load(&file->fd) < 0) {
        /* Open it anew: a FUSE server, such as unionfs, may keep the flag with which
         * its own file was opened. Where that fails, clear the flag. */
        int buffered;
        do
            buffered = reopen(fd, 0);
        while (buffered == -EINTR);
        if (buffered < 0 && fcntl(fd, F_SETFL, 0))
            return -errno;
        atomic_store(&file->fd, buffered < 0 ? fd : buffered);
    }
    if (atomic_load(&file->fd) != fd)
        close(fd);
    file->direct_fd = -1;
    return 0;
}

/* The umask may have removed permissions of a new file that opening it again needs. So
 * open the page cache's descriptor at once. Because we have just created the file, we
 * may grant the missing permissions for a moment, and only to its owner. */
static int open_without_rights(struct nvmeio_file *file, mode_t mode)
{
    mode_t needed =
        (file->info.readable ? S_IRUSR : 0) | (file->info.writable ? S_IWUSR : 0);

    if ((mode & needed) == needed)
        return 0;
    int fd = reopen(file->direct_fd, 0);
    if (fd == -EACCES && fchmod(file->direct_fd, mode | needed) == 0) {
        fd = reopen(file->direct_fd, 0);
        (void)fchmod(file->direct_fd, mode);
    }
    if (fd < 0)
        return may_fall_back(file, fd) ? 0 : fd;
    atomic_store(&file->fd, fd);
    return 0;
}

static struct nvmeio_file *file_new(enum nvmeio_direct direct)
{
    struct nvmeio_file *file = calloc(1, sizeof(*file));

    if (!file)
        return NULL;
    atomic_init(&file->references, 1);
    atomic_init(&file->remembered, 1);
    atomic_init(&file->fd, -1);
    file->direct_fd = -1;
    file->demanded = direct == NVMEIO_DIRECT_ALWAYS;
    return file;
}

/* Linux closes the descriptor whatever close(2) returns, so it is never repeated; EINTR
 * only means that it did not wait. */
static int close_descriptor(int fd)
{
    return fd >= 0 && close(fd) && errno != EINTR ? nvmeio_error_reported(-errno) : 0;
}

/* Close both descriptors. Returns the first error, if the file was open for writing. */
static int file_close(struct nvmeio_file *file)
{
    int first = close_descriptor(file->direct_fd);
    int second = close_descriptor(atomic_load(&file->fd));

    nvmeio_inode_put(file->inode);
    if (!file->info.writable)
        return 0;
    return first ? first : second;
}

/* Give a new descriptor, or the -errno of opening it, to a file, which closes it. */
static int own(struct nvmeio_file *file, int fd, struct statx *status)
{
    if (fd < 0)
        return fd;
    atomic_store(&file->fd, fd);
    return look_at(fd, status);
}

/* Open a path, and create it if the flags say so; *made is true if that was needed. Of
 * O_DIRECT, *existing keeps what the file system accepts. */
static int open_or_create(struct nvmeio_file *file, const char *path, int flags,
                          int *existing, struct statx *status, bool *made)
{
    bool must_make = (flags & O_CREAT) && (flags & O_EXCL);
    int error = must_make ? -ENOENT : own(file, open_existing(path, existing), status);

    /* Open another user's file with O_CREAT, as the caller asked. In folders like /tmp
     * the kernel may refuse that, and checks it only with this flag
     * (fs.protected_regular). */
    if (!(flags & O_CREAT) ||
        (error != -ENOENT && (error || status->stx_uid == geteuid())))
        return error;
    close_descriptor(atomic_exchange(&file->fd, -1));
    /* Without O_DIRECT: where it is not supported, the kernel would create the file and
     * then fail. */
    return own(file, create(path, flags, made), status);
}

/* Open a path as the first descriptor of a file. *made is true if this call created the
 * file, which the caller must then remove after an error. */
static int open_path(struct nvmeio_file *file, const char *path, int flags,
                     enum nvmeio_direct direct, bool *made)
{
    /* O_NONBLOCK: opening a FIFO must not hang. The flag is cleared below, because with
     * it io_uring would return EAGAIN instead of waiting for the disk. O_NOCTTY: a
     * terminal that is opened by mistake must not become the controlling one. O_TRUNC
     * is left to the caller, because an open that fails must not have emptied the
     * file. */
    int base = (flags & ~(O_TRUNC | O_DIRECT)) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    int existing = (base & ~O_CREAT) | (direct == NVMEIO_DIRECT_NEVER ? 0 : O_DIRECT);
    struct statx status;

    int error = open_or_create(file, path, base, &existing, &status, made);
    if (error)
        return error == -ENXIO ? -EINVAL : error;
    error = describe(file, &status, flags);
    if (error)
        return error;
    int fd = atomic_load(&file->fd);
    bool has_direct = existing & O_DIRECT && fcntl(fd, F_SETFL, O_DIRECT) == 0;
    if (!has_direct && fcntl(fd, F_SETFL, 0))
        return -errno;
    if (direct == NVMEIO_DIRECT_NEVER)
        return 0;
    if (has_direct)
        atomic_store(&file->fd, -1);
    error = use_direct(file, &status, has_direct ? fd : -EINVAL);
    if (error == 0 && *made && file->direct_fd >= 0)
        error = open_without_rights(file, status.stx_mode);
    return error;
}

int nvmeio_file_open(const char *path, int flags, enum nvmeio_direct direct,
                     struct nvmeio_file **result)
{
    struct nvmeio_file *file = file_new(direct);
    bool made = false;

    if (!file)
        return -ENOMEM;
    int error = open_path(file, path, flags, direct, &made);
    if (error == 0 && (flags & O_TRUNC) && file->device_bytes < 0)
        error = nvmeio_file_truncate(file, 0);
    if (error) {
        if (made)
            remove_created(path, nvmeio_file_any_fd(file));
        nvmeio_file_release(file);
        return error;
    }
    *result = file;
    return 0;
}

/* Set fd and direct_fd from a duplicate of the caller's descriptor. It shares the
 * caller's open file description, whose flags must not change. So if O_DIRECT or
 * O_NONBLOCK is in the way, open the file anew. */
static int duplicate(struct nvmeio_file *file, int fd, int flags,
                     enum nvmeio_direct direct)
{
    struct statx status;
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    int error = own(file, copy < 0 ? -errno : copy, &status);

    if (error == 0)
        error = describe(file, &status, flags);
    if (error)
        return error;
    int own = copy;
    bool shared =
        direct != NVMEIO_DIRECT_NEVER && (flags & (O_DIRECT | O_NONBLOCK)) == O_DIRECT;
    if (flags & (O_DIRECT | O_NONBLOCK)) {
        own = reopen(copy, 0);
        if (own < 0)
            return own;
        atomic_store(&file->fd, own);
        if (!shared)
            close(copy);
    }
    if (direct == NVMEIO_DIRECT_NEVER)
        return 0;
    return use_direct(file, &status, shared ? copy : reopen(own, O_DIRECT));
}

int nvmeio_file_dup(int fd, enum nvmeio_direct direct, struct nvmeio_file **result)
{
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return -errno;
    if (flags & O_PATH)
        return -EBADF;
    if (flags & O_APPEND)
        return -EINVAL;
    struct nvmeio_file *file = file_new(direct);
    if (!file)
        return -ENOMEM;
    int error = duplicate(file, fd, flags, direct);
    if (error) {
        nvmeio_file_release(file);
        return error;
    }
    *result = file;
    return 0;
}

void nvmeio_file_retain(struct nvmeio_file *file)
{
    atomic_fetch_add_explicit(&file->references, 1, memory_order_relaxed);
}

int nvmeio_file_release(struct nvmeio_file *file)
{
    /* Acquire and release: the last owner sees everything that the others did. */
    if (!file ||
        atomic_fetch_sub_explicit(&file->references, 1, memory_order_acq_rel) != 1)
        return 0;
    int error = file_close(file);
    nvmeio_file_forget(file);
    return error;
}

void nvmeio_file_remember(struct nvmeio_file *file)
{
    atomic_fetch_add_explicit(&file->remembered, 1, memory_order_relaxed);
}

void nvmeio_file_forget(struct nvmeio_file *file)
{
    if (file &&
        atomic_fetch_sub_explicit(&file->remembered, 1, memory_order_acq_rel) == 1)
        free(file);
}

bool nvmeio_file_is_open(const struct nvmeio_file *file)
{
    return atomic_load_explicit(&file->references, memory_order_relaxed) > 0;
}

bool nvmeio_file_try_retain(struct nvmeio_file *file)
{
    unsigned count = atomic_load_explicit(&file->references, memory_order_relaxed);

    while (count > 0)
        if (atomic_compare_exchange_weak_explicit(&file->references, &count, count + 1,
                                                  memory_order_relaxed,
                                                  memory_order_relaxed))
            return true;
    return false;
}

bool nvmeio_file_release_shared(struct nvmeio_file *file)
{
    unsigned count = atomic_load_explicit(&file->references, memory_order_relaxed);

    while (count > 1)
        if (atomic_compare_exchange_weak_explicit(&file->references, &count, count - 1,
                                                  memory_order_release,
                                                  memory_order_relaxed))
            return true;
    return false;
}

bool nvmeio_file_is_slow_to_close(const struct nvmeio_file *file)
{
    struct stat status;

    if (!file->local)
        return true;
    if (atomic_load_explicit(&file->bytes_max, memory_order_relaxed) <=
        FREED_AT_ONCE_BYTES)
        return false;
    return fstat(nvmeio_file_any_fd(file), &status) == 0 && status.st_nlink == 0 &&
           status.st_blocks > FREED_AT_ONCE_BYTES / 512;
}

void nvmeio_file_get_info(const struct nvmeio_file *file, struct nvmeio_file_info *info)
{
    *info = file->info;
    if (atomic_load_explicit(&file->direct_refused, memory_order_relaxed))
        info->direct = false;
}

/* Give up O_DIRECT, because the file cannot be opened again: its permissions have
 * changed, or there is no /proc. Without the flag on its only description, the page
 * cache serves all transfers. */
static int turn_to_page_cache(struct nvmeio_file *file)
{
    int fd = fcntl(file->direct_fd, F_DUPFD_CLOEXEC, 0);

    if (fd < 0)
        return -errno;
    if (fcntl(file->direct_fd, F_SETFL, 0)) {
        close(fd);
        return -EACCES;
    }
    atomic_store_explicit(&file->direct_refused, true, memory_order_relaxed);
    return fd;
}

int nvmeio_error_reported(int error)
{
    return error == -ENODATA || error == -ECANCELED ? -EIO : error;
}

/* Return the page cache's descriptor, and open it if necessary. If that fails and
 * `may_turn` is set, give up O_DIRECT instead. If several threads do this at once, the
 * first descriptor stays. */
static int open_buffered(struct nvmeio_file *file, bool may_turn)
{
    int fd = atomic_load_explicit(&file->fd, memory_order_acquire), none = -1;

    if (fd >= 0)
        return fd;
    do
        fd = reopen(file->direct_fd, 0);
    while (fd == -EINTR);
    if (fd < 0 && may_turn && may_fall_back(file, fd))
        fd = turn_to_page_cache(file);
    if (fd < 0)
        return nvmeio_error_reported(fd);
    /* Opening may block, so forks are held back only during the store. */
    nvmeio_fork_hold();
    bool first = atomic_compare_exchange_strong(&file->fd, &none, fd);
    nvmeio_fork_resume();
    if (first)
        return fd;
    close(fd);
    return none;
}

int nvmeio_file_fd(struct nvmeio_file *file)
{
    return open_buffered(file, true);
}

bool nvmeio_file_try_buffered(struct nvmeio_file *file)
{
    return open_buffered(file, false) >= 0;
}

int64_t nvmeio_cached_pages(int fd, int64_t offset, size_t size)
{
    struct cachestat_range part = {(uint64_t)offset, size};
    struct cachestat_result found;

    if (size == 0) /* to the kernel, 0 means the rest of the file */
        return 0;
    if (syscall(SYS_cachestat, fd, &part, &found, 0L, 0L, 0L))
        return -errno;
    return (int64_t)found.pages;
}

int nvmeio_file_is_cached(const struct nvmeio_file *file, int64_t offset, size_t size)
{
    int64_t page_bytes = sysconf(_SC_PAGESIZE);
    int64_t first = offset / page_bytes;
    int64_t last = (offset + (int64_t)size - 1) / page_bytes;

    if (!file->local || file->device_bytes >= 0 || file->in_memory || file->demanded)
        return 0;
    int64_t pages = nvmeio_cached_pages(nvmeio_file_any_fd(file), offset, size);
    return pages < 0 ? (int)pages : pages == last - first + 1;
}

/* The blocks that drives have read for this thread. */
static long blocks_read(void)
{
    struct rusage usage = {0};

    (void)getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_inblock;
}

int nvmeio_try_cached(int fd, int64_t offset)
{
    char byte;
    struct iovec place = {&byte, 1};
    long before = blocks_read();
    ssize_t count = preadv2(fd, &place, 1, offset, RWF_NOWAIT);

    if (count < 0)
        return errno == EAGAIN ? 0 : -errno;
    /* A virtual drive may have read the page before the call returns. */
    return count == 1 && blocks_read() == before;
}

bool nvmeio_file_has_bytes(struct nvmeio_file *file, const int64_t *offsets,
                           size_t count)
{
    size_t found = 0;

    if (nvmeio_now_ns() <
            atomic_load_explicit(&file->cold_until_ns, memory_order_relaxed) ||
        !nvmeio_file_try_buffered(file))
        return false;
    int fd = atomic_load_explicit(&file->fd, memory_order_acquire);
    /* Otherwise the kernel would read ahead of a missing byte. */
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    while (found < count && nvmeio_try_cached(fd, offsets[found]) == 1)
        found++;
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_NORMAL);
    if (found < count)
        atomic_store_explicit(&file->cold_until_ns, nvmeio_now_ns() + COLD_NS,
                              memory_order_relaxed);
    return found == count;
}

/* The same as nvmeio_file_warmth(), if the kernel does not say what is cached. The
 * places are other ones each time, because a page that was tried is there the next
 * time. */
static enum nvmeio_warmth guess_warmth(struct nvmeio_file *file, int64_t offset,
                                       size_t size)
{
    uint64_t random = (uint64_t)nvmeio_now_ns();
    int64_t places[WARMTH_SAMPLES];

    for (size_t i = 0; i < WARMTH_SAMPLES; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        places[i] = offset + (int64_t)((random >> 33) % size);
    }
    return nvmeio_file_has_bytes(file, places, WARMTH_SAMPLES) ? NVMEIO_HOT
                                                               : NVMEIO_COLD;
}

/* Whether to look up a small range at all: not always if many in a row were cold. */
static bool is_worth_a_look(struct nvmeio_file *file)
{
    unsigned cold = atomic_load_explicit(&file->cold_ranges, memory_order_relaxed);

    if (cold < COLD_RANGES)
        return true;
    atomic_store_explicit(&file->cold_ranges, cold + 1, memory_order_relaxed);
    return cold % COLD_RANGES_A_LOOK == 0;
}

static void note_cold(struct nvmeio_file *file, bool is_cold)
{
    unsigned cold = atomic_load_explicit(&file->cold_ranges, memory_order_relaxed);

    if (!is_cold)
        atomic_store_explicit(&file->cold_ranges, 0, memory_order_relaxed);
    else if (cold < COLD_RANGES)
        atomic_store_explicit(&file->cold_ranges, cold + 1, memory_order_relaxed);
}

enum nvmeio_warmth nvmeio_file_warmth(struct nvmeio_file *file, int64_t offset,
                                      size_t size)
{
    size_t samples = (size + WARMTH_BYTES - 1) / WARMTH_BYTES;
    enum nvmeio_warmth warmth = NVMEIO_COLD;

    if (samples == 1 && !is_worth_a_look(file))
        return NVMEIO_COLD;
    if (samples > WARMTH_SAMPLES)
        samples = WARMTH_SAMPLES;
    size_t step = size / samples;
    for (size_t i = 0; i < samples && warmth == NVMEIO_COLD; i++) {
        /* A small range is looked up whole, of a large one a byte in the middle of each
         * part. */
        int64_t at = offset + (int64_t)(samples > 1 ? i * step + step / 2 : 0);
        int found = nvmeio_file_is_cached(file, at, samples > 1 ? 1 : size);
        if (found < 0)
            return guess_warmth(file, offset, size);
        if (found > 0)
            warmth = samples > 1 ? NVMEIO_WARM : NVMEIO_HOT;
    }
    if (samples == 1)
        note_cold(file, warmth == NVMEIO_COLD);
    return warmth == NVMEIO_COLD || nvmeio_file_try_buffered(file) ? warmth
                                                                   : NVMEIO_COLD;
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

void nvmeio_file_write_last(struct nvmeio_file *file)
{
    atomic_store_explicit(&file->writes_last, true, memory_order_relaxed);
}

int64_t nvmeio_file_size(const struct nvmeio_file *file)
{
    struct stat status;

    if (file->device_bytes >= 0)
        return file->device_bytes;
    if (fstat(nvmeio_file_any_fd(file), &status))
        return nvmeio_error_reported(-errno);
    return status.st_size;
}

void nvmeio_file_note_end(struct nvmeio_file *file, int64_t end)
{
    if (end > atomic_load_explicit(&file->bytes_max, memory_order_relaxed))
        atomic_store_explicit(&file->bytes_max, end, memory_order_relaxed);
}

int64_t nvmeio_file_size_for_read(struct nvmeio_file *file, int64_t end)
{
    int64_t seen = atomic_load_explicit(&file->size_seen, memory_order_relaxed);

    if (end <= seen)
        return seen;
    seen = nvmeio_file_size(file);
    atomic_store_explicit(&file->size_seen, seen, memory_order_relaxed);
    return seen;
}

int nvmeio_file_truncate(struct nvmeio_file *file, int64_t size)
{
    int result;
    do
        result = ftruncate(nvmeio_file_any_fd(file), size);
    while (result && errno == EINTR);
    atomic_store_explicit(&file->size_seen, 0, memory_order_relaxed);
    return result ? -errno : 0;
}

void nvmeio_file_geometry(const struct nvmeio_file *file,
                          struct nvmeio_geometry *geometry)
{
    geometry->direct = file->info.direct && !atomic_load_explicit(&file->direct_refused,
                                                                  memory_order_relaxed);
    geometry->memory_align = file->info.memory_align;
    geometry->offset_align = file->info.offset_align;
    geometry->edge = file->info.offset_align > file->block_bytes
                         ? file->info.offset_align
                         : file->block_bytes;
}

static size_t first_difference(const char *a, const char *b, size_t size)
{
    size_t i = 0;
    while (i < size && a[i] == b[i])
        i++;
    return i;
}

/* Return whether to try again after an error of pread(2). Sleeps 1 ms before that if
 * the error is EAGAIN or EBUSY, and gives up after a second of them. */
static bool should_retry(int error, unsigned *tries)
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
    int fd = nvmeio_file_fd(file);
    size_t done = 0;
    unsigned tries = 0;
    int result = 0;

    if (fd < 0)
        return fd;
    char *memory = malloc(COMPARE_BYTES);
    if (!memory)
        return -ENOMEM;
    while (done < size && result == 0) {
        size_t left = size - done;
        ssize_t got = pread(fd, memory, left < COMPARE_BYTES ? left : COMPARE_BYTES,
                            offset + (int64_t)done);
        if (got < 0 && should_retry(errno, &tries))
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
