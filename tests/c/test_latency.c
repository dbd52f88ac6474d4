/* Buckets of latencies; and every transferring block is counted once, on every engine.
 * */
#include "engine.h"
#include "block.h"
#include "transfer.h"

#define LAST (NVMEIO_LATENCY_BUCKETS - 1)
#define SIZE (512 * KIB)
#define RECORDS 40

static bool holds(unsigned bucket, uint64_t ns)
{
    uint64_t shortest = bucket > 0 ? (uint64_t)nvmeio_latency_ns(bucket - 1) + 1 : 0;
    return ns >= shortest && ns <= (uint64_t)nvmeio_latency_ns(bucket);
}

static void test_every_latency_is_within_the_bounds_of_its_bucket(void)
{
    for (uint64_t ns = 0; ns < 1 << 20; ns++)
        CHECK(holds(nvmeio_latency_bucket(ns), ns));
    for (unsigned bits = 20; bits < 63; bits++)
        for (uint64_t part = 0; part < 1000; part++) {
            uint64_t ns = (UINT64_C(1) << bits) + (UINT64_C(1) << bits) / 1000 * part;
            CHECK(holds(nvmeio_latency_bucket(ns), ns));
            CHECK(holds(nvmeio_latency_bucket(ns - 1), ns - 1));
        }
}

static void test_buckets_follow_each_other_without_a_gap(void)
{
    CHECK(nvmeio_latency_bucket(0) == 0 && nvmeio_latency_ns(0) == 0);
    for (unsigned bucket = 0; bucket < LAST; bucket++) {
        uint64_t longest = (uint64_t)nvmeio_latency_ns(bucket);
        CHECK(nvmeio_latency_bucket(longest) == bucket);
        CHECK(nvmeio_latency_bucket(longest + 1) == bucket + 1);
    }
}

static void test_a_buckets_width_is_at_most_a_thirty_second_of_its_latencies(void)
{
    for (unsigned bucket = 1; bucket < LAST; bucket++) {
        int64_t shortest = nvmeio_latency_ns(bucket - 1) + 1;
        CHECK(32 * (nvmeio_latency_ns(bucket) - shortest) <= shortest);
    }
}

static void test_the_last_bucket_has_all_longer_latencies(void)
{
    CHECK(nvmeio_latency_ns(LAST - 1) > 67 * SECOND_NS);
    CHECK(nvmeio_latency_ns(LAST) == INT64_MAX);
    CHECK(nvmeio_latency_ns(LAST + 1) == INT64_MAX);
    CHECK(nvmeio_latency_ns(UINT32_MAX) == INT64_MAX);
    CHECK(nvmeio_latency_bucket(INT64_MAX) == LAST);
    CHECK(nvmeio_latency_bucket(UINT64_MAX) == LAST);
}

static struct nvmeio_request *submit_records(struct nvmeio_handle *handle,
                                             struct nvmeio_file *file, char *memory)
{
    const int64_t size = PAGE;
    int64_t offsets[RECORDS], places[RECORDS];
    struct nvmeio_request *request;
    size_t offender;

    for (int64_t i = 0; i < RECORDS; i++) {
        offsets[i] = i * 7 % RECORDS * 3 * size;
        places[i] = i * size;
    }
    struct nvmeio_gather gather = {
        .op = NVMEIO_OP_READ,
        .file = file,
        .address = memory,
        .size = SIZE,
        .count = RECORDS,
        .offsets = offsets,
        .sizes = &size,
        .one_size = true,
        .places = places,
    };
    CHECK(nvmeio_submit_gather(handle, &gather, &request, &offender) == 0);
    return request;
}

/* One request of each kind, and two fsyncs, which are not counted. */
static void carry_out_all(struct nvmeio_handle *handle, struct nvmeio_file *file,
                          char *memory, bool perform)
{
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = file};

    for (size_t size = 1; size <= SIZE; size *= 8) {
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_WRITE, file, memory, size, (int64_t)size / 3);
        CHECK(carry_out_by(perform, handle, &t).result == (int64_t)size);
        t.op = NVMEIO_OP_READ;
        CHECK(carry_out_by(perform, handle, &t).result == (int64_t)size);
    }
    CHECK(finish(submit_records(handle, file, memory)).result ==
          (int64_t)(RECORDS * PAGE));
    CHECK(carry_out(handle, &sync).result == 0);
    CHECK(carry_out(handle, &sync).result == 0);
}

static void test_every_block_but_fsyncs_is_counted(const char *engine, const char *path)
{
    for (int perform = 0; perform < 2; perform++) {
        struct nvmeio_config config = config_of(engine);
        struct nvmeio_stats stats;
        config.workers = 2;
        config.single_submit = perform;
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
        struct guarded memory = guarded_new(SIZE, (size_t)perform);
        CHECK(latencies_counted(handle) == 0);
        int64_t before = nvmeio_now_ns();
        carry_out_all(handle, file, memory.address, perform);
        int64_t whole_ns = nvmeio_now_ns() - before;
        nvmeio_handle_stats(handle, &stats);
        CHECK(stats.blocks > 2 + SIZE / config.block_bytes);
        CHECK(latencies_counted(handle) == stats.blocks - 2);
        CHECK(latencies_within(handle, 1, whole_ns) == stats.blocks - 2);
        nvmeio_handle_stop(handle);
        CHECK(latencies_within(handle, 1, whole_ns) == stats.blocks - 2);
        guarded_free(&memory);
        nvmeio_file_release(file);
        nvmeio_handle_close(handle);
    }
}

int main(void)
{
    const char *engine;

    begin();
    test_every_latency_is_within_the_bounds_of_its_bucket();
    test_buckets_follow_each_other_without_a_gap();
    test_a_buckets_width_is_at_most_a_thirty_second_of_its_latencies();
    test_the_last_bucket_has_all_longer_latencies();
    const char *path = path_in(test_folder());
    make_file(path, SIZE, 1);
    FOR_EACH_ENGINE(engine)
    test_every_block_but_fsyncs_is_counted(engine, path);
    return 0;
}
