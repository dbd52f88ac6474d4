/* schedule.c -- the lists of a handle: what is active, what waits for a lane, what is
 * done.
 *
 * Everything here runs under the handle's mutex, and drops it only round system calls
 * and frees.  When a request may go on is decided here: the edges of a write behind its
 * middle, an fsync behind the writes before it. */
#include "handle_internal.h"

#include "file_internal.h"
#include "runs.h"

static void request_retain(struct nvmeio_request *request)
{
    atomic_fetch_add_explicit(&request->references, 1, memory_order_relaxed);
}

void nvmeio_schedule_add(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    request_retain(request);
    request->active_previous = handle->active_last;
    if (handle->active_last)
        handle->active_last->active_next = request;
    else
        handle->active_first = request;
    handle->active_last = request;
    handle->active_count++;
}

static void active_remove(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    struct nvmeio_request *next = request->active_next;
    struct nvmeio_request *previous = request->active_previous;

    if (next)
        next->active_previous = previous;
    else
        handle->active_last = previous;
    if (previous)
        previous->active_next = next;
    else
        handle->active_first = next;
    handle->active_count--;
}

static void queue_add(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    request->queued = true;
    request->queue_next = NULL;
    if (handle->queue_first)
        handle->queue_last->queue_next = request;
    else
        handle->queue_first = request;
    handle->queue_last = request;
}

static void queue_remove(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    struct nvmeio_request *previous = NULL;
    struct nvmeio_request *r = handle->queue_first;

    for (; r != request; r = r->queue_next)
        previous = r;
    if (previous)
        previous->queue_next = request->queue_next;
    else
        handle->queue_first = request->queue_next;
    if (handle->queue_last == request)
        handle->queue_last = previous;
    request->queued = false;
}

static void done_add(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    request->listed = true;
    request->done_next = NULL;
    request->done_previous = handle->done_last;
    if (handle->done_first)
        handle->done_last->done_next = request;
    else
        handle->done_first = request;
    handle->done_last = request;
}

void nvmeio_schedule_take_done(struct nvmeio_handle *handle,
                               struct nvmeio_request *request)
{
    if (request->done_previous)
        request->done_previous->done_next = request->done_next;
    else
        handle->done_first = request->done_next;
    if (request->done_next)
        request->done_next->done_previous = request->done_previous;
    else
        handle->done_last = request->done_previous;
    request->listed = false;
}

/* Set enough lanes to work on `blocks` new blocks: those that rest, then those that
 * wait for completions and have room. */
static void wake_lanes(struct nvmeio_handle *handle, size_t blocks)
{
    size_t missing = blocks;
    for (; handle->lanes_idle > 0 && missing > 0; missing--) {
        /* No longer idle, also before it has woken up: the next block is not its. */
        handle->lanes_idle--;
        sem_post(&handle->work);
    }
    for (unsigned i = 0; i < handle->lanes_started && missing > 0; i++) {
        struct nvmeio_lane *lane = &handle->lanes[i];
        if (!lane->listening)
            continue;
        lane->listening = false;
        lane->engine.ops->wake(&lane->engine);
        missing--;
    }
}

static void enqueue(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    queue_add(handle, request);
    wake_lanes(handle, nvmeio_request_blocks_left(request, handle->block_bytes));
}

static bool same_file(const struct nvmeio_request *a, const struct nvmeio_request *b)
{
    return a->file->info.device == b->file->info.device &&
           a->file->info.inode == b->file->info.inode;
}

/* The last write to the same file before this fsync, or NULL; one that is being settled
 * has all its blocks behind it, and its file no more. */
static struct nvmeio_request *write_before(const struct nvmeio_request *request)
{
    struct nvmeio_request *r = request->active_previous;

    while (r && (r->op != NVMEIO_OP_WRITE || nvmeio_schedule_settling(r) ||
                 !same_file(r, request)))
        r = r->active_previous;
    return r;
}

void nvmeio_schedule_gate(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    request->write_before = write_before(request);
    if (request->write_before) {
        request->gated_next = handle->gated_first;
        handle->gated_first = request;
    } else {
        request->gate_open = true;
    }
}

/* A write is done: each fsync that waited for it waits for the one before, or goes. */
static void open_gates(struct nvmeio_handle *handle, const struct nvmeio_request *write)
{
    struct nvmeio_request **place = &handle->gated_first;

    while (*place) {
        struct nvmeio_request *r = *place;
        if (r->write_before == write)
            r->write_before = write_before(r);
        if (r->write_before) {
            place = &r->gated_next;
            continue;
        }
        *place = r->gated_next;
        r->gate_open = true;
        if (nvmeio_request_has_block(r))
            enqueue(handle, r);
    }
}

/* An fsync ends without having been let go. */
static void gated_remove(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    struct nvmeio_request **place = &handle->gated_first;

    while (*place != request)
        place = &(*place)->gated_next;
    *place = request->gated_next;
}

/* Store the outcome and tell who waits.  Drops the mutex for a while. */
static void complete(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    struct nvmeio_file *file = request->file;

    if (request->op == NVMEIO_OP_FSYNC && !request->gate_open)
        gated_remove(handle, request);
    /* A request that is kept for its outcome does not keep its file open; who sees that
     * it is done may count on the descriptor. */
    request->file = NULL;
    pthread_mutex_unlock(&handle->mutex);
    nvmeio_file_release(file);
    pthread_mutex_lock(&handle->mutex);
    active_remove(handle, request);
    if (request->caller_lane)
        request->caller_lane->own = NULL;
    /* Pairs with the acquire in nvmeio_request_done(). */
    atomic_store_explicit(&request->state, NVMEIO_STATE_DONE, memory_order_release);
    if (request->waiters > 0 || (handle->drainers > 0 && handle->active_count == 0))
        pthread_cond_broadcast(&handle->news);
    nvmeio_watch_signal(handle);
    if (request->op == NVMEIO_OP_WRITE)
        open_gates(handle, request);
    if (request->user) {
        done_add(handle, request);
        return;
    }
    pthread_mutex_unlock(&handle->mutex);
    nvmeio_request_release(request);
    pthread_mutex_lock(&handle->mutex);
}

/* Over: tidy up, without the mutex where that takes a system call. */
static void settle(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    atomic_store_explicit(&request->state, NVMEIO_STATE_SETTLING, memory_order_relaxed);
    if (request->error || request->cancelled) {
        pthread_mutex_unlock(&handle->mutex);
        nvmeio_request_settle(request);
        pthread_mutex_lock(&handle->mutex);
    } else {
        nvmeio_request_settle(request);
    }
    complete(handle, request);
}

bool nvmeio_schedule_settling(const struct nvmeio_request *request)
{
    return atomic_load_explicit(&request->state, memory_order_relaxed) !=
           NVMEIO_STATE_ACTIVE;
}

void nvmeio_schedule_progress(struct nvmeio_handle *handle,
                              struct nvmeio_request *request)
{
    if (nvmeio_schedule_settling(request))
        return;
    bool at_gate = !request->error && !request->cancelled &&
                   request->op == NVMEIO_OP_WRITE && request->in_flight == 0 &&
                   request->span == request->plan.edges &&
                   request->span < request->plan.count;
    if (at_gate)
        request->gate_open = true;
    nvmeio_runs_retry(request);
    bool has_block = nvmeio_request_has_block(request);
    if (request->queued && !has_block)
        queue_remove(handle, request);
    if (nvmeio_request_is_over(request))
        settle(handle, request);
    else if (has_block && !request->queued && !request->caller_lane)
        enqueue(handle, request);
}

struct nvmeio_request *nvmeio_schedule_next(struct nvmeio_handle *handle)
{
    /* A request that has been cut to its end, or to its gate, leaves the queue here. */
    while (handle->queue_first && !nvmeio_request_has_block(handle->queue_first))
        queue_remove(handle, handle->queue_first);
    return handle->queue_first;
}

void nvmeio_schedule_bury(struct nvmeio_handle *handle, int error)
{
    if (--handle->lanes_alive > 0)
        return;
    handle->dead_error = error;
    /* The list changes under our hands: begin again after each.  What is in flight in a
     * caller lane is not ours to fail. */
    for (;;) {
        struct nvmeio_request *r = handle->active_first;
        while (r && (r->caller_lane || r->error || nvmeio_schedule_settling(r)))
            r = r->active_next;
        if (!r)
            return;
        nvmeio_request_fail(r, error, r->position);
        nvmeio_schedule_progress(handle, r);
    }
}
