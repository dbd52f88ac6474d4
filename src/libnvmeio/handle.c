/* handle.c -- opening, submitting, cancelling, closing, and what a fork means for them.
 *
 * One mutex guards a handle; it is held over no system call that can block, but where
 * a closed handle takes down the lanes of its callers.  When a request may go on is
 * schedule.c's, how it is cut is request.c's, how blocks are carried out is lane.c's;
 * threads that wait are wait.c's. */
#include "handle_internal.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "file_internal.h"
#include "runs.h"

/* Added to the generation of the process that is making lists and lanes anew.  A child
 * forked meanwhile has another one, and does not wait for a thread it does not have. */
#define REVIVING (UINT32_C(1) << 31)

static void handle_release(struct nvmeio_handle *handle)
{
    /* Acquire and release: the last holder sees all that the others did. */
    if (atomic_fetch_sub_explicit(&handle->references, 1, memory_order_acq_rel) != 1)
        return;
    /* In a child that never used it, the parent's threads look as if they still waited,
     * and pthread_cond_destroy() would wait for them. */
    if (atomic_load_explicit(&handle->generation, memory_order_relaxed) ==
        nvmeio_fork_generation()) {
        pthread_mutex_destroy(&handle->mutex);
        sem_destroy(&handle->work);
        pthread_cond_destroy(&handle->news);
    }
    free((char *)handle->config.engine);
    free(handle->lanes);
    nvmeio_watch_free(handle);
    free(handle);
}

void nvmeio_request_release(struct nvmeio_request *request)
{
    /* Acquire and release, as above. */
    if (!request ||
        atomic_fetch_sub_explicit(&request->references, 1, memory_order_acq_rel) != 1)
        return;
    nvmeio_file_release(request->file);
    handle_release(request->handle);
    free(request->records);
    free(request);
}

void nvmeio_config_default(struct nvmeio_config *config)
{
    *config = (struct nvmeio_config){
        .block_bytes = 1u << 20,
        .queue_depth = 128,
        .lanes = 1,
        .bounce = NVMEIO_BOUNCE_AUTO,
        .engine = "auto",
    };
}

static bool valid(const struct nvmeio_config *config)
{
    return config->block_bytes >= 1 && config->block_bytes <= NVMEIO_BLOCK_BYTES_MAX &&
           config->queue_depth >= 1 && config->queue_depth <= NVMEIO_QUEUE_DEPTH_MAX &&
           config->lanes >= 1 && config->lanes <= NVMEIO_LANES_MAX && config->engine;
}

/* Whole alignments, for any file; at least two bounces a lane, where so much is
 * allowed. */
static size_t bounce_bytes(const struct nvmeio_handle *handle)
{
    uint64_t unit = NVMEIO_OFFSET_ALIGN_MAX;
    uint64_t share = NVMEIO_LANE_BOUNCE_BYTES / handle->config.lanes / 2;
    uint64_t bytes = nvmeio_round_up(handle->block_bytes, unit);

    if (bytes > NVMEIO_BOUNCE_BYTES)
        bytes = NVMEIO_BOUNCE_BYTES;
    if (bytes > share)
        bytes = nvmeio_round_down(share, unit);
    return bytes > unit ? bytes : unit;
}

static void locks_init(struct nvmeio_handle *handle)
{
    pthread_condattr_t monotonic;

    sem_init(&handle->work, 0, 0);
    pthread_mutex_init(&handle->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&handle->news, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* Send the lanes home and wait for them. */
static void lanes_stop(struct nvmeio_handle *handle)
{
    pthread_mutex_lock(&handle->mutex);
    const unsigned count = handle->lanes_started;
    handle->stopping = true;
    for (; handle->lanes_idle > 0; handle->lanes_idle--)
        sem_post(&handle->work);
    pthread_mutex_unlock(&handle->mutex);
    for (unsigned i = 0; i < count; i++)
        pthread_join(handle->lanes[i].thread, NULL);
    /* Others may be asking for the figures, which must not be counted twice. */
    pthread_mutex_lock(&handle->mutex);
    for (unsigned i = 0; i < count; i++)
        nvmeio_lane_retire(&handle->lanes[i]);
    handle->lanes_started = 0;
    pthread_mutex_unlock(&handle->mutex);
}

static int lanes_start(struct nvmeio_handle *handle)
{
    if (!handle->lanes)
        handle->lanes = calloc(handle->config.lanes, sizeof(*handle->lanes));
    if (!handle->lanes)
        return -ENOMEM;
    for (unsigned i = 0; i < handle->config.lanes; i++) {
        int error = nvmeio_lane_start(&handle->lanes[i], handle);
        if (error) {
            /* Lanes before it may have what it lacks, of which others want less. */
            handle->refused = handle->lanes[i].refused || i > 0;
            lanes_stop(handle);
            handle->stopping = false;
            memset(handle->lanes, 0, handle->config.lanes * sizeof(*handle->lanes));
            return error;
        }
        /* A child that had none may be asked for its figures meanwhile. */
        pthread_mutex_lock(&handle->mutex);
        handle->lanes_started++;
        pthread_mutex_unlock(&handle->mutex);
    }
    handle->lanes_alive = handle->lanes_started;
    return 0;
}

/* Try the engines from the first on, and note why one is passed over.  Where a thread,
 * a descriptor or memory is lacking, another engine is no remedy. */
static int start_any(struct nvmeio_handle *handle)
{
    size_t used = 0;
    int error = -ENOSYS;

    for (unsigned i = 0; (handle->ops = nvmeio_engine_at(i)); i++) {
        char reason[256];
        error = lanes_start(handle);
        if (error == 0 || !handle->refused)
            return error;
        nvmeio_engine_explain(handle->ops->name, error, reason, sizeof(reason));
        int length = snprintf(handle->fallback + used, sizeof(handle->fallback) - used,
                              "%s%s: %s", used ? "; " : "", handle->ops->name, reason);
        used += (size_t)length;
        if (used >= sizeof(handle->fallback))
            used = sizeof(handle->fallback) - 1;
    }
    return error;
}

static int start_named(struct nvmeio_handle *handle)
{
    bool known;

    handle->ops = nvmeio_engine_find(handle->config.engine, &known);
    if (!handle->ops)
        return known ? -ENOSYS : -EINVAL;
    return lanes_start(handle);
}

int nvmeio_handle_open(const struct nvmeio_config *config,
                       struct nvmeio_handle **result)
{
    if (!valid(config))
        return -EINVAL;
    struct nvmeio_handle *handle = calloc(1, sizeof(*handle));
    if (!handle)
        return -ENOMEM;
    handle->config = *config;
    handle->config.engine = strdup(config->engine);
    handle->block_bytes = nvmeio_round_up(config->block_bytes, NVMEIO_EDGE_BYTES);
    handle->bounce_bytes = bounce_bytes(handle);
    atomic_init(&handle->references, 1);
    atomic_init(&handle->generation, nvmeio_fork_generation());
    locks_init(handle);
    int error = handle->config.engine ? 0 : -ENOMEM;
    if (error == 0)
        error = strcmp(config->engine, "auto") == 0 ? start_any(handle)
                                                    : start_named(handle);
    if (error) {
        handle_release(handle);
        return error;
    }
    *result = handle;
    return 0;
}

/* In a child: forget the parent's lists, lanes and locks (they are abandoned, not
 * freed: a ring of the parent must not be touched) and start lanes of our own. */
static void revive(struct nvmeio_handle *handle)
{
    handle->active_first = handle->active_last = NULL;
    handle->active_count = 0;
    handle->queue_first = handle->queue_last = NULL;
    handle->done_first = handle->done_last = NULL;
    handle->gated_first = NULL;
    handle->drainers = handle->sleepers = 0;
    handle->watches = NULL;
    handle->watches_armed = 0;
    handle->callers = NULL;
    handle->caller_count = 0;
    handle->lanes_idle = 0;
    handle->lanes_alive = handle->lanes_started = 0;
    /* What the parent's lanes have done is told by the parent. */
    handle->retired = (struct nvmeio_stats){0};
    atomic_store_explicit(&handle->requests, 0, memory_order_relaxed);
    memset(handle->retired_latencies, 0, sizeof(handle->retired_latencies));
    handle->stopping = false;
    /* Closed by the parent, or here before it was ever used: nobody is stopping it. */
    handle->stopped = handle->closing;
    locks_init(handle);
    handle->lanes = NULL;
    handle->dead_error = handle->closing ? 0 : lanes_start(handle);
    handle->lanes_missing = handle->dead_error != 0;
    handle->lanes_starting = false;
    atomic_store_explicit(&handle->generation, nvmeio_fork_generation(),
                          memory_order_release);
}

/* In a child where nobody has used the handle yet: true, and it is ours alone until
 * revive().  False: lists and lanes are this process's. */
static bool claim(struct nvmeio_handle *handle)
{
    uint32_t now = nvmeio_fork_generation();
    /* Acquire: pairs with the release in revive(). */
    uint32_t then = atomic_load_explicit(&handle->generation, memory_order_acquire);

    while (then != now) {
        if (then != (now | REVIVING) && atomic_compare_exchange_strong_explicit(
                                            &handle->generation, &then, now | REVIVING,
                                            memory_order_acquire, memory_order_acquire))
            return true;
        sched_yield();
        then = atomic_load_explicit(&handle->generation, memory_order_acquire);
    }
    return false;
}

void nvmeio_handle_ensure_own(struct nvmeio_handle *handle)
{
    if (claim(handle))
        revive(handle);
}

/* In a child that was short of descriptors, memory or threads when it used the handle
 * first: what was lacking may be there by now. */
static void start_missing_lanes(struct nvmeio_handle *handle)
{
    pthread_mutex_lock(&handle->mutex);
    while (handle->lanes_starting)
        pthread_cond_wait(&handle->news, &handle->mutex);
    bool starting = handle->lanes_missing && !handle->closing;
    handle->lanes_starting = starting;
    pthread_mutex_unlock(&handle->mutex);
    if (!starting)
        return;
    int error = lanes_start(handle);
    pthread_mutex_lock(&handle->mutex);
    handle->dead_error = error;
    handle->lanes_missing = error != 0;
    handle->lanes_starting = false;
    pthread_cond_broadcast(&handle->news);
    pthread_mutex_unlock(&handle->mutex);
}

/* Give the request to those who carry it out.  The mutex is held. */
static void dispatch(struct nvmeio_handle *handle, struct nvmeio_request *request,
                     bool caller)
{
    nvmeio_schedule_add(handle, request);
    if (request->op == NVMEIO_OP_FSYNC)
        nvmeio_schedule_gate(handle, request);
    else if (caller && nvmeio_wait_give(handle, request))
        return;
    /* The last lane may have died, and buried this one, while the mutex was dropped. */
    if (handle->dead_error && !nvmeio_schedule_settling(request))
        nvmeio_request_fail(request, handle->dead_error, 0);
    nvmeio_schedule_progress(handle, request);
}

static int check_transfer(const struct nvmeio_transfer *transfer)
{
    if (!transfer->file)
        return -EINVAL;
    const struct nvmeio_file_info *info = &transfer->file->info;
    switch (transfer->op) {
    case NVMEIO_OP_FSYNC:
        return 0;
    case NVMEIO_OP_READ:
        if (!info->readable)
            return -EBADF;
        break;
    case NVMEIO_OP_WRITE:
        if (!info->writable)
            return -EBADF;
        break;
    default:
        return -EINVAL;
    }
    if (transfer->offset < 0 || (transfer->size > 0 && !transfer->address))
        return -EINVAL;
    if (transfer->size > (uint64_t)(INT64_MAX - transfer->offset))
        return -EOVERFLOW;
    return 0;
}

/* Hand over a request that was just made. */
static int hand_in(struct nvmeio_handle *handle, struct nvmeio_request *request,
                   bool caller, struct nvmeio_request **result)
{
    atomic_fetch_add_explicit(&handle->references, 1, memory_order_relaxed);
    nvmeio_request_check(request);
    pthread_mutex_lock(&handle->mutex);
    if (handle->lanes_missing) {
        pthread_mutex_unlock(&handle->mutex);
        start_missing_lanes(handle);
        pthread_mutex_lock(&handle->mutex);
    }
    if (handle->closing) {
        pthread_mutex_unlock(&handle->mutex);
        /* A file that was made ready for this write is cut back. */
        request->cancelled = true;
        nvmeio_request_settle(request);
        nvmeio_request_release(request);
        return -EPIPE;
    }
    atomic_fetch_add_explicit(&handle->requests, 1, memory_order_relaxed);
    /* Before it can be done: another thread may pop it at once. */
    *result = request;
    dispatch(handle, request, caller);
    pthread_mutex_unlock(&handle->mutex);
    return 0;
}

int nvmeio_submit(struct nvmeio_handle *handle, const struct nvmeio_transfer *transfer,
                  struct nvmeio_request **result)
{
    int error = check_transfer(transfer);

    if (error)
        return error;
    nvmeio_handle_ensure_own(handle);
    struct nvmeio_request *request = nvmeio_request_new(handle, transfer);
    return request ? hand_in(handle, request, transfer->caller, result) : -ENOMEM;
}

static int check_gather(const struct nvmeio_gather *gather)
{
    const struct nvmeio_transfer whole = {
        .op = gather->op,
        .file = gather->file,
        .address = gather->address,
        .size = gather->size,
    };

    if (gather->op == NVMEIO_OP_FSYNC)
        return -EINVAL;
    return check_transfer(&whole);
}

int nvmeio_submit_gather(struct nvmeio_handle *handle,
                         const struct nvmeio_gather *gather,
                         struct nvmeio_request **result, size_t *offender)
{
    int64_t size = INT64_MAX;
    int error = check_gather(gather);

    *offender = SIZE_MAX;
    if (error)
        return error;
    if (gather->op == NVMEIO_OP_READ)
        size = nvmeio_file_size(gather->file);
    if (size < 0)
        return (int)size;
    struct nvmeio_records *records = nvmeio_records_new(gather, size, &error, offender);
    if (!records)
        return error;
    nvmeio_handle_ensure_own(handle);
    struct nvmeio_request *request = nvmeio_request_new_gather(handle, gather, records);
    if (!request) {
        free(records);
        return -ENOMEM;
    }
    return hand_in(handle, request, gather->caller, result);
}

int nvmeio_request_cancel(struct nvmeio_request *request)
{
    struct nvmeio_handle *handle = request->handle;
    int dropped = 0;

    if (nvmeio_request_done(request))
        return 0;
    if (nvmeio_request_before_fork(request))
        return -EOWNERDEAD;
    pthread_mutex_lock(&handle->mutex);
    if (!nvmeio_schedule_settling(request) && !request->error && !request->cancelled &&
        !nvmeio_request_is_cut(request)) {
        dropped = 1;
        request->cancelled = true;
        nvmeio_schedule_progress(handle, request);
    }
    pthread_mutex_unlock(&handle->mutex);
    return dropped;
}

unsigned nvmeio_handle_pending(struct nvmeio_handle *handle)
{
    nvmeio_handle_ensure_own(handle);
    pthread_mutex_lock(&handle->mutex);
    unsigned count = handle->active_count;
    pthread_mutex_unlock(&handle->mutex);
    return count;
}

const char *nvmeio_handle_engine(struct nvmeio_handle *handle)
{
    return handle->ops->name;
}

const char *nvmeio_handle_fallback(struct nvmeio_handle *handle)
{
    return handle->fallback;
}

void nvmeio_handle_stats(struct nvmeio_handle *handle, struct nvmeio_stats *stats)
{
    nvmeio_handle_ensure_own(handle);
    pthread_mutex_lock(&handle->mutex);
    *stats = handle->retired;
    stats->requests = atomic_load_explicit(&handle->requests, memory_order_relaxed);
    for (unsigned i = 0; i < handle->lanes_started; i++)
        nvmeio_lane_count(&handle->lanes[i], stats);
    for (struct nvmeio_lane *lane = handle->callers; lane; lane = lane->next)
        nvmeio_lane_count(lane, stats);
    pthread_mutex_unlock(&handle->mutex);
}

void nvmeio_handle_latencies(struct nvmeio_handle *handle,
                             uint64_t counts[NVMEIO_LATENCY_BUCKETS])
{
    nvmeio_handle_ensure_own(handle);
    pthread_mutex_lock(&handle->mutex);
    for (unsigned i = 0; i < NVMEIO_LATENCY_BUCKETS; i++)
        counts[i] = handle->retired_latencies[i];
    for (unsigned i = 0; i < handle->lanes_started; i++)
        nvmeio_latency_add(&handle->lanes[i].latencies, counts);
    for (struct nvmeio_lane *lane = handle->callers; lane; lane = lane->next)
        nvmeio_latency_add(&lane->latencies, counts);
    pthread_mutex_unlock(&handle->mutex);
}

void nvmeio_handle_stop(struct nvmeio_handle *handle)
{
    if (claim(handle)) {
        /* A child that never used it has nothing to stop: what there is, is the
         * parent's. */
        handle->closing = true;
        revive(handle);
        return;
    }
    pthread_mutex_lock(&handle->mutex);
    bool first = !handle->closing;
    handle->closing = true;
    while (handle->lanes_starting || (!first && !handle->stopped))
        pthread_cond_wait(&handle->news, &handle->mutex);
    pthread_mutex_unlock(&handle->mutex);
    if (!first)
        return;
    nvmeio_handle_drain(handle, -1);
    lanes_stop(handle);
    nvmeio_wait_close(handle);
    pthread_mutex_lock(&handle->mutex);
    handle->stopped = true;
    pthread_cond_broadcast(&handle->news);
    pthread_mutex_unlock(&handle->mutex);
}

void nvmeio_handle_close(struct nvmeio_handle *handle)
{
    void *user;

    nvmeio_handle_stop(handle);
    while (nvmeio_handle_pop(handle, &user, 1) == 1)
        ;
    handle_release(handle);
}
