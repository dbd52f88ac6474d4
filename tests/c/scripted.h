#ifndef SCRIPTED_H
#define SCRIPTED_H

/* An engine that replaces "sync" at link time: a test's script decides for each block
 * whether it is finished, and with which result. */

#include <pthread.h>
#include <stdio.h>

#include "engine.h"
#include "file_internal.h"
#include "transfer.h"

/* Dead workers keep memory to which the kernel may still write for ever. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:uring_open\nleak:fake_open\nleak:set_up";
}

#define BLOCK (64 * KIB)
#define BLOCKS 8

/* Guarded by the mutex. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static bool (*script)(struct nvmeio_block *block); /* true: finished, with a result */
static int death;                                  /* returned by reap(), if not 0 */
static unsigned reaps, pushes, pushed_max, in_flight, in_flight_max, calls;
static unsigned in_flight_of[3]; /* by operation */

/* Called by the worker with each block that it submits; may be NULL. */
static void (*_Atomic on_push)(void);

struct fake {
    struct nvmeio_block *pushed;
    unsigned since_reap;
    bool woken;
};

static inline int fake_open(struct nvmeio_engine *engine)
{
    engine->state = calloc(1, sizeof(struct fake));
    return engine->state ? 0 : -ENOMEM;
}

static inline void fake_close(struct nvmeio_engine *engine)
{
    CHECK(engine->in_flight == 0);
    free(engine->state);
}

static inline void fake_push(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    struct fake *fake = engine->state;
    struct nvmeio_block **end = &fake->pushed;

    CHECK(engine->in_flight < engine->depth);
    void (*call)(void) = atomic_load(&on_push);
    if (call)
        call();
    pthread_mutex_lock(&mutex);
    while (*end)
        end = &(*end)->next;
    block->next = NULL;
    *end = block;
    engine->in_flight++;
    pushes++;
    in_flight++;
    in_flight_of[block->op]++;
    if (in_flight > in_flight_max)
        in_flight_max = in_flight;
    if (++fake->since_reap > pushed_max)
        pushed_max = fake->since_reap;
    pthread_mutex_unlock(&mutex);
}

static inline int fake_collect(struct nvmeio_engine *engine)
{
    struct fake *fake = engine->state;
    struct nvmeio_block **at = &fake->pushed;
    int count = 0;

    while (*at) {
        struct nvmeio_block *block = *at;
        if (!script(block)) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        in_flight--;
        in_flight_of[block->op]--;
        nvmeio_engine_finish(engine, block);
        count++;
    }
    return count;
}

static inline int fake_reap(struct nvmeio_engine *engine, unsigned wait_min)
{
    struct fake *fake = engine->state;
    int count = 0;

    pthread_mutex_lock(&mutex);
    reaps++;
    fake->since_reap = 0;
    for (;;) {
        if (death) {
            count = death;
            break;
        }
        count += fake_collect(engine);
        if (count >= (int)wait_min || fake->woken)
            break;
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_nsec = (soon.tv_nsec + 1000000) % 1000000000;
        soon.tv_sec += soon.tv_nsec < 1000000;
        pthread_cond_timedwait(&change, &mutex, &soon);
    }
    if (wait_min > 0)
        fake->woken = false;
    pthread_mutex_unlock(&mutex);
    return count;
}

static inline void fake_wake(struct nvmeio_engine *engine)
{
    pthread_mutex_lock(&mutex);
    ((struct fake *)engine->state)->woken = true;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&mutex);
}

const struct nvmeio_engine_ops nvmeio_engine_sync = {
    .name = "sync",
    .open = fake_open,
    .close = fake_close,
    .push = fake_push,
    .reap = fake_reap,
    .wake = fake_wake,
};

static inline bool perform(struct nvmeio_block *block)
{
    nvmeio_block_perform(block);
    return true;
}

static inline bool hold(struct nvmeio_block *block)
{
    (void)block;
    return false;
}

static inline void play(bool (*next)(struct nvmeio_block *block))
{
    pthread_mutex_lock(&mutex);
    script = next;
    calls = 0;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&mutex);
}

static inline unsigned look(const unsigned *figure)
{
    pthread_mutex_lock(&mutex);
    unsigned value = *figure;
    pthread_mutex_unlock(&mutex);
    return value;
}

static inline void pause_ms(long ms)
{
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

/* The watchdog ends an endless wait. */
static inline void await(const unsigned *figure, unsigned value)
{
    while (look(figure) != value)
        pause_ms(1);
}

/* A handle on the scripted engine, a file of BLOCKS blocks and memory for them. */
static struct stage {
    struct nvmeio_config config;
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    struct guarded memory;
    const char *path;
} stage;

static inline void stage_open(unsigned depth)
{
    play(perform);
    death = 0;
    pushes = pushed_max = in_flight = in_flight_max = 0;
    memset(in_flight_of, 0, sizeof(in_flight_of));
    stage.config = config_of("sync");
    stage.config.queue_depth = depth;
    stage.handle = open_handle(&stage.config);
    make_file(stage.path, BLOCKS * BLOCK, 1);
    stage.file = open_file(stage.path, O_RDWR, NVMEIO_DIRECT_AUTO);
    stage.memory = guarded_in_pool(BLOCKS * BLOCK);
    fill(stage.memory.address, BLOCKS * BLOCK, 0, 9);
}

/* Open the handle again after a change of the configuration. */
static inline void stage_reopen(void)
{
    nvmeio_handle_close(stage.handle);
    stage.handle = open_handle(&stage.config);
}

static inline void stage_free(void)
{
    check_canaries(&stage.memory);
    nvmeio_pool_free(stage.memory.base);
}

static inline void stage_close(void)
{
    nvmeio_handle_close(stage.handle);
    nvmeio_file_release(stage.file);
    stage_free();
}

static inline struct nvmeio_transfer whole(enum nvmeio_op op)
{
    return transfer_of(op, stage.file, stage.memory.address, stage.memory.size, 0);
}

static inline struct nvmeio_request *start(enum nvmeio_op op)
{
    struct nvmeio_transfer t = whole(op);
    return submit(stage.handle, &t);
}

static inline bool memory_holds_file(size_t size)
{
    return file_holds(stage.path, stage.memory.address, size, 0);
}

#endif
