/* file_internal.h -- what the library knows of an open file. */
#ifndef NVMEIO_FILE_INTERNAL_H
#define NVMEIO_FILE_INTERNAL_H

#include <nvmeio/file.h>
#include <stdatomic.h>

#include "align.h"

/* Larger alignments than these are left to the page cache: bounces are aligned to the
 * first and are multiples of the second. */
#define NVMEIO_MEMORY_ALIGN_MAX 4096u
#define NVMEIO_OFFSET_ALIGN_MAX 65536u

struct nvmeio_file {
    atomic_uint references;

    /* There is always one of them, and what they lead to is the same. */
    atomic_int fd; /* through the page cache, or -1: nvmeio_file_fd() opens it */
    int direct_fd; /* with O_DIRECT, or -1 */

    bool demanded;  /* NVMEIO_DIRECT_ALWAYS: no falling back to the page cache */
    bool fuse;      /* on a FUSE file system: see nvmeio_block.plain */
    bool in_memory; /* on tmpfs: there is no device that minds what pages it gets */
    bool local;     /* a block device, or on a file system that is known to be of here:
                     * not on FUSE, NFS and the like, nor on overlayfs */
    struct nvmeio_file_info info;
    int64_t device_bytes; /* the size of a block device, -1 for a regular file */

    /* The device refused a direct transfer that should have been right (EINVAL): from
     * then on the file goes through the page cache.  Relaxed: a hint, seen sooner or
     * later. */
    atomic_bool direct_refused;
};

/* For what is the same by either descriptor. */
static inline int nvmeio_file_any_fd(const struct nvmeio_file *file)
{
    int fd = atomic_load_explicit(&file->fd, memory_order_acquire);
    return fd >= 0 ? fd : file->direct_fd;
}

/* Open the page-cache descriptor, where it is not open yet: 0 or -errno. */
static inline int nvmeio_file_need_buffered(struct nvmeio_file *file)
{
    int fd = nvmeio_file_fd(file);
    return fd < 0 ? fd : 0;
}

/* Whether the page cache has all of a part of a file, which is not empty, and may serve
 * it: of a regular file on a local file system, where all that is written shows in it.
 * It does not where the bytes come from elsewhere (FUSE, NFS), nor in that of a disk of
 * which partitions are written to. */
bool nvmeio_file_is_cached(const struct nvmeio_file *file, int64_t offset, size_t size);

/* Open the page-cache descriptor, where it is not open yet, unless that would take
 * O_DIRECT from the file: whether it is there. */
bool nvmeio_file_try_buffered(struct nvmeio_file *file);

/* What plans for this file are made from, but for the handle's bounce policy. */
void nvmeio_file_geometry(const struct nvmeio_file *file,
                          struct nvmeio_geometry *geometry);

/* Drop a reference, unless it is the last: then nothing is done, and false returned. */
bool nvmeio_file_release_shared(struct nvmeio_file *file);

/* What an outcome says for an error of the system's, -errno.  With O_DIRECT the kernel
 * says ENODATA of a medium that cannot be read or written (BLK_STS_MEDIUM in its
 * block/blk-core.c), and a server of FUSE may say what it likes.  In an outcome one
 * means the end of the file, the other that cancel() did it: then it is -EIO. */
int nvmeio_error_told(int error);

#endif
