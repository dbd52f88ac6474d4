/* block.h -- a block of a request: prepared, and evaluated when it comes back. */
#ifndef NVMEIO_BLOCK_H
#define NVMEIO_BLOCK_H

#include <nvmeio/handle.h>

#include "engine.h"

/* What to do with a block that came back. */
enum nvmeio_verdict {
    NVMEIO_BLOCK_FINISHED,  /* block->result is 0 or the error */
    NVMEIO_BLOCK_CONTINUED, /* it was short: push it again */
    NVMEIO_BLOCK_REPEATED,  /* nothing moved: push it again */
};

/* Prepare a block that was just cut: its descriptor (or, if it cannot be opened, its
 * errno instead of pushing it), its addresses, and the copy of a bounced write. Called
 * without the handle's mutex, as is the next. */
void nvmeio_block_prepare(struct nvmeio_block *block);

/* Evaluate a result. A short block goes on, a transient error is repeated, and a
 * bounced read is copied out. */
enum nvmeio_verdict nvmeio_block_advance(struct nvmeio_block *block);

/* Count a finished block. Its request still has its file. */
void nvmeio_block_count(const struct nvmeio_block *block, struct nvmeio_stats *stats,
                        uint64_t latencies[NVMEIO_LATENCY_BUCKETS]);

/* latency.c: the bucket for this many nanoseconds. The last bucket holds all longer
 * ones. */
unsigned nvmeio_latency_bucket(uint64_t ns);

#endif
