/* handle_internal.h -- the inside of a handle: a queue, and workers that empty it. */
#ifndef NVMEIO_HANDLE_INTERNAL_H
#define NVMEIO_HANDLE_INTERNAL_H

#include <nvmeio/handle.h>

#include "queue.h"
#include "worker.h"

struct nvmeio_handle {
    /* Never change after opening. */
    struct nvmeio_config config;
    struct nvmeio_owner owner;
    char fallback[512];

    atomic_uint references;
    /* The fork generation of the process that the queue and the workers belong to, plus
     * REOPENING while a forked child makes its own. Release and acquire: a thread that
     * sees the number sees the queue. */
    _Atomic uint32_t generation;

    struct nvmeio_queue queue;

    /* The queue's mutex guards these. */
    struct nvmeio_workers workers;
    enum {
        NVMEIO_HANDLE_OPEN,
        NVMEIO_HANDLE_MISSING,  /* a forked child could not start its workers; each
                                   submission tries again */
        NVMEIO_HANDLE_STARTING, /* a thread is starting them now */
        NVMEIO_HANDLE_CLOSING,  /* no more submissions */
        NVMEIO_HANDLE_CLOSED,   /* the workers have ended */
    } life;
    struct nvmeio_waiter *life_waiters; /* threads that wait for the next state */
};

/* Make sure that the queue and the workers belong to this process: in a forked child,
 * the first call makes new ones. Call it without the mutex. */
void nvmeio_handle_ensure_own(struct nvmeio_handle *handle);

#endif
