/* waiter.h -- a thread that sleeps until another thread wakes it, or until a deadline.
 *
 * Each sleeping thread has its own waiter, in a list that a mutex guards. A thread that
 * takes a waiter off the list must wake it, and may do so after unlocking the mutex, so
 * that the woken thread does not run into it. Unlike with a shared condition variable,
 * no thread is woken for nothing. */
#ifndef NVMEIO_WAITER_H
#define NVMEIO_WAITER_H

#include <nvmeio/base.h>
#include <stdatomic.h>

struct nvmeio_waiter {
    struct nvmeio_waiter *next;
    _Atomic uint32_t woken;
    bool reported; /* of a request: this thread has learned of its completion */
};

/* Nanoseconds of CLOCK_MONOTONIC. */
int64_t nvmeio_now_ns(void);

/* When a timeout ends, in nanoseconds of CLOCK_MONOTONIC. A negative timeout never
 * ends, and stays negative. */
int64_t nvmeio_deadline(int64_t timeout_ns);

/* Sleep until the waiter is woken (true) or until the deadline (false). If false, the
 * caller takes it off its list. If another thread has already done that, it sleeps
 * again: the wake-up is on its way. */
bool nvmeio_waiter_sleep(struct nvmeio_waiter *waiter, int64_t deadline_ns);

/* The waiter may be gone as soon as it is woken. */
void nvmeio_waiter_wake(struct nvmeio_waiter *waiter);
void nvmeio_waiter_wake_all(struct nvmeio_waiter *list);

/* Take a waiter off a list. False if it is no longer there. */
bool nvmeio_waiter_remove(struct nvmeio_waiter **list,
                          const struct nvmeio_waiter *waiter);

#endif
