/* closer.c -- threads that close files of FUSE, NFS and the like, so that no worker
 * waits for close(2).
 *
 * There, close(2) may write back all that was written, and waits for the server. The
 * threads serve all handles of the process. They start when they are needed, end when
 * they have been idle for a second, and touch nothing once their last request is done,
 * so nobody joins them. */
#include "closer.h"

#include <pthread.h>

#include "fork.h"
#include "thread.h"
#include "waiter.h"

/* A server that does not answer holds up one thread for each of its files. */
#define CLOSERS_MAX 4u
#define IDLE_NS 1000000000

/* The mutex guards these. */
static pthread_mutex_t closers_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct nvmeio_request *first, **end = &first; /* linked by queue_next */
static unsigned closers;
static struct nvmeio_waiter *idle; /* closers that wait for a request */

/* The request whose memory this one's is a part of. */
static struct nvmeio_request *whole_of(struct nvmeio_request *request)
{
    return request->whole ? request->whole : request;
}

/* Take the next request; wait for it if there is none. NULL if none comes. The mutex is
 * held, and unlocked meanwhile. */
static struct nvmeio_request *next_request(void)
{
    if (!first) {
        struct nvmeio_waiter waiter = {.next = idle};
        idle = &waiter;
        pthread_mutex_unlock(&closers_mutex);
        nvmeio_waiter_sleep(&waiter, nvmeio_deadline(IDLE_NS));
        pthread_mutex_lock(&closers_mutex);
        /* Another thread has taken the waiter off the list, and is about to wake it. */
        if (!nvmeio_waiter_remove(&idle, &waiter))
            nvmeio_waiter_sleep(&waiter, -1);
    }
    struct nvmeio_request *request = first;
    if (request)
        first = request->queue_next;
    if (!first)
        end = &first;
    return request;
}

static void *closer_main(void *unused)
{
    struct nvmeio_request *request;

    pthread_mutex_lock(&closers_mutex);
    while ((request = next_request())) {
        struct nvmeio_request *whole = whole_of(request);
        pthread_mutex_unlock(&closers_mutex);
        request->owner->close(request);
        nvmeio_request_release(whole);
        pthread_mutex_lock(&closers_mutex);
    }
    closers--;
    pthread_mutex_unlock(&closers_mutex);
    return unused;
}

/* Start another thread. Returns whether there is any. The mutex is held. */
static bool start_closer(void)
{
    pthread_t thread;

    if (closers < CLOSERS_MAX && nvmeio_thread_start(&thread, closer_main, NULL) == 0) {
        pthread_detach(thread);
        closers++;
    }
    return closers > 0;
}

bool nvmeio_closer_add(struct nvmeio_request *request)
{
    struct nvmeio_waiter *waiter;

    pthread_mutex_lock(&closers_mutex);
    waiter = idle;
    if (waiter)
        idle = waiter->next;
    bool added = waiter || start_closer();
    if (added) {
        /* Holds the handle too, until close() is over. */
        atomic_fetch_add_explicit(&whole_of(request)->references, 1,
                                  memory_order_relaxed);
        request->queue_next = NULL;
        *end = request;
        end = &request->queue_next;
    }
    pthread_mutex_unlock(&closers_mutex);
    if (waiter)
        nvmeio_waiter_wake(waiter);
    return added;
}

static void lock_closers(void)
{
    pthread_mutex_lock(&closers_mutex);
}

static void unlock_closers(void)
{
    pthread_mutex_unlock(&closers_mutex);
}

/* A forked child has none of the threads. Its handles forget their requests, too. */
static void forget_closers(void)
{
    first = NULL;
    end = &first;
    closers = 0;
    idle = NULL;
    pthread_mutex_unlock(&closers_mutex);
}

static struct nvmeio_fork_hooks fork_hooks = {
    .prepare = lock_closers,
    .parent = unlock_closers,
    .child = forget_closers,
};

__attribute__((constructor)) static void register_hooks(void)
{
    nvmeio_fork_hook(&fork_hooks);
}
