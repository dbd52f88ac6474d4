/* engine_uring.c -- blocks by io_uring(7), through liburing.
 *
 * A lane owns its ring alone (SINGLE_ISSUER, DEFER_TASKRUN where the kernel has them);
 * a shared one, for callers' threads, does without.  An entry that was published is
 * in flight whatever io_uring_enter returned, so a call that fails is repeated until
 * it works or the ring counts as dead.  No SQPOLL: 30 times the CPU for the same speed
 * (docs/design.md). */
#include "engine.h"

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>

#include "registered.h"

/* Flags that are younger than the oldest liburing we build with. */
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8) /* Linux 5.19 */
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12) /* Linux 6.0 */
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13) /* Linux 6.1 */
#endif

/* Entries between two calls of io_uring_enter; more are handed over in parts. */
#define SQ_ENTRIES_MAX 512u

struct uring {
    struct io_uring ring;
    struct nvmeio_patience patience;
    struct nvmeio_registered registered;
    bool wake_armed;
};

/* User data of the poll on the wake-up eventfd; blocks are never there. */
static char wake_mark;

/* Set a ring up with as many of the helpful flags as the kernel knows. */
static int uring_setup(struct io_uring *ring, unsigned entries, unsigned completions,
                       bool shared)
{
    static const unsigned own_flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_COOP_TASKRUN,
        0,
    };
    int error = -EINVAL;

    for (unsigned i = shared ? 1 : 0; i < 3 && error == -EINVAL; i++) {
        struct io_uring_params params = {
            .flags = own_flags[i] | IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP,
            .cq_entries = completions,
        };
        error = io_uring_queue_init_params(entries, ring, &params);
    }
    return error;
}

/* Before Linux 5.12 rings are charged to RLIMIT_MEMLOCK: take a smaller one then. */
static int uring_open(struct nvmeio_engine *engine)
{
    struct uring *uring = calloc(1, sizeof(*uring));
    int error;

    if (!uring)
        return -ENOMEM;
    for (;;) {
        /* One entry more, for the poll of the wake-up. */
        unsigned wanted = engine->depth + 1;
        unsigned entries = wanted < SQ_ENTRIES_MAX ? wanted : SQ_ENTRIES_MAX;
        error = uring_setup(&uring->ring, entries, 2 * wanted, engine->shared);
        if (error != -ENOMEM || engine->depth == 1)
            break;
        engine->depth /= 2;
    }
    if (error) {
        free(uring);
        return error;
    }
    nvmeio_registered_open(&uring->registered, &uring->ring);
    engine->state = uring;
    return 0;
}

static void uring_close(struct nvmeio_engine *engine)
{
    struct uring *uring = engine->state;
    nvmeio_registered_close(&uring->registered);
    io_uring_queue_exit(&uring->ring);
    free(uring);
}

/* Hand over what was published.  Patience decides when a ring is dead. */
static int uring_hand_over(struct nvmeio_engine *engine)
{
    struct uring *uring = engine->state;

    for (;;) {
        int result = io_uring_submit(&uring->ring);
        if (result >= 0)
            return 0;
        engine->retries++;
        int error = nvmeio_patience_try(&uring->patience, result);
        if (error)
            return error;
    }
}

/* NULL only where the ring is full and the kernel takes nothing off it. */
static struct io_uring_sqe *uring_entry(struct nvmeio_engine *engine)
{
    struct uring *uring = engine->state;
    struct io_uring_sqe *entry = io_uring_get_sqe(&uring->ring);

    while (!entry && uring_hand_over(engine) == 0)
        entry = io_uring_get_sqe(&uring->ring);
    return entry;
}

/* Say in an entry what the block wants, in terms of what is registered where it is. */
static void uring_prepare(struct io_uring_sqe *entry, struct nvmeio_block *block,
                          int memory, int file)
{
    int fd = file >= 0 ? file : block->fd;
    uint64_t offset = (uint64_t)block->offset;

    if (block->op == NVMEIO_OP_FSYNC)
        io_uring_prep_fsync(entry, fd, 0);
    else if (block->op == NVMEIO_OP_READ && memory >= 0)
        io_uring_prep_read_fixed(entry, fd, block->address, block->bytes, offset,
                                 memory);
    else if (block->op == NVMEIO_OP_READ)
        io_uring_prep_read(entry, fd, block->address, block->bytes, offset);
    else if (memory >= 0)
        io_uring_prep_write_fixed(entry, fd, block->address, block->bytes, offset,
                                  memory);
    else
        io_uring_prep_write(entry, fd, block->address, block->bytes, offset);
    if (file >= 0)
        entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(entry, block);
}

static void uring_push(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    struct uring *uring = engine->state;
    struct io_uring_sqe *entry;

    engine->in_flight++;
    if (block->plain) {
        nvmeio_block_perform(block);
        nvmeio_engine_finish(engine, block);
        return;
    }
    int memory = nvmeio_registered_memory(&uring->registered, block);
    int file = nvmeio_registered_file(&uring->registered, block);
    entry = uring_entry(engine);
    if (!entry) {
        /* It was never published, so it can be refused like any failed I/O. */
        nvmeio_registered_done(&uring->registered, block);
        block->result = -EIO;
        nvmeio_engine_finish(engine, block);
        return;
    }
    uring_prepare(entry, block, memory, file);
    engine->registered += memory >= 0;
}

static void uring_arm_wake(struct nvmeio_engine *engine)
{
    struct uring *uring = engine->state;
    struct io_uring_sqe *entry;

    if (uring->wake_armed || engine->shared)
        return;
    entry = uring_entry(engine);
    if (!entry)
        return; /* the reap that follows finds out that the ring is dead */
    io_uring_prep_poll_add(entry, engine->wake_fd, POLLIN);
    io_uring_sqe_set_data(entry, &wake_mark);
    uring->wake_armed = true;
}

/* We cancel nothing, so a block that comes back so was not begun: the kernel had to
 * give it to a thread of its own, and could start none (RLIMIT_NPROC, pids.max).  And
 * when a thread of ours ends, it gives back what that had begun with one of these two
 * (both seen on Linux 6.18); lanes keep their threads, callers come and go.  Nothing is
 * wrong with the block, and whoever looks makes up for it. */
static bool left_behind(const struct nvmeio_engine *engine, int result)
{
    return result == -ECANCELED || (engine->shared && result == -EFAULT);
}

/* Take all completions that are there; blocks go to `finished`. */
static int uring_collect(struct nvmeio_engine *engine)
{
    struct uring *uring = engine->state;
    struct io_uring_cqe *entry;
    unsigned head, seen = 0;
    int count = 0;

    io_uring_for_each_cqe(&uring->ring, head, entry)
    {
        void *data = io_uring_cqe_get_data(entry);
        seen++;
        if (data == &wake_mark) {
            nvmeio_eventfd_clear(engine->wake_fd);
            uring->wake_armed = false;
        } else if (entry->user_data != LIBURING_UDATA_TIMEOUT) {
            struct nvmeio_block *block = data;
            block->result = entry->res;
            nvmeio_registered_done(&uring->registered, block);
            if (left_behind(engine, entry->res))
                nvmeio_block_perform(block);
            nvmeio_engine_finish(engine, block);
            count++;
        }
    }
    io_uring_cq_advance(&uring->ring, seen);
    nvmeio_registered_let_go(&uring->registered);
    if (seen)
        uring->patience.since_ns = 0;
    return count;
}

/* One call into the kernel that hands over and waits. */
static int uring_enter(struct nvmeio_engine *engine, unsigned wait_min,
                       int64_t timeout_ns)
{
    struct uring *uring = engine->state;
    struct io_uring_cqe *entry;

    if (timeout_ns < 0 || wait_min == 0)
        return io_uring_submit_and_wait(&uring->ring, wait_min);
    struct __kernel_timespec limit = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    int error = uring_hand_over(engine);
    if (error)
        return error;
    error = io_uring_wait_cqes(&uring->ring, &entry, wait_min, &limit, NULL);
    return error == -ETIME ? 0 : error;
}

static int uring_reap(struct nvmeio_engine *engine, unsigned wait_min,
                      int64_t timeout_ns)
{
    struct uring *uring = engine->state;

    if (wait_min > 0)
        uring_arm_wake(engine);
    for (;;) {
        int result = uring_enter(engine, wait_min, timeout_ns);
        int count = uring_collect(engine);
        if (result >= 0) {
            uring->patience.since_ns = 0;
            return count;
        }
        engine->retries++;
        /* A signal while waiting is news for the caller's thread, which looks at it and
         * comes back; lanes block all signals. */
        bool waiting = io_uring_sq_ready(&uring->ring) == 0;
        if (count > 0 || (result == -EINTR && engine->shared && waiting))
            return count;
        int error = nvmeio_patience_try(&uring->patience, result);
        if (error)
            return error;
    }
}

static void uring_wake(struct nvmeio_engine *engine)
{
    nvmeio_eventfd_signal(engine->wake_fd);
}

const struct nvmeio_engine_ops nvmeio_engine_uring = {
    .name = "io_uring",
    .library = "liburing",
    .punctual_direct = true,
    .punctual_buffered = true,
    .open = uring_open,
    .close = uring_close,
    .push = uring_push,
    .reap = uring_reap,
    .wake = uring_wake,
};
