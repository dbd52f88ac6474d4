/* file_internal.h -- what the library knows of an open file. */
#ifndef NVMEIO_FILE_INTERNAL_H
#define NVMEIO_FILE_INTERNAL_H

#include <nvmeio/file.h>
#include <pthread.h>
#include <stdatomic.h>

#include "align.h"

/* Larger alignments than these are left to the page cache: bounces are aligned to the
 * first and are multiples of the second. */
#define NVMEIO_MEMORY_ALIGN_MAX 4096u
#define NVMEIO_OFFSET_ALIGN_MAX 65536u

struct nvmeio_file {
    atomic_uint references;
    int fd;         /* through the page cache */
    int direct_fd;  /* with O_DIRECT, or -1 */
    bool demanded;  /* NVMEIO_DIRECT_ALWAYS: no falling back to the page cache */
    bool fuse;      /* on a FUSE file system: see nvmeio_block.plain */
    bool in_memory; /* on tmpfs: there is no device that minds what pages it gets */
    struct nvmeio_file_info info;
    int64_t device_bytes; /* the size of a block device, -1 for a regular file */

    /* The device refused a direct transfer that should have been right (EINVAL): from
     * then on the file goes through the page cache.  Relaxed: a hint, seen sooner or
     * later. */
    atomic_bool direct_refused;

    /* How far the writes of this open reach: the furthest one, and the furthest of all
     * others.  They only grow.  The lock is held over noting them and cutting back, and
     * taken by the process that opened the file alone: no child can inherit it held. */
    pthread_mutex_t ends;
    int64_t end_max;
    int64_t end_second;
    uint32_t generation; /* of the process that opened it */
};

/* What plans for this file are made from, but for the handle's bounce policy. */
void nvmeio_file_geometry(const struct nvmeio_file *file,
                          struct nvmeio_geometry *geometry);

/* Reserve `size` bytes from `offset` on, and make the file that long.  0 also where the
 * file system cannot, or a signal came. */
int nvmeio_file_preallocate(struct nvmeio_file *file, int64_t offset, int64_t size);

/* Whether the length is ours to set: this open, in this process, made the file.  Not in
 * a forked child, who does not know what its parent writes. */
bool nvmeio_file_is_ours(const struct nvmeio_file *file);

/* Note that a write reaches to `end`, before it does.  Of files that are ours. */
void nvmeio_file_note_end(struct nvmeio_file *file, int64_t end);

/* A write to a file that is ours reached from `kept` to `end` and has failed: cut back
 * what it alone has made longer.  Nothing is lost that others have written: not by this
 * open, for `end_second` is kept, nor by others, for they make the file longer. */
void nvmeio_file_cut_back(struct nvmeio_file *file, int64_t kept, int64_t end);

#endif
