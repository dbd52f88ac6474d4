/* engine_sync.c -- carries out blocks one after the other, in the thread that reaps.
 *
 * It is the reference for all other engines, and the last fallback. */
#include "engine.h"

/* engine->state is the list of pushed blocks, newest first. */

static int sync_open(struct nvmeio_engine *engine)
{
    engine->state = NULL;
    return 0;
}

static void sync_close(struct nvmeio_engine *engine)
{
    (void)engine;
}

static void sync_push(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    block->next = engine->state;
    engine->state = block;
    engine->in_flight++;
}

/* Reverse the list, because disks prefer the order in which blocks were pushed. */
static struct nvmeio_block *oldest_first(struct nvmeio_block *newest)
{
    struct nvmeio_block *oldest = NULL;

    while (newest) {
        struct nvmeio_block *block = newest;
        newest = block->next;
        block->next = oldest;
        oldest = block;
    }
    return oldest;
}

static int sync_reap(struct nvmeio_engine *engine, unsigned wait_min)
{
    struct nvmeio_block *block = oldest_first(engine->state);
    int count = 0;

    (void)wait_min;
    engine->state = NULL;
    while (block) {
        struct nvmeio_block *next = block->next;
        nvmeio_block_perform(block);
        nvmeio_engine_finish(engine, block);
        block = next;
        count++;
    }
    return count;
}

static void sync_wake(struct nvmeio_engine *engine)
{
    (void)engine; /* reap() never waits */
}

const struct nvmeio_engine_ops nvmeio_engine_sync = {
    .name = "sync",
    .open = sync_open,
    .close = sync_close,
    .push = sync_push,
    .reap = sync_reap,
    .wake = sync_wake,
};
