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
        NVMEIO_CONSUMER_CALLED, /* no longer idle, but perhaps still asleep */
    } state;
    unsigned parked;               /* its blocks that wait for their claims */
    struct nvmeio_waiter unparked; /* wakes it while nothing else is in flight */
};

#define NVMEIO_LINES 1024u /* a power of two */

/* How much of a request is cut before it is the next one's turn: the default size of a
 * block. A request that a thread waits for has more: otherwise those that were
 * submitted together would end together, and the drive would be idle while the first is
 * used. */
#define NVMEIO_TURN_BYTES ((size_t)1 << 20)
#define NVMEIO_WAITED_TURN_BYTES ((size_t)8 << 20)

/* How many bytes of other requests are cut for each byte of writes that come last (see
 * nvmeio_file_write_last()), and how many before the first of these. */
#define NVMEIO_LAST_SHARE 8u
#define NVMEIO_LAST_BYTES ((size_t)8 << 20)

/* Requests with blocks to cut, in turns. */
struct nvmeio_turns {
    struct nvmeio_request *first, *last;
};

struct nvmeio_queue {
    pthread_mutex_t mutex;
    int cancelling; /* the cancel state (pthread_setcancelstate(3)) of the thread that
                       holds the mutex */
    struct nvmeio_request *active_first, *active_last;
    unsigned active_count;
    struct nvmeio_turns turns[2]; /* the second one has the writes that come last */
    size_t cut_before_last; /* bytes of the others since then, at most LAST_BYTES */
    size_t blocks_left; /* of these requests together, about: see nvmeio_queue_took() */
    struct nvmeio_request *done_first, *done_last; /* done, not yet reported */
    struct nvmeio_request *lines[NVMEIO_LINES];    /* writes of a file; hashed */
    struct nvmeio_waiter *drainers; /* threads that wait until nothing is active */
    struct nvmeio_consumer *consumers;
    struct nvmeio_eventfds eventfds;
    int dead_error; /* the -errno why there are no consumers (any more, or yet), or 0 */
    struct nvmeio_stats stats;
    uint64_t latencies[NVMEIO_LATENCY_BUCKETS];

    /* For nvmeio_queue_unlock(). */
    struct nvmeio_request *ready; /* requests whose turn has come, or that must fail */
    size_t added;                 /* blocks that may need more consumers */
    bool stopped;               /* a request was stopped that may have parked blocks */
    struct nvmeio_waiter *wake; /* threads to wake */
    struct nvmeio_waiter *calls[NVMEIO_WORKERS_MAX]; /* consumers to rouse */
    unsigned call_count;
    struct nvmeio_request *settle; /* requests that are over, for settle() */
    struct nvmeio_request *drop;   /* requests that lose a reference */
};

void nvmeio_queue_init(struct nvmeio_queue *queue);
void nvmeio_queue_destroy(struct nvmeio_queue *queue);

void nvmeio_queue_lock(struct nvmeio_queue *queue);

/* Unlock, and carry out the consequences of all changes. Afterwards the requests and
 * the handle may be gone, unless the caller holds references. */
void nvmeio_queue_unlock(struct nvmeio_queue *queue);

/* Let other threads have the mutex for a moment, in a loop over many parts or records:
 * call it after each step with the number of the step. Requests may end meanwhile, so
 * hold a reference. */
void nvmeio_queue_pause(struct nvmeio_queue *queue, size_t step);

/* Wait until nothing is active. Returns 0, or -ETIMEDOUT after the deadline. */
int nvmeio_queue_drain(struct nvmeio_queue *queue, int64_t deadline_ns);

/* Plan or settle a request, whichever is its turn, and carry out what that entails. The
 * caller holds a reference to it, or to its whole. */
void nvmeio_queue_continue(struct nvmeio_queue *queue, struct nvmeio_request *request);

/* Does the work of nvmeio_handle_pop(). */
unsigned nvmeio_queue_pop(struct nvmeio_queue *queue, void **users, unsigned count);

/* The mutex is held in all functions below. */

/* Add a new request, and take a reference to it. The request must be planned, or have
 * room for its links if it comes after others. It pauses after many parts. */
void nvmeio_queue_add(struct nvmeio_queue *queue, struct nvmeio_request *request,
                      const struct nvmeio_after *after);

/* Start a request that was just added or planned. It pauses after many parts. */
void nvmeio_queue_begin(struct nvmeio_queue *queue, struct nvmeio_request *request);

/* Return the next request to cut blocks from, or NULL. */
struct nvmeio_request *nvmeio_queue_next(struct nvmeio_queue *queue);

/* A thread begins to wait for a request: it no longer comes last. */
void nvmeio_queue_hurry(struct nvmeio_queue *queue, struct nvmeio_request *request);

/* A block of this size was cut from the next request. At the end of its turn it goes
 * behind the others. */
void nvmeio_queue_took(struct nvmeio_queue *queue, struct nvmeio_request *request,
                       size_t bytes);

/* The state of a request has changed: put it into the queue, take it out, or end it. */
void nvmeio_queue_progress(struct nvmeio_queue *queue, struct nvmeio_request *request);

/* Take a request off the list of done requests. */
void nvmeio_queue_take_done(struct nvmeio_queue *queue, struct nvmeio_request *request);

/* Note that a request loses a reference. nvmeio_queue_unlock() releases it. */
void nvmeio_queue_drop(struct nvmeio_queue *queue, struct nvmeio_request *request);

/* Fail everything that waits for workers, because there are none any more. */
void nvmeio_queue_fail_all(struct nvmeio_queue *queue, int error);

/* Empty a list of waiters. nvmeio_queue_unlock() wakes them. */
void nvmeio_queue_wake(struct nvmeio_queue *queue, struct nvmeio_waiter **waiters);

/* Add the waiter to a list, unlock the mutex, and sleep. Returns 0 when another thread
 * has woken the caller, or -ETIMEDOUT after the deadline. The mutex is not held on
 * return. */
int nvmeio_queue_sleep(struct nvmeio_queue *queue, struct nvmeio_waiter **list,
                       struct nvmeio_waiter *waiter, int64_t deadline_ns);

/* End the wait of a consumer that is not idle, or its next one. Needs no mutex, but the
 * consumer must not end meanwhile. */
void nvmeio_consumer_interrupt(struct nvmeio_consumer *consumer);

/* Wake a consumer if it is idle. Returns whether it was. If it was called before and
 * has not come yet, rouse it once more: the thread that called it may not be running.
 */
bool nvmeio_queue_call(struct nvmeio_queue *queue, struct nvmeio_consumer *consumer);

#endif
