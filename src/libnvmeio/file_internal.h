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
    int fd;        /* through the page cache */
    int direct_fd; /* with O_DIRECT, or -1 */
    bool demanded; /* NVMEIO_DIRECT_ALWAYS: no falling back to the page cache */
    struct nvmeio_file_info info;
    int64_t device_bytes; /* the size of a block device, -1 for a regular file */

    /* The device refused a direct transfer that should have been right (EINVAL): from
     * then on the file goes through the page cache.  Relaxed: a hint, seen sooner or
     * later. */
    atomic_bool direct_refused;

    /* The first request that writes owns the making of the file: it alone may
     * preallocate it and give the space back.  Claimed by exchange. */
    atomic_bool creation_open;
    atomic_uint writers; /* requests that ever wrote here */
};

/* What plans for this file are made from, but for the handle's bounce policy. */
void nvmeio_file_geometry(const struct nvmeio_file *file,
                          struct nvmeio_geometry *geometry);

/* Reserve [0, size) and make it the file's size.  0 also where the file system cannot.
 */
int nvmeio_file_preallocate(struct nvmeio_file *file, int64_t size);

#endif
