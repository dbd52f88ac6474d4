/* nvmeio_perform(): transfers that it runs in the calling thread, those that it leaves
 * to workers; meanwhile it counts as a request. */
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>

#include "file_internal.h"
#include "transfer.h"

#define BLOCK (64 * KIB)

/* Replace pread() and pwrite() in the library; they count this thread's calls, and can
 * delay a write. */
static _Thread_local unsigned calls_here;
static _Thread_local bool held_here;
static atomic_bool written;
static sem_t entered, released;

static void await_post(sem_t *semaphore)
{
    while (sem_wait(semaphore))
        ;
}

ssize_t pread(int fd, void *address, size_t size, off_t offset)
{
    calls_here++;
    return syscall(SYS_pread64, fd, address, size, offset);
}

ssize_t pwrite(int fd, const void *address, size_t size, off_t offset)
{
    calls_here++;
    if (held_here) {
        sem_post(&entered);
        await_post(&released);
    }
    ssize_t result = syscall(SYS_pwrite64, fd, address, size, offset);
    if (held_here)
        atomic_store(&written, true);
    return result;
}

static bool is_local(const char *path)
{
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    bool local = file->local;

    nvmeio_file_release(file);
    return local;
}

static bool aligns(const char *path)
{
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    bool found = file->info.direct && file->info.offset_align > 1;

    nvmeio_file_release(file);
    return found;
}

struct kind {
    enum nvmeio_op op;
    enum nvmeio_direct direct;
    enum nvmeio_bounce bounce;
    size_t block_bytes;
    int64_t offset;
    size_t residue; /* of the address */
    size_t size;
    size_t direct_bytes, buffered_bytes; /* both 0: left to the workers */
};

#define READ NVMEIO_OP_READ
#define WRITE NVMEIO_OP_WRITE
#define AUTO NVMEIO_DIRECT_AUTO
#define NEVER NVMEIO_DIRECT_NEVER

/* Of a file with O_DIRECT for whole sectors. */
static const struct kind kinds_direct[] = {
    {READ, AUTO, NVMEIO_BOUNCE_AUTO, BLOCK, PAGE, 0, BLOCK, BLOCK, 0},
    {WRITE, AUTO, NVMEIO_BOUNCE_AUTO, BLOCK, PAGE, 0, BLOCK, BLOCK, 0},
    {READ, AUTO, NVMEIO_BOUNCE_AUTO, 4 * MIB, PAGE, 0, MIB, MIB, 0},
    /* It fills no page. */
    {WRITE, AUTO, NVMEIO_BOUNCE_AUTO, BLOCK, 5000, 7, 100, 0, 100},
    /* It needs a bounce, or bounces are requested. */
    {READ, AUTO, NVMEIO_BOUNCE_AUTO, BLOCK, 5000, 0, 100, 0, 0},
    {READ, AUTO, NVMEIO_BOUNCE_AUTO, BLOCK, PAGE, 1, BLOCK, 0, 0},
    {WRITE, AUTO, NVMEIO_BOUNCE_AUTO, BLOCK, PAGE, 1, BLOCK, 0, 0},
    {READ, AUTO, NVMEIO_BOUNCE_ALWAYS, BLOCK, PAGE, 0, BLOCK, 0, 0},
    /* It takes two routes, in separate blocks. */
    {WRITE, AUTO, NVMEIO_BOUNCE_AUTO, BLOCK, PAGE, 0, 2 * PAGE + 1, 0, 0},
};

/* Of any file. */
static const struct kind kinds_any[] = {
    {READ, NEVER, NVMEIO_BOUNCE_AUTO, BLOCK, 5000, 7, 100, 0, 100},
    {WRITE, NEVER, NVMEIO_BOUNCE_AUTO, BLOCK, 5000, 7, BLOCK, 0, BLOCK},
    /* It exceeds a block, or the limit of transfers in the calling thread. */
    {READ, NEVER, NVMEIO_BOUNCE_AUTO, BLOCK, 0, 0, BLOCK + 1, 0, 0},
    {READ, NEVER, NVMEIO_BOUNCE_AUTO, 4 * MIB, 0, 0, MIB + 1, 0, 0},
};

static void try_kind(const struct kind *kind, const char *engine, const char *path)
{
    struct nvmeio_config config = config_of(engine);
    struct guarded memory = guarded_in_pool(kind->size + kind->residue);
    struct nvmeio_outcome outcome = {.result = -12345};
    struct nvmeio_file *file = open_file(path, O_RDWR, kind->direct);
    bool taken = kind->direct_bytes || kind->buffered_bytes;
    struct nvmeio_transfer t = transfer_of(
        kind->op, file, memory.address + kind->residue, kind->size, kind->offset);
    struct nvmeio_stats stats;

    config.bounce = kind->bounce;
    config.block_bytes = kind->block_bytes;
    struct nvmeio_handle *handle = open_handle(&config);
    fill(t.address, t.size, (uint64_t)t.offset, 8);
    cool(path);
    calls_here = 0;
    CHECK(nvmeio_perform(handle, &t, &outcome) == taken);
    CHECK(calls_here == taken);
    CHECK(outcome.result == (taken ? (int64_t)kind->size : -12345));
    nvmeio_handle_stats(handle, &stats);
    CHECK(stats.requests == taken && stats.blocks == taken);
    CHECK(stats.bytes_direct == kind->direct_bytes);
    CHECK(stats.bytes_buffered == kind->buffered_bytes && stats.bytes_bounced == 0);
    CHECK(latencies_counted(handle) == taken);
    CHECK(nvmeio_handle_pending(handle) == 0);
    if (taken) {
        CHECK(outcome.got == outcome.result && !outcome.abandoned);
        CHECK(file_holds(path, t.address, t.size, t.offset));
    }
    nvmeio_handle_close(handle);
    nvmeio_file_release(file);
    check_canaries(&memory);
    nvmeio_pool_free(memory.base);
}

static void test_it_runs_one_block_that_needs_no_bounce(const char *engine,
                                                        const char *path)
{
    for (size_t i = 0; i < sizeof(kinds_any) / sizeof(kinds_any[0]); i++)
        try_kind(&kinds_any[i], engine, path);
    for (size_t i = 0; i < sizeof(kinds_direct) / sizeof(kinds_direct[0]); i++)
        if (aligns(path))
            try_kind(&kinds_direct[i], engine, path);
}

static void test_transfers_that_it_leaves_or_refuses_are_not_begun(const char *engine,
                                                                   const char *path)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_NEVER);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = file};
    struct nvmeio_transfer t;
    struct nvmeio_outcome outcome;
    struct nvmeio_stats stats;
    char byte = CANARY;

    CHECK(nvmeio_perform(handle, &sync, &outcome) == 0);
    t = transfer_of(NVMEIO_OP_WRITE, file, &byte, 1, 0);
    CHECK(nvmeio_perform(handle, &t, &outcome) == -EBADF);
    t = transfer_of(NVMEIO_OP_READ, file, &byte, 1, -1);
    CHECK(nvmeio_perform(handle, &t, &outcome) == -EINVAL);
    t = transfer_of(NVMEIO_OP_READ, file, NULL, 1, 0);
    CHECK(nvmeio_perform(handle, &t, &outcome) == -EINVAL);
    t = transfer_of(NVMEIO_OP_READ, NULL, &byte, 1, 0);
    CHECK(nvmeio_perform(handle, &t, &outcome) == -EINVAL);
    t = transfer_of(NVMEIO_OP_READ, file, &byte, 2, INT64_MAX - 1);
    CHECK(nvmeio_perform(handle, &t, &outcome) == -EOVERFLOW);
    t = transfer_of(NVMEIO_OP_READ, file, &byte, 1, 0);
    file->local = false; /* such as a file of a server, which may block a thread for
    ever */
    CHECK(nvmeio_perform(handle, &t, &outcome) == 0);
    file->local = true;
    nvmeio_handle_stop(handle);
    CHECK(nvmeio_perform(handle, &t, &outcome) == -EPIPE);
    nvmeio_handle_stats(handle, &stats);
    CHECK(byte == CANARY && stats.requests == 0);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_a_read_past_the_end_leaves_the_memory_alone(const char *engine,
                                                             const char *path,
                                                             enum nvmeio_direct direct)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, direct);
    struct guarded memory = guarded_in_pool(2 * PAGE);
    int64_t end = nvmeio_file_size(file);
    struct nvmeio_outcome outcome;

    memset(memory.address, CANARY, memory.size);
    memory.size = 0;
    for (int64_t there = (int64_t)PAGE; there >= -(int64_t)PAGE; there -= PAGE) {
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_READ, file, memory.address, 2 * PAGE, end - there);
        calls_here = 0;
        CHECK(nvmeio_perform(handle, &t, &outcome) == 1 && calls_here == 0);
        CHECK(outcome.result == -ENODATA && !outcome.abandoned);
        CHECK(outcome.got == (there > 0 ? there : 0));
    }
    check_canaries(&memory);
    nvmeio_pool_free(memory.base);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* A write in another thread, held until it is released. */
struct writer {
    pthread_t thread;
    struct nvmeio_handle *handle;
    struct nvmeio_transfer transfer;
};

static void *perform_held(void *argument)
{
    struct writer *writer = argument;
    struct nvmeio_outcome outcome;

    held_here = true;
    CHECK(nvmeio_perform(writer->handle, &writer->transfer, &outcome) == 1);
    CHECK(outcome.result == BLOCK);
    return NULL;
}

static void *drain_main(void *handle)
{
    CHECK(nvmeio_handle_drain(handle, LONG_NS) == 0);
    CHECK(atomic_load(&written));
    return NULL;
}

static void *stop_main(void *handle)
{
    nvmeio_handle_stop(handle);
    CHECK(atomic_load(&written));
    return NULL;
}

static unsigned count_drainers(struct nvmeio_handle *handle)
{
    unsigned count = 0;

    pthread_mutex_lock(&handle->queue.mutex);
    for (const struct nvmeio_waiter *w = handle->queue.drainers; w; w = w->next)
        count++;
    pthread_mutex_unlock(&handle->queue.mutex);
    return count;
}

static void test_drain_stop_and_fsync_wait_for_it(const char *engine, const char *path)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_in_pool(BLOCK);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = file};
    struct writer writer = {
        .handle = handle,
        .transfer = transfer_of(NVMEIO_OP_WRITE, file, memory.address, BLOCK, BLOCK),
    };
    pthread_t drains, stops;
    char bytes[16];

    fill(memory.address, BLOCK, 0, 9);
    atomic_store(&written, false);
    CHECK(sem_init(&entered, 0, 0) == 0 && sem_init(&released, 0, 0) == 0);
    CHECK(pthread_create(&writer.thread, NULL, perform_held, &writer) == 0);
    await_post(&entered);
    CHECK(nvmeio_handle_pending(handle) == 1);
    struct nvmeio_request *behind = submit(handle, &sync);
    /* The only worker takes requests in the order of the queue. */
    CHECK(read_at(handle, file, bytes, sizeof(bytes), 1).result == sizeof(bytes));
    CHECK(nvmeio_request_wait(behind, 1000000) == -ETIMEDOUT);
    CHECK(nvmeio_handle_drain(handle, 1000000) == -ETIMEDOUT);
    CHECK(pthread_create(&drains, NULL, drain_main, handle) == 0);
    CHECK(pthread_create(&stops, NULL, stop_main, handle) == 0);
    while (count_drainers(handle) < 2)
        sched_yield();
    sem_post(&released);
    pthread_join(stops, NULL);
    pthread_join(drains, NULL);
    pthread_join(writer.thread, NULL);
    CHECK(finish(behind).result == 0);
    CHECK(file_holds(path, memory.address, BLOCK, BLOCK));
    check_canaries(&memory);
    nvmeio_pool_free(memory.base);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void try_folder(const char *folder)
{
    const char *path = path_in(folder), *engine;

    make_file(path, 2 * MIB, 1);
    FOR_EACH_ENGINE(engine)
    {
        test_it_runs_one_block_that_needs_no_bounce(engine, path);
        test_transfers_that_it_leaves_or_refuses_are_not_begun(engine, path);
        test_a_read_past_the_end_leaves_the_memory_alone(engine, path,
                                                         NVMEIO_DIRECT_AUTO);
        test_a_read_past_the_end_leaves_the_memory_alone(engine, path,
                                                         NVMEIO_DIRECT_NEVER);
        test_drain_stop_and_fsync_wait_for_it(engine, path);
    }
}

/* On the disk, and in memory. */
int main(void)
{
    const char *folders[] = {test_folder(), "/dev/shm"};
    unsigned tried = 0;

    begin();
    for (int i = 0; i < 2; i++) {
        const char *path = path_in(folders[i]);
        make_file(path, 1, 1);
        if (is_local(path)) {
            try_folder(folders[i]);
            tried++;
        }
    }
    if (tried == 0)
        SKIP("/dev/shm is no tmpfs");
    return 0;
}
