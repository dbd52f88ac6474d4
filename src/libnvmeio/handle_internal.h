/* handle_internal.h -- a handle from within: a queue and the workers that empty it. */
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
    /* Of the process whose queue and workers these are; REOPENING while a forked child
     * makes its own.  Release and acquire: who sees the number sees the queue. */
    _Atomic uint32_t generation;

    struct nvmeio_queue queue;

    /* Guarded by the queue's mutex. */
    struct nvmeio_workers workers;
    enum {
        NVMEIO_HANDLE_OPEN,
        NVMEIO_HANDLE_MISSING,  /* a child could not start its workers, and tries again
                                 */
        NVMEIO_HANDLE_STARTING, /* a thread does so now */
        NVMEIO_HANDLE_CLOSING,  /* no more submissions */
        NVMEIO_HANDLE_CLOSED,   /* the workers have gone home */
    } life;
    struct nvmeio_waiter *life_waiters; /* threads that wait for the next */
};

/* After this, queue and workers are those of this process, made anew in a child.  The
 * mutex is not held. */
void nvmeio_handle_ensure_own(struct nvmeio_handle *handle);

#endif
