/* queue.h -- the requests of a handle: active, waiting for a worker, done.
 *
 * One mutex guards the lists and the requests. The consequences of a change (threads to
 * wake, files to close, requests to free) are noted under the mutex, and
 * nvmeio_queue_unlock() carries them out after unlocking. So no woken thread blocks on
 * the mutex, and no system call that can block is made under it. */
#ifndef NVMEIO_QUEUE_H
#define NVMEIO_QUEUE_H

#include <nvmeio/handle.h>
#include <pthread.h>

#include "eventfds.h"
#include "request_internal.h"
#include "waiter.h"

/* A worker, as the queue sees it. */
struct nvmeio_consumer {
    struct nvmeio_consumer *next;
    struct nvmeio_engine *engine;
    struct nvmeio_waiter waiter; /* wakes it while it is idle */
    enum {
        NVMEIO_CONSUMER_BUSY,
        NVMEIO_CONSUMER_LISTENING, /* in reap(), with room for more blocks */
        NVMEIO_CONSUMER_IDLE,
    } state;
};

struct nvmeio_queue {
    pthread_mutex_t mutex;
    int cancelling; /* the cancel state (pthread_setcancelstate(3)) of the thread that
                       holds the mutex */
    struct nvmeio_request *active_first, *active_last;
    unsigned active_count;
    struct nvmeio_request *first, *last;           /* requests with blocks to cut */
    struct nvmeio_request *done_first, *done_last; /* done, not yet reported */
    struct nvmeio_request *gated;                  /* fsyncs that wait for writes */
    struct nvmeio_waiter *drainers; /* threads that wait until nothing is active */
    struct nvmeio_consumer *consumers;
    struct nvmeio_eventfds eventfds;
    int dead_error; /* the -errno why there are no consumers (any more, or yet), or 0 */
    struct nvmeio_stats stats;
    uint64_t latencies[NVMEIO_LATENCY_BUCKETS];

    /* For nvmeio_queue_unlock(). */
    struct nvmeio_request *ready;  /* requests whose turn has come, or that must fail */
    size_t added;                  /* blocks that may need more consumers */
    struct nvmeio_waiter *wake;    /* threads to wake */
    struct nvmeio_request *settle; /* requests that are over, for settle() */
    struct nvmeio_request *drop;   /* requests that lose a reference */
};

void nvmeio_queue_init(struct nvmeio_queue *queue);
void nvmeio_queue_destroy(struct nvmeio_queue *queue);

void nvmeio_queue_lock(struct nvmeio_queue *queue);

/* Unlock, and carry out the consequences of all changes. Afterwards the requests and
 * the handle may be gone, unless the caller holds references. */
void nvmeio_queue_unlock(struct nvmeio_queue *queue);

/* Wait until nothing is active. Returns 0, or -ETIMEDOUT after the deadline. */
int nvmeio_queue_drain(struct nvmeio_queue *queue, int64_t deadline_ns);

/* Does the work of nvmeio_handle_pop(). */
unsigned nvmeio_queue_pop(struct nvmeio_queue *queue, void **users, unsigned count);

/* The mutex is held in all functions below. */

/* Add a new request, and take a reference to it. The request must be planned, or have
 * room for its links if it comes after others. */
void nvmeio_queue_add(struct nvmeio_queue *queue, struct nvmeio_request *request,
                      const struct nvmeio_after *after);

/* Start a request that was just added or planned. */
void nvmeio_queue_begin(struct nvmeio_queue *queue, struct nvmeio_request *request);

/* Return the next request to cut blocks from, or NULL. */
struct nvmeio_request *nvmeio_queue_next(struct nvmeio_queue *queue);

/* The state of a request has changed: put it into the queue, take it out, or end it. */
void nvmeio_queue_progress(struct nvmeio_queue *queue, struct nvmeio_request *request);

/* Take a request off the list of done requests. */
void nvmeio_queue_take_done(struct nvmeio_queue *queue, struct nvmeio_request *request);

/* Fail everything that waits for workers, because there are none any more. */
void nvmeio_queue_fail_all(struct nvmeio_queue *queue, int error);

/* Empty a list of waiters. nvmeio_queue_unlock() wakes them. */
void nvmeio_queue_wake(struct nvmeio_queue *queue, struct nvmeio_waiter **waiters);

/* Add the waiter to a list, unlock the mutex, and sleep. Returns 0 when another thread
 * has woken the caller, or -ETIMEDOUT after the deadline. The mutex is not held on
 * return. */
int nvmeio_queue_sleep(struct nvmeio_queue *queue, struct nvmeio_waiter **list,
                       struct nvmeio_waiter *waiter, int64_t deadline_ns);

/* Wake a consumer if it is idle. Returns whether it was. */
bool nvmeio_queue_call(struct nvmeio_queue *queue, struct nvmeio_consumer *consumer);

/* Whether a request cannot change any more: it is being settled, or done. */
bool nvmeio_queue_is_settling(const struct nvmeio_request *request);

#endif
