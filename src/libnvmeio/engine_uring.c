/* engine_uring.c -- carries out blocks by io_uring(7), through liburing.
 *
 * Each ring belongs to one worker (SINGLE_ISSUER, and DEFER_TASKRUN where the kernel
 * has it). A published entry is in flight whatever io_uring_enter(2) returned. So a
 * call that fails is repeated until it works or the ring counts as dead.
 *
 * SQPOLL is not used: it takes 30 times the CPU for the same speed
 * (docs/decisions.md). */
#include "engine.h"

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>

/* Flags that the oldest liburing we build with does not define. */
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8) /* Linux 5.19 */
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12) /* Linux 6.0 */
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13) /* Linux 6.1 */
#endif

/* Entries per call of io_uring_enter(2). More are submitted in several calls. */
#define SQ_ENTRIES_MAX 512u

struct uring {
    struct io_uring ring;
    struct nvmeio_patience patience;
    unsigned wakes_armed;
};

/* User data of the poll on the wake-up eventfd. No block has this address. */
static char wake_mark;

/* Set up a ring with the best flags that the kernel knows. It returns EINVAL for
 * others. */
static int uring_setup(struct io_uring *ring, unsigned entries, unsigned completions)
{
    static const unsigned own_flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_COOP_TASKRUN,
        0,
    };
    int error = -EINVAL;

    for (unsigned i = 0; i < 3 && error == -EINVAL; i++) {
        struct io_uring_params params = {
            .flags = own_flags[i] | IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP,
            .cq_entries = completions,
        };
        error = io_uring_queue_init_params(entries, ring, &params);
    }
    return error;
}

/* Set up the ring, with half the depth for as long as the kernel returns ENOMEM: before
 * Linux 5.12, rings count towards RLIMIT_MEMLOCK. */
static int uring_open(struct nvmeio_engine *engine)
{
    struct uring *uring = calloc(1, sizeof(*uring));
    int error;

    if (!uring)
        return -ENOMEM;
    for (;;) {
        /* One more entry, for the poll of the wake-up eventfd. */
        unsigned wanted = engine->depth + 1;
        unsigned entries = wanted < SQ_ENTRIES_MAX ? wanted : SQ_ENTRIES_MAX;
        error = uring_setup(&uring->ring, entries, 2 * wanted);
        if (error != -ENOMEM || engine->depth == 1)
            break;
        engine->depth /= 2;
    }
    if (error) {
        free(uring);
        return error;
    }
    engine->state = uring;
    return 0;
}

static void uring_close(struct nvmeio_engine *engine)
{
    struct uring *uring = engine->state;
    io_uring_queue_exit(&uring->ring);
    free(uring);
}

/* Submit what was published. nvmeio_patience_try() decides when a ring is dead. */
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

/* Return a free entry. NULL only if the ring is full and the kernel takes nothing from
 * it. */
static struct io_uring_sqe *uring_entry(struct nvmeio_engine *engine)
{
    struct uring *uring = engine->state;
    struct io_uring_sqe *entry = io_uring_get_sqe(&uring->ring);

    while (!entry && uring_hand_over(engine) == 0)
        entry = io_uring_get_sqe(&uring->ring);
    return entry;
}

static void uring_push(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    uint64_t offset = (uint64_t)block->offset;

    if (block->aside) {
        nvmeio_engine_push_aside(engine, block);
        return;
    }
    engine->in_flight++;
    struct io_uring_sqe *entry = uring_entry(engine);
    if (!entry) {
        /* It was never published, so it can fail like any other I/O. */
        block->result = -EIO;
        nvmeio_engine_finish(engine, block);
        return;
    }
    if (block->op == NVMEIO_OP_FSYNC)
        io_uring_prep_fsync(entry, block->fd,
                            block->data_only ? IORING_FSYNC_DATASYNC : 0);
    else if (block->op == NVMEIO_OP_READ)
        io_uring_prep_read(entry, block->fd, block->address, block->bytes, offset);
    else
        io_uring_prep_write(entry, block->fd, block->address, block->bytes, offset);
    io_uring_sqe_set_data(entry, block);
}

/* Arm one poll of the wake-up eventfd per awaited completion. A wake-up then completes
 * all of them, and so ends the wait. */
static void uring_arm_wakes(struct nvmeio_engine *engine, unsigned wait_min)
{
    struct uring *uring = engine->state;

    while (uring->wakes_armed < wait_min) {
        struct io_uring_sqe *entry = uring_entry(engine);
        if (!entry)
            return; /* the next reap() finds out that the ring is dead */
        io_uring_prep_poll_add(entry, engine->wake_fd, POLLIN);
        io_uring_sqe_set_data(entry, &wake_mark);
        uring->wakes_armed++;
    }
}

/* Move all completed blocks to `finished`, and return how many. A call that did not
 * wait leaves the eventfd signalled, for the next one that waits. */
static int uring_collect(struct nvmeio_engine *engine, bool waits)
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
            if (waits)
                nvmeio_eventfd_clear(engine->wake_fd);
            uring->wakes_armed--;
        } else {
            struct nvmeio_block *block = data;
            block->result = entry->res;
            /* We cancel nothing. A block that comes back cancelled was not begun: the
             * kernel needed a thread of its own for it and could not start one
             * (RLIMIT_NPROC, pids.max). */
            if (entry->res == -ECANCELED)
                nvmeio_block_perform(block);
            nvmeio_engine_finish(engine, block);
            count++;
        }
    }
    io_uring_cq_advance(&uring->ring, seen);
    if (seen)
        uring->patience.since_ns = 0;
    return count;
}

/* Submit, wait and collect. Collect even if the call failed, because blocks may have
 * completed before it did. */
static int uring_reap(struct nvmeio_engine *engine, unsigned wait_min)
{
    struct uring *uring = engine->state;

    /* A wake-up, which a block aside causes too, completes all the polls. */
    if (wait_min > 1 && engine->aside && engine->aside->in_flight > 0)
        wait_min = 1;
    uring_arm_wakes(engine, wait_min);
    for (;;) {
        int result = io_uring_submit_and_wait(&uring->ring, wait_min);
        int count = uring_collect(engine, wait_min > 0);
        count += nvmeio_engine_collect_aside(engine);
        if (result >= 0) {
            uring->patience.since_ns = 0;
            return count;
        }
        engine->retries++;
        if (count > 0)
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
    .open = uring_open,
    .close = uring_close,
    .push = uring_push,
    .reap = uring_reap,
    .wake = uring_wake,
};
