/* registered.h -- what an io_uring has registered: huge pages of the pool, and files.
 *
 * The kernel then need not look up and pin what each block uses, which takes 11 % of
 * the CPU time of those of 4 KiB (docs/design.md).  Registering costs system calls of
 * its own, so that it is done for what many small blocks have used already.  Nothing
 * here fails: what cannot be registered is used as it is, as is all before Linux 6.14.
 *
 * A file is registered only while blocks of it are in flight, for it would stay open;
 * pool memory until other memory needs its place. */
#ifndef NVMEIO_REGISTERED_H
#define NVMEIO_REGISTERED_H

#include <liburing.h>

#include "engine.h"
#include "pool_internal.h"

/* Larger blocks move for so long that it does not matter. */
#define NVMEIO_REGISTERED_BLOCK_MAX (64u << 10)

#define NVMEIO_REGISTERED_FILES 8u

struct nvmeio_registered {
    struct io_uring *ring;
    uint64_t unmappings; /* of the pool, when the table of pages was last true */
    bool pages_ready, pages_refused;
    bool files_ready, files_refused;
    unsigned files_held;

    /* Which huge page has the place, by its number: the one that is used more often.
     * `held`: the kernel has a page here, and it is this one if `valid`. */
    struct nvmeio_registered_page {
        uintptr_t number;
        unsigned uses;
        bool held, valid;
    } pages[NVMEIO_REGISTERED_PAGES_MAX];

    /* Which descriptor has the place: that of the blocks in flight. */
    struct nvmeio_registered_file {
        int fd;
        unsigned in_flight;
        bool held;
    } files[NVMEIO_REGISTERED_FILES];
};

/* Begin with nothing, before the first block of a ring. */
void nvmeio_registered_open(struct nvmeio_registered *registered,
                            struct io_uring *ring);

/* Before the ring is closed. */
void nvmeio_registered_close(struct nvmeio_registered *registered);

/* The place of the block's memory among the registered, or -1.  May submit what was
 * prepared, so it comes before an entry is taken, like the next. */
int nvmeio_registered_memory(struct nvmeio_registered *registered,
                             const struct nvmeio_block *block);

/* The same for the block's file.  Each block that was asked for is told of to
 * nvmeio_registered_done(), when it has come back. */
int nvmeio_registered_file(struct nvmeio_registered *registered,
                           struct nvmeio_block *block);
void nvmeio_registered_done(struct nvmeio_registered *registered,
                            const struct nvmeio_block *block);

/* Let go of files of which nothing is in flight, before anyone hears that the blocks
 * are done. */
void nvmeio_registered_let_go(struct nvmeio_registered *registered);

#endif
