/* wake() ends a reap() that waits for one or all of some slow blocks, repeatedly, on
 * the engines that wait for the kernel or for threads. */
#include <pthread.h>

#include "engine.h"
#include "system_calls.h"
#include "transfer.h"

#if __has_include(<liburing.h>)
#include "liburing_calls.h"
#endif

/* Rings as before Linux 6.1, where completions may arrive at any time. */
static bool old_rings;

#if __has_include(<liburing.h>)
int io_uring_queue_init_params(unsigned entries, struct io_uring *ring,
                               struct io_uring_params *params)
{
    int (*set_up)(unsigned, struct io_uring *, struct io_uring_params *) =
        real("io_uring_queue_init_params");

    /* IORING_SETUP_DEFER_TASKRUN, which older headers lack. */
    if (old_rings && params->flags & (1U << 13))
        return -EINVAL;
    return set_up(entries, ring, params);
}

void io_uring_queue_exit(struct io_uring *ring)
{
    ((void (*)(struct io_uring *))real("io_uring_queue_exit"))(ring);
}

int io_uring_submit(struct io_uring *ring)
{
    return ((int (*)(struct io_uring *))real("io_uring_submit"))(ring);
}

int io_uring_submit_and_wait(struct io_uring *ring, unsigned count)
{
    int (*enter)(struct io_uring *, unsigned) = real("io_uring_submit_and_wait");
    return enter(ring, count);
}
#endif

#define BLOCKS 4

/* Blocks that libaio and the threads hold until they are released. */
static atomic_bool held;
static long context_held;
static long blocks_held[BLOCKS]; /* addresses */
static unsigned count_held;

static bool answer(long number, const long *words, long *result)
{
    if (number != SYS_io_submit)
        return false;
    context_held = words[0];
    for (long i = 0; i < words[1]; i++) {
        CHECK(count_held < BLOCKS);
        blocks_held[count_held++] = ((long *)words[2])[i];
    }
    *result = words[1];
    return true;
}

ssize_t pread(int fd, void *address, size_t size, off_t offset)
{
    while (atomic_load(&held))
        sched_yield();
    return syscall(SYS_pread64, fd, address, size, offset);
}

static void *wake_later(void *engine)
{
    static const struct timespec pause = {0, 5000000};

    nanosleep(&pause, NULL);
    ((struct nvmeio_engine *)engine)->ops->wake(engine);
    return NULL;
}

/* Before the reap, and during it. */
static void wake_and_reap(struct nvmeio_engine *engine, unsigned wait_min)
{
    pthread_t thread;

    for (int i = 0; i < 3; i++) {
        /* A reap that does not wait leaves the wake-up to one that does. */
        engine->ops->wake(engine);
        CHECK(engine->ops->reap(engine, 0) == 0);
        CHECK(engine->ops->reap(engine, wait_min) == 0);
        engine->ops->wake(engine);
        CHECK(engine->ops->reap(engine, wait_min) == 0);
        CHECK(pthread_create(&thread, NULL, wake_later, engine) == 0);
        CHECK(engine->ops->reap(engine, wait_min) == 0);
        pthread_join(thread, NULL);
    }
    CHECK(engine->in_flight == BLOCKS && !engine->finished);
}

static void take_and_wake(struct nvmeio_engine *engine, const int pipes[2], int fd)
{
    struct nvmeio_block blocks[BLOCKS];
    char bytes[BLOCKS];

    atomic_store(&held, true);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        blocks[i] = (struct nvmeio_block){.op = NVMEIO_OP_READ,
                                          .fd = fd,
                                          .address = &bytes[i],
                                          .index = i,
                                          .bytes = 1};
        engine->ops->push(engine, &blocks[i]);
    }
    wake_and_reap(engine, 1);
    wake_and_reap(engine, BLOCKS);
    wake_and_reap(engine, 2);
    atomic_store(&held, false);
    CHECK(write(pipes[1], "xxxx", BLOCKS) == BLOCKS);
    const long words[6] = {context_held, (long)count_held, (long)blocks_held};
    CHECK(count_held == 0 || call_kernel(SYS_io_submit, words) == (long)count_held);
    count_held = 0;
    while (engine->in_flight > 0)
        CHECK(engine->ops->reap(engine, 1) >= 0);
    for (int i = 0; i < BLOCKS; i++)
        CHECK(blocks[i].result == 1);
    engine->finished = NULL;
}

static void try_engine(const struct nvmeio_engine_ops *ops, const char *path)
{
    bool uring = strcmp(ops->name, "io_uring") == 0;
    int pipes[2], file = open(path, O_RDONLY | O_CLOEXEC);
    struct nvmeio_engine engine;

    CHECK(nvmeio_engine_start(&engine, ops, BLOCKS) == 0);
    CHECK(pipe2(pipes, O_CLOEXEC) == 0);
    /* The second time after a wait that a block ended. */
    for (int i = 0; i < 2; i++)
        take_and_wake(&engine, pipes, uring ? pipes[0] : file);
    nvmeio_engine_stop(&engine);
    close(pipes[0]);
    close(pipes[1]);
    close(file);
}

int main(void)
{
    const char *path, *engine;
    bool known;

    begin();
    path = path_in(test_folder());
    make_file(path, 1, 1);
    FOR_EACH_ENGINE(engine)
    {
        for (int old = 0; old < 2; old++) {
            old_rings = old;
            if (strcmp(engine, "sync") != 0) /* which never waits */
                try_engine(nvmeio_engine_find(engine, &known), path);
        }
    }
    return 0;
}
