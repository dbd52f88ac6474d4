/* lane.h -- one engine, its blocks and its bounces: where blocks are carried out.
 *
 * A lane of the handle has a thread; a caller lane is run by the threads that wait for
 * the one request it was given. */
#ifndef NVMEIO_LANE_H
#define NVMEIO_LANE_H

#include <nvmeio/handle.h>
#include <pthread.h>
#include <stdatomic.h>

#include "engine.h"
#include "latency.h"
#include "request_internal.h"

struct nvmeio_lane_stats {
    /* Written by the lane, read by anyone, relaxed: figures, no order. */
    _Atomic uint64_t blocks, bytes_direct, bytes_buffered, bytes_bounced;
    _Atomic uint64_t short_transfers, retries, blocks_registered;
};

struct nvmeio_lane {
    struct nvmeio_handle *handle;
    struct nvmeio_engine engine;
    struct nvmeio_lane_stats stats;
    pthread_t thread;
    bool caller; /* a caller lane: without a thread, never changes */

    /* The running thread's own. */
    struct nvmeio_block *blocks; /* engine.depth of them */
    struct nvmeio_block *free;   /* of blocks, those that are idle */
    struct nvmeio_block *taken;  /* cut, to be pushed: oldest first */
    struct nvmeio_block **taken_end;
    unsigned in_flight; /* blocks that are not free */
    unsigned gathered;  /* of them, those of gathers and scatters */
    void **bounces;     /* idle ones: a stack; behind its end those that are split */
    unsigned bounces_idle, bounces_owned, bounces_max, bounces_split;
    void **smalls; /* parts of split bounces that are idle: a stack */
    unsigned smalls_idle, smalls_max;
    bool bounces_short; /* a block could not be cut for want of one */
    uint64_t repeats;   /* of blocks */
    int64_t pause_ns;   /* back-off while the kernel says "again" */

    /* Guarded by the handle's mutex. */
    struct nvmeio_request *own; /* a caller lane's request */
    struct nvmeio_lane *next;   /* of the caller lanes */
    bool started;               /* it is ready for work, or `error` says why not */
    bool refused;               /* the latter, for want of the engine alone */
    bool driven;                /* a caller lane: a thread is in nvmeio_lane_turn() */
    bool deserted;              /* a caller lane: the thread that waited gave up */
    bool listening; /* waits for completions, and has room for more blocks */
    bool dead;
    int error; /* of starting or dying */

    struct nvmeio_latencies latencies; /* large, and so the last */
};

/* Start a lane with a thread, and wait until its engine is open. */
int nvmeio_lane_start(struct nvmeio_lane *lane, struct nvmeio_handle *handle);

/* Ready a caller lane. */
int nvmeio_lane_open(struct nvmeio_lane *lane, struct nvmeio_handle *handle);

/* Give back everything: done by the lane's thread before it ends, and for a caller lane
 * that nobody drives.  A dead lane keeps what the kernel may still write to. */
void nvmeio_lane_close(struct nvmeio_lane *lane);

/* One turn: take blocks, hand them over, wait for at least one of them at most
 * timeout_ns (negative: no limit), book what has finished.  The mutex is not held.
 * False when there was nothing to do, or the lane is dead. */
bool nvmeio_lane_turn(struct nvmeio_lane *lane, int64_t timeout_ns);

/* Add the lane's figures to `stats`. */
void nvmeio_lane_count(struct nvmeio_lane *lane, struct nvmeio_stats *stats);

/* Add the lane's figures and latencies to what its handle keeps of closed lanes.  The
 * mutex is held. */
void nvmeio_lane_retire(struct nvmeio_lane *lane);

#endif
