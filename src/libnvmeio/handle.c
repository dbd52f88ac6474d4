/* handle.c -- opening, submitting, waiting, closing, and what a fork means for them.
 *
 * One mutex guards a handle; it is never held over a system call that can block.  When
 * a request may go on is schedule.c's, how it is cut and judged is request.c's, how
 * blocks are carried out is lane.c's. */
#include "handle_internal.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "file_internal.h"

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
        pthread_cond_destroy(&handle->work);
        pthread_cond_destroy(&handle->news);
    }
    free((char *)handle->config.engine);
    free(handle->lanes);
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

static int locks_init(struct nvmeio_handle *handle)
{
    pthread_condattr_t monotonic;

    pthread_mutex_init(&handle->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&handle->work, &monotonic);
    pthread_cond_init(&handle->news, &monotonic);
    pthread_condattr_destroy(&monotonic);
    handle->lanes = calloc(handle->config.lanes, sizeof(*handle->lanes));
    return handle->lanes ? 0 : -ENOMEM;
}

/* Send the lanes home and wait for them. */
static void lanes_stop(struct nvmeio_handle *handle)
{
    pthread_mutex_lock(&handle->mutex);
    const unsigned count = handle->lanes_started;
    handle->stopping = true;
    pthread_cond_broadcast(&handle->work);
    pthread_mutex_unlock(&handle->mutex);
    for (unsigned i = 0; i < count; i++)
        pthread_join(handle->lanes[i].thread, NULL);
    /* Others may be asking for the figures, which must not be counted twice. */
    pthread_mutex_lock(&handle->mutex);
    for (unsigned i = 0; i < count; i++)
        nvmeio_lane_count(&handle->lanes[i], &handle->retired);
    handle->lanes_started = 0;
    pthread_mutex_unlock(&handle->mutex);
    for (unsigned i = 0; i < count; i++)
        nvmeio_lane_close(&handle->lanes[i]);
}

static int lanes_start(struct nvmeio_handle *handle)
{
    for (unsigned i = 0; i < handle->config.lanes; i++) {
        int error = nvmeio_lane_start(&handle->lanes[i], handle);
        if (error) {
            lanes_stop(handle);
            handle->stopping = false;
            memset(handle->lanes, 0, handle->config.lanes * sizeof(*handle->lanes));
            return error;
        }
        handle->lanes_started++;
    }
    handle->lanes_alive = handle->lanes_started;
    return 0;
}

/* Try the engines from the first on, and note why one is passed over. */
static int start_any(struct nvmeio_handle *handle)
{
    size_t used = 0;
    int error = -ENOSYS;

    for (unsigned i = 0; (handle->ops = nvmeio_engine_at(i)); i++) {
        char reason[256];
        error = lanes_start(handle);
        if (error == 0)
            return 0;
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
    int error = locks_init(handle);
    if (error == 0 && !handle->config.engine)
        error = -ENOMEM;
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
    handle->fsyncs_gated = handle->drainers = handle->sleepers = 0;
    handle->callers = NULL;
    handle->caller_count = 0;
    handle->lanes_idle = handle->lanes_alive = handle->lanes_started = 0;
    handle->stopping = false;
    /* Closed by the parent, or here before it was ever used: nobody is stopping it. */
    handle->stopped = handle->closing;
    handle->dead_error = locks_init(handle);
    if (handle->dead_error == 0 && !handle->closing)
        handle->dead_error = lanes_start(handle);
}

/* Whether lists and lanes are this process's, after making them so if need be. */
static void ensure_own(struct nvmeio_handle *handle)
{
    uint32_t now = nvmeio_fork_generation();
    /* Acquire: pairs with the release below. */
    uint32_t then = atomic_load_explicit(&handle->generation, memory_order_acquire);

    while (then != now) {
        if (then != (now | REVIVING) &&
            atomic_compare_exchange_strong_explicit(
                &handle->generation, &then, now | REVIVING, memory_order_acquire,
                memory_order_acquire)) {
            revive(handle);
            atomic_store_explicit(&handle->generation, now, memory_order_release);
            return;
        }
        sched_yield();
        then = atomic_load_explicit(&handle->generation, memory_order_acquire);
    }
}

static bool from_before_fork(const struct nvmeio_request *request)
{
    return request->generation != nvmeio_fork_generation();
}

/* A caller lane that is free, or NULL.  The mutex is held. */
static struct nvmeio_lane *caller_lane_find(struct nvmeio_handle *handle)
{
    struct nvmeio_lane *lane = handle->callers;
    while (lane && (lane->own || lane->driven || lane->dead))
        lane = lane->next;
    return lane;
}

/* A new one, or NULL: the lanes with threads serve as well.  The mutex is held, and
 * dropped meanwhile. */
static struct nvmeio_lane *caller_lane_add(struct nvmeio_handle *handle)
{
    if (handle->caller_count == NVMEIO_CALLERS_MAX)
        return NULL;
    handle->caller_count++;
    pthread_mutex_unlock(&handle->mutex);
    struct nvmeio_lane *lane = calloc(1, sizeof(*lane));
    if (lane && nvmeio_lane_open(lane, handle)) {
        free(lane);
        lane = NULL;
    }
    pthread_mutex_lock(&handle->mutex);
    if (!lane) {
        handle->caller_count--;
        return NULL;
    }
    lane->next = handle->callers;
    handle->callers = lane;
    return lane;
}

/* Give the request to a caller lane, if one can be had.  The mutex is held, and may be
 * dropped meanwhile. */
static bool give_to_caller(struct nvmeio_handle *handle, struct nvmeio_request *request)
{
    bool punctual = nvmeio_request_is_buffered(request) ? handle->ops->punctual_buffered
                                                        : handle->ops->punctual_direct;
    /* What a FUSE server does not answer holds up whoever asks, in any engine. */
    if (!punctual || request->file->fuse || nvmeio_request_is_over(request))
        return false;
    struct nvmeio_lane *lane = caller_lane_find(handle);
    if (!lane)
        lane = caller_lane_add(handle);
    if (!lane || lane->own || lane->driven || nvmeio_schedule_settling(request))
        return false;
    lane->own = request;
    lane->deserted = false;
    request->caller_lane = lane;
    /* Who drains, or waits for an fsync behind it, may sleep for want of a lane to
     * drive. */
    if (handle->drainers > 0 || handle->fsyncs_gated > 0)
        pthread_cond_broadcast(&handle->news);
    return true;
}

/* Give the request to those who carry it out.  The mutex is held. */
static void dispatch(struct nvmeio_handle *handle, struct nvmeio_request *request,
                     bool caller)
{
    nvmeio_schedule_add(handle, request);
    if (request->op == NVMEIO_OP_FSYNC)
        handle->fsyncs_gated++;
    else if (caller && give_to_caller(handle, request))
        return;
    /* The last lane may have died, and buried this one, while the mutex was dropped. */
    if (handle->dead_error && !nvmeio_schedule_settling(request))
        nvmeio_request_fail(request, handle->dead_error, 0);
    else
        nvmeio_schedule_open_gates(handle);
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

int nvmeio_submit(struct nvmeio_handle *handle, const struct nvmeio_transfer *transfer,
                  struct nvmeio_request **result)
{
    int error = check_transfer(transfer);

    if (error)
        return error;
    ensure_own(handle);
    struct nvmeio_request *request = nvmeio_request_new(handle, transfer);
    if (!request)
        return -ENOMEM;
    atomic_fetch_add_explicit(&handle->references, 1, memory_order_relaxed);
    nvmeio_request_check(request);
    pthread_mutex_lock(&handle->mutex);
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
    dispatch(handle, request, transfer->caller);
    pthread_mutex_unlock(&handle->mutex);
    return 0;
}

struct deadline {
    bool limited;
    int64_t end_ns;
};

static struct deadline deadline_in(int64_t timeout_ns)
{
    struct deadline deadline = {.limited = timeout_ns >= 0};
    int64_t now = nvmeio_now_ns();

    deadline.end_ns = timeout_ns < INT64_MAX - now ? now + timeout_ns : INT64_MAX;
    return deadline;
}

static int64_t deadline_left(const struct deadline *deadline)
{
    if (!deadline->limited)
        return -1;
    int64_t left = deadline->end_ns - nvmeio_now_ns();
    return left > 0 ? left : 0;
}

/* Sleep until there is news.  The mutex is held. */
static int wait_news(struct nvmeio_handle *handle, const struct deadline *deadline)
{
    struct timespec end = {deadline->end_ns / 1000000000,
                           deadline->end_ns % 1000000000};

    int error;

    handle->sleepers++;
    if (deadline->limited)
        error = pthread_cond_timedwait(&handle->news, &handle->mutex, &end);
    else
        error = pthread_cond_wait(&handle->news, &handle->mutex);
    handle->sleepers--;
    return -error;
}

/* Run a caller lane for one turn.  The mutex is held, and dropped meanwhile. */
static void turn(struct nvmeio_handle *handle, struct nvmeio_lane *lane,
                 int64_t timeout_ns)
{
    lane->driven = true;
    pthread_mutex_unlock(&handle->mutex);
    nvmeio_lane_turn(lane, timeout_ns);
    pthread_mutex_lock(&handle->mutex);
    lane->driven = false;
    /* Others may wait for this lane's request, or for their turn to run it. */
    if (handle->sleepers > 0)
        pthread_cond_broadcast(&handle->news);
}

/* Run a caller lane for one turn, unless another thread does; then wait for it.  The
 * mutex is held, and dropped meanwhile. */
static int drive(struct nvmeio_handle *handle, struct nvmeio_lane *lane,
                 const struct deadline *deadline)
{
    if (!lane || lane->driven)
        return wait_news(handle, deadline);
    /* Also when no time is left: who looks again and again must come to an end. */
    int64_t left = deadline_left(deadline);
    turn(handle, lane, left);
    return left == 0 ? -ETIMEDOUT : 0;
}

/* A caller lane with a request that no thread drives just now, or NULL. */
static struct nvmeio_lane *undriven(struct nvmeio_handle *handle)
{
    struct nvmeio_lane *lane = handle->callers;
    while (lane && (!lane->own || lane->driven))
        lane = lane->next;
    return lane;
}

/* The caller lane that brings this request forward: its own, or for an fsync those of
 * the writes before it, for which nobody else may be waiting.  The mutex is held. */
static struct nvmeio_lane *lane_towards(const struct nvmeio_request *request)
{
    if (request->op == NVMEIO_OP_FSYNC && !request->gate_open)
        return undriven(request->handle);
    return request->caller_lane;
}

static void set_deserted(struct nvmeio_request *request, bool deserted)
{
    if (request->caller_lane && !nvmeio_request_done(request))
        request->caller_lane->deserted = deserted;
}

int nvmeio_request_wait(struct nvmeio_request *request, int64_t timeout_ns)
{
    struct nvmeio_handle *handle = request->handle;
    int error = 0;

    if (nvmeio_request_done(request))
        return 0;
    if (from_before_fork(request))
        return -EOWNERDEAD;
    struct deadline deadline = deadline_in(timeout_ns);
    pthread_mutex_lock(&handle->mutex);
    request->waiters++;
    set_deserted(request, false);
    while (!nvmeio_request_done(request) && error == 0)
        error = drive(handle, lane_towards(request), &deadline);
    request->waiters--;
    set_deserted(request, true);
    pthread_mutex_unlock(&handle->mutex);
    return nvmeio_request_done(request) ? 0 : error;
}

int nvmeio_handle_drain(struct nvmeio_handle *handle, int64_t timeout_ns)
{
    struct deadline deadline = deadline_in(timeout_ns);
    int error = 0;

    ensure_own(handle);
    pthread_mutex_lock(&handle->mutex);
    handle->drainers++;
    while (handle->active_count > 0 && error == 0)
        error = drive(handle, undriven(handle), &deadline);
    handle->drainers--;
    error = handle->active_count > 0 ? error : 0;
    pthread_mutex_unlock(&handle->mutex);
    return error;
}

int nvmeio_request_cancel(struct nvmeio_request *request)
{
    struct nvmeio_handle *handle = request->handle;
    int dropped = 0;

    if (nvmeio_request_done(request))
        return 0;
    if (from_before_fork(request))
        return -EOWNERDEAD;
    pthread_mutex_lock(&handle->mutex);
    if (!nvmeio_schedule_settling(request) && !request->error && !request->cancelled &&
        request->span < request->plan.count) {
        dropped = 1;
        request->cancelled = true;
        nvmeio_schedule_progress(handle, request);
    }
    pthread_mutex_unlock(&handle->mutex);
    return dropped;
}

/* A caller lane whose caller gave up waiting, or NULL.  The mutex is held. */
static struct nvmeio_lane *deserted(struct nvmeio_handle *handle)
{
    struct nvmeio_lane *lane = handle->callers;
    while (lane && (!lane->own || lane->driven || !lane->deserted))
        lane = lane->next;
    return lane;
}

unsigned nvmeio_handle_pop(struct nvmeio_handle *handle, void **users, unsigned count)
{
    struct nvmeio_request *popped = NULL;
    unsigned found = 0;

    ensure_own(handle);
    pthread_mutex_lock(&handle->mutex);
    struct nvmeio_lane *lane = deserted(handle);
    if (lane)
        turn(handle, lane, 0); /* has it finished? */
    while (found < count && handle->done_first) {
        struct nvmeio_request *request = handle->done_first;
        handle->done_first = request->done_next;
        users[found++] = request->user;
        request->done_next = popped;
        popped = request;
    }
    pthread_mutex_unlock(&handle->mutex);
    while (popped) {
        struct nvmeio_request *next = popped->done_next;
        nvmeio_request_release(popped);
        popped = next;
    }
    return found;
}

unsigned nvmeio_handle_pending(struct nvmeio_handle *handle)
{
    ensure_own(handle);
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
    ensure_own(handle);
    pthread_mutex_lock(&handle->mutex);
    *stats = handle->retired;
    stats->requests = atomic_load_explicit(&handle->requests, memory_order_relaxed);
    for (unsigned i = 0; i < handle->lanes_started; i++)
        nvmeio_lane_count(&handle->lanes[i], stats);
    for (struct nvmeio_lane *lane = handle->callers; lane; lane = lane->next)
        nvmeio_lane_count(lane, stats);
    pthread_mutex_unlock(&handle->mutex);
}

/* All requests are done, but the thread that ran the last one may still be on its way
 * out of the lane. */
static void callers_close(struct nvmeio_handle *handle)
{
    const struct deadline never = deadline_in(-1);

    pthread_mutex_lock(&handle->mutex);
    while (handle->callers) {
        struct nvmeio_lane *lane = handle->callers;
        if (lane->driven) {
            wait_news(handle, &never);
            continue;
        }
        handle->callers = lane->next;
        nvmeio_lane_count(lane, &handle->retired);
        nvmeio_lane_close(lane);
        if (!lane->dead)
            free(lane);
    }
    pthread_mutex_unlock(&handle->mutex);
}

void nvmeio_handle_stop(struct nvmeio_handle *handle)
{
    /* A child that never used it has nothing to stop: what there is, is the parent's.
     */
    if (atomic_load_explicit(&handle->generation, memory_order_acquire) !=
        nvmeio_fork_generation()) {
        handle->closing = true;
        return;
    }
    pthread_mutex_lock(&handle->mutex);
    bool first = !handle->closing;
    handle->closing = true;
    while (!first && !handle->stopped)
        pthread_cond_wait(&handle->news, &handle->mutex);
    pthread_mutex_unlock(&handle->mutex);
    if (!first)
        return;
    nvmeio_handle_drain(handle, -1);
    lanes_stop(handle);
    callers_close(handle);
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
