/* slow.c -- threads that plan and settle requests where that may take long, so that no
 * worker and no caller waits for it.
 *
 * A request of many records or parts takes long to plan and to settle. On FUSE, NFS and
 * the like, each system call waits for a server, and close(2) may write back all that
 * was written. The threads serve all handles of the process. They start when they are
 * needed, end when they have been idle for a second, and touch nothing once their last
 * request is done, so nobody joins them. */
#include "slow.h"

#include <pthread.h>
#include <string.h>

#include "fork.h"
#include "thread.h"
#include "waiter.h"

/* A server that does not answer holds up one thread for each of its files. */
#define THREADS_MAX 4u
#define IDLE_NS 1000000000

/* Requests that hold up only each other. */
struct lane {
    struct nvmeio_request *first, *last; /* linked by slow_next */
    unsigned threads;
    struct nvmeio_waiter *idle; /* threads that wait for a request */
};

/* The mutex guards the lanes: of requests with many records or parts; and, elsewhere
 * than on local file systems, of those to be settled and of those to be planned. */
static pthread_mutex_t lanes_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct lane lanes[3];

static struct lane *lane_of(const struct nvmeio_request *request)
{
    if (!nvmeio_request_is_distant(request))
        return &lanes[0];
    return &lanes[nvmeio_request_is_settling(request) ? 1 : 2];
}

/* The request whose memory this one's is a part of. */
static struct nvmeio_request *whole_of(struct nvmeio_request *request)
{
    return request->whole ? request->whole : request;
}

/* Take the next request; wait for it if there is none. NULL if none comes. The mutex is
 * held, and unlocked meanwhile. */
static struct nvmeio_request *next_request(struct lane *lane)
{
    if (!lane->first) {
        struct nvmeio_waiter waiter = {.next = lane->idle};
        lane->idle = &waiter;
        pthread_mutex_unlock(&lanes_mutex);
        nvmeio_waiter_sleep(&waiter, nvmeio_deadline(IDLE_NS));
        pthread_mutex_lock(&lanes_mutex);
        /* Another thread has taken the waiter off the list, and is about to wake it. */
        if (!nvmeio_waiter_remove(&lane->idle, &waiter))
            nvmeio_waiter_sleep(&waiter, -1);
    }
    struct nvmeio_request *request = lane->first;
    if (request)
        lane->first = request->slow_next;
    return request;
}

static void *slow_main(void *argument)
{
    struct lane *lane = argument;
    struct nvmeio_request *request;

    pthread_mutex_lock(&lanes_mutex);
    while ((request = next_request(lane))) {
        struct nvmeio_request *whole = whole_of(request);
        pthread_mutex_unlock(&lanes_mutex);
        request->owner->continue_slowly(request);
        nvmeio_request_release(whole);
        pthread_mutex_lock(&lanes_mutex);
    }
    lane->threads--;
    pthread_mutex_unlock(&lanes_mutex);
    return NULL;
}

/* Start another thread. Returns whether there is any. The mutex is held. */
static bool start_thread(struct lane *lane)
{
    pthread_t thread;

    if (lane->threads < THREADS_MAX &&
        nvmeio_thread_start(&thread, slow_main, lane) == 0) {
        pthread_detach(thread);
        lane->threads++;
    }
    return lane->threads > 0;
}

bool nvmeio_slow_add(struct nvmeio_request *request)
{
    struct lane *lane = lane_of(request);
    struct nvmeio_waiter *waiter;

    pthread_mutex_lock(&lanes_mutex);
    waiter = lane->idle;
    if (waiter)
        lane->idle = waiter->next;
    bool added = waiter || start_thread(lane);
    if (added) {
        /* Holds the handle too. */
        atomic_fetch_add_explicit(&whole_of(request)->references, 1,
                                  memory_order_relaxed);
        request->slow_next = NULL;
        if (lane->first)
            lane->last->slow_next = request;
        else
            lane->first = request;
        lane->last = request;
    }
    pthread_mutex_unlock(&lanes_mutex);
    if (waiter)
        nvmeio_waiter_wake(waiter);
    return added;
}

static void lock_lanes(void)
{
    pthread_mutex_lock(&lanes_mutex);
}

static void unlock_lanes(void)
{
    pthread_mutex_unlock(&lanes_mutex);
}

/* A forked child has none of the threads. Its handles forget their requests, too. */
static void forget_lanes(void)
{
    memset(lanes, 0, sizeof(lanes));
    pthread_mutex_unlock(&lanes_mutex);
}

static struct nvmeio_fork_hooks fork_hooks = {
    .prepare = lock_lanes,
    .parent = unlock_lanes,
    .child = forget_lanes,
};

__attribute__((constructor)) static void register_hooks(void)
{
    nvmeio_fork_hook(&fork_hooks);
}
