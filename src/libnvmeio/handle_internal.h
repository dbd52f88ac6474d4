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
    struct nvmeio_waiter *restarters; /* threads that wait for `starting` */
    struct nvmeio_waiter *stoppers;   /* threads that wait for `stopped` */
    bool missing;  /* a child could not start its workers, and tries again */
    bool starting; /* a thread does so now */
    bool closing;  /* no more submissions */
    bool stopped;  /* the workers have gone home */
};

/* After this, queue and workers are those of this process, made anew in a child.  The
 * mutex is not held. */
void nvmeio_handle_ensure_own(struct nvmeio_handle *handle);

#endif
