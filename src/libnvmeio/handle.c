/* handle.c -- opening and closing handles, submitting and cancelling requests, and what
 * a forked child does anew.
 *
 * queue.c decides when a request may go on, request.c how it is cut, and worker.c
 * carries out its blocks. Waiting is in wait.c. */
#include "handle_internal.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "block.h"
#include "file_internal.h"
#include "records.h"
#include "slow.h"

/* Added to the generation while a process makes its queue and workers anew. A child
 * that is forked meanwhile has another generation, so it does not wait for that thread,
 * which it does not have. */
#define REOPENING (UINT32_C(1) << 31)

static struct nvmeio_handle *retain(struct nvmeio_handle *handle)
{
    atomic_fetch_add_explicit(&handle->references, 1, memory_order_relaxed);
    return handle;
}

/* The size of blocks that extend a file. They land one at a time, and at this size that
 * is as fast as many at once (figures in docs/decisions.md). */
#define ORDERED_BYTES (8u << 20)

/* The largest transfer that nvmeio_perform() carries out itself. Larger ones go to the
 * workers, because Ctrl-C can interrupt a thread that waits for them. */
#define PERFORM_BYTES_MAX (1u << 20)

static void handle_release(struct nvmeio_handle *handle)
{
    /* Acquire and release: the last owner sees everything that the others did. */
    if (atomic_fetch_sub_explicit(&handle->references, 1, memory_order_acq_rel) != 1)
        return;
    /* In a child that never used the handle, the queue is still the parent's. */
    if (atomic_load_explicit(&handle->generation, memory_order_relaxed) ==
        nvmeio_fork_generation())
        nvmeio_queue_destroy(&handle->queue);
    free((char *)handle->config.engine);
    free(handle->workers.list);
    free(handle);
}

void nvmeio_config_default(struct nvmeio_config *config)
{
    *config = (struct nvmeio_config){
        .block_bytes = 1u << 20,
        .queue_depth = 128,
        .workers = 1,
        .bounce = NVMEIO_BOUNCE_AUTO,
        .engine = "auto",
    };
}

static bool valid(const struct nvmeio_config *config)
{
    return config->block_bytes >= 1 && config->block_bytes <= NVMEIO_BLOCK_BYTES_MAX &&
           config->queue_depth >= 1 && config->queue_depth <= NVMEIO_QUEUE_DEPTH_MAX &&
           config->workers >= 1 && config->workers <= NVMEIO_WORKERS_MAX &&
           config->engine;
}

static void pause_queue(struct nvmeio_handle *handle, size_t step)
{
    nvmeio_queue_pause(&handle->queue, step);
}

static void continue_slowly(struct nvmeio_request *request)
{
    nvmeio_queue_continue(&request->handle->queue, request);
}

/* Set the sizes of blocks and bounces, rounded so that they suit any file. */
static void set_owner(struct nvmeio_handle *handle)
{
    uint64_t unit = NVMEIO_OFFSET_ALIGN_MAX;
    /* Whole pages, however many workers share. */
    uint64_t quota =
        nvmeio_round_down(NVMEIO_ARENA_BYTES_MAX / handle->config.workers, unit);
    uint64_t block = nvmeio_round_up(handle->config.block_bytes, NVMEIO_EDGE_BYTES);
    uint64_t ordered = block * handle->config.queue_depth;
    uint64_t bounce = nvmeio_round_up(block, unit);

    if (ordered > ORDERED_BYTES)
        ordered = block > ORDERED_BYTES ? block : ORDERED_BYTES;
    uint64_t large = ordered;
    /* At least two bounces per worker, if the limit allows that. */
    if (bounce > NVMEIO_BOUNCE_BYTES)
        bounce = NVMEIO_BOUNCE_BYTES;
    if (bounce > quota / 2)
        bounce = nvmeio_round_down(quota / 2, unit);
    if (bounce < unit)
        bounce = unit;
    if (large > quota / 2)
        large = quota / 2;
    large = nvmeio_round_down(large, unit);
    handle->owner = (struct nvmeio_owner){
        .release = handle_release,
        .pause = pause_queue,
        .continue_slowly = continue_slowly,
        .bounce = handle->config.bounce,
        .block_bytes = block,
        .ordered_bytes = ordered,
        .arena_bytes = quota,
        .bounce_bytes = bounce,
        .large_bounce_bytes = large > bounce ? large : bounce,
    };
}

/* Start the first engine that works, and note why others were skipped. Give up if
 * threads, descriptors or memory ran out, because another engine would not help. */
static int start_any(struct nvmeio_handle *handle)
{
    size_t used = 0;
    int error = -ENOSYS;

    for (unsigned i = 0; (handle->workers.ops = nvmeio_engine_at(i)); i++) {
        char reason[256];
        error = nvmeio_workers_start(&handle->workers);
        if (error == 0 || !handle->workers.refused)
            return error;
        nvmeio_engine_explain(handle->workers.ops->name, error, reason, sizeof(reason));
        int length =
            snprintf(handle->fallback + used, sizeof(handle->fallback) - used,
                     "%s%s: %s", used ? "; " : "", handle->workers.ops->name, reason);
        used += (size_t)length;
        if (used >= sizeof(handle->fallback))
            used = sizeof(handle->fallback) - 1;
    }
    return error;
}

static int start_named(struct nvmeio_handle *handle)
{
    bool known;

    handle->workers.ops = nvmeio_engine_find(handle->config.engine, &known);
    if (!handle->workers.ops)
        return known ? -ENOSYS : -EINVAL;
    return nvmeio_workers_start(&handle->workers);
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
    set_owner(handle);
    atomic_init(&handle->references, 1);
    atomic_init(&handle->generation, nvmeio_fork_generation());
    nvmeio_queue_init(&handle->queue);
    handle->workers = (struct nvmeio_workers){
        .queue = &handle->queue,
        .owner = &handle->owner,
        .count = config->workers,
        .queue_depth = config->queue_depth,
        .single_submit = config->single_submit,
    };
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

/* In a child: abandon the parent's queue and workers, and start new ones. Nothing is
 * freed, because the parent's ring must not be touched. */
static void reopen(struct nvmeio_handle *handle)
{
    nvmeio_queue_init(&handle->queue);
    handle->life_waiters = NULL;
    handle->workers.list = NULL;
    handle->workers.alive = handle->workers.started = 0;
    /* The parent closed the handle before the fork, or stop() is closing it in this
     * child before its first use. Either way, no thread is stopping workers. */
    bool closed = handle->life >= NVMEIO_HANDLE_CLOSING;
    int error = closed ? 0 : nvmeio_workers_start(&handle->workers);
    handle->queue.dead_error = error;
    handle->life = closed  ? NVMEIO_HANDLE_CLOSED
                   : error ? NVMEIO_HANDLE_MISSING
                           : NVMEIO_HANDLE_OPEN;
    atomic_store_explicit(&handle->generation, nvmeio_fork_generation(),
                          memory_order_release);
}

/* Return true if this is the first use of the handle in a forked child. The caller must
 * then call reopen(), and other threads wait for it. Return false if the queue and the
 * workers already belong to this process. */
static bool claim(struct nvmeio_handle *handle)
{
    uint32_t now = nvmeio_fork_generation();
    /* Acquire: pairs with the release in reopen(). */
    uint32_t then = atomic_load_explicit(&handle->generation, memory_order_acquire);

    while (then != now) {
        if (then != (now | REOPENING) &&
            atomic_compare_exchange_strong_explicit(
                &handle->generation, &then, now | REOPENING, memory_order_acquire,
                memory_order_acquire))
            return true;
        sched_yield();
        then = atomic_load_explicit(&handle->generation, memory_order_acquire);
    }
    return false;
}

void nvmeio_handle_ensure_own(struct nvmeio_handle *handle)
{
    if (claim(handle))
        reopen(handle);
}

/* Sleep for as long as the handle is in this state. The mutex is held, and unlocked
 * meanwhile. */
static void wait_while(struct nvmeio_handle *handle, int life)
{
    while ((int)handle->life == life) {
        struct nvmeio_waiter waiter = {0};
        nvmeio_queue_sleep(&handle->queue, &handle->life_waiters, &waiter, -1);
        nvmeio_queue_lock(&handle->queue);
    }
}

/* Try again to start the workers of a forked child, which ran out of descriptors,
 * memory or threads before. The mutex is held, and unlocked meanwhile. */
static void start_missing_workers(struct nvmeio_handle *handle)
{
    wait_while(handle, NVMEIO_HANDLE_STARTING);
    if (handle->life != NVMEIO_HANDLE_MISSING)
        return;
    handle->life = NVMEIO_HANDLE_STARTING;
    nvmeio_queue_unlock(&handle->queue);
    int error = nvmeio_workers_start(&handle->workers);
    nvmeio_queue_lock(&handle->queue);
    handle->queue.dead_error = error;
    handle->life = error ? NVMEIO_HANDLE_MISSING : NVMEIO_HANDLE_OPEN;
    nvmeio_queue_wake(&handle->queue, &handle->life_waiters);
}

/* Refuse `after` requests of another handle, or from before a fork. */
static int check_after(const struct nvmeio_handle *handle,
                       const struct nvmeio_after *after)
{
    for (size_t i = 0; i < after->count; i++) {
        if (after->requests[i]->handle != handle)
            return -EXDEV;
        if (nvmeio_request_before_fork(after->requests[i]))
            return -EOWNERDEAD;
    }
    return 0;
}

/* Whether a new request is planned by a thread of slow.c, so that its submission does
 * not take long. What is left for the caller are some 50 ns a record. */
static bool is_planned_later(const struct nvmeio_request *request)
{
    return request->gathering && request->steps > NVMEIO_STEPS_MAX;
}

/* Plan a new request, or make its links if it comes after others. If that fails, the
 * request is released. */
static int prepare(struct nvmeio_request *request, const struct nvmeio_after *after)
{
    struct nvmeio_request *part;
    int cancelling;

    if (after->count == 0 && is_planned_later(request)) {
        request->phase = NVMEIO_PHASE_PLANNING;
        return 0;
    }
    if (after->count == 0) {
        /* It may open the file again, which is a cancellation point. */
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
        request->ops->plan(request);
        pthread_setcancelstate(cancelling, NULL);
        request->phase = NVMEIO_PHASE_PLANNED;
        for (size_t i = 0; (part = nvmeio_part(request, i)); i++)
            part->phase = NVMEIO_PHASE_PLANNED;
        return 0;
    }
    request->links = calloc(after->count, sizeof(*request->links));
    request->link_count = after->count;
    if (request->links)
        return 0;
    nvmeio_request_release(request);
    return -ENOMEM;
}

/* Plan a new request and pass it to the queue. If that fails, the request is
 * released. */
static int hand_in(struct nvmeio_handle *handle, struct nvmeio_request *request,
                   const struct nvmeio_after *after, struct nvmeio_request **result)
{
    int error = prepare(request, after);

    if (error)
        return error;
    nvmeio_queue_lock(&handle->queue);
    start_missing_workers(handle);
    if (handle->life >= NVMEIO_HANDLE_CLOSING) {
        nvmeio_queue_unlock(&handle->queue);
        nvmeio_request_release(request);
        return -EPIPE;
    }
    /* Set *result first: another thread may pop the request as soon as it is queued. */
    *result = request;
    bool is_unplanned = request->phase == NVMEIO_PHASE_PLANNING;
    bool needed = request->parts || is_unplanned;
    if (needed)
        atomic_fetch_add_explicit(&request->references, 1, memory_order_relaxed);
    nvmeio_queue_add(&handle->queue, request, after);
    if (!is_unplanned)
        nvmeio_queue_begin(&handle->queue, request);
    nvmeio_queue_unlock(&handle->queue);
    if (is_unplanned && !nvmeio_slow_add(request))
        nvmeio_queue_continue(&handle->queue, request);
    if (needed)
        nvmeio_request_release(request);
    return 0;
}

int nvmeio_submit(struct nvmeio_handle *handle, const struct nvmeio_transfer *transfer,
                  struct nvmeio_request **result)
{
    int error = nvmeio_transfer_check(transfer);

    if (error == 0)
        error = check_after(handle, &transfer->after);
    if (error)
        return error;
    nvmeio_handle_ensure_own(handle);
    struct nvmeio_request *request = malloc(sizeof(*request));
    if (!request)
        return -ENOMEM;
    nvmeio_transfer_init(request, retain(handle), &handle->owner, transfer);
    return hand_in(handle, request, &transfer->after, result);
}

int nvmeio_submit_many(struct nvmeio_handle *handle, const struct nvmeio_many *many,
                       struct nvmeio_request **result, size_t *offender)
{
    int error = check_after(handle, &many->after);

    *offender = SIZE_MAX;
    for (size_t i = 0; i < many->count && error == 0; i++) {
        error = nvmeio_transfer_check(&many->transfers[i]);
        *offender = error ? i : SIZE_MAX;
    }
    if (error)
        return error;
    nvmeio_handle_ensure_own(handle);
    struct nvmeio_request *request =
        nvmeio_many_new(retain(handle), &handle->owner, many);
    if (!request) {
        handle_release(handle);
        return -ENOMEM;
    }
    return hand_in(handle, request, &many->after, result);
}

int nvmeio_submit_gather(struct nvmeio_handle *handle,
                         const struct nvmeio_gather *gather,
                         struct nvmeio_request **result, size_t *offender)
{
    const struct nvmeio_transfer whole = {
        .op = gather->op,
        .file = gather->file,
        .address = gather->address,
        .size = nvmeio_gather_is_by_address(gather) ? 0 : gather->size,
    };
    int64_t size = INT64_MAX;
    int error = gather->op == NVMEIO_OP_FSYNC ? -EINVAL : nvmeio_transfer_check(&whole);

    *offender = SIZE_MAX;
    if (error == 0)
        error = check_after(handle, &gather->after);
    if (error)
        return error;
    if (gather->op == NVMEIO_OP_READ && gather->after.count == 0)
        size = nvmeio_file_size(gather->file);
    if (size < 0)
        return (int)size;
    struct nvmeio_records *records = nvmeio_records_new(gather, size, &error, offender);
    if (!records)
        return error;
    nvmeio_handle_ensure_own(handle);
    struct nvmeio_request *request =
        nvmeio_gather_new(retain(handle), &handle->owner, gather, records);
    if (!request) {
        handle_release(handle);
        free(records);
        return -ENOMEM;
    }
    return hand_in(handle, request, &gather->after, result);
}

/* A claim that this thread waits for was granted. */
static void wake_claimant(struct nvmeio_claim *claim)
{
    nvmeio_waiter_wake(claim->user);
}

/* Claim what a block needs, and wait if necessary. That is rare: the file has just
 * refused O_DIRECT. Otherwise nvmeio_perform() leaves blocks that must wait to the
 * workers. */
static void claim_in_thread(struct nvmeio_block *block)
{
    struct nvmeio_waiter waiter = {0};

    block->claim.grant = wake_claimant;
    block->claim.user = &waiter;
    if (!nvmeio_block_claim(block))
        nvmeio_waiter_sleep(&waiter, -1);
}

/* Carry out the only block of a request in this thread. A write beyond RLIMIT_FSIZE
 * returns EFBIG, but also sends SIGXFSZ, which would end the process. So the signal is
 * blocked here, as it is in the workers, and removed if it came. */
static void perform(struct nvmeio_block *block, struct nvmeio_stats *stats)
{
    static const struct timespec at_once = {0, 0};
    struct timespec pause = {0, 1000};
    enum nvmeio_verdict verdict;
    bool writes = block->op == NVMEIO_OP_WRITE;
    sigset_t file_size, before;

    if (writes) {
        sigemptyset(&file_size);
        sigaddset(&file_size, SIGXFSZ);
        pthread_sigmask(SIG_BLOCK, &file_size, &before);
    }
    nvmeio_block_prepare(block);
    block->pushed_ns = nvmeio_now_ns();
    for (;;) {
        if (block->fd >= 0) {
            claim_in_thread(block);
            nvmeio_block_perform(block);
        }
        block->seen_ns = nvmeio_now_ns();
        verdict = nvmeio_block_advance(block);
        if (verdict == NVMEIO_BLOCK_FINISHED)
            break;
        if (verdict == NVMEIO_BLOCK_CONTINUED) {
            stats->short_transfers++;
            continue;
        }
        stats->retries++;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < 10000000)
            pause.tv_nsec *= 2;
    }
    if (writes && block->result == -EFBIG && !sigismember(&before, SIGXFSZ))
        sigtimedwait(&file_size, NULL, &at_once);
    if (writes)
        pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Claim what the only block of a write needs. False if it would have to wait: then
 * another thread must be able to cancel it. */
static bool claim_at_once(const struct nvmeio_request *request,
                          struct nvmeio_block *block)
{
    bool direct = request->plan.spans[0].route == NVMEIO_ROUTE_DIRECT;

    /* Blocks of different threads are on different stacks. */
    block->claim.slot = (unsigned)((uintptr_t)block >> 12);
    return request->op == NVMEIO_OP_READ || request->plan.count == 0 ||
           nvmeio_claim_begin(&block->claim, request->file->inode,
                              direct ? NVMEIO_CLAIM_DIRECT : NVMEIO_CLAIM_BUFFERED,
                              request->offset, request->size);
}

int nvmeio_perform(struct nvmeio_handle *handle, const struct nvmeio_transfer *transfer,
                   struct nvmeio_outcome *outcome)
{
    struct nvmeio_request request;
    struct nvmeio_stats extra = {0};
    struct nvmeio_block block = {0};
    const struct nvmeio_after at_once = {0};
    int error = nvmeio_transfer_check(transfer), cancelling;

    if (error || transfer->op == NVMEIO_OP_FSYNC || !transfer->file->local ||
        transfer->size > handle->owner.block_bytes ||
        transfer->size > PERFORM_BYTES_MAX)
        return error;
    /* The request is on this thread's stack, and the queue points to it. So
     * pthread_cancel(3) must not end the thread now. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
    nvmeio_handle_ensure_own(handle);
    nvmeio_transfer_init(&request, retain(handle), &handle->owner, transfer);
    request.user = NULL;
    prepare(&request, &at_once);
    if (request.plan.count > 1 || nvmeio_request_next_bounce(&request) > 0 ||
        (transfer->buffered && request.plan.spans[0].route != NVMEIO_ROUTE_BUFFERED) ||
        !claim_at_once(&request, &block))
        goto unsuited;
    /* No other thread has the request, so the queue's reference is never the last. */
    nvmeio_queue_lock(&handle->queue);
    if (handle->life >= NVMEIO_HANDLE_CLOSING) {
        error = -EPIPE;
        nvmeio_queue_unlock(&handle->queue);
        goto unsuited;
    }
    nvmeio_queue_add(&handle->queue, &request, &at_once);
    if (transfer->more)
        handle->queue.stats.requests--;
    bool has_block = nvmeio_request_has_block(&request);
    if (has_block)
        /* One block takes all of it, even if it is not aligned. */
        nvmeio_request_cut(&request, &block,
                           handle->owner.block_bytes + NVMEIO_OFFSET_ALIGN_MAX);
    else
        nvmeio_queue_progress(&handle->queue, &request);
    nvmeio_queue_unlock(&handle->queue);
    if (!has_block)
        nvmeio_claim_end(&block.claim);
    if (has_block) {
        perform(&block, &extra);
        nvmeio_queue_lock(&handle->queue);
        handle->queue.stats.short_transfers += extra.short_transfers;
        handle->queue.stats.retries += extra.retries;
        nvmeio_block_count(&block, &handle->queue.stats, handle->queue.latencies);
        nvmeio_request_book(&request, &block);
        nvmeio_queue_progress(&handle->queue, &request);
        nvmeio_queue_unlock(&handle->queue);
    }
    nvmeio_request_outcome(&request, outcome);
    error = 1;
    goto out;
unsuited:
    nvmeio_claim_end(&block.claim);
    nvmeio_file_release(request.file);
out:
    handle_release(handle);
    pthread_setcancelstate(cancelling, NULL);
    return error;
}

/* Whether a request, or a part of one, has anything left to drop. While a request is
 * being planned, another thread writes its fields, so only its phase may be read. */
static bool can_drop(const struct nvmeio_request *request)
{
    return !nvmeio_request_is_settling(request) && !request->cancelled &&
           (request->phase == NVMEIO_PHASE_PLANNING ||
            (!nvmeio_request_is_stopped(request) &&
             (!nvmeio_request_is_cut(request) || request->parked > 0)));
}

static bool drop_rest(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    if (!can_drop(request))
        return false;
    request->cancelled = true;
    /* A request that is being planned ends as soon as plan() returns. */
    if (request->phase != NVMEIO_PHASE_PLANNING)
        nvmeio_queue_progress(queue, request);
    return true;
}

int nvmeio_request_cancel(struct nvmeio_request *request)
{
    struct nvmeio_queue *queue = &request->handle->queue;
    struct nvmeio_request *part;
    bool dropped = false;

    if (nvmeio_request_done(request))
        return 0;
    if (nvmeio_request_before_fork(request))
        return -EOWNERDEAD;
    nvmeio_queue_lock(queue);
    /* Mark the whole before its parts, because the last part to end also ends the
     * whole. */
    for (size_t i = 0; !dropped && (part = nvmeio_part(request, i)); i++) {
        dropped = can_drop(part);
        nvmeio_queue_pause(queue, dropped ? 0 : i);
    }
    if (dropped)
        request->cancelled = true;
    for (size_t i = 0; dropped && (part = nvmeio_part(request, i)); i++) {
        drop_rest(queue, part);
        nvmeio_queue_pause(queue, i);
    }
    if (!request->parts)
        dropped = drop_rest(queue, request);
    nvmeio_queue_unlock(queue);
    return dropped;
}

unsigned nvmeio_handle_pending(struct nvmeio_handle *handle)
{
    nvmeio_handle_ensure_own(handle);
    nvmeio_queue_lock(&handle->queue);
    unsigned count = handle->queue.active_count;
    nvmeio_queue_unlock(&handle->queue);
    return count;
}

const char *nvmeio_handle_engine(struct nvmeio_handle *handle)
{
    return handle->workers.ops->name;
}

const char *nvmeio_handle_fallback(struct nvmeio_handle *handle)
{
    return handle->fallback;
}

void nvmeio_handle_stats(struct nvmeio_handle *handle, struct nvmeio_stats *stats)
{
    nvmeio_handle_ensure_own(handle);
    nvmeio_queue_lock(&handle->queue);
    *stats = handle->queue.stats;
    nvmeio_queue_unlock(&handle->queue);
}

void nvmeio_handle_latencies(struct nvmeio_handle *handle,
                             uint64_t counts[NVMEIO_LATENCY_BUCKETS])
{
    nvmeio_handle_ensure_own(handle);
    nvmeio_queue_lock(&handle->queue);
    for (unsigned i = 0; i < NVMEIO_LATENCY_BUCKETS; i++)
        counts[i] = handle->queue.latencies[i];
    nvmeio_queue_unlock(&handle->queue);
}

static void stop(struct nvmeio_handle *handle)
{
    if (claim(handle)) {
        /* A child that never used the handle has nothing to stop: everything belongs to
         * the parent. */
        handle->life = NVMEIO_HANDLE_CLOSING;
        reopen(handle);
        return;
    }
    nvmeio_queue_lock(&handle->queue);
    wait_while(handle, NVMEIO_HANDLE_STARTING);
    bool first = handle->life < NVMEIO_HANDLE_CLOSING;
    if (first)
        handle->life = NVMEIO_HANDLE_CLOSING;
    else
        wait_while(handle, NVMEIO_HANDLE_CLOSING);
    nvmeio_queue_unlock(&handle->queue);
    if (!first)
        return;
    nvmeio_queue_drain(&handle->queue, -1);
    nvmeio_workers_stop(&handle->workers);
    nvmeio_queue_lock(&handle->queue);
    handle->life = NVMEIO_HANDLE_CLOSED;
    nvmeio_queue_wake(&handle->queue, &handle->life_waiters);
    nvmeio_queue_unlock(&handle->queue);
}

void nvmeio_handle_stop(struct nvmeio_handle *handle)
{
    /* Hold a reference, because another thread may close the handle as soon as it is
     * stopped. */
    retain(handle);
    stop(handle);
    handle_release(handle);
}

void nvmeio_handle_close(struct nvmeio_handle *handle)
{
    void *user;

    nvmeio_handle_stop(handle);
    /* Drop the queue's references to requests that nobody has popped. */
    while (nvmeio_queue_pop(&handle->queue, &user, 1) == 1)
        ;
    handle_release(handle);
}
