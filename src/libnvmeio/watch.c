/* watch.c -- eventfds by which a handle tells event loops that requests are done.
 *
 * An eventfd is signalled once, and then only after its owner has asked again: so a
 * loop that is busy costs no system call for each completion.  Which requests are done
 * is asked by nvmeio_handle_pop(). */
#include "handle_internal.h"

#include <errno.h>
#include <stdlib.h>

#include <sys/eventfd.h>

#include "fork.h"

/* An eventfd that was asked for; guarded by the handle's mutex. */
struct nvmeio_watch {
    struct nvmeio_watch *next;
    int fd;
    bool armed; /* to be signalled when a request becomes done */
};

/* Where the pointer to the watch of `fd` is, or the one at the end, which is NULL. */
static struct nvmeio_watch **place_of(struct nvmeio_handle *handle, int fd)
{
    struct nvmeio_watch **place = &handle->watches;

    while (*place && (*place)->fd != fd)
        place = &(*place)->next;
    return place;
}

int nvmeio_handle_watch(struct nvmeio_handle *handle, int fd)
{
    int error = 0;

    nvmeio_handle_ensure_own(handle);
    pthread_mutex_lock(&handle->mutex);
    struct nvmeio_watch **place = place_of(handle, fd);
    if (!*place && (*place = calloc(1, sizeof(**place))))
        (*place)->fd = fd;
    if (!*place) {
        error = -ENOMEM;
    } else if (!(*place)->armed) {
        (*place)->armed = true;
        handle->watches_armed++;
    }
    pthread_mutex_unlock(&handle->mutex);
    return error;
}

void nvmeio_handle_unwatch(struct nvmeio_handle *handle, int fd)
{
    /* In a child that has not used the handle the list is the parent's, and so may be
     * the mutex.  Acquire: pairs with the release in revive(). */
    if (atomic_load_explicit(&handle->generation, memory_order_acquire) !=
        nvmeio_fork_generation())
        return;
    pthread_mutex_lock(&handle->mutex);
    struct nvmeio_watch **place = place_of(handle, fd), *watch = *place;
    if (watch) {
        *place = watch->next;
        handle->watches_armed -= watch->armed;
    }
    pthread_mutex_unlock(&handle->mutex);
    free(watch);
}

void nvmeio_watch_signal(struct nvmeio_handle *handle)
{
    if (handle->watches_armed == 0)
        return;
    for (struct nvmeio_watch *watch = handle->watches; watch; watch = watch->next) {
        /* It fails where the counter is full, and then the loop is awake anyway. */
        if (watch->armed)
            eventfd_write(watch->fd, 1);
        watch->armed = false;
    }
    handle->watches_armed = 0;
}

void nvmeio_watch_free(struct nvmeio_handle *handle)
{
    while (handle->watches) {
        struct nvmeio_watch *watch = handle->watches;
        handle->watches = watch->next;
        free(watch);
    }
}
