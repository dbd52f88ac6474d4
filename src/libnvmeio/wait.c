/* wait.c -- threads that wait, and the lanes that they run meanwhile.
 *
 * A caller lane serves one request at a time, in the thread that waits for it: so a
 * small transfer costs no change of threads.  When a request may go on is schedule.c's;
 * opening, submitting and closing are handle.c's. */
#include "handle_internal.h"

#include <errno.h>
#include <stdlib.h>

#include "file_internal.h"

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

bool nvmeio_wait_give(struct nvmeio_handle *handle, struct nvmeio_request *request)
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
    if (handle->drainers > 0 || handle->gated_first)
        pthread_cond_broadcast(&handle->news);
    return true;
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

/* Whether who runs the lane brings its request forward: not while another thread runs
 * it, or tidies up what the request has left. */
static bool helps(const struct nvmeio_lane *lane)
{
    return lane->own && !lane->driven && !nvmeio_schedule_settling(lane->own);
}

/* Run a caller lane for one turn; where there is none to run, wait for those who do
 * what there is to do.  The mutex is held, and dropped meanwhile. */
static int drive(struct nvmeio_handle *handle, struct nvmeio_lane *lane,
                 const struct deadline *deadline)
{
    if (!lane)
        return wait_news(handle, deadline);
    /* Also when no time is left: who looks again and again must come to an end. */
    int64_t left = deadline_left(deadline);
    turn(handle, lane, left);
    return left == 0 ? -ETIMEDOUT : 0;
}

/* A caller lane with a request that nobody brings forward just now, or NULL. */
static struct nvmeio_lane *undriven(struct nvmeio_handle *handle)
{
    struct nvmeio_lane *lane = handle->callers;
    while (lane && !helps(lane))
        lane = lane->next;
    return lane;
}

/* The caller lane to run for this request: its own, or for an fsync one of the writes
 * before it, for which nobody else may be waiting.  NULL: none.  The mutex is held. */
static struct nvmeio_lane *lane_towards(const struct nvmeio_request *request)
{
    if (request->op == NVMEIO_OP_FSYNC && !request->gate_open)
        return undriven(request->handle);
    struct nvmeio_lane *lane = request->caller_lane;
    return lane && helps(lane) ? lane : NULL;
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
    if (nvmeio_request_before_fork(request))
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

    nvmeio_handle_ensure_own(handle);
    pthread_mutex_lock(&handle->mutex);
    handle->drainers++;
    while (handle->active_count > 0 && error == 0)
        error = drive(handle, undriven(handle), &deadline);
    handle->drainers--;
    error = handle->active_count > 0 ? error : 0;
    pthread_mutex_unlock(&handle->mutex);
    return error;
}

/* Look whether the requests are done whose callers gave up waiting.  Lanes are only
 * added, and in front.  The mutex is held, and dropped meanwhile. */
static void visit_deserted(struct nvmeio_handle *handle)
{
    for (struct nvmeio_lane *lane = handle->callers; lane; lane = lane->next) {
        if (lane->own && !lane->driven && lane->deserted)
            turn(handle, lane, 0);
    }
}

unsigned nvmeio_handle_pop(struct nvmeio_handle *handle, void **users, unsigned count)
{
    struct nvmeio_request *popped = NULL;
    unsigned found = 0;

    nvmeio_handle_ensure_own(handle);
    pthread_mutex_lock(&handle->mutex);
    visit_deserted(handle);
    while (found < count && handle->done_first) {
        struct nvmeio_request *request = handle->done_first;
        nvmeio_schedule_take_done(handle, request);
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

bool nvmeio_request_take(struct nvmeio_request *request)
{
    struct nvmeio_handle *handle = request->handle;

    if (nvmeio_request_before_fork(request))
        return false;
    pthread_mutex_lock(&handle->mutex);
    bool taken = request->listed;
    if (taken)
        nvmeio_schedule_take_done(handle, request);
    pthread_mutex_unlock(&handle->mutex);
    if (taken)
        nvmeio_request_release(request);
    return taken;
}

/* All requests are done, but the thread that ran the last one may still be on its way
 * out of the lane. */
void nvmeio_wait_close(struct nvmeio_handle *handle)
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
        nvmeio_lane_retire(lane);
        nvmeio_lane_close(lane);
        if (!lane->dead)
            free(lane);
    }
    pthread_mutex_unlock(&handle->mutex);
}
