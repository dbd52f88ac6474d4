/* block.h -- what happens to a block before and after the engine has it. */
#ifndef NVMEIO_BLOCK_H
#define NVMEIO_BLOCK_H

#include <nvmeio/handle.h>

#include "engine.h"

/* What to do next with a block that came back from the engine. */
enum nvmeio_verdict {
    NVMEIO_BLOCK_FINISHED,  /* block->result is 0 or the error */
    NVMEIO_BLOCK_CONTINUED, /* it was short: push it again */
    NVMEIO_BLOCK_REPEATED,  /* nothing moved: push it again */
};

/* Prepare a block that was just cut: choose its descriptor and address, and copy the
 * data of a bounced write. If the descriptor cannot be opened, block->fd and
 * block->result are the -errno, and the block must not be pushed. Call it without the
 * handle's mutex, because it may open a file and copy. */
void nvmeio_block_prepare(struct nvmeio_block *block);

/* Claim what a block of a write or an fsync needs of its file, when it is cut, and
 * again before each push: its way may have changed. Returns whether it may be pushed.
 * If not, it waits or claims nothing, as block->claim.grant says. */
bool nvmeio_block_claim_cut(struct nvmeio_block *block);
bool nvmeio_block_claim(struct nvmeio_block *block);

/* Evaluate block->result. A short transfer continues, a transient error is retried.
 * When the block is finished, a bounced read is copied out, and its claim ends. Call it
 * without the handle's mutex. */
enum nvmeio_verdict nvmeio_block_advance(struct nvmeio_block *block);

/* Add a finished block to the statistics. Its request must still have its file. */
void nvmeio_block_count(const struct nvmeio_block *block, struct nvmeio_stats *stats,
                        uint64_t latencies[NVMEIO_LATENCY_BUCKETS]);

/* latency.c: return the bucket that counts a latency. The last bucket counts everything
 * longer than the others. */
unsigned nvmeio_latency_bucket(uint64_t ns);

#endif
