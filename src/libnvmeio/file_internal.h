/* file_internal.h -- what the library knows about an open file. */
#ifndef NVMEIO_FILE_INTERNAL_H
#define NVMEIO_FILE_INTERNAL_H

#include <nvmeio/file.h>
#include <stdatomic.h>

#include "align.h"

/* Files with larger alignments use the page cache. Bounces are aligned to the first,
 * and their sizes are multiples of the second. */
#define NVMEIO_MEMORY_ALIGN_MAX 4096u
#define NVMEIO_OFFSET_ALIGN_MAX 65536u

struct nvmeio_inode;

struct nvmeio_file {
    atomic_uint references;
    /* How many remember it, and one for all references. */
    atomic_uint remembered;

    struct nvmeio_inode *inode; /* shared by all open files of the same inode */
    uint32_t losses;            /* of the inode, when this file was opened */

    /* At least one of the two is open. Both refer to the same file. */
    atomic_int fd; /* through the page cache, or -1 until nvmeio_file_fd() opens it */
    int direct_fd; /* with O_DIRECT, or -1 */

    bool demanded; /* NVMEIO_DIRECT_ALWAYS: never use the page cache instead */
    bool aside;    /* on FUSE, virtiofs or 9p: see nvmeio_block.aside */
    bool
        fills_holes; /* the kernel writes to holes through the page cache in any case */
    bool in_memory;  /* on tmpfs: there is no device that prefers huge pages */
    /* A block device, or on a file system that is known to be local: not on FUSE, NFS
     * or the like, nor on overlayfs. */
    bool local;
    struct nvmeio_file_info info;
    int64_t device_bytes; /* the size of a block device, -1 for a regular file */
    /* The larger of a page and, on a local file system or a block device, a block. */
    uint32_t block_bytes;

    /* The size when it was last looked up. Relaxed: it is only a hint. */
    _Atomic int64_t size_seen;
    /* The larger of the size at opening and of the ends of writes. Relaxed, too. */
    _Atomic int64_t bytes_max;

    /* See nvmeio_file_write_last(). Relaxed, too. */
    atomic_bool writes_last;

    /* How many small ranges in a row the page cache did not have. Relaxed, too. */
    _Atomic unsigned cold_ranges;
    /* nvmeio_file_has_bytes() says no until then. Relaxed, too. */
    _Atomic int64_t cold_until_ns;

    /* A direct transfer was refused although it was aligned (EINVAL, EOPNOTSUPP), or
     * O_DIRECT had to be given up. From then on the file uses the page cache. Relaxed:
     * it is only a hint. */
    atomic_bool direct_refused;
};

/* Return either descriptor, for calls that do not care which. */
static inline int nvmeio_file_any_fd(const struct nvmeio_file *file)
{
    int fd = atomic_load_explicit(&file->fd, memory_order_acquire);
    return fd >= 0 ? fd : file->direct_fd;
}

/* Open the page cache's descriptor, if it is not open yet. Returns 0 or -errno. */
static inline int nvmeio_file_need_buffered(struct nvmeio_file *file)
{
    int fd = nvmeio_file_fd(file);
    return fd < 0 ? fd : 0;
}

/* Whether the page cache holds all of a non-empty range, and may serve it: 1 or 0, or
 * -errno if the kernel does not say (cachestat(2) is not there before Linux 6.5, and
 * refused to who may not write the file). It may serve regular files on local file
 * systems, because it shows every write to them. It may be out of date for files whose
 * bytes come from elsewhere (FUSE, NFS), and for a disk whose partitions are written
 * to. */
int nvmeio_file_is_cached(const struct nvmeio_file *file, int64_t offset, size_t size);

/* Find out by reading whether it holds all of some bytes. The kernel reads the page of
 * the first that is missing, so nothing is tried again for a while. */
bool nvmeio_file_has_bytes(struct nvmeio_file *file, const int64_t *offsets,
                           size_t count);

/* How much of a range the page cache seems to have, and may serve. */
enum nvmeio_warmth {
    NVMEIO_COLD,
    NVMEIO_WARM, /* a part, or all: each block must be looked up */
    NVMEIO_HOT,  /* all */
};

/* Find that out from up to 16 samples; a range of at most 1 MiB is looked up whole. If
 * it is not cold, the page cache's descriptor is open. */
enum nvmeio_warmth nvmeio_file_warmth(struct nvmeio_file *file, int64_t offset,
                                      size_t size);

/* Open the page cache's descriptor, if it is not open yet, without ever giving up
 * O_DIRECT for it. Returns whether it is open. */
bool nvmeio_file_try_buffered(struct nvmeio_file *file);

/* The size of the file, or -errno; for a read up to `end`, one that was seen before is
 * enough. If the file has become shorter since, the read meets its end. */
int64_t nvmeio_file_size_for_read(struct nvmeio_file *file, int64_t end);

/* Note that a write ends there. */
void nvmeio_file_note_end(struct nvmeio_file *file, int64_t end);

/* Set all fields of a geometry except `bounce`, which is the handle's. */
void nvmeio_file_geometry(const struct nvmeio_file *file,
                          struct nvmeio_geometry *geometry);

/* Drop a reference and return true, unless it is the last one. The caller must drop the
 * last one without the queue's mutex, because that closes the file. */
bool nvmeio_file_release_shared(struct nvmeio_file *file);

/* Whether closing its last descriptor may take long: a server writes back what was
 * written, or the file has no name any more, and the kernel frees many blocks. */
bool nvmeio_file_is_slow_to_close(const struct nvmeio_file *file);

/* Return the error that an outcome reports for -errno from the system. In an outcome,
 * -ENODATA means the end of the file, and -ECANCELED means nvmeio_request_cancel(). But
 * with O_DIRECT the kernel returns ENODATA for an unreadable medium (BLK_STS_MEDIUM in
 * its block/blk-core.c), and a FUSE server may return either. So both become -EIO. */
int nvmeio_error_reported(int error);

#endif
