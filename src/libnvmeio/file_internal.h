/* file_internal.h -- what the library knows of an open file. */
#ifndef NVMEIO_FILE_INTERNAL_H
#define NVMEIO_FILE_INTERNAL_H

#include <nvmeio/file.h>
#include <stdatomic.h>

#include "align.h"
#include "ends.h"

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

    /* NULL where nothing is cut back: of a block device, and what is read alone. */
    struct nvmeio_ends *ends;
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

/* Note that a write reaches to `end`, before it does. */
void nvmeio_file_note_end(struct nvmeio_file *file, int64_t end);

/* A write to a file that is ours reached from `kept` to `end` and has failed: cut back
 * what it alone has made longer.  Nothing is lost that others have written.  Of this
 * process none is cut that was noted, whichever open it comes through; others, and who
 * writes past nvmeio, have made the file longer than `end`, but for those who do so in
 * the very moment of the cut. */
void nvmeio_file_cut_back(struct nvmeio_file *file, int64_t kept, int64_t end);

#endif
