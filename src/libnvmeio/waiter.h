/* waiter.h -- a thread that sleeps until another thread wakes it, or until a time.
 *
 * Each sleeping thread has a waiter of its own, in a list that a mutex guards: whoever
 * takes it off the list must wake it, and may do so after the mutex is unlocked, so
 * that the thread does not run into the mutex.  So no thread is woken for nothing, as
 * with a condition variable that many wait for. */
#ifndef NVMEIO_WAITER_H
#define NVMEIO_WAITER_H

#include <nvmeio/base.h>
#include <stdatomic.h>

struct nvmeio_waiter {
    struct nvmeio_waiter *next;
    _Atomic uint32_t woken;
    bool reported; /* of a request: this thread was told of its completion */
};

/* Nanoseconds of CLOCK_MONOTONIC. */
int64_t nvmeio_now_ns(void);

/* When a timeout ends, in nanoseconds of CLOCK_MONOTONIC; a negative one never does,
 * and stays negative. */
int64_t nvmeio_deadline(int64_t timeout_ns);

/* Sleep until the waiter is woken: true; or until the deadline: false.  Then the caller
 * takes it off its list, or, where another thread has done that, sleeps again: the
 * wake-up is on its way. */
bool nvmeio_waiter_sleep(struct nvmeio_waiter *waiter, int64_t deadline_ns);

/* The waiter may be gone as soon as it is woken. */
void nvmeio_waiter_wake(struct nvmeio_waiter *waiter);
void nvmeio_waiter_wake_all(struct nvmeio_waiter *list);

/* Take a waiter off a list; false where it is not there any more. */
bool nvmeio_waiter_remove(struct nvmeio_waiter **list,
                          const struct nvmeio_waiter *waiter);

#endif
