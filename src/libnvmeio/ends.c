/* ends.c -- how far the writes to a file reach, by whichever open of it they come.
 *
 * What a write that failed has made longer is cut off again.  Linux cannot cut a file
 * only if nobody has made it longer meanwhile, so whoever cuts must know of the writes
 * that are in flight: a path, a descriptor and a File may all be the same file. */
#include "ends.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "fork.h"

struct nvmeio_ends {
    struct nvmeio_ends *next;
    uint64_t device, inode;
    unsigned opens;
    atomic_bool inherited; /* a child was forked, which may write too */

    /* The furthest write, and the furthest of all others.  They only grow. */
    pthread_mutex_t mutex;
    int64_t max, second;
};

/* Of the files that are open in this process; a child begins with none. */
static struct nvmeio_ends *first;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

struct nvmeio_ends *nvmeio_ends_join(uint64_t device, uint64_t inode)
{
    pthread_mutex_lock(&mutex);
    struct nvmeio_ends *ends = first;
    while (ends && (ends->device != device || ends->inode != inode))
        ends = ends->next;
    if (!ends)
        ends = calloc(1, sizeof(*ends));
    if (ends && ends->opens++ == 0) {
        ends->device = device;
        ends->inode = inode;
        pthread_mutex_init(&ends->mutex, NULL);
        ends->next = first;
        first = ends;
    }
    pthread_mutex_unlock(&mutex);
    return ends;
}

void nvmeio_ends_leave(struct nvmeio_ends *ends)
{
    pthread_mutex_lock(&mutex);
    if (--ends->opens == 0) {
        struct nvmeio_ends **at = &first;
        while (*at && *at != ends)
            at = &(*at)->next;
        /* Those of a parent are not there, and may look as if they were held. */
        if (*at) {
            *at = ends->next;
            pthread_mutex_destroy(&ends->mutex);
        }
        free(ends);
    }
    pthread_mutex_unlock(&mutex);
}

void nvmeio_ends_note(struct nvmeio_ends *ends, int64_t end)
{
    pthread_mutex_lock(&ends->mutex);
    int64_t lower = end;
    if (end > ends->max) {
        lower = ends->max;
        ends->max = end;
    }
    if (lower > ends->second)
        ends->second = lower;
    pthread_mutex_unlock(&ends->mutex);
}

int64_t nvmeio_ends_hold(struct nvmeio_ends *ends, int64_t end)
{
    pthread_mutex_lock(&ends->mutex);
    if (atomic_load_explicit(&ends->inherited, memory_order_relaxed))
        return INT64_MAX;
    return ends->max == end ? ends->second : ends->max;
}

void nvmeio_ends_release(struct nvmeio_ends *ends)
{
    pthread_mutex_unlock(&ends->mutex);
}

static void lock_list(void)
{
    pthread_mutex_lock(&mutex);
    for (struct nvmeio_ends *ends = first; ends; ends = ends->next)
        atomic_store_explicit(&ends->inherited, true, memory_order_relaxed);
}

static void unlock_list(void)
{
    pthread_mutex_unlock(&mutex);
}

static void unlock_list_in_child(void)
{
    first = NULL;
    pthread_mutex_unlock(&mutex);
}

static struct nvmeio_fork_hooks fork_hooks = {
    .prepare = lock_list,
    .parent = unlock_list,
    .child = unlock_list_in_child,
};

__attribute__((constructor)) static void watch_forks(void)
{
    nvmeio_fork_hook(&fork_hooks);
}
