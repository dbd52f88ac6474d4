/* wake() ends a reap() that waits for a block which takes its time, again and again, on
 * the engines that wait for the kernel or for threads. */
#include <pthread.h>
#include <sys/syscall.h>

#include "engine.h"
#include "transfer.h"

struct iocb;
int io_submit(unsigned long context, long count, struct iocb **blocks);

/* What libaio and the threads have of the block until it is let go. */
static atomic_bool held;
static unsigned long context_held;
static struct iocb *block_held;

static long submit_one(unsigned long context, struct iocb *block)
{
    return syscall(SYS_io_submit, context, 1, &block);
}

int io_submit(unsigned long context, long count, struct iocb **blocks)
{
    CHECK(count == 1 && !block_held);
    context_held = context;
    block_held = blocks[0];
    return 1;
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

/* Before the reap, and amid it. */
static void wake_and_reap(struct nvmeio_engine *engine)
{
    pthread_t thread;

    for (int i = 0; i < 3; i++) {
        engine->ops->wake(engine);
        CHECK(engine->ops->reap(engine, 1, -1) == 0);
        CHECK(pthread_create(&thread, NULL, wake_later, engine) == 0);
        CHECK(engine->ops->reap(engine, 1, -1) == 0);
        pthread_join(thread, NULL);
    }
    CHECK(engine->in_flight == 1 && !engine->finished);
}

static void try_engine(const struct nvmeio_engine_ops *ops, const char *path)
{
    bool uring = strcmp(ops->name, "io_uring") == 0;
    struct nvmeio_engine engine;
    int pipes[2];
    char byte = 0;

    CHECK(nvmeio_engine_start(&engine, ops, 1, false) == 0);
    CHECK(pipe2(pipes, O_CLOEXEC) == 0);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct nvmeio_block block = {.op = NVMEIO_OP_READ,
                                 .fd = uring ? pipes[0] : file,
                                 .address = &byte,
                                 .bytes = 1};
    atomic_store(&held, true);
    engine.ops->push(&engine, &block);
    wake_and_reap(&engine);
    atomic_store(&held, false);
    CHECK(write(pipes[1], "x", 1) == 1);
    if (block_held)
        CHECK(submit_one(context_held, block_held) == 1);
    block_held = NULL;
    while (!engine.finished)
        CHECK(engine.ops->reap(&engine, 1, -1) >= 0);
    CHECK(engine.finished == &block && block.result == 1 && engine.in_flight == 0);
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
        if (strcmp(engine, "sync") != 0) /* which never waits */
            try_engine(nvmeio_engine_find(engine, &known), path);
    }
    return 0;
}
