/* wait.c -- threads and event loops that wait for requests of a handle. */
#include <errno.h>

#include "handle_internal.h"

int nvmeio_request_wait(struct nvmeio_request *request, int64_t timeout_ns)
{
    struct nvmeio_queue *queue = &request->handle->queue;
    struct nvmeio_waiter waiter = {0};
    int error = 0;

    if (nvmeio_request_before_fork(request))
        return nvmeio_request_done(request) ? 0 : -EOWNERDEAD;
    /* No mutex if there is nothing to report, or no time to wait. */
    if (nvmeio_request_done(request) ? !request->user : timeout_ns == 0)
        return nvmeio_request_done(request) ? 0 : -ETIMEDOUT;
    int64_t deadline_ns = nvmeio_deadline(timeout_ns);
    nvmeio_queue_lock(queue);
    if (!nvmeio_request_done(request)) {
        nvmeio_queue_hurry(queue, request);
        error = nvmeio_queue_sleep(queue, &request->waiters, &waiter, deadline_ns);
        return error ? error : waiter.reported;
    }
    if (request->listed) {
        nvmeio_queue_take_done(queue, request);
        nvmeio_queue_drop(queue, request);
        waiter.reported = true;
    }
    nvmeio_queue_unlock(queue);
    return waiter.reported;
}

int nvmeio_handle_drain(struct nvmeio_handle *handle, int64_t timeout_ns)
{
    nvmeio_handle_ensure_own(handle);
    return nvmeio_queue_drain(&handle->queue, nvmeio_deadline(timeout_ns));
}

unsigned nvmeio_handle_pop(struct nvmeio_handle *handle, void **users, unsigned count)
{
    nvmeio_handle_ensure_own(handle);
    return nvmeio_queue_pop(&handle->queue, users, count);
}

int nvmeio_handle_watch(struct nvmeio_handle *handle, int fd)
{
    nvmeio_handle_ensure_own(handle);
    nvmeio_queue_lock(&handle->queue);
    int error = nvmeio_eventfds_arm(&handle->queue.eventfds, fd);
    nvmeio_queue_unlock(&handle->queue);
    return error;
}

void nvmeio_handle_unwatch(struct nvmeio_handle *handle, int fd)
{
    /* In a child that has not used the handle, the list is the parent's, and the mutex
     * may be locked. Acquire: pairs with the release in reopen(). */
    if (atomic_load_explicit(&handle->generation, memory_order_acquire) !=
        nvmeio_fork_generation())
        return;
    nvmeio_queue_lock(&handle->queue);
    nvmeio_eventfds_remove(&handle->queue.eventfds, fd);
    nvmeio_queue_unlock(&handle->queue);
}
