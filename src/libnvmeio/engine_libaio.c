/* engine_libaio.c -- carries out blocks by the kernel's native AIO.  It makes the
 * system calls itself, so it needs no library.
 *
 * Completions and wake-ups signal the same eventfd, which reap() polls, because nothing
 * can wake a thread that sleeps in io_getevents(2). Blocks without O_DIRECT are carried
 * out inside io_submit(2). A kernel thread carries out an fsync; before Linux 4.18, the
 * worker does. */
#include "engine.h"

#include <errno.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

struct aio {
    aio_context_t context;
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
    while (syscall(SYS_io_setup, (long)engine->depth, &aio->context)) {
        if ((errno != EAGAIN && errno != ENOMEM) || engine->depth == 1)
            return -errno;
        engine->depth /= 2;
    }
    return 0;
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
    syscall(SYS_io_destroy, aio->context);
    aio_free(aio);
}

static uint16_t opcode_of(const struct nvmeio_block *block)
{
    if (block->op == NVMEIO_OP_FSYNC)
        return block->data_only ? IOCB_CMD_FDSYNC : IOCB_CMD_FSYNC;
    return block->op == NVMEIO_OP_READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
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
    *control = (struct iocb){
        .aio_data = (uintptr_t)block,
        .aio_lio_opcode = opcode_of(block),
        .aio_fildes = (uint32_t)block->fd,
        .aio_flags = IOCB_FLAG_RESFD,
        .aio_resfd = (uint32_t)engine->wake_fd,
    };
    /* The kernel refuses an fsync with any of these. */
    if (block->op != NVMEIO_OP_FSYNC) {
        control->aio_buf = (uintptr_t)block->address;
        control->aio_nbytes = block->bytes;
        control->aio_offset = block->offset;
    }
    aio->pending[aio->pending_count++] = control;
}

static struct nvmeio_block *block_of(uint64_t data)
{
    return (struct nvmeio_block *)(uintptr_t)data;
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
    return error != -EINTR && error != -EAGAIN && error != -EBUSY && error != -ENOMEM;
}

/* Submit all pending blocks. A block that the kernel refuses finishes with its error.
 * After any other error, try again until nvmeio_patience_try() gives up. */
static int aio_hand_over(struct nvmeio_engine *engine)
{
    struct aio *aio = engine->state;

    while (aio->pending_count > 0) {
        long count = syscall(SYS_io_submit, aio->context, (long)aio->pending_count,
                             aio->pending);
        if (count > 0) {
            aio_taken(aio, (unsigned)count);
            aio->patience.since_ns = 0;
            continue;
        }
        int error = count < 0 ? -errno : -EAGAIN;
        if (concerns_block(error)) {
            struct nvmeio_block *block = block_of(aio->pending[0]->aio_data);
            aio_taken(aio, 1);
            block->result = error;
            /* Kernels before 4.18 do not know this operation. */
            if (block->op == NVMEIO_OP_FSYNC && error == -EINVAL)
                nvmeio_block_perform(block);
            nvmeio_engine_finish(engine, block);
            continue;
        }
        engine->retries++;
        error = nvmeio_patience_try(&aio->patience, error);
        if (error)
            return error;
    }
    return 0;
}

/* Collect all completions. Returns 0 or -errno. */
static int aio_collect(struct nvmeio_engine *engine)
{
    struct aio *aio = engine->state;
    struct timespec now = {0, 0};
    long count = syscall(SYS_io_getevents, aio->context, 0L, (long)engine->depth,
                         aio->events, &now);

    for (long i = 0; i < count; i++) {
        struct nvmeio_block *block = block_of(aio->events[i].data);
        block->result = aio->events[i].res;
        nvmeio_engine_finish(engine, block);
    }
    if (count < 0)
        return -errno;
    aio->patience.since_ns = 0;
    return 0;
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
        error = aio_collect(engine);
        if (error) {
            engine->retries++;
            error = nvmeio_patience_try(&aio->patience, error);
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
    .open = aio_open,
    .close = aio_close,
    .push = aio_push,
    .reap = aio_reap,
    .wake = aio_wake,
};
