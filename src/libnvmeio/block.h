/* block.h -- a block of a request on its way: readied, and judged when it comes back.
 */
#ifndef NVMEIO_BLOCK_H
#define NVMEIO_BLOCK_H

#include <nvmeio/handle.h>

#include "engine.h"

/* What is said of a block that came back. */
enum nvmeio_verdict {
    NVMEIO_BLOCK_FINISHED,  /* block->result is 0 or the error */
    NVMEIO_BLOCK_CONTINUED, /* it was short; to be pushed again */
    NVMEIO_BLOCK_REPEATED,  /* nothing moved; to be pushed again */
};

/* Ready a block that was just cut: descriptor (where there is none its errno, in
 * place of pushing it), addresses, and for a bounced write the copy.  Without the mutex
 * of the handle, as the next. */
void nvmeio_block_prepare(struct nvmeio_block *block);

/* Look at a result: what was short goes on, what passes goes again, and a bounced read
 * is copied out. */
enum nvmeio_verdict nvmeio_block_advance(struct nvmeio_block *block);

/* Count a block that is finished; its request still has its file. */
void nvmeio_block_count(const struct nvmeio_block *block, struct nvmeio_stats *stats,
                        uint64_t latencies[NVMEIO_LATENCY_BUCKETS]);

/* latency.c: the bucket for so many nanoseconds; the last for all that is longer. */
unsigned nvmeio_latency_bucket(uint64_t ns);

#endif
