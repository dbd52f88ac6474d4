/* file.h -- an open file, with and without O_DIRECT, and its alignment.
 *
 * Files are reference-counted: open and dup return a reference that the caller
 * releases.  Requests hold their own.  All functions are thread-safe. */
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
    uint32_t memory_align; /* of addresses, for O_DIRECT; 1 if direct is false */
    uint32_t offset_align; /* of offsets and lengths; 1 if direct is false */
    uint64_t device;       /* st_dev and st_ino identify the file; for a block device */
    uint64_t inode;        /* st_rdev and 0 */
};

/* Open `path` with open(2) `flags`: an access mode and O_CREAT, O_EXCL, O_TRUNC.
 * Adds O_CLOEXEC; creates files with 0666 & ~umask.  Returns 0; -EINVAL if the path is
 * not a regular file or block device (-EISDIR for a directory), or if direct is
 * NVMEIO_DIRECT_ALWAYS and the file system refuses O_DIRECT; -EINTR if a signal
 * interrupted it, as on a slow network file system: try again. */
NVMEIO_API int nvmeio_file_open(const char *path, int flags, enum nvmeio_direct direct,
                                struct nvmeio_file **file);

/* The same for an open descriptor, which is duplicated and never changed.  Refuses
 * O_APPEND with -EINVAL.  Opens the file anew to add or remove O_DIRECT, and returns an
 * errno of open(2), such as -EACCES, if that is not permitted.  With NVMEIO_DIRECT_AUTO
 * a file that cannot get O_DIRECT uses the page cache. */
NVMEIO_API int nvmeio_file_dup(int fd, enum nvmeio_direct direct,
                               struct nvmeio_file **file);

/* Take another reference, for nvmeio_file_release(). */
NVMEIO_API void nvmeio_file_retain(struct nvmeio_file *file);

/* Release a reference; the last one closes the file.  Returns the error of close(2) for
 * a file that was open for writing, such as -ENOSPC, -EDQUOT or -EIO: its bytes may be
 * lost.  Returns 0 while there are other references, for files that were only open for
 * reading, and for NULL.  The file is closed in any case. */
NVMEIO_API int nvmeio_file_release(struct nvmeio_file *file);

/* Remember a file without keeping it open: it is closed with its last reference, but
 * its memory stays until nvmeio_file_forget(). */
NVMEIO_API void nvmeio_file_remember(struct nvmeio_file *file);

/* Undo nvmeio_file_remember(). */
NVMEIO_API void nvmeio_file_forget(struct nvmeio_file *file);

/* Take another reference to a file that the caller remembers, unless it is closed. */
NVMEIO_API bool nvmeio_file_try_retain(struct nvmeio_file *file);

/* Whether a file that the caller remembers has references. */
NVMEIO_API bool nvmeio_file_is_open(const struct nvmeio_file *file);

/* Store what the file permits and needs.  `direct` becomes false if the file has to
 * give up O_DIRECT later. */
NVMEIO_API void nvmeio_file_get_info(const struct nvmeio_file *file,
                                     struct nvmeio_file_info *info);

/* Return the descriptor without O_DIRECT, which is opened on first need, or -errno.
 * It is closed with the file. */
NVMEIO_API int nvmeio_file_fd(struct nvmeio_file *file);

/* Return 1 if `path` leads to this file now, else 0; or -errno of stat(2).  A reference
 * is not needed, if the caller remembers the file. */
NVMEIO_API int nvmeio_file_is_at(const struct nvmeio_file *file, const char *path);

/* Let later writes to a file come last in a handle: while there is anything else to do,
 * they get one byte in nine, until a thread waits for them. */
NVMEIO_API void nvmeio_file_write_last(struct nvmeio_file *file);

/* Return the size in bytes now, also of a block device, or -errno. */
NVMEIO_API int64_t nvmeio_file_size(const struct nvmeio_file *file);

/* Set the size in bytes, by ftruncate(2): new bytes read as zeros.  Returns 0 or
 * -errno: -EINVAL if the file is not open for writing. */
NVMEIO_API int nvmeio_file_truncate(struct nvmeio_file *file, int64_t size);

/* Return how many pages of a part of an open file are in the page cache, by
 * cachestat(2), which takes 0.1 us if none is and up to 1 ms per GiB; -ENOSYS before
 * Linux 6.5; -EPERM for a file that this user neither owns nor may write to. */
NVMEIO_API int64_t nvmeio_cached_pages(int fd, int64_t offset, size_t size);

/* Read one byte of an open file with RWF_NOWAIT.  Returns 1 if it was in the page
 * cache; 0 if not, and then the kernel begins to read its page; or -errno: -EOPNOTSUPP
 * if the file system does not say. */
NVMEIO_API int nvmeio_try_cached(int fd, int64_t offset);

/* Compare with an ordinary read.  Returns 0 if equal; 1 if not, with the first
 * difference in *position, relative to offset; -ENODATA at the end of the file; or
 * -errno. */
NVMEIO_API int nvmeio_file_compare(struct nvmeio_file *file, int64_t offset,
                                   const void *address, size_t size, size_t *position);

#ifdef __cplusplus
}
#endif
#endif
