/* worker.c -- moves blocks from the queue to an engine and back.
 *
 * block.c decides what a result means, and queue.c which threads to wake. */
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "block.h"
#include "file_internal.h"
#include "thread.h"

struct nvmeio_worker {
    struct nvmeio_workers *workers;
    struct nvmeio_engine engine;
    pthread_t thread;

    /* Only this worker's thread uses these. */
    struct nvmeio_block *blocks; /* engine.depth of them */
    struct nvmeio_block *free;   /* idle blocks */
    struct nvmeio_block *taken;  /* cut blocks that are not yet pushed, oldest first */
    struct nvmeio_block **taken_end;
    unsigned in_flight; /* blocks that are not free */
    size_t bytes;       /* of those that are not parked */
    unsigned parked;    /* of those, blocks that wait for their claims */
    /* Claims of parked blocks that were granted; other threads add to it. */
    struct nvmeio_claim *_Atomic granted;
    struct nvmeio_arena arena; /* of bounces */
    bool arena_full;           /* a block could not be cut for want of a bounce */
    bool more;                 /* there are more blocks to take at once */
    int64_t pause_ns;          /* how long to sleep while the kernel returns EAGAIN */
    /* The one request whose blocks are in flight, or NULL if there are several. */
    const struct nvmeio_request *only;

    /* The queue's mutex guards these. */
    struct nvmeio_consumer consumer;
    struct nvmeio_waiter *starter; /* the thread that starts this worker */
    bool dead;
    int error;    /* why it could not start, or why it died */
    bool refused; /* it could not start, but might with another engine */
};

/* While several requests are active, the workers have no more than this and a block
 * each in flight: a request waits that long behind the blocks of others. */
#define WINDOW_BYTES ((size_t)24 << 20)

/* A worker that is idle for this long lets the kernel have the memory of its bounces.
 */
#define IDLE_NS 1000000000

#define PAUSE_MIN_NS 1000
#define PAUSE_MAX_NS 10000000

/* A bounced write below this size is submitted together with others: the system call
 * would cost as much as its copy. */
#define COPIED_ALONE_BYTES (64u << 10)

static struct nvmeio_block *block_of(struct nvmeio_claim *claim)
{
    return (struct nvmeio_block *)((char *)claim -
                                   offsetof(struct nvmeio_block, claim));
}

/* The claim of a parked block was granted, in any thread. */
static void grant(struct nvmeio_claim *claim)
{
    struct nvmeio_worker *worker = claim->user;

    claim->blocked_next = atomic_load(&worker->granted);
    while (!atomic_compare_exchange_weak(&worker->granted, &claim->blocked_next, claim))
        continue;
    nvmeio_consumer_interrupt(&worker->consumer);
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* How many blocks to take at once. Several workers share what there is, so that the
 * first one does not take all. */
static size_t fair_share(const struct nvmeio_worker *worker)
{
    const struct nvmeio_workers *workers = worker->workers;

    return workers->count == 1 ? SIZE_MAX
                               : workers->queue->blocks_left / workers->count + 1;
}

/* Whether enough is in flight to keep a drive busy, while a request may be waiting
 * behind that of another. */
static bool is_busy_enough(const struct nvmeio_worker *worker)
{
    const struct nvmeio_workers *workers = worker->workers;

    return workers->queue->active_count > 1 &&
           worker->bytes >= WINDOW_BYTES / workers->count;
}

/* Assign a bounce to a block that needs this many bytes, and return its size; 0 if
 * there is no room. A block that makes a file longer may have a large one, while most
 * of the arena is idle. */
static size_t take_bounce(struct nvmeio_worker *worker, struct nvmeio_block *block,
                          size_t bytes, bool ordered)
{
    const struct nvmeio_owner *owner = worker->workers->owner;
    struct nvmeio_arena *arena = &worker->arena;
    bool large = ordered && arena->idle >= arena->units / 4 * 3;
    size_t most = large ? owner->large_bounce_bytes : owner->bounce_bytes;

    block->bounce_bytes =
        nvmeio_round_up(smaller(bytes, most), NVMEIO_ARENA_UNIT_BYTES);
    block->bounce = nvmeio_arena_take(arena, block->bounce_bytes);
    if (!block->bounce && block->bounce_bytes > owner->bounce_bytes) {
        block->bounce_bytes = owner->bounce_bytes;
        block->bounce = nvmeio_arena_take(arena, block->bounce_bytes);
    }
    return block->bounce ? block->bounce_bytes : 0;
}

static void give_bounce(struct nvmeio_worker *worker, struct nvmeio_block *block)
{
    if (block->bounce)
        nvmeio_arena_give(&worker->arena, block->bounce, block->bounce_bytes);
    block->bounce = NULL;
}

static void append_taken(struct nvmeio_worker *worker, struct nvmeio_block *block)
{
    block->next = NULL;
    *worker->taken_end = block;
    worker->taken_end = &block->next;
    worker->bytes += block->piece.io_bytes;
}

/* Cut the next block of a request, and park it if it must wait for its claim. False if
 * it needs a bounce and none is left. */
static bool take_block(struct nvmeio_worker *worker, struct nvmeio_request *request)
{
    const struct nvmeio_workers *workers = worker->workers;
    const struct nvmeio_request *whole = request->whole ? request->whole : request;
    struct nvmeio_block *block = worker->free;
    bool ordered = nvmeio_request_is_ordered(request);
    size_t bytes =
        ordered ? workers->owner->ordered_bytes : workers->owner->block_bytes;
    size_t bounced = nvmeio_request_next_bounce(request);

    if (bounced) {
        size_t room = take_bounce(worker, block, bounced, ordered);
        worker->arena_full = room == 0;
        if (room == 0)
            return false;
        bytes = smaller(bytes, room);
    }
    worker->free = block->next;
    nvmeio_request_cut(request, block, bytes);
    block->prepared = false;
    block->parked = !nvmeio_block_claim_cut(block);
    if (block->parked) {
        request->parked++;
        worker->consumer.parked = ++worker->parked;
    } else {
        append_taken(worker, block);
    }
    if (worker->in_flight++ == 0)
        worker->only = whole;
    else if (worker->only != whole)
        worker->only = NULL;
    nvmeio_queue_took(workers->queue, request, block->piece.io_bytes);
    return true;
}

/* Cut blocks until none is left to cut, the worker is full, bounces run out, or it has
 * its share. The mutex is held. */
static void take(struct nvmeio_worker *worker)
{
    struct nvmeio_queue *queue = worker->workers->queue;
    size_t share = fair_share(worker);
    struct nvmeio_request *request;

    worker->arena_full = false;
    while (worker->free && share-- > 0 && !is_busy_enough(worker) &&
           (request = nvmeio_queue_next(queue)))
        if (!take_block(worker, request))
            break;
    bool room = worker->free && !worker->arena_full && !is_busy_enough(worker);
    worker->more = room && nvmeio_queue_next(queue);
    /* From now on, a thread that adds a request wakes this worker. */
    worker->consumer.state = room && !worker->more && worker->in_flight > 0
                                 ? NVMEIO_CONSUMER_LISTENING
                                 : NVMEIO_CONSUMER_BUSY;
}

static bool has_unseen(const struct nvmeio_engine *engine)
{
    return engine->finished && engine->finished->seen_ns == 0;
}

/* Note the time at which the finished blocks were seen, and return it. Blocks that were
 * seen before are at the end of the list. */
static int64_t see_finished(struct nvmeio_engine *engine)
{
    int64_t now_ns = nvmeio_now_ns();

    for (struct nvmeio_block *block = engine->finished; block && block->seen_ns == 0;
         block = block->next)
        block->seen_ns = now_ns;
    return now_ns;
}

/* Push a block. If it takes another way than when it was cut, it may have to wait for
 * another claim: then park it. */
static void push(struct nvmeio_worker *worker, struct nvmeio_block *block)
{
    if (nvmeio_block_claim(block)) {
        worker->engine.ops->push(&worker->engine, block);
        return;
    }
    block->parked = true;
    worker->parked++;
    worker->bytes -= block->piece.io_bytes;
}

static void unpark(struct nvmeio_worker *worker, struct nvmeio_block *block)
{
    block->request->parked -= !block->prepared;
    block->parked = false;
    worker->parked--;
}

/* Take the parked blocks whose claims were granted, in the order of the grants. The
 * mutex is held. */
static void take_granted(struct nvmeio_worker *worker)
{
    struct nvmeio_claim *claim = atomic_exchange(&worker->granted, NULL);
    struct nvmeio_block *blocks = NULL, *next;

    for (; claim; claim = claim->blocked_next) {
        struct nvmeio_block *block = block_of(claim);
        unpark(worker, block);
        block->next = blocks;
        blocks = block;
    }
    for (; blocks; blocks = next) {
        next = blocks->next;
        append_taken(worker, blocks);
    }
}

/* Push the taken blocks. With single_submit they are submitted one by one. So are
 * blocks that needed a copy, so that the device works while the next one is copied.
 *
 * Blocks pushed in a row share one reading of the clock. It is read again after
 * anything slow: a copy, a system call, or a block that the engine carried out at
 * once. */
static int push_taken(struct nvmeio_worker *worker)
{
    struct nvmeio_engine *engine = &worker->engine;
    int64_t now_ns = 0; /* 0: read the clock */

    while (worker->taken) {
        struct nvmeio_block *block = worker->taken;
        worker->taken = block->next;
        /* Only once: the rest of a short transfer may have been parked. */
        bool first = !block->prepared;
        if (first) {
            worker->bytes -= block->piece.io_bytes;
            nvmeio_block_prepare(block);
            worker->bytes += block->piece.io_bytes;
        }
        block->prepared = true;
        bool copied = first && block->bounce && block->op == NVMEIO_OP_WRITE;
        bool alone = (copied && block->bytes >= COPIED_ALONE_BYTES) ||
                     worker->workers->single_submit;
        if (copied || now_ns == 0)
            now_ns = nvmeio_now_ns();
        if (first)
            block->pushed_ns = now_ns;
        block->seen_ns = 0;
        if (block->fd < 0) {
            engine->in_flight++;
            nvmeio_engine_finish(engine, block);
        } else {
            push(worker, block);
        }
        if (alone) {
            int result = engine->ops->reap(engine, 0);
            if (result < 0) {
                worker->taken_end = &worker->taken;
                return result;
            }
        }
        if (alone || has_unseen(engine))
            now_ns = see_finished(engine);
    }
    worker->taken_end = &worker->taken;
    return 0;
}

/* Wait for completions. Wait for one only, so that no request waits for another's
 * blocks. If all blocks in flight belong to one request, wait for as many as still
 * leave the device busy, because a wake-up costs as much as an I/O of 4 KiB. A thread
 * that adds a request ends the wait. */
static int reap(struct nvmeio_worker *worker)
{
    struct nvmeio_engine *engine = &worker->engine;
    unsigned batch = worker->only ? (engine->in_flight + 3) / 4 : 1;

    if (worker->more || engine->finished || engine->in_flight == 0)
        batch = 0;
    /* Nothing but parked blocks. */
    if (!worker->more && !engine->finished && engine->in_flight == 0)
        nvmeio_waiter_sleep(&worker->consumer.unparked, -1);
    return engine->ops->reap(engine, batch);
}

/* Evaluate the completions. Returns the finished blocks. The others are pushed again,
 * after a pause that grows as long as nothing moves. */
static struct nvmeio_block *advance(struct nvmeio_worker *worker, unsigned *continued)
{
    struct nvmeio_engine *engine = &worker->engine;
    struct nvmeio_block *block = engine->finished;
    struct nvmeio_block *finished = NULL, *again = NULL;
    bool moved = false;

    /* Read the clock before anything is copied out of a bounce. */
    if (has_unseen(engine))
        see_finished(engine);
    engine->finished = NULL;
    while (block) {
        struct nvmeio_block *next = block->next;
        enum nvmeio_verdict verdict = nvmeio_block_advance(block);
        struct nvmeio_block **list =
            verdict == NVMEIO_BLOCK_FINISHED ? &finished : &again;
        *continued += verdict == NVMEIO_BLOCK_CONTINUED;
        engine->retries += verdict == NVMEIO_BLOCK_REPEATED;
        moved |= verdict != NVMEIO_BLOCK_REPEATED;
        block->next = *list;
        *list = block;
        block = next;
    }
    if (moved || !again) {
        worker->pause_ns = 0;
    } else {
        struct timespec pause = {0, worker->pause_ns};
        nanosleep(&pause, NULL);
        worker->pause_ns = worker->pause_ns == 0             ? PAUSE_MIN_NS
                           : worker->pause_ns < PAUSE_MAX_NS ? 2 * worker->pause_ns
                                                             : PAUSE_MAX_NS;
    }
    while (again) {
        struct nvmeio_block *next = again->next;
        again->seen_ns = 0;
        push(worker, again);
        again = next;
    }
    return finished;
}

/* Record finished blocks with their requests, and make them free again. The mutex is
 * held. */
static void book(struct nvmeio_worker *worker, struct nvmeio_block *finished)
{
    struct nvmeio_workers *workers = worker->workers;

    worker->consumer.state = NVMEIO_CONSUMER_BUSY;
    workers->queue->stats.retries += worker->engine.retries;
    worker->engine.retries = 0;
    while (finished) {
        struct nvmeio_block *block = finished;
        struct nvmeio_request *request = block->request;

        finished = block->next;
        if (block->pushed_ns) {
            nvmeio_block_count(block, &workers->queue->stats,
                               workers->queue->latencies);
            worker->bytes -= block->piece.io_bytes;
        }
        nvmeio_request_book(request, block);
        give_bounce(worker, block);
        block->request = NULL;
        block->next = worker->free;
        worker->free = block;
        worker->in_flight--;
        nvmeio_queue_progress(workers->queue, request);
    }
}

/* Drop the parked blocks of requests that were stopped, of which nothing has begun. The
 * mutex is held. */
static void drop_parked(struct nvmeio_worker *worker)
{
    struct nvmeio_block *dropped = NULL;

    for (unsigned i = 0; worker->parked > 0 && i < worker->engine.depth; i++) {
        struct nvmeio_block *block = &worker->blocks[i];
        if (!block->parked || block->prepared ||
            !nvmeio_request_is_stopped(block->request) ||
            !nvmeio_claim_withdraw(&block->claim))
            continue;
        unpark(worker, block);
        block->pushed_ns = 0;
        block->moved = 0;
        block->result = block->request->error ? block->request->error : -ECANCELED;
        block->next = dropped;
        dropped = block;
    }
    book(worker, dropped);
}

/* The engine no longer answers. Fail the requests of its blocks, and mark them as
 * abandoned: the kernel may still write to their memory, so nobody may free it. For the
 * same reason, the worker's own memory is never freed. The mutex is held. */
static void die(struct nvmeio_worker *worker, int error)
{
    struct nvmeio_workers *workers = worker->workers;

    worker->dead = true;
    worker->consumer.state = NVMEIO_CONSUMER_BUSY;
    worker->error = error;
    for (unsigned i = 0; i < worker->engine.depth; i++) {
        struct nvmeio_block *block = &worker->blocks[i];
        struct nvmeio_request *request = block->request;
        if (!request)
            continue;
        if (!block->parked || !nvmeio_claim_withdraw(&block->claim))
            nvmeio_claim_end(&block->claim);
        block->request = NULL;
        block->result = error;
        block->moved = 0;
        nvmeio_request_book(request, block);
        request->abandoned = true;
        nvmeio_request_fail(request, error, block->piece.position);
        nvmeio_queue_progress(workers->queue, request);
    }
    if (--workers->alive > 0)
        /* Call other workers, because this one may have been the only one called. */
        workers->queue->added += workers->count;
    else
        nvmeio_queue_fail_all(workers->queue, error);
}

/* Submit, wait and record. The mutex is held, and unlocked meanwhile. */
static void turn(struct nvmeio_worker *worker)
{
    struct nvmeio_queue *queue = worker->workers->queue;
    struct nvmeio_block *finished = NULL;
    unsigned continued = 0;

    nvmeio_queue_unlock(queue);
    int result = push_taken(worker);
    if (result >= 0)
        result = reap(worker);
    if (result >= 0)
        finished = advance(worker, &continued);
    nvmeio_queue_lock(queue);
    worker->workers->queue->stats.short_transfers += continued;
    if (result < 0)
        die(worker, result);
    else
        book(worker, finished);
}

/* Free what the worker owns. A dead worker keeps what the kernel may still write to. */
static void tear_down(struct nvmeio_worker *worker)
{
    nvmeio_engine_stop(&worker->engine);
    nvmeio_arena_close(&worker->arena);
    free(worker->blocks);
}

/* Wait for work, and let the kernel have the arena's memory if none comes for a while.
 * Returns false when the thread must end. The mutex is held, and unlocked meanwhile. */
static bool wait_for_work(struct nvmeio_worker *worker)
{
    struct nvmeio_workers *workers = worker->workers;
    struct nvmeio_queue *queue = workers->queue;

    while (!nvmeio_queue_next(queue) && !workers->stopping) {
        atomic_store_explicit(&worker->consumer.waiter.woken, 0, memory_order_relaxed);
        worker->consumer.state = NVMEIO_CONSUMER_IDLE;
        nvmeio_queue_unlock(queue);
        if (!nvmeio_waiter_sleep(&worker->consumer.waiter, nvmeio_deadline(IDLE_NS))) {
            nvmeio_arena_rest(&worker->arena);
            nvmeio_waiter_sleep(&worker->consumer.waiter, -1);
        }
        nvmeio_queue_lock(queue);
    }
    return nvmeio_queue_next(queue);
}

/* Set up the engine, the blocks and the arena. */
static int set_up(struct nvmeio_worker *worker)
{
    const struct nvmeio_workers *workers = worker->workers;
    int error =
        nvmeio_engine_start(&worker->engine, workers->ops, workers->queue_depth);

    if (error) {
        /* Every engine needs descriptors, so another one would not help. */
        worker->refused = error != -EMFILE && error != -ENFILE;
        return error;
    }
    unsigned depth = worker->engine.depth;
    worker->blocks = calloc(depth, sizeof(*worker->blocks));
    if (!worker->blocks ||
        nvmeio_arena_open(&worker->arena, workers->owner->arena_bytes)) {
        tear_down(worker);
        return -ENOMEM;
    }
    worker->taken_end = &worker->taken;
    for (unsigned i = depth; i-- > 0;) {
        worker->blocks[i].index = i;
        worker->blocks[i].claim.grant = grant;
        worker->blocks[i].claim.user = worker;
        worker->blocks[i].claim.slot = i;
        worker->blocks[i].next = worker->free;
        worker->free = &worker->blocks[i];
    }
    worker->consumer.engine = &worker->engine;
    return 0;
}

static void *worker_main(void *argument)
{
    struct nvmeio_worker *worker = argument;
    struct nvmeio_queue *queue = worker->workers->queue;
    int error = set_up(worker);
    bool going = error == 0;

    nvmeio_queue_lock(queue);
    worker->error = error;
    if (error == 0) {
        worker->consumer.next = queue->consumers;
        queue->consumers = &worker->consumer;
    }
    nvmeio_queue_wake(queue, &worker->starter);
    while (going && !worker->dead) {
        atomic_store(&worker->consumer.unparked.woken, 0);
        take_granted(worker);
        drop_parked(worker);
        worker->consumer.parked = worker->parked;
        take(worker);
        if (worker->in_flight > 0)
            turn(worker);
        else
            going = wait_for_work(worker);
    }
    nvmeio_queue_unlock(queue);
    /* Each worker frees what it owns in its own thread, so that they do so at the same
     * time: io_destroy(2) takes 30 ms. */
    if (error == 0 && !worker->dead)
        tear_down(worker);
    return NULL;
}

static int start(struct nvmeio_worker *worker, struct nvmeio_workers *workers)
{
    struct nvmeio_waiter starter = {0};

    *worker = (struct nvmeio_worker){.workers = workers, .starter = &starter};
    int error = nvmeio_thread_start(&worker->thread, worker_main, worker);
    if (error)
        return error;
    nvmeio_waiter_sleep(&starter, -1);
    if (worker->error)
        pthread_join(worker->thread, NULL);
    return worker->error;
}

/* Joining a thread is a cancellation point. pthread_cancel(3) must not end the caller
 * there, because other threads wait until the handle is open or closed. */
void nvmeio_workers_stop(struct nvmeio_workers *workers)
{
    struct nvmeio_queue *queue = workers->queue;
    int cancelling;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
    nvmeio_queue_lock(queue);
    workers->stopping = true;
    for (struct nvmeio_consumer *c = queue->consumers; c; c = c->next)
        nvmeio_queue_call(queue, c);
    nvmeio_queue_unlock(queue);
    for (unsigned i = 0; i < workers->started; i++)
        pthread_join(workers->list[i].thread, NULL);
    nvmeio_queue_lock(queue);
    queue->consumers = NULL;
    free(workers->list);
    workers->list = NULL;
    workers->started = 0;
    nvmeio_queue_unlock(queue);
    pthread_setcancelstate(cancelling, NULL);
}

int nvmeio_workers_start(struct nvmeio_workers *workers)
{
    int error = 0, cancelling;

    workers->stopping = workers->refused = false;
    workers->list = calloc(workers->count, sizeof(*workers->list));
    if (!workers->list)
        return -ENOMEM;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
    while (workers->started < workers->count && error == 0) {
        struct nvmeio_worker *worker = &workers->list[workers->started];
        error = start(worker, workers);
        if (error)
            workers->refused = worker->refused;
        else
            workers->started++;
    }
    workers->alive = workers->started;
    if (error)
        nvmeio_workers_stop(workers);
    pthread_setcancelstate(cancelling, NULL);
    return error;
}
