/* worker.h -- threads with one engine each, which carry out the blocks of a queue. */
#ifndef NVMEIO_WORKER_H
#define NVMEIO_WORKER_H

#include "arena.h"
#include "engine.h"
#include "queue.h"

/* One bounce is at most NVMEIO_BOUNCE_BYTES, unless it makes a file longer. The workers
 * of a handle share NVMEIO_ARENA_BYTES_MAX. More in flight is slower: reads into
 * ordinary tensors reached 0.96 of the speed of pool memory with 16 MiB, and 0.73 to
 * 0.80 with 48. Bounces of 1 MiB left too few for overwrites (bench_transfer.py,
 * 2026-11-21). */
#define NVMEIO_BOUNCE_BYTES (256u << 10)

struct nvmeio_worker;

struct nvmeio_workers {
    /* Never change after opening. */
    struct nvmeio_queue *queue;
    const struct nvmeio_owner *owner;
    const struct nvmeio_engine_ops *ops;
    unsigned count; /* wanted */
    unsigned queue_depth;
    bool single_submit;

    /* The queue's mutex guards these. */
    struct nvmeio_worker *list;
    unsigned started, alive;
    bool stopping;
    bool refused; /* they could not start, but might with another engine */
};

/* Start all workers or none. Returns 0 or -errno. Call it without the mutex. */
int nvmeio_workers_start(struct nvmeio_workers *workers);

/* End all workers, and wait until they have ended. Call it without the mutex. */
void nvmeio_workers_stop(struct nvmeio_workers *workers);

#endif
