/* queue.c -- when a request may go on, and which threads learn that it is done.
 *
 * request.c decides how a request is cut, and worker.c cuts it. */
#include "queue.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "file_internal.h"
#include "slow.h"

void nvmeio_queue_init(struct nvmeio_queue *queue)
{
    memset(queue, 0, sizeof(*queue));
    pthread_mutex_init(&queue->mutex, NULL);
}

void nvmeio_queue_destroy(struct nvmeio_queue *queue)
{
    pthread_mutex_destroy(&queue->mutex);
    nvmeio_eventfds_clear(&queue->eventfds);
}

/* pthread_cancel(3) must not end a thread that holds the mutex, because the mutex would
 * stay locked. */
void nvmeio_queue_lock(struct nvmeio_queue *queue)
{
    int cancelling;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
    pthread_mutex_lock(&queue->mutex);
    queue->cancelling = cancelling;
}

/* How many steps a thread makes in a row, in 0.1 ms or so. */
#define STEPS 1024u

void nvmeio_queue_pause(struct nvmeio_queue *queue, size_t step)
{
    static const struct timespec moment = {0, 1000};
    int cancelling = queue->cancelling;

    if (step % STEPS != STEPS - 1)
        return;
    pthread_mutex_unlock(&queue->mutex);
    /* Otherwise this thread would nearly always be the next to lock it. */
    nanosleep(&moment, NULL);
    pthread_mutex_lock(&queue->mutex);
    queue->cancelling = cancelling;
}

void nvmeio_queue_wake(struct nvmeio_queue *queue, struct nvmeio_waiter **waiters)
{
    while (*waiters) {
        struct nvmeio_waiter *waiter = *waiters;
        *waiters = waiter->next;
        waiter->next = queue->wake;
        queue->wake = waiter;
    }
}

bool nvmeio_queue_call(struct nvmeio_queue *queue, struct nvmeio_consumer *consumer)
{
    bool idle = consumer->state == NVMEIO_CONSUMER_IDLE;

    if (!idle && consumer->state != NVMEIO_CONSUMER_CALLED)
        return false;
    /* Not idle from now on, even before it wakes: the next block goes to another
     * consumer. */
    consumer->state = NVMEIO_CONSUMER_CALLED;
    nvmeio_waiter_mark(&consumer->waiter);
    if (queue->call_count < NVMEIO_WORKERS_MAX)
        queue->calls[queue->call_count++] = &consumer->waiter;
    else
        nvmeio_waiter_rouse(&consumer->waiter);
    return idle;
}

void nvmeio_consumer_interrupt(struct nvmeio_consumer *consumer)
{
    nvmeio_waiter_wake(&consumer->unparked);
    consumer->engine->ops->wake(consumer->engine);
}

/* Set consumers to work on the added blocks: first the idle ones, then those that wait
 * for completions and have room. An engine is woken under the mutex, because its
 * consumer could close it otherwise. */
static void call_consumers(struct nvmeio_queue *queue)
{
    size_t missing = nvmeio_queue_next(queue) ? queue->added : 0;

    for (struct nvmeio_consumer *c = queue->consumers; c && missing > 0; c = c->next)
        missing -= nvmeio_queue_call(queue, c);
    for (struct nvmeio_consumer *c = queue->consumers; c && missing > 0; c = c->next) {
        if (c->state != NVMEIO_CONSUMER_LISTENING)
            continue;
        c->state = NVMEIO_CONSUMER_BUSY;
        if (c->parked > 0)
            nvmeio_consumer_interrupt(c);
        else
            c->engine->ops->wake(c->engine);
        missing--;
    }
    queue->added = 0;
}

/* Call the consumers with parked blocks, so that they drop those of requests that were
 * stopped. */
static void call_parked(struct nvmeio_queue *queue)
{
    for (struct nvmeio_consumer *c = queue->consumers; c; c = c->next)
        if (c->parked > 0)
            nvmeio_consumer_interrupt(c);
    queue->stopped = false;
}

static void active_remove(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    struct nvmeio_request *next = request->active_next;
    struct nvmeio_request *previous = request->active_previous;

    if (next)
        next->active_previous = previous;
    else
        queue->active_last = previous;
    if (previous)
        previous->active_next = next;
    else
        queue->active_first = next;
    queue->active_count -= !request->whole;
}

static void append(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    struct nvmeio_turns *turns = &queue->turns[request->comes_last];

    request->queue_next = NULL;
    request->queue_previous = turns->last;
    if (turns->first)
        turns->last->queue_next = request;
    else
        turns->first = request;
    turns->last = request;
}

static bool is_awaited(const struct nvmeio_request *request)
{
    return (request->whole ? request->whole : request)->waiters != NULL;
}

static void enqueue(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    request->comes_last =
        request->op == NVMEIO_OP_WRITE && !is_awaited(request) &&
        atomic_load_explicit(&request->file->writes_last, memory_order_relaxed);
    append(queue, request);
    request->queued = true;
    request->turn_bytes = 0;
    request->blocks_left = request->ops->blocks_left(request);
    queue->blocks_left += request->blocks_left;
    queue->added += request->blocks_left;
}

static void unlink_queued(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    struct nvmeio_turns *turns = &queue->turns[request->comes_last];
    struct nvmeio_request *next = request->queue_next;
    struct nvmeio_request *previous = request->queue_previous;

    if (next)
        next->queue_previous = previous;
    else
        turns->last = previous;
    if (previous)
        previous->queue_next = next;
    else
        turns->first = next;
}

static void dequeue(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    unlink_queued(queue, request);
    request->queued = false;
    queue->blocks_left -= request->blocks_left;
}

static size_t turn_bytes(const struct nvmeio_request *request)
{
    return is_awaited(request) ? NVMEIO_WAITED_TURN_BYTES : NVMEIO_TURN_BYTES;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void count_cut(struct nvmeio_queue *queue, bool comes_last, size_t bytes)
{
    size_t *cut = &queue->cut_before_last;

    if (comes_last)
        *cut -= smaller(*cut, NVMEIO_LAST_SHARE * bytes);
    else
        *cut = smaller(*cut + bytes, NVMEIO_LAST_BYTES);
}

void nvmeio_queue_hurry(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    if (!request->queued || !request->comes_last)
        return;
    unlink_queued(queue, request);
    request->comes_last = false;
    append(queue, request);
}

void nvmeio_queue_took(struct nvmeio_queue *queue, struct nvmeio_request *request,
                       size_t bytes)
{
    /* While next() paused, another thread may have taken it off the queue. */
    if (!request->queued) {
        nvmeio_queue_progress(queue, request);
        return;
    }
    if (request->blocks_left > 0) {
        request->blocks_left--;
        queue->blocks_left--;
    }
    /* A block of a few bytes takes as long as one of a page. */
    bytes = bytes > NVMEIO_EDGE_BYTES ? bytes : NVMEIO_EDGE_BYTES;
    request->turn_bytes += bytes;
    count_cut(queue, request->comes_last, bytes);
    if (request->turn_bytes < turn_bytes(request))
        return;
    request->turn_bytes = 0;
    unlink_queued(queue, request);
    append(queue, request);
}

static void done_add(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    request->listed = true;
    request->done_next = NULL;
    request->done_previous = queue->done_last;
    if (queue->done_first)
        queue->done_last->done_next = request;
    else
        queue->done_first = request;
    queue->done_last = request;
}

void nvmeio_queue_take_done(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    if (request->done_previous)
        request->done_previous->done_next = request->done_next;
    else
        queue->done_first = request->done_next;
    if (request->done_next)
        request->done_next->done_previous = request->done_previous;
    else
        queue->done_last = request->done_previous;
    request->listed = false;
}

void nvmeio_queue_drop(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    request->drop_next = queue->drop;
    queue->drop = request;
}

static bool same_file(const struct nvmeio_request *a, const struct nvmeio_request *b)
{
    return a->device == b->device && a->inode == b->inode;
}

/* The line of a request's file: the writes and the fsyncs that wait for them, in order
 * of submission. Returns the place that points to its first request, a write, or to
 * NULL if there is none. */
static struct nvmeio_request **line_of(struct nvmeio_queue *queue,
                                       const struct nvmeio_request *request)
{
    uint64_t mixed = (request->inode ^ request->device << 32) * 0x9e3779b97f4a7c15u;
    struct nvmeio_request **place = &queue->lines[mixed >> 32 & (NVMEIO_LINES - 1)];

    while (*place && !same_file(*place, request))
        place = &(*place)->lines_next;
    return place;
}

/* Add a write or an fsync to the end of its line. An fsync with no write before it may
 * run at once, so it joins none. */
static void join_line(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    request->device = request->file->info.device;
    request->inode = request->file->info.inode;
    struct nvmeio_request **place = line_of(queue, request), *first = *place;

    if (!first && request->op == NVMEIO_OP_FSYNC)
        return;
    request->in_line = true;
    request->line_next = NULL;
    request->line_previous = first ? first->line_last : NULL;
    if (first) {
        first->line_last->line_next = request;
        first->line_last = request;
    } else {
        request->line_last = request;
        request->lines_next = NULL;
        *place = request;
    }
}

/* Take a write that has nothing in flight any more, or an fsync that ends early, out of
 * its line. Fsyncs that are then first may run. */
static void leave_line(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    struct nvmeio_request **place = line_of(queue, request), *first = *place;
    struct nvmeio_request *next = request->line_next;

    request->in_line = false;
    if (next)
        next->line_previous = request->line_previous;
    else
        first->line_last = request->line_previous;
    if (request->line_previous) {
        request->line_previous->line_next = next;
        return;
    }
    while (next && next->op == NVMEIO_OP_FSYNC) {
        struct nvmeio_request *fsync = next;
        next = fsync->line_next;
        fsync->in_line = false;
        if (nvmeio_request_has_block(fsync))
            enqueue(queue, fsync);
    }
    if (next) {
        next->line_previous = NULL;
        next->line_last = first->line_last;
        next->lines_next = first->lines_next;
    }
    *place = next ? next : first->lines_next;
}

static void active_add(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    request->active_previous = queue->active_last;
    if (queue->active_last)
        queue->active_last->active_next = request;
    else
        queue->active_first = request;
    queue->active_last = request;
    queue->active_count += !request->whole;
    /* Never the last reference, because the request has another. */
    if (request->file_passed)
        nvmeio_file_release_shared(request->file);
    if (request->op != NVMEIO_OP_READ)
        join_line(queue, request);
}

/* Note a held request whose turn has come, or that must fail. nvmeio_queue_unlock()
 * then plans it or ends it. */
static void make_ready(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    if (request->ready)
        return;
    request->ready = true;
    request->ready_next = queue->ready;
    queue->ready = request;
}

static void unlink_link(struct nvmeio_link *link)
{
    if (link->next)
        link->next->place = link->place;
    *link->place = link->next;
    link->place = NULL;
}

/* `request` is done, and the link's dependent comes after it. If the request failed,
 * the dependent fails with the same error. */
static void pass_on(struct nvmeio_queue *queue, const struct nvmeio_request *request,
                    const struct nvmeio_link *link)
{
    struct nvmeio_request *dependent = link->dependent;
    int error = request->cancelled ? -ECANCELED : request->error;

    if (error && !nvmeio_request_is_stopped(dependent)) {
        nvmeio_request_fail(dependent, error, 0);
        dependent->blocker = link->index;
    }
    if (error)
        make_ready(queue, dependent);
}

void nvmeio_queue_add(struct nvmeio_queue *queue, struct nvmeio_request *request,
                      const struct nvmeio_after *after)
{
    struct nvmeio_request *part;

    atomic_fetch_add_explicit(&request->references, 1, memory_order_relaxed);
    queue->stats.requests++;
    active_add(queue, request);
    /* All of them count at once, so that the whole does not end before they are added.
     */
    request->in_flight = request->parts ? (unsigned)request->parts->count : 0;
    for (size_t i = 0; (part = nvmeio_part(request, i)); i++) {
        active_add(queue, part);
        nvmeio_queue_pause(queue, i);
    }
    for (size_t i = 0; i < after->count; i++) {
        struct nvmeio_request *before = after->requests[i];
        struct nvmeio_link *link = &request->links[i];
        *link = (struct nvmeio_link){.dependent = request, .index = i};
        if (nvmeio_request_done(before)) {
            pass_on(queue, before, link);
            continue;
        }
        link->next = before->dependents;
        link->place = &before->dependents;
        if (link->next)
            link->next->place = &link->next;
        before->dependents = link;
        request->waits++;
    }
    if (after->count > 0 && request->waits == 0)
        make_ready(queue, request);
}

/* The outcome is final. Report it once: to a thread that waits for the request, or else
 * through nvmeio_handle_pop(). */
static void complete(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    if (request->in_line)
        leave_line(queue, request);
    active_remove(queue, request);
    /* Pairs with the acquire in nvmeio_request_done(). */
    atomic_store_explicit(&request->state, NVMEIO_STATE_DONE, memory_order_release);
    if (request->whole) {
        nvmeio_many_book(request);
        nvmeio_queue_progress(queue, request->whole);
        return;
    }
    while (request->dependents) {
        struct nvmeio_link *link = request->dependents;
        unlink_link(link);
        pass_on(queue, request, link);
        if (--link->dependent->waits == 0)
            make_ready(queue, link->dependent);
    }
    if (request->user && !request->waiters) {
        done_add(queue, request);
    } else {
        if (request->user)
            request->waiters->reported = true;
        nvmeio_queue_drop(queue, request);
    }
    nvmeio_queue_wake(queue, &request->waiters);
    if (queue->active_count == 0)
        nvmeio_queue_wake(queue, &queue->drainers);
    if (queue->eventfds.armed > 0)
        nvmeio_eventfds_signal(&queue->eventfds);
}

/* End a request that has nothing in flight, and nothing left to cut. It settles first,
 * without the mutex, if it failed or was cancelled, or if it may hold the last
 * reference to its file: a caller that sees the request done may rely on the descriptor
 * being closed. */
static void finish(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    bool troubled = request->failed || request->cancelled;

    for (size_t i = 0; i < request->link_count; i++)
        if (request->links[i].place)
            unlink_link(&request->links[i]);
    if (!troubled)
        request->got = request->total;
    if (!troubled && (!request->file || nvmeio_file_release_shared(request->file))) {
        request->file = NULL;
        complete(queue, request);
        return;
    }
    atomic_store_explicit(&request->state, NVMEIO_STATE_SETTLING, memory_order_relaxed);
    request->settle_next = queue->settle;
    queue->settle = request;
}

void nvmeio_queue_progress(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    if (nvmeio_request_is_settling(request))
        return;
    if (nvmeio_request_is_over(request) && !nvmeio_request_is_stopped(request) &&
        request->ops->next_round)
        request->ops->next_round(request);
    bool has_block = nvmeio_request_has_block(request);
    if (request->queued && !has_block)
        dequeue(queue, request);
    if (nvmeio_request_is_stopped(request) && request->in_flight > 0)
        queue->stopped = true;
    if (nvmeio_request_is_over(request))
        finish(queue, request);
    else if (has_block && !request->queued)
        enqueue(queue, request);
}

struct nvmeio_request *nvmeio_queue_next(struct nvmeio_queue *queue)
{
    const struct nvmeio_turns *turns = queue->turns;

    /* Requests that are fully cut, or have to wait, leave the queue here. */
    for (int i = 0; i < 2; i++)
        while (turns[i].first && !nvmeio_request_has_block(turns[i].first))
            dequeue(queue, turns[i].first);
    bool last = !turns[0].first || queue->cut_before_last >= NVMEIO_LAST_BYTES;
    return last && turns[1].first ? turns[1].first : turns[0].first;
}

void nvmeio_queue_fail_all(struct nvmeio_queue *queue, int error)
{
    struct nvmeio_request *next;

    queue->dead_error = error;
    for (struct nvmeio_request *r = queue->active_first; r; r = next) {
        /* If a thread is carrying out this request itself, or planning it, the request
         * ends when that thread comes back. */
        next = r->active_next;
        if (r->phase == NVMEIO_PHASE_PLANNING || nvmeio_request_is_settling(r) ||
            r->error || r->in_flight > 0)
            continue;
        nvmeio_request_fail(r, error, r->position);
        nvmeio_queue_progress(queue, r);
    }
}

/* Release the file of a request. If that closes it, and fails, so does the request. */
static void release_file(struct nvmeio_request *request)
{
    request->close_error = nvmeio_file_release(request->file);
    request->file = NULL;
    if (!request->close_error || nvmeio_request_is_stopped(request))
        return;
    request->error = request->close_error;
    request->closing = true;
}

static bool is_troubled(const struct nvmeio_request *request)
{
    return request->failed || request->cancelled;
}

/* Find out how far a failed request came, and release its file. */
static void settle(struct nvmeio_request *request)
{
    if (is_troubled(request) && !request->settled)
        request->ops->settle(request);
    request->settled = true;
    release_file(request);
}

/* Whether it takes long to find out how far a request came: it sorts many records, or
 * asks a server for the size of the file. */
static bool is_slow_to_settle(const struct nvmeio_request *request)
{
    return is_troubled(request) &&
           (request->steps > NVMEIO_STEPS_MAX ||
            (request->error == -ENODATA && nvmeio_request_is_distant(request)));
}

/* Settle a request. If that takes long, a thread of slow.c does it: then this returns
 * false, and the request may be gone. */
static bool settle_quickly(struct nvmeio_request *request)
{
    if (is_slow_to_settle(request) && nvmeio_slow_add(request))
        return false;
    if (is_troubled(request))
        request->ops->settle(request);
    request->settled = true;
    if (request->file && nvmeio_file_release_shared(request->file))
        request->file = NULL;
    if (request->file && nvmeio_file_is_slow_to_close(request->file) &&
        nvmeio_slow_add(request))
        return false;
    release_file(request);
    return true;
}

/* Settle a list of requests, and return the list of those that are done. The threads of
 * slow.c do the slow ones; these may be gone then. */
static struct nvmeio_request *settle_all(struct nvmeio_request *request)
{
    struct nvmeio_request *settled = NULL, **end = &settled, *next;

    for (; request; request = next) {
        next = request->settle_next;
        if (!settle_quickly(request))
            continue;
        *end = request;
        end = &request->settle_next;
    }
    *end = NULL;
    return settled;
}

/* Plan a list of requests, which the caller has retained, and return the list of those
 * that can begin. The threads of slow.c plan the slow ones. */
static struct nvmeio_request *plan_all(struct nvmeio_request *request)
{
    struct nvmeio_request *planned = NULL, **end = &planned, *next;

    for (; request; request = next) {
        next = request->ready_next;
        if (nvmeio_request_is_slow(request) && nvmeio_slow_add(request)) {
            nvmeio_request_release(request);
            continue;
        }
        request->ops->plan(request);
        *end = request;
        end = &request->ready_next;
    }
    *end = NULL;
    return planned;
}

static void set_phase(struct nvmeio_request *request, enum nvmeio_phase phase)
{
    struct nvmeio_request *part;

    request->phase = phase;
    for (size_t i = 0; (part = nvmeio_part(request, i)); i++)
        part->phase = phase;
}

/* Let a request and all its parts progress. If the whole has failed, its parts fail. */
static void progress_all(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    struct nvmeio_request *part;

    for (size_t i = 0; (part = nvmeio_part(request, i)); i++) {
        if (request->error && !nvmeio_request_is_settling(part))
            nvmeio_request_fail(part, request->error, 0);
        nvmeio_queue_progress(queue, part);
        nvmeio_queue_pause(queue, i);
    }
    nvmeio_queue_progress(queue, request);
}

void nvmeio_queue_begin(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    if (queue->dead_error)
        nvmeio_request_fail(request, queue->dead_error, 0);
    progress_all(queue, request);
}

/* What the thread that unlocks the mutex releases at the end. */
struct leftovers {
    struct nvmeio_request *begun; /* by this thread, so that it retained them */
    struct nvmeio_request *dropped;
};

static void add_begun(struct leftovers *left, struct nvmeio_request *request)
{
    request->begun_next = left->begun;
    left->begun = request;
}

/* Take the requests whose turn has come, and retain them. Those that failed or were
 * cancelled end here; the others are returned, to be planned. Dependents of one request
 * come in the order of their submission: the lists of links and of ready requests both
 * turn it around. */
static struct nvmeio_request *take_ready(struct nvmeio_queue *queue,
                                         struct leftovers *left)
{
    struct nvmeio_request *planning = NULL, **end = &planning;

    while (queue->ready) {
        struct nvmeio_request *request = queue->ready;
        queue->ready = request->ready_next;
        if (nvmeio_request_is_settling(request))
            continue;
        /* The mutex is unlocked between its parts. */
        atomic_fetch_add_explicit(&request->references, 1, memory_order_relaxed);
        if (nvmeio_request_is_stopped(request)) {
            progress_all(queue, request);
            add_begun(left, request);
            continue;
        }
        set_phase(request, NVMEIO_PHASE_PLANNING);
        *end = request;
        end = &request->ready_next;
    }
    *end = NULL;
    return planning;
}

/* Unlock the mutex, and wake the threads and consumers that were noted. */
static void unlock_and_wake(struct nvmeio_queue *queue)
{
    struct nvmeio_waiter *wake = queue->wake, *calls[NVMEIO_WORKERS_MAX];
    unsigned call_count = queue->call_count;

    memcpy(calls, queue->calls, call_count * sizeof(calls[0]));
    queue->call_count = 0;
    queue->wake = NULL;
    pthread_mutex_unlock(&queue->mutex);
    for (unsigned i = 0; i < call_count; i++)
        nvmeio_waiter_rouse(calls[i]);
    nvmeio_waiter_wake_all(wake);
}

/* Unlock the mutex, and carry out what was noted. Returns whether it was locked again,
 * because requests were settled or planned: that may make others ready. */
static bool carry_out(struct nvmeio_queue *queue, struct leftovers *left)
{
    struct nvmeio_request *planned, *settled, *next;

    planned = take_ready(queue, left); /* this may add to the other lists */
    settled = queue->settle;
    queue->settle = NULL;
    for (; queue->drop; queue->drop = next) {
        next = queue->drop->drop_next;
        queue->drop->drop_next = left->dropped;
        left->dropped = queue->drop;
    }
    if (queue->added > 0)
        call_consumers(queue);
    if (queue->stopped)
        call_parked(queue);
    unlock_and_wake(queue);
    settled = settle_all(settled);
    planned = plan_all(planned);
    if (!settled && !planned)
        return false;
    pthread_mutex_lock(&queue->mutex);
    for (; planned; planned = next) {
        next = planned->ready_next;
        set_phase(planned, NVMEIO_PHASE_PLANNED);
        nvmeio_queue_begin(queue, planned);
        add_begun(left, planned);
    }
    for (; settled; settled = next) {
        next = settled->settle_next;
        complete(queue, settled);
    }
    return true;
}

void nvmeio_queue_unlock(struct nvmeio_queue *queue)
{
    struct leftovers left = {0};
    struct nvmeio_request *next;
    int cancelling = queue->cancelling;

    while (carry_out(queue, &left))
        continue;
    for (; left.dropped; left.dropped = next) {
        next = left.dropped->drop_next;
        nvmeio_request_release(left.dropped);
    }
    for (; left.begun; left.begun = next) {
        next = left.begun->begun_next;
        nvmeio_request_release(left.begun);
    }
    pthread_setcancelstate(cancelling, NULL);
}

void nvmeio_queue_continue(struct nvmeio_queue *queue, struct nvmeio_request *request)
{
    bool settling = nvmeio_request_is_settling(request);
    int cancelling;

    /* Otherwise pthread_cancel(3) could end a caller here, and the request would never
     * be done. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
    if (settling)
        settle(request);
    else
        request->ops->plan(request);
    nvmeio_queue_lock(queue);
    if (settling) {
        complete(queue, request);
    } else {
        set_phase(request, NVMEIO_PHASE_PLANNED);
        nvmeio_queue_begin(queue, request);
    }
    nvmeio_queue_unlock(queue);
    pthread_setcancelstate(cancelling, NULL);
}

int nvmeio_queue_sleep(struct nvmeio_queue *queue, struct nvmeio_waiter **list,
                       struct nvmeio_waiter *waiter, int64_t deadline_ns)
{
    waiter->next = *list;
    *list = waiter;
    nvmeio_queue_unlock(queue);
    if (nvmeio_waiter_sleep(waiter, deadline_ns))
        return 0;
    nvmeio_queue_lock(queue);
    bool removed = nvmeio_waiter_remove(list, waiter);
    nvmeio_queue_unlock(queue);
    if (removed)
        return -ETIMEDOUT;
    /* Another thread has taken the waiter off the list, and is about to wake it. */
    nvmeio_waiter_sleep(waiter, -1);
    return 0;
}

int nvmeio_queue_drain(struct nvmeio_queue *queue, int64_t deadline_ns)
{
    struct nvmeio_waiter waiter = {0};

    nvmeio_queue_lock(queue);
    if (queue->active_count > 0)
        return nvmeio_queue_sleep(queue, &queue->drainers, &waiter, deadline_ns);
    nvmeio_queue_unlock(queue);
    return 0;
}

unsigned nvmeio_queue_pop(struct nvmeio_queue *queue, void **users, unsigned count)
{
    unsigned found = 0;

    nvmeio_queue_lock(queue);
    while (found < count && queue->done_first) {
        struct nvmeio_request *request = queue->done_first;
        nvmeio_queue_take_done(queue, request);
        users[found++] = request->user;
        nvmeio_queue_drop(queue, request);
    }
    nvmeio_queue_unlock(queue);
    return found;
}
