/* lane.c -- blocks from the queue to an engine and back.
 *
 * One loop serves overlapped and sequential submission: they differ in when a lane
 * takes blocks.  What a result means is block.c's, who is told of it is schedule.c's.
 */
#include "lane.h"

#include <errno.h>
#include <nvmeio/pool.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "block.h"
#include "file_internal.h"
#include "handle_internal.h"

#define STACK_BYTES (256u << 10)
#define PAUSE_MIN_NS 1000
#define PAUSE_MAX_NS 10000000

/* Bounces that a lane takes from the pool at a time, at least. */
#define BOUNCES_GROWN_MIN 4u

/* A write that is bounced in less is handed over with others: a call into the kernel
 * costs as much as the copy. */
#define COPIED_ALONE_BYTES (64u << 10)

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* The request to cut blocks from, or NULL.  A caller lane whose request was cancelled
 * has none, and leaves the queue alone: nobody would drive it to the end. */
static struct nvmeio_request *next_request(const struct nvmeio_lane *lane)
{
    return lane->caller ? lane->own : nvmeio_schedule_next(lane->handle);
}

/* How many blocks to take at once: with several lanes, a fair share of what there is,
 * or the first to come would take all. */
static size_t fair_share(const struct nvmeio_lane *lane)
{
    const struct nvmeio_handle *handle = lane->handle;
    size_t left = 0;

    if (lane->caller || handle->config.lanes == 1)
        return SIZE_MAX;
    for (const struct nvmeio_request *r = handle->queue_first; r; r = r->queue_next) {
        left += nvmeio_request_blocks_left(r, handle->block_bytes);
        if (left / handle->config.lanes >= lane->engine.depth)
            break;
    }
    return left / handle->config.lanes + 1;
}

static unsigned smalls_in_one(const struct nvmeio_lane *lane)
{
    return (unsigned)(lane->handle->bounce_bytes / NVMEIO_SMALL_BOUNCE_BYTES);
}

/* Make small bounces of an idle one, for good; not of the last, for which a block that
 * needs a whole one might wait for ever. */
static void split_bounce(struct nvmeio_lane *lane)
{
    unsigned parts = smalls_in_one(lane);

    if (lane->bounces_idle == 0 || lane->bounces_owned - lane->bounces_split < 2 ||
        (lane->bounces_split + 1) * parts > lane->smalls_max)
        return;
    char *memory = lane->bounces[--lane->bounces_idle];
    lane->bounces[lane->bounces_max - ++lane->bounces_split] = memory;
    while (parts-- > 0)
        lane->smalls[lane->smalls_idle++] =
            memory + (size_t)parts * NVMEIO_SMALL_BOUNCE_BYTES;
}

/* Give a block a bounce for `bytes`; false when there is none just now. */
static bool take_bounce(struct nvmeio_lane *lane, struct nvmeio_block *block,
                        size_t bytes)
{
    bool fits_small = bytes <= NVMEIO_SMALL_BOUNCE_BYTES;

    if (fits_small && lane->smalls_idle == 0)
        split_bounce(lane);
    block->bounce_small = fits_small && lane->smalls_idle > 0;
    if (block->bounce_small)
        block->bounce = lane->smalls[--lane->smalls_idle];
    else if (lane->bounces_idle > 0)
        block->bounce = lane->bounces[--lane->bounces_idle];
    return block->bounce;
}

static void give_bounce(struct nvmeio_lane *lane, struct nvmeio_block *block)
{
    if (block->bounce && block->bounce_small)
        lane->smalls[lane->smalls_idle++] = block->bounce;
    else if (block->bounce)
        lane->bounces[lane->bounces_idle++] = block->bounce;
    block->bounce = NULL;
}

/* Whether blocks may be taken while others are in flight: a gather is one batch,
 * however many blocks it has. */
static bool may_overlap(const struct nvmeio_lane *lane)
{
    struct nvmeio_request *request = next_request(lane);

    return lane->in_flight == 0 || lane->handle->config.overlap_events ||
           (request && request->records);
}

/* Cut blocks, as many as there are, fit and are this lane's share.  The mutex is held.
 */
static void lane_take(struct nvmeio_lane *lane)
{
    struct nvmeio_handle *handle = lane->handle;
    size_t share = fair_share(lane);

    if (!may_overlap(lane))
        return;
    lane->bounces_short = false;
    for (; lane->free && share > 0; share--) {
        struct nvmeio_request *request = next_request(lane);
        if (!request || !nvmeio_request_has_block(request))
            break;
        struct nvmeio_block *block = lane->free;
        size_t bounced = nvmeio_request_next_bounce(request);
        if (bounced && !take_bounce(lane, block, bounced)) {
            lane->bounces_short = true;
            break;
        }
        lane->free = block->next;
        block->next = NULL;
        lane->gathered += request->records != NULL;
        nvmeio_request_cut(request, block,
                           bounced ? smaller(handle->bounce_bytes, handle->block_bytes)
                                   : handle->block_bytes);
        *lane->taken_end = block;
        lane->taken_end = &block->next;
        lane->in_flight++;
    }
}

/* Take more bounces from the pool, doubling them up to the lane's limit. */
static int lane_grow_bounces(struct nvmeio_lane *lane)
{
    unsigned more = lane->bounces_owned > BOUNCES_GROWN_MIN ? lane->bounces_owned
                                                            : BOUNCES_GROWN_MIN;
    int error = 0;

    while (more-- > 0 && lane->bounces_owned < lane->bounces_max && error == 0) {
        void *memory;
        error = nvmeio_pool_alloc(lane->handle->bounce_bytes, false, &memory, NULL);
        if (error == 0) {
            lane->bounces[lane->bounces_idle++] = memory;
            lane->bounces_owned++;
        }
    }
    return lane->bounces_owned > 0 ? 0 : error;
}

/* A lane without a single bounce cannot carry this request any further, unless it can
 * do without.  The mutex is held. */
static void miss_bounce(struct nvmeio_lane *lane, int error)
{
    struct nvmeio_request *request = next_request(lane);

    if (!request || !nvmeio_request_has_block(request) ||
        nvmeio_request_next_bounce(request) == 0)
        return;
    if (!nvmeio_request_waive_bounce(request))
        nvmeio_request_fail(request, error, request->position);
    /* What a scatter does without them may all be behind its gate. */
    nvmeio_schedule_progress(lane->handle, request);
}

static void lane_take_all(struct nvmeio_lane *lane)
{
    struct nvmeio_handle *handle = lane->handle;

    pthread_mutex_lock(&handle->mutex);
    lane_take(lane);
    pthread_mutex_unlock(&handle->mutex);
    if (!lane->bounces_short || lane->bounces_owned == lane->bounces_max)
        return;
    int error = lane_grow_bounces(lane);
    pthread_mutex_lock(&handle->mutex);
    if (error)
        miss_bounce(lane, error);
    lane_take(lane);
    pthread_mutex_unlock(&handle->mutex);
}

static bool has_unseen(const struct nvmeio_engine *engine)
{
    return engine->finished && engine->finished->seen_ns == 0;
}

/* Note for what has finished that it was seen now, which is returned; what was seen
 * before stands last. */
static int64_t see_finished(struct nvmeio_engine *engine)
{
    int64_t now_ns = nvmeio_now_ns();

    for (struct nvmeio_block *block = engine->finished; block && block->seen_ns == 0;
         block = block->next)
        block->seen_ns = now_ns;
    return now_ns;
}

/* Hand the taken blocks over: one by one for single_submit, and where each has cost a
 * copy, so that the device works while the next is copied.  The clock is read once for
 * blocks that are pushed in a row, and anew behind what takes time: a copy, a call into
 * the kernel, and a block that the engine carried out at once. */
static int lane_push(struct nvmeio_lane *lane)
{
    struct nvmeio_engine *engine = &lane->engine;
    int64_t now_ns = 0; /* 0: to be read */

    while (lane->taken) {
        struct nvmeio_block *block = lane->taken;
        lane->taken = block->next;
        nvmeio_block_prepare(block);
        bool copied = block->bounce && block->op == NVMEIO_OP_WRITE;
        bool alone = (copied && block->bytes >= COPIED_ALONE_BYTES) ||
                     lane->handle->config.single_submit;
        if (copied || now_ns == 0)
            now_ns = nvmeio_now_ns();
        block->pushed_ns = now_ns;
        block->seen_ns = 0;
        engine->ops->push(engine, block);
        if (alone) {
            int result = engine->ops->reap(engine, 0, 0);
            if (result < 0) {
                lane->taken_end = &lane->taken;
                return result;
            }
        }
        if (alone || has_unseen(engine))
            now_ns = see_finished(engine);
    }
    lane->taken_end = &lane->taken;
    return 0;
}

/* How many completions to wait for.  A batch is waited for as a whole, unless its
 * blocks are to be copied as they come; of gathers as many as keep the device busy
 * while they are looked at, for to wake up costs as much as an I/O.  Some may have come
 * back while others were pushed. */
static unsigned wait_count(const struct nvmeio_lane *lane)
{
    const struct nvmeio_engine *engine = &lane->engine;
    bool bounced = lane->bounces_idle + lane->bounces_split < lane->bounces_owned ||
                   lane->smalls_idle < lane->bounces_split * smalls_in_one(lane);

    if (lane->gathered == lane->in_flight && !engine->finished) {
        bool last = lane->caller && lane->free && !bounced;
        return last ? engine->in_flight : (engine->in_flight + 3) / 4;
    }

    if (!lane->handle->config.overlap_events && !bounced)
        return engine->in_flight;
    return engine->finished || engine->in_flight == 0 ? 0 : 1;
}

static void count_block(struct nvmeio_lane *lane, const struct nvmeio_block *block)
{
    struct nvmeio_lane_stats *stats = &lane->stats;
    bool direct = block->fd == block->request->file->direct_fd;
    _Atomic uint64_t *bytes = !direct         ? &stats->bytes_buffered
                              : block->bounce ? &stats->bytes_bounced
                                              : &stats->bytes_direct;

    atomic_fetch_add_explicit(&stats->blocks, 1, memory_order_relaxed);
    if (block->result == 0)
        atomic_fetch_add_explicit(bytes, block->piece.wanted, memory_order_relaxed);
    /* An fsync transfers nothing, and lasts as long as many transfers. */
    if (block->op != NVMEIO_OP_FSYNC)
        nvmeio_latency_count(&lane->latencies,
                             (uint64_t)(block->seen_ns - block->pushed_ns));
}

/* Look at what came back.  Returns the blocks that are finished; the others are pushed
 * again, slower and slower while nothing moves. */
static struct nvmeio_block *lane_advance(struct nvmeio_lane *lane)
{
    struct nvmeio_engine *engine = &lane->engine;
    struct nvmeio_block *block = engine->finished;
    struct nvmeio_block *finished = NULL, *again = NULL;
    bool moved = false;

    /* Before anything is copied out of a bounce. */
    if (has_unseen(engine))
        see_finished(engine);
    engine->finished = NULL;
    while (block) {
        struct nvmeio_block *next = block->next;
        enum nvmeio_verdict verdict = nvmeio_block_advance(block);
        struct nvmeio_block **list =
            verdict == NVMEIO_BLOCK_FINISHED ? &finished : &again;
        if (verdict == NVMEIO_BLOCK_FINISHED)
            count_block(lane, block);
        else if (verdict == NVMEIO_BLOCK_CONTINUED)
            atomic_fetch_add_explicit(&lane->stats.short_transfers, 1,
                                      memory_order_relaxed);
        else
            lane->repeats++;
        moved |= verdict != NVMEIO_BLOCK_REPEATED;
        block->next = *list;
        *list = block;
        block = next;
    }
    if (moved || !again) {
        lane->pause_ns = 0;
    } else {
        struct timespec pause = {0, lane->pause_ns};
        nanosleep(&pause, NULL);
        lane->pause_ns = lane->pause_ns == 0             ? PAUSE_MIN_NS
                         : lane->pause_ns < PAUSE_MAX_NS ? 2 * lane->pause_ns
                                                         : PAUSE_MAX_NS;
    }
    while (again) {
        struct nvmeio_block *next = again->next;
        again->seen_ns = 0;
        engine->ops->push(engine, again);
        again = next;
    }
    atomic_store_explicit(&lane->stats.retries, lane->repeats + engine->retries,
                          memory_order_relaxed);
    atomic_store_explicit(&lane->stats.blocks_registered, engine->registered,
                          memory_order_relaxed);
    return finished;
}

/* Tell the requests, and free the blocks.  The mutex is held. */
static void lane_book(struct nvmeio_lane *lane, struct nvmeio_block *finished)
{
    while (finished) {
        struct nvmeio_block *block = finished;
        struct nvmeio_request *request = block->request;

        finished = block->next;
        nvmeio_request_book(request, block);
        give_bounce(lane, block);
        lane->gathered -= request->records != NULL;
        block->request = NULL;
        block->next = lane->free;
        lane->free = block;
        lane->in_flight--;
        nvmeio_schedule_progress(lane->handle, request);
    }
}

/* The engine no longer answers.  Its blocks' requests fail and are marked: the kernel
 * may still write to their memory, which therefore is never freed, nor is the lane. */
static void lane_die(struct nvmeio_lane *lane, int error)
{
    struct nvmeio_handle *handle = lane->handle;

    pthread_mutex_lock(&handle->mutex);
    lane->dead = true;
    lane->listening = false;
    lane->error = error;
    for (unsigned i = 0; i < lane->engine.depth; i++) {
        struct nvmeio_block *block = &lane->blocks[i];
        struct nvmeio_request *request = block->request;
        if (!request)
            continue;
        block->request = NULL;
        block->result = error;
        block->moved = 0;
        nvmeio_request_book(request, block);
        request->abandoned = true;
        nvmeio_request_fail(request, error, block->piece.position);
        nvmeio_schedule_progress(handle, request);
    }
    pthread_mutex_unlock(&handle->mutex);
}

bool nvmeio_lane_turn(struct nvmeio_lane *lane, int64_t timeout_ns)
{
    struct nvmeio_handle *handle = lane->handle;

    lane_take_all(lane);
    if (lane->in_flight == 0)
        return false;
    int result = lane_push(lane);
    if (result >= 0) {
        pthread_mutex_lock(&handle->mutex);
        lane->listening = handle->config.overlap_events && lane->free && !lane->caller;
        /* What was submitted since the last look found nobody listening. */
        bool more = lane->listening && handle->queue_first && !lane->bounces_short;
        pthread_mutex_unlock(&handle->mutex);
        result = lane->engine.ops->reap(&lane->engine, more ? 0 : wait_count(lane),
                                        timeout_ns);
    }
    if (result < 0) {
        lane_die(lane, result);
        return false;
    }
    struct nvmeio_block *finished = lane_advance(lane);
    pthread_mutex_lock(&handle->mutex);
    lane->listening = false;
    lane_book(lane, finished);
    pthread_mutex_unlock(&handle->mutex);
    return true;
}

/* Blocks, bounce stack and engine.  For a lane with a thread, called by that thread. */
static int lane_equip(struct nvmeio_lane *lane, unsigned depth, unsigned bounces_max,
                      bool shared)
{
    int error = nvmeio_engine_start(&lane->engine, lane->handle->ops, depth, shared);

    if (error) {
        lane->refused = lane->engine.wake_fd >= 0;
        return error;
    }
    depth = lane->engine.depth;
    /* One bounce at least stays whole. */
    unsigned splits = (depth + smalls_in_one(lane) - 1) / smalls_in_one(lane);
    splits = splits < bounces_max - 1 ? splits : bounces_max - 1;
    lane->smalls_max = splits * smalls_in_one(lane);
    lane->blocks = calloc(depth, sizeof(*lane->blocks));
    lane->bounces = calloc(bounces_max, sizeof(*lane->bounces));
    lane->smalls = calloc(lane->smalls_max + 1, sizeof(*lane->smalls));
    if (!lane->blocks || !lane->bounces || !lane->smalls) {
        free(lane->blocks);
        free(lane->bounces);
        free(lane->smalls);
        nvmeio_engine_stop(&lane->engine);
        return -ENOMEM;
    }
    lane->bounces_max = bounces_max;
    lane->taken_end = &lane->taken;
    for (unsigned i = depth; i-- > 0;) {
        lane->blocks[i].index = i;
        lane->blocks[i].next = lane->free;
        lane->free = &lane->blocks[i];
    }
    return 0;
}

/* Wait for work.  False when it is time to go.  The mutex is held, and dropped
 * meanwhile. */
static bool lane_rest(struct nvmeio_lane *lane)
{
    struct nvmeio_handle *handle = lane->handle;

    while (!handle->queue_first && !handle->stopping) {
        handle->lanes_idle++;
        pthread_mutex_unlock(&handle->mutex);
        nvmeio_semaphore_wait(&handle->work);
        pthread_mutex_lock(&handle->mutex);
    }
    return handle->queue_first != NULL;
}

static void *lane_main(void *argument)
{
    struct nvmeio_lane *lane = argument;
    struct nvmeio_handle *handle = lane->handle;
    unsigned depth = handle->config.queue_depth;
    size_t quota = NVMEIO_LANE_BOUNCE_BYTES / handle->config.lanes;
    unsigned bounces_max = (unsigned)(quota / handle->bounce_bytes);
    bool going = true;

    int error = lane_equip(lane, depth, bounces_max, false);
    pthread_mutex_lock(&handle->mutex);
    lane->error = error;
    lane->started = true;
    pthread_cond_broadcast(&handle->news);
    while (error == 0 && going && !lane->dead) {
        pthread_mutex_unlock(&handle->mutex);
        bool busy = nvmeio_lane_turn(lane, -1);
        pthread_mutex_lock(&handle->mutex);
        if (!busy && !lane->dead)
            going = lane_rest(lane);
    }
    if (lane->dead)
        nvmeio_schedule_bury(handle, lane->error);
    pthread_mutex_unlock(&handle->mutex);
    /* Each its own, for all at once: io_destroy(2) takes 30 ms. */
    if (error == 0)
        nvmeio_lane_close(lane);
    return NULL;
}

int nvmeio_lane_start(struct nvmeio_lane *lane, struct nvmeio_handle *handle)
{
    pthread_attr_t attributes;
    sigset_t all, before;

    lane->handle = handle;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    /* Signals belong to the program's own threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&lane->thread, &attributes, lane_main, lane);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error)
        return -error;
    pthread_mutex_lock(&handle->mutex);
    while (!lane->started)
        pthread_cond_wait(&handle->news, &handle->mutex);
    pthread_mutex_unlock(&handle->mutex);
    if (lane->error)
        pthread_join(lane->thread, NULL);
    return lane->error;
}

int nvmeio_lane_open(struct nvmeio_lane *lane, struct nvmeio_handle *handle)
{
    lane->handle = handle;
    lane->caller = true;
    unsigned depth = handle->config.queue_depth;
    unsigned bounces_max =
        (unsigned)(NVMEIO_CALLER_BOUNCE_BYTES / handle->bounce_bytes);
    return lane_equip(lane,
                      depth < NVMEIO_CALLER_DEPTH_MAX ? depth : NVMEIO_CALLER_DEPTH_MAX,
                      bounces_max, true);
}

void nvmeio_lane_close(struct nvmeio_lane *lane)
{
    if (lane->dead)
        return;
    nvmeio_engine_stop(&lane->engine);
    while (lane->bounces_idle > 0)
        nvmeio_pool_free(lane->bounces[--lane->bounces_idle]);
    while (lane->bounces_split > 0)
        nvmeio_pool_free(lane->bounces[lane->bounces_max - lane->bounces_split--]);
    free(lane->bounces);
    free(lane->smalls);
    free(lane->blocks);
}

void nvmeio_lane_count(struct nvmeio_lane *lane, struct nvmeio_stats *stats)
{
    struct nvmeio_lane_stats *own = &lane->stats;

    stats->blocks += atomic_load_explicit(&own->blocks, memory_order_relaxed);
    stats->blocks_registered +=
        atomic_load_explicit(&own->blocks_registered, memory_order_relaxed);
    stats->bytes_direct +=
        atomic_load_explicit(&own->bytes_direct, memory_order_relaxed);
    stats->bytes_buffered +=
        atomic_load_explicit(&own->bytes_buffered, memory_order_relaxed);
    stats->bytes_bounced +=
        atomic_load_explicit(&own->bytes_bounced, memory_order_relaxed);
    stats->short_transfers +=
        atomic_load_explicit(&own->short_transfers, memory_order_relaxed);
    stats->retries += atomic_load_explicit(&own->retries, memory_order_relaxed);
}

void nvmeio_lane_retire(struct nvmeio_lane *lane)
{
    nvmeio_lane_count(lane, &lane->handle->retired);
    nvmeio_latency_add(&lane->latencies, lane->handle->retired_latencies);
}
