/* waiter.h -- a thread that sleeps until another thread wakes it, or until a deadline.
 *
 * Each sleeping thread has its own waiter, in a list that a mutex guards. A thread that
 * takes a waiter off the list must wake it. It may do so after unlocking the mutex, so
 * that the woken thread does not block on it. Unlike with a shared condition variable,
 * no thread is woken for nothing. */
#ifndef NVMEIO_WAITER_H
#define NVMEIO_WAITER_H

#include <nvmeio/base.h>
#include <stdatomic.h>

struct nvmeio_waiter {
    struct nvmeio_waiter *next;
    _Atomic uint32_t woken;
    bool reported; /* for a request: its completion was reported to this thread */
};

/* Nanoseconds of CLOCK_MONOTONIC. */
int64_t nvmeio_now_ns(void);

/* Return when a timeout ends, in nanoseconds of CLOCK_MONOTONIC. A negative timeout
 * means never, and so does the negative result. */
int64_t nvmeio_deadline(int64_t timeout_ns);

/* Sleep until the waiter is woken (true), or until the deadline (false). After false,
 * the caller must take the waiter off its list. If another thread has already done so,
 * the caller must sleep again, because the wake-up is on its way. */
bool nvmeio_waiter_sleep(struct nvmeio_waiter *waiter, int64_t deadline_ns);

/* Wake one waiter, or all of a list. Do not touch a waiter afterwards: its thread may
 * have returned, and the waiter may be gone. */
void nvmeio_waiter_wake(struct nvmeio_waiter *waiter);
void nvmeio_waiter_wake_all(struct nvmeio_waiter *list);

/* The two halves of nvmeio_waiter_wake(): from the first on, the waiter does not sleep;
 * the second ends a sleep. The second does not touch the waiter, and several threads
 * may call it. */
void nvmeio_waiter_mark(struct nvmeio_waiter *waiter);
void nvmeio_waiter_rouse(const struct nvmeio_waiter *waiter);

/* Take a waiter off a list. Returns false if it is no longer there. */
bool nvmeio_waiter_remove(struct nvmeio_waiter **list,
                          const struct nvmeio_waiter *waiter);

#endif
