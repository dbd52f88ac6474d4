/* waiter.c -- sleeping and waking by futex(2).
 *
 * Semaphores have no deadlines on CLOCK_MONOTONIC before glibc 2.30. Condition
 * variables are not used because pthread_cond_signal(3) of glibc 2.25 to 2.40 may wake
 * no thread (its bug 25847). */
#include "waiter.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int64_t nvmeio_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t nvmeio_deadline(int64_t timeout_ns)
{
    if (timeout_ns < 0)
        return -1;
    int64_t now = nvmeio_now_ns();
    return timeout_ns < INT64_MAX - now ? now + timeout_ns : INT64_MAX;
}

bool nvmeio_waiter_sleep(struct nvmeio_waiter *waiter, int64_t deadline_ns)
{
    struct timespec end = {deadline_ns / 1000000000, deadline_ns % 1000000000};

    /* Acquire: pairs with the release in nvmeio_waiter_wake(). */
    while (!atomic_load_explicit(&waiter->woken, memory_order_acquire)) {
        /* FUTEX_WAIT_BITSET takes a deadline instead of a timeout. After any other
         * error, look again: it is transient, or the waiter was already woken. */
        if (syscall(SYS_futex, &waiter->woken, FUTEX_WAIT_BITSET_PRIVATE, 0,
                    deadline_ns < 0 ? NULL : &end, NULL, FUTEX_BITSET_MATCH_ANY) &&
            errno == ETIMEDOUT)
            return atomic_load_explicit(&waiter->woken, memory_order_acquire);
    }
    return true;
}

void nvmeio_waiter_mark(struct nvmeio_waiter *waiter)
{
    atomic_store_explicit(&waiter->woken, 1, memory_order_release);
}

void nvmeio_waiter_rouse(const struct nvmeio_waiter *waiter)
{
    /* The waiter may be gone by now, and its memory reused. Then no thread sleeps at
     * this address, or one does that checks again after a wake-up. */
    syscall(SYS_futex, &waiter->woken, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void nvmeio_waiter_wake(struct nvmeio_waiter *waiter)
{
    nvmeio_waiter_mark(waiter);
    nvmeio_waiter_rouse(waiter);
}

void nvmeio_waiter_wake_all(struct nvmeio_waiter *list)
{
    while (list) {
        struct nvmeio_waiter *waiter = list;
        list = waiter->next;
        nvmeio_waiter_wake(waiter);
    }
}

bool nvmeio_waiter_remove(struct nvmeio_waiter **list,
                          const struct nvmeio_waiter *waiter)
{
    while (*list && *list != waiter)
        list = &(*list)->next;
    if (!*list)
        return false;
    *list = waiter->next;
    return true;
}
