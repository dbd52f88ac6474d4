/* handle_internal.h -- a handle from within: lists of requests, lanes, one mutex. */
#ifndef NVMEIO_HANDLE_INTERNAL_H
#define NVMEIO_HANDLE_INTERNAL_H

#include <nvmeio/handle.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#include "engine.h"
#include "lane.h"

/* Bounces: one is at most NVMEIO_BOUNCE_BYTES, the lanes with threads share
 * NVMEIO_LANE_BOUNCE_BYTES, and each of a bounded number of caller lanes has a few of
 * its own; together less than NVMEIO_BOUNCE_BYTES_MAX.  More in flight is slower: reads
 * into ordinary tensors came to 0.96 of the speed of pool memory with 16 MiB, to 0.73
 * to 0.80 with 48, and bounces of 1 MiB left too few for overwrites (bench_transfer.py,
 * 2026-11-21). */
#define NVMEIO_BOUNCE_BYTES (256u << 10)
#define NVMEIO_LANE_BOUNCE_BYTES (16u << 20)
#define NVMEIO_CALLERS_MAX 16u
#define NVMEIO_CALLER_BOUNCE_BYTES (3u << 20)

/* Bounces of small records are parts of one of the others: 128 of them are 2 MiB, a
 * huge page, where as many of 256 KiB would drive each other out of the caches. */
#define NVMEIO_SMALL_BOUNCE_BYTES (16u << 10)

/* Blocks in flight in a caller lane, at most: more make no device that we know faster.
 */
#define NVMEIO_CALLER_DEPTH_MAX 1024u

struct nvmeio_handle {
    /* Never change after opening. */
    struct nvmeio_config config;
    const struct nvmeio_engine_ops *ops;
    size_t block_bytes;  /* config.block_bytes in whole pages */
    size_t bounce_bytes; /* of one bounce */
    char fallback[512];
    bool refused; /* the lanes could not be started; with another engine they may */

    atomic_uint references;
    /* Of the process whose lists and lanes these are; REVIVING while a forked child
     * makes its own.  Release and acquire: who sees the number sees the lists. */
    _Atomic uint32_t generation;
    _Atomic uint64_t requests; /* statistics, relaxed */

    /* For lanes: one for each that is called, to the queue or to go home. */
    sem_t work;

    pthread_mutex_t mutex;
    pthread_cond_t news; /* for callers: a request is done, a lane has started */

    /* Guarded by the mutex. */
    struct nvmeio_request *active_first, *active_last;
    unsigned active_count;
    struct nvmeio_request *queue_first, *queue_last; /* with blocks to cut */
    struct nvmeio_request *done_first, *done_last;   /* not popped */
    struct nvmeio_request *gated_first;              /* fsyncs behind writes */
    struct nvmeio_watch *watches;                    /* eventfds of event loops */
    unsigned watches_armed;                          /* of these, to be signalled */
    unsigned drainers;                               /* threads in drain() */
    unsigned sleepers;                               /* threads that wait for news */
    struct nvmeio_lane *lanes;                       /* config.lanes of them */
    struct nvmeio_lane *callers;                     /* a list */
    unsigned caller_count;
    unsigned lanes_started, lanes_alive;
    unsigned lanes_idle;         /* in wait for `work`, and not yet called */
    struct nvmeio_stats retired; /* of lanes that are closed */
    int dead_error;              /* of the last lane to die, when none is alive */
    bool lanes_missing;          /* a child could not start its own, and tries again */
    bool lanes_starting;         /* a thread does so now */
    bool closing;                /* no more submissions */
    bool stopping;               /* lanes go home */
    bool stopped;                /* they have gone */

    uint64_t retired_latencies[NVMEIO_LATENCY_BUCKETS]; /* as `retired` */
};

/* handle.c: after this, lists and lanes are those of this process, made anew in a
 * child. The mutex is not held. */
void nvmeio_handle_ensure_own(struct nvmeio_handle *handle);

/* wait.c. */

/* Give the request to a caller lane, if one can be had.  The mutex is held, and may be
 * dropped meanwhile. */
bool nvmeio_wait_give(struct nvmeio_handle *handle, struct nvmeio_request *request);

/* Close the caller lanes, once all requests are done.  The mutex is not held. */
void nvmeio_wait_close(struct nvmeio_handle *handle);

/* watch.c. */

/* A request is done: signal the eventfds that wait for it.  The mutex is held. */
void nvmeio_watch_signal(struct nvmeio_handle *handle);

/* Forget all eventfds.  Nobody else has the handle any more. */
void nvmeio_watch_free(struct nvmeio_handle *handle);

/* schedule.c.  The mutex is held. */

/* Put a new request into the list of what is active, which takes a reference. */
void nvmeio_schedule_add(struct nvmeio_handle *handle, struct nvmeio_request *request);

/* The next request for a lane with a thread to cut blocks from, or NULL. */
struct nvmeio_request *nvmeio_schedule_next(struct nvmeio_handle *handle);

/* The state of a request has changed: queue it or not, open its gate, and once it is
 * over settle it, store the outcome and wake who waits.  Drops the mutex for a while
 * where that needs a system call; the request may be gone afterwards. */
void nvmeio_schedule_progress(struct nvmeio_handle *handle,
                              struct nvmeio_request *request);

/* Take a request off the list of those that are done; its reference is the caller's. */
void nvmeio_schedule_take_done(struct nvmeio_handle *handle,
                               struct nvmeio_request *request);

/* Hold up an fsync that was just added until the writes before it are done. */
void nvmeio_schedule_gate(struct nvmeio_handle *handle, struct nvmeio_request *request);

/* Whether a request is beyond change: being settled, or done. */
bool nvmeio_schedule_settling(const struct nvmeio_request *request);

/* A lane died of `error`: when it was the last, all that waits for lanes fails. */
void nvmeio_schedule_bury(struct nvmeio_handle *handle, int error);

#endif
