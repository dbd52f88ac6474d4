/* file.h -- an open file, with and without O_DIRECT, and its alignment.
 *
 * A file is counted: open and dup give one reference, which the caller
 * releases.  A request holds its own.  All functions are thread-safe. */
#ifndef NVMEIO_FILE_H
#define NVMEIO_FILE_H

#include <nvmeio/base.h>

#ifdef __cplusplus
extern "C" {
#endif

struct nvmeio_file;

struct nvmeio_file_info {
    bool direct; /* blocks may go to the device without the page cache */
    bool readable;
    bool writable;
    uint32_t memory_align; /* of addresses, for O_DIRECT; 1 where direct is false */
    uint32_t offset_align; /* of offsets and lengths; 1 where direct is false */
    uint64_t device;       /* st_dev and st_ino: the identity of the file; of a block */
    uint64_t inode;        /* device st_rdev and 0 */
};

/* Open `path` with open(2) `flags`: an access mode and O_CREAT, O_EXCL, O_TRUNC.
 * O_CLOEXEC is added, files are created 0666 & ~umask.  -EINVAL where the path is
 * no regular file or block device (-EISDIR for a directory), or where direct is
 * NVMEIO_DIRECT_ALWAYS and the file system refuses O_DIRECT.  -EINTR where a signal
 * came in between, as on a slow network file system: try again. */
NVMEIO_API int nvmeio_file_open(const char *path, int flags, enum nvmeio_direct direct,
                                struct nvmeio_file **file);

/* The same for an open descriptor, which is duplicated and never changed; O_APPEND is
 * refused with -EINVAL.  The file is opened anew where it has O_DIRECT, and for
 * O_DIRECT where it has not: an errno of open(2), such as -EACCES, where that is not
 * allowed. With NVMEIO_DIRECT_AUTO a file that cannot get O_DIRECT uses the page cache.
 */
NVMEIO_API int nvmeio_file_dup(int fd, enum nvmeio_direct direct,
                               struct nvmeio_file **file);

NVMEIO_API void nvmeio_file_retain(struct nvmeio_file *file);
NVMEIO_API void nvmeio_file_release(struct nvmeio_file *file);

NVMEIO_API void nvmeio_file_get_info(const struct nvmeio_file *file,
                                     struct nvmeio_file_info *info);

/* The descriptor without O_DIRECT, which is opened when it is first needed: -errno
 * where that fails.  Lent: closed with the file. */
NVMEIO_API int nvmeio_file_fd(struct nvmeio_file *file);

/* Whether `path` leads to this very file now: 1, 0, or -errno of stat(2). */
NVMEIO_API int nvmeio_file_is_at(const struct nvmeio_file *file, const char *path);

/* The size in bytes now, or -errno.  Block devices have one too. */
NVMEIO_API int64_t nvmeio_file_size(const struct nvmeio_file *file);

NVMEIO_API int nvmeio_file_truncate(struct nvmeio_file *file, int64_t size);

/* How many pages of a part of an open file the page cache has, by cachestat(2), which
 * takes 0.1 us where it has none and up to 1 ms a GiB: -ENOSYS before Linux 6.5, -EPERM
 * for a file that this user neither owns nor may write to. */
NVMEIO_API int64_t nvmeio_cached_pages(int fd, int64_t offset, size_t size);

/* Compare with an ordinary read: 0 if equal, 1 if not (the first difference is in
 * *position, relative to offset), -ENODATA at the end of the file, or -errno. */
NVMEIO_API int nvmeio_file_compare(struct nvmeio_file *file, int64_t offset,
                                   const void *address, size_t size, size_t *position);

#ifdef __cplusplus
}
#endif
#endif
