/* engine_libaio.c -- carries out blocks by the kernel's native AIO, through libaio.
 *
 * Completions and wake-ups signal the same eventfd, which reap() polls, because nothing
 * can wake a thread that sleeps in io_getevents(2). Blocks without O_DIRECT are carried
 * out inside io_submit(2). A kernel thread carries out an fsync; before Linux 4.18, the
 * worker does. */
#include "engine.h"

#include <errno.h>
#include <libaio.h>
#include <poll.h>
#include <stdlib.h>

struct aio {
    io_context_t context;
    struct iocb *controls;   /* one per block, by its index */
    struct iocb **pending;   /* pushed, not yet submitted */
    struct io_event *events; /* room for the completions of all blocks */
    unsigned pending_count;
    struct nvmeio_patience patience;
};

static void aio_free(struct aio *aio)
{
    free(aio->controls);
    free(aio->pending);
    free(aio->events);
    free(aio);
}

/* Set up the context. fs.aio-max-nr limits the events of the whole system, so lower the
 * depth until there are enough. */
static int aio_setup(struct nvmeio_engine *engine, struct aio *aio)
{
    int error = io_setup((int)engine->depth, &aio->context);

    while ((error == -EAGAIN || error == -ENOMEM) && engine->depth > 1) {
        engine->depth /= 2;
        error = io_setup((int)engine->depth, &aio->context);
    }
    return error;
}

static int aio_open(struct nvmeio_engine *engine)
{
    struct aio *aio = calloc(1, sizeof(*aio));
    int error = -ENOMEM;

    if (!aio)
        return error;
    aio->controls = calloc(engine->depth, sizeof(*aio->controls));
    aio->pending = calloc(engine->depth, sizeof(struct iocb *));
    aio->events = calloc(engine->depth, sizeof(*aio->events));
    if (aio->controls && aio->pending && aio->events)
        error = aio_setup(engine, aio);
    if (error) {
        aio_free(aio);
        return error;
    }
    engine->state = aio;
    return 0;
}

static void aio_close(struct nvmeio_engine *engine)
{
    struct aio *aio = engine->state;
    io_destroy(aio->context);
    aio_free(aio);
}

static void aio_push(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    struct aio *aio = engine->state;
    struct iocb *control = &aio->controls[block->index];

    if (block->aside) {
        nvmeio_engine_push_aside(engine, block);
        return;
    }
    engine->in_flight++;
    if (block->op == NVMEIO_OP_FSYNC && block->data_only)
        io_prep_fdsync(control, block->fd);
    else if (block->op == NVMEIO_OP_FSYNC)
        io_prep_fsync(control, block->fd);
    else if (block->op == NVMEIO_OP_READ)
        io_prep_pread(control, block->fd, block->address, block->bytes, block->offset);
    else
        io_prep_pwrite(control, block->fd, block->address, block->bytes, block->offset);
    io_set_eventfd(control, engine->wake_fd);
    control->data = block;
    aio->pending[aio->pending_count++] = control;
}

/* Remove the first `count` pending blocks, which the kernel has taken. */
static void aio_taken(struct aio *aio, unsigned count)
{
    aio->pending_count -= count;
    for (unsigned i = 0; i < aio->pending_count; i++)
        aio->pending[i] = aio->pending[i + count];
}

/* Whether an error of io_submit(2) concerns only the first pending block. The kernel
 * checks the blocks one by one, so all errors do that are not transient; security
 * modules, for example, return EACCES or EPERM for one file. */
static bool concerns_block(int error)
{
    return error < 0 && error != -EINTR && error != -EAGAIN && error != -EBUSY &&
           error != -ENOMEM;
}

/* Submit all pending blocks. A block that the kernel refuses finishes with its error.
 * After any other error, try again until nvmeio_patience_try() gives up. */
static int aio_hand_over(struct nvmeio_engine *engine)
{
    struct aio *aio = engine->state;

    while (aio->pending_count > 0) {
        int result = io_submit(aio->context, (long)aio->pending_count, aio->pending);
        if (result > 0) {
            aio_taken(aio, (unsigned)result);
            aio->patience.since_ns = 0;
            continue;
        }
        if (concerns_block(result)) {
            struct nvmeio_block *block = aio->pending[0]->data;
            aio_taken(aio, 1);
            block->result = result;
            /* Kernels before 4.18 do not know this operation. */
            if (block->op == NVMEIO_OP_FSYNC && result == -EINVAL)
                nvmeio_block_perform(block);
            nvmeio_engine_finish(engine, block);
            continue;
        }
        engine->retries++;
        int error = nvmeio_patience_try(&aio->patience, result ? result : -EAGAIN);
        if (error)
            return error;
    }
    return 0;
}

/* Collect all completions. */
static int aio_collect(struct nvmeio_engine *engine)
{
    struct aio *aio = engine->state;
    struct timespec now = {0, 0};
    int count = io_getevents(aio->context, 0, (long)engine->depth, aio->events, &now);

    for (int i = 0; i < count; i++) {
        struct nvmeio_block *block = aio->events[i].data;
        block->result = (int64_t)aio->events[i].res;
        nvmeio_engine_finish(engine, block);
    }
    if (count >= 0)
        aio->patience.since_ns = 0;
    return count;
}

/* Sleep until a completion, a wake-up or a signal. */
static void aio_sleep(struct nvmeio_engine *engine)
{
    struct pollfd events = {.fd = engine->wake_fd, .events = POLLIN};

    if (ppoll(&events, 1, NULL, NULL) > 0)
        nvmeio_eventfd_clear(engine->wake_fd);
}

static unsigned finished_count(const struct nvmeio_engine *engine)
{
    unsigned count = 0;
    for (const struct nvmeio_block *block = engine->finished; block;
         block = block->next)
        count++;
    return count;
}

static int aio_reap(struct nvmeio_engine *engine, unsigned wait_min)
{
    struct aio *aio = engine->state;
    bool slept = false;

    for (;;) {
        int error = aio_hand_over(engine);
        if (error)
            return error;
        int collected = aio_collect(engine);
        if (collected < 0) {
            engine->retries++;
            error = nvmeio_patience_try(&aio->patience, collected);
            if (error)
                return error;
            continue;
        }
        nvmeio_engine_collect_aside(engine);
        unsigned count = finished_count(engine);
        /* Sleep only once. A wake-up or a signal may have ended the sleep, and the
         * worker calls reap() again if it still has to wait. */
        if (count >= wait_min || slept || engine->in_flight == 0)
            return (int)count;
        aio_sleep(engine);
        slept = true;
    }
}

static void aio_wake(struct nvmeio_engine *engine)
{
    nvmeio_eventfd_signal(engine->wake_fd);
}

const struct nvmeio_engine_ops nvmeio_engine_libaio = {
    .name = "libaio",
    .library = "libaio",
    .open = aio_open,
    .close = aio_close,
    .push = aio_push,
    .reap = aio_reap,
    .wake = aio_wake,
};
