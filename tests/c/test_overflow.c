/* An overflowing completion queue.  Ours hold everything that can be in flight, so a
 * replaced set-up makes them small: 64 operations meet a queue of 8, and the kernel
 * must keep the other completions. */
#include <pthread.h>

#include "transfer.h"

#if __has_include(<liburing.h>)
#include "liburing_calls.h"

#define ENTRIES 8u
#define DEPTH 64u
#define SIZE (2 * MIB)
#define BLOCK PAGE

static const char *path;
static atomic_uint overflows; /* calls after which the kernel kept completions */
static atomic_uint dropped;

int io_uring_queue_init_params(unsigned entries, struct io_uring *ring,
                               struct io_uring_params *params)
{
    int (*set_up)(unsigned, struct io_uring *, struct io_uring_params *) =
        real("io_uring_queue_init_params");

    entries = entries < ENTRIES ? entries : ENTRIES;
    params->cq_entries = entries;
    int error = set_up(entries, ring, params);
    CHECK(error || params->cq_entries <= ENTRIES);
    return error;
}

void io_uring_queue_exit(struct io_uring *ring)
{
    void (*tear_down)(struct io_uring *) = real("io_uring_queue_exit");

    /* Completions that the kernel had no memory to keep. */
    atomic_fetch_add(&dropped, *ring->cq.koverflow);
    tear_down(ring);
}

static int watch(const struct io_uring *ring, int result)
{
    unsigned flags = __atomic_load_n(ring->sq.kflags, __ATOMIC_RELAXED);
    atomic_fetch_add(&overflows, (flags & IORING_SQ_CQ_OVERFLOW) != 0);
    return result;
}

int io_uring_submit(struct io_uring *ring)
{
    int (*submit_all)(struct io_uring *) = real("io_uring_submit");
    return watch(ring, submit_all(ring));
}

int io_uring_submit_and_wait(struct io_uring *ring, unsigned count)
{
    int (*enter)(struct io_uring *, unsigned) = real("io_uring_submit_and_wait");
    return watch(ring, enter(ring, count));
}

static struct nvmeio_handle *open_deep(unsigned workers)
{
    struct nvmeio_config config = config_of("io_uring");

    config.block_bytes = BLOCK;
    config.queue_depth = DEPTH;
    config.workers = workers;
    return open_handle(&config);
}

/* Queues have overflowed since the last look. */
static void expect_overflows(void)
{
    CHECK(atomic_exchange(&overflows, 0) > 0);
}

/* Each block was counted once. */
static void close_deep(struct nvmeio_handle *handle, uint64_t blocks)
{
    struct nvmeio_stats stats;

    nvmeio_handle_stats(handle, &stats);
    CHECK(stats.blocks == blocks);
    CHECK(nvmeio_handle_pending(handle) == 0);
    CHECK(latencies_counted(handle) == blocks);
    nvmeio_handle_close(handle);
    CHECK(atomic_load(&dropped) == 0);
}

static void test_no_completion_is_lost(enum nvmeio_op op, enum nvmeio_direct direct,
                                       unsigned workers)
{
    struct nvmeio_handle *handle = open_deep(workers);
    struct nvmeio_file *file = open_file(path, O_RDWR, direct);
    struct guarded memory = guarded_in_pool(SIZE);
    struct nvmeio_request *requests[8];
    struct nvmeio_outcome outcome;
    const size_t part = SIZE / 8;

    fill(memory.address, SIZE, 0, op == NVMEIO_OP_WRITE ? 3 : 9);
    for (unsigned i = 0; i < 8; i++) {
        struct nvmeio_transfer t =
            transfer_of(op, file, memory.address + i * part, part, (int64_t)(i * part));
        requests[i] = submit(handle, &t);
    }
    for (unsigned i = 0; i < 8; i++) {
        outcome = finish(requests[i]);
        CHECK(outcome.result == (int64_t)part);
    }
    CHECK(file_holds(path, memory.address, SIZE, 0));
    close_deep(handle, SIZE / BLOCK);
    nvmeio_file_release(file);
    check_canaries(&memory);
    nvmeio_pool_free(memory.base);
}

/* Every other block. */
static void test_a_gather_loses_no_completion(void)
{
    struct nvmeio_handle *handle = open_deep(1);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_NEVER);
    const size_t count = SIZE / BLOCK / 2;
    struct guarded memory = guarded_in_pool(count * BLOCK);
    int64_t *offsets = calloc(count, sizeof(*offsets));
    const int64_t block_bytes = BLOCK;
    struct nvmeio_request *request;
    size_t offender;

    CHECK(offsets);
    for (size_t i = 0; i < count; i++)
        offsets[i] = (int64_t)((count - 1 - i) * 2 * BLOCK);
    struct nvmeio_gather gather = {.op = NVMEIO_OP_READ,
                                   .file = file,
                                   .address = memory.address,
                                   .size = memory.size,
                                   .offsets = offsets,
                                   .count = count,
                                   .sizes = &block_bytes,
                                   .one_size = true};
    CHECK(nvmeio_submit_gather(handle, &gather, &request, &offender) == 0);
    CHECK(finish(request).result == (int64_t)memory.size);
    for (size_t i = 0; i < count; i++)
        CHECK(file_holds(path, memory.address + i * BLOCK, BLOCK, offsets[i]));
    close_deep(handle, count);
    nvmeio_file_release(file);
    free(offsets);
    check_canaries(&memory);
    nvmeio_pool_free(memory.base);
}

struct reader {
    pthread_t thread;
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
};

static void *reader_main(void *argument)
{
    const struct reader *reader = argument;
    struct guarded memory = guarded_new(SIZE / 4, 0);

    for (int round = 0; round < 16; round++) {
        struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, reader->file,
                                               memory.address, memory.size, round);
        CHECK(carry_out(reader->handle, &t).result == (int64_t)memory.size);
        CHECK(file_holds(path, memory.address, memory.size, round));
    }
    guarded_free(&memory);
    return NULL;
}

/* Workers are woken for new requests while they wait. */
static void test_threads_share_rings_that_overflow(void)
{
    struct reader readers[4];
    struct nvmeio_handle *handle = open_deep(2);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_NEVER);

    for (unsigned i = 0; i < 4; i++) {
        readers[i] = (struct reader){.handle = handle, .file = file};
        CHECK(pthread_create(&readers[i].thread, NULL, reader_main, &readers[i]) == 0);
    }
    for (unsigned i = 0; i < 4; i++)
        pthread_join(readers[i].thread, NULL);
    CHECK(nvmeio_handle_pending(handle) == 0);
    nvmeio_handle_close(handle);
    nvmeio_file_release(file);
    CHECK(atomic_load(&dropped) == 0);
}

/* Cached bytes are read within the submitting call, so the queue surely overflows; from
 * a device completions may come one by one. */
static void test_every_kind_of_request_survives_an_overflow(enum nvmeio_direct direct,
                                                            bool surely)
{
    for (unsigned i = 0; i < 4; i++) {
        enum nvmeio_op op = i & 1 ? NVMEIO_OP_WRITE : NVMEIO_OP_READ;
        test_no_completion_is_lost(op, direct, i & 2 ? 3 : 1);
        if (surely && op == NVMEIO_OP_READ)
            expect_overflows();
    }
    expect_overflows();
}

int main(void)
{
    begin();
    if (!engine_works("io_uring"))
        SKIP("io_uring does not work here");
    path = path_in(test_folder());
    make_file(path, SIZE, 1);
    test_every_kind_of_request_survives_an_overflow(NVMEIO_DIRECT_NEVER, true);
    test_every_kind_of_request_survives_an_overflow(NVMEIO_DIRECT_AUTO, false);
    test_a_gather_loses_no_completion();
    expect_overflows();
    test_threads_share_rings_that_overflow();
    expect_overflows();
    return 0;
}

#else

int main(void)
{
    SKIP("io_uring does not work here");
}

#endif
