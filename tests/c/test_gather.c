/* Gathers and scatters: the right bytes in the right places, what is merged, what is
 * refused before any I/O, and records that fail while others do not. */
#include <pthread.h>
#include <sched.h>

#include "transfer.h"

#define FILE_BYTES (4 * MIB + 777)
#define RECORDS_MAX 512

static uint64_t random_state;

static uint64_t next_random(uint64_t below)
{
    random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407;
    return (random_state >> 33) % below;
}

struct plan {
    size_t count;
    int64_t offsets[RECORDS_MAX], sizes[RECORDS_MAX], places[RECORDS_MAX];
};

static struct nvmeio_gather gather_of(enum nvmeio_op op, struct nvmeio_file *file,
                                      const struct guarded *memory,
                                      const struct plan *plan)
{
    return (struct nvmeio_gather){
        .op = op,
        .file = file,
        .address = memory->address,
        .size = memory->size,
        .count = plan->count,
        .offsets = plan->offsets,
        .sizes = plan->sizes,
        .places = plan->places,
        .gap_max = 4096,
    };
}

/* Give the places of a gather as addresses. */
static void aim_by_address(struct nvmeio_gather *what, struct plan *plan)
{
    for (size_t i = 0; i < plan->count; i++)
        plan->places[i] += (int64_t)(intptr_t)what->address;
    what->address = NULL;
    what->size = SIZE_MAX;
}

static struct nvmeio_outcome gather(struct nvmeio_handle *handle,
                                    const struct nvmeio_gather *what)
{
    struct nvmeio_request *request;
    size_t offender;

    CHECK(nvmeio_submit_gather(handle, what, &request, &offender) == 0);
    CHECK(offender == SIZE_MAX);
    return finish(request);
}

/* Make records of one kind: tiny or large, aligned or not, in order or not, in memory
 * with gaps between them.  Return the size of the memory. */
static size_t plan_records(struct plan *plan, uint64_t seed, bool apart)
{
    static const size_t units[] = {1, 8, 512, 4096};
    size_t unit, end = 0, longest;

    random_state = seed;
    unit = units[next_random(4)];
    longest = (size_t)1 << (4 + next_random(15));
    plan->count = 1 + next_random(longest > 32 * KIB ? 24 : RECORDS_MAX - 1);
    int64_t last = 0;
    bool sorted = next_random(2), holes = next_random(2), near = next_random(2);
    for (size_t i = 0; i < plan->count; i++) {
        size_t size = (1 + next_random(longest)) / unit * unit;
        size_t range = near ? 64 * KIB : FILE_BYTES - size;
        int64_t offset = (int64_t)(next_random(range) / unit * unit);
        if (sorted || apart)
            offset = last + (int64_t)(next_random(3) * unit);
        if (offset + (int64_t)size > (int64_t)FILE_BYTES) {
            plan->count = i;
            break;
        }
        last = offset + (int64_t)(apart || next_random(4) ? size : 0);
        end += holes ? next_random(3) * unit : 0;
        plan->offsets[i] = offset;
        plan->sizes[i] = (int64_t)size;
        plan->places[i] = (int64_t)end;
        end += size;
    }
    /* The order in memory differs from that in the file. */
    for (size_t i = 1; i < plan->count && !sorted; i++) {
        size_t j = next_random(i + 1);
        int64_t offset = plan->offsets[i], size = plan->sizes[i];
        int64_t place = plan->places[i];
        plan->offsets[i] = plan->offsets[j], plan->offsets[j] = offset;
        plan->sizes[i] = plan->sizes[j], plan->sizes[j] = size;
        plan->places[i] = plan->places[j], plan->places[j] = place;
    }
    return end;
}

/* The expected memory after a gather into canaries. */
static void expect_gathered(char *expected, const struct plan *plan, size_t size)
{
    memset(expected, CANARY, size);
    for (size_t i = 0; i < plan->count; i++)
        fill(expected + plan->places[i], (size_t)plan->sizes[i],
             (uint64_t)plan->offsets[i], 1);
}

static size_t total_of(const struct plan *plan)
{
    size_t total = 0;

    for (size_t i = 0; i < plan->count; i++)
        total += (size_t)plan->sizes[i];
    return total;
}

static void check_gathers(struct nvmeio_handle *handle, struct nvmeio_file *file,
                          uint64_t seed)
{
    static struct plan plan;
    size_t size = plan_records(&plan, seed, false);
    struct guarded memory = guarded_new(size, seed % 3 ? 0 : 5);
    char *expected = malloc(size + 1);

    expect_gathered(expected, &plan, size);
    struct nvmeio_gather what = gather_of(NVMEIO_OP_READ, file, &memory, &plan);
    if (seed % 4 == 0)
        aim_by_address(&what, &plan);
    struct nvmeio_outcome outcome = gather(handle, &what);
    CHECK(outcome.result == (int64_t)total_of(&plan));
    CHECK(outcome.got == outcome.result);
    CHECK(memcmp(memory.address, expected, size) == 0);
    guarded_free(&memory);
    free(expected);
}

static void check_scatters(struct nvmeio_handle *handle, const char *path,
                           struct nvmeio_file *file, uint64_t seed)
{
    static struct plan plan;
    size_t size = plan_records(&plan, seed, true);
    struct guarded memory = guarded_new(size, seed % 3 ? 0 : 5);
    char *expected = malloc(FILE_BYTES);

    fill(expected, FILE_BYTES, 0, 1);
    fill(memory.address, size, seed, 2);
    for (size_t i = 0; i < plan.count; i++)
        memcpy(expected + plan.offsets[i], memory.address + plan.places[i],
               (size_t)plan.sizes[i]);
    struct nvmeio_gather what = gather_of(NVMEIO_OP_WRITE, file, &memory, &plan);
    CHECK(gather(handle, &what).result == (int64_t)total_of(&plan));
    CHECK(nvmeio_file_size(file) == (int64_t)FILE_BYTES);
    CHECK(file_holds(path, expected, FILE_BYTES, 0));
    guarded_free(&memory);
    free(expected);
}

/* Cache nothing of a file, or pieces of 256 KiB. */
static void warm(const char *path, bool partly)
{
    static char bytes[256 * KIB];
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    CHECK(fd >= 0);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    for (size_t at = 0; partly && at < FILE_BYTES; at += MIB)
        CHECK(pread(fd, bytes, sizeof(bytes), (off_t)at) > 0);
    close(fd);
}

/* 1. Bytes come from the right offsets and go to the right places. */
static void test_bytes_and_places(const char *path, const struct nvmeio_config *config,
                                  uint64_t seed)
{
    uint64_t last = seed + 20;
    make_file(path, FILE_BYTES, 1);
    struct nvmeio_handle *handle = open_handle(config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);

    for (; seed < last; seed++) {
        warm(path, seed % 2);
        check_gathers(handle, file, seed);
    }
    nvmeio_file_release(file);
    for (; seed < last + 4; seed++) {
        make_file(path, FILE_BYTES, 1);
        file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
        check_scatters(handle, path, file, seed);
        nvmeio_file_release(file);
    }
    nvmeio_handle_close(handle);
}

static void test_records_take_the_expected_routes(const char *path, const char *engine)
{
    struct nvmeio_config config = config_of(engine);

    test_bytes_and_places(path, &config, 1);
    config.block_bytes = 4096;
    config.workers = 3;
    test_bytes_and_places(path, &config, 101);
    config.block_bytes = MIB;
    config.queue_depth = 200;
    config.bounce = NVMEIO_BOUNCE_NEVER;
    test_bytes_and_places(path, &config, 201);
    config.bounce = NVMEIO_BOUNCE_ALWAYS;
    config.single_submit = true;
    test_bytes_and_places(path, &config, 301);
}

static uint64_t blocks_of(struct nvmeio_handle *handle)
{
    struct nvmeio_stats stats;

    nvmeio_handle_stats(handle, &stats);
    return stats.blocks;
}

/* 2. Neighbours are merged up to max_gap, and repeated records are read once. */
static void test_neighbours_are_merged(const char *path, const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(MIB, 0);
    static const struct {
        int64_t step, size;
        size_t gap_max;
        uint64_t blocks;
    } cases[] = {
        {16384, 64, 4096, 32}, /* too far apart */
        {8192, 64, 16384, 4},  /* 32 x 8 KiB by blocks of 64 */
        {64, 64, 0, 1},        /* they touch */
        {0, 64, 0, 1},         /* all the same */
        {0, 256 * 1024, 0, 4}, /* the same, in four blocks, with only one place in
        memory */
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct plan plan = {.count = cases[i].size > 4096 ? 3 : 32};
        for (size_t j = 0; j < plan.count; j++) {
            plan.offsets[j] = (int64_t)j * cases[i].step;
            plan.sizes[j] = cases[i].size;
            /* Not in the order of the file, so that they are not adjacent in memory. */
            plan.places[j] = (int64_t)(plan.count - 1 - j) * cases[i].size;
        }
        struct nvmeio_gather what = gather_of(NVMEIO_OP_READ, file, &memory, &plan);
        what.gap_max = cases[i].gap_max;
        uint64_t before = blocks_of(handle);
        CHECK(gather(handle, &what).result == (int64_t)total_of(&plan));
        CHECK(blocks_of(handle) - before == cases[i].blocks);
        for (size_t j = 0; j < plan.count; j++)
            CHECK(file_holds(path, memory.address + plan.places[j],
                             (size_t)plan.sizes[j], plan.offsets[j]));
    }
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* 3. Invalid records are refused before anything is read, with the first of them. */
/* All of them are one extent, of many blocks: each block finds the records that begin
 * in it, and the long ones that began before it. */
static void test_short_and_long_records_within_a_longer_one(const char *path,
                                                            const char *engine)
{
    static struct plan plan;
    struct nvmeio_config config = config_of(engine);
    size_t end = 0;

    plan.count = 0;
    for (int i = 0; i < 400; i++) {
        int64_t size = i == 0        ? (int64_t)(2 * MIB)
                       : i % 40 == 1 ? (int64_t)(200 * KIB)
                                     : 100;
        plan.offsets[plan.count] = i * 4001;
        plan.sizes[plan.count] = size;
        plan.places[plan.count++] = (int64_t)end;
        end += (size_t)size;
    }
    struct guarded memory = guarded_new(end, 0);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct nvmeio_gather what = gather_of(NVMEIO_OP_READ, file, &memory, &plan);
    CHECK(gather(handle, &what).result == (int64_t)end);
    for (size_t i = 0; i < plan.count; i++)
        CHECK(file_holds(path, memory.address + plan.places[i], (size_t)plan.sizes[i],
                         plan.offsets[i]));
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
    guarded_free(&memory);
}

static void test_refusals(const char *path, const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(4096, 0);
    static const struct {
        enum nvmeio_op op;
        int64_t offset, size, place;
        int error;
        size_t offender;
    } cases[] = {
        {NVMEIO_OP_READ, -1, 64, 128, -EINVAL, 2},
        {NVMEIO_OP_READ, 0, -1, 128, -EINVAL, 2},
        {NVMEIO_OP_READ, 0, 64, -1, -EINVAL, 2},
        {NVMEIO_OP_WRITE, INT64_MAX, 64, 128, -EOVERFLOW, 2},
        {NVMEIO_OP_READ, 0, 64, 4033, -EFAULT, 2},
        {NVMEIO_OP_READ, 0, 64, INT64_MAX, -EFAULT, 2},
        {NVMEIO_OP_READ, FILE_BYTES - 63, 64, 128, -ENODATA, 2},
        {NVMEIO_OP_READ, 0, 64, 255, -EEXIST, 3},
        {NVMEIO_OP_READ, 0, 64, 1, -EEXIST, 2},
        {NVMEIO_OP_WRITE, 1, 64, 128, -EEXIST, 2},
    };
    struct nvmeio_request *request;
    size_t offender;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct plan plan = {
            .count = 5,
            .offsets = {0, 64, cases[i].offset, 1024, 2048},
            .sizes = {64, 64, cases[i].size, 64, 64},
            .places = {0, 64, cases[i].place, 256, 512},
        };
        struct nvmeio_gather what = gather_of(cases[i].op, file, &memory, &plan);
        CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) ==
              cases[i].error);
        CHECK(offender == cases[i].offender);
    }
    /* A long record, last but one, overlaps all others. */
    struct plan plan = {
        .count = 5,
        .offsets = {10, 40, 15, 0, 60},
        .sizes = {10, 10, 10, 80, 10},
        .places = {10, 40, 15, 0, 60},
    };
    for (int op = NVMEIO_OP_READ; op <= NVMEIO_OP_WRITE; op++) {
        struct nvmeio_gather what = gather_of((enum nvmeio_op)op, file, &memory, &plan);
        CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) == -EEXIST);
        CHECK(offender == 2);
    }
    plan = (struct plan){.count = 1, .sizes = {64}};
    struct nvmeio_gather what = gather_of(NVMEIO_OP_FSYNC, file, &memory, &plan);
    CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) == -EINVAL);
    CHECK(offender == SIZE_MAX);
    /* Memory that could not be allocated is not taken for places by address. */
    what = gather_of(NVMEIO_OP_READ, file, &memory, &plan);
    what.address = NULL;
    CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) == -EINVAL);
    what.size = SIZE_MAX;
    what.places = NULL;
    CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) < 0);
    /* Nor is NULL an address, or memory that would end beyond all addresses. */
    what.places = plan.places;
    for (size_t i = 0; i < 2; i++) {
        plan.places[0] = i ? INT64_MAX - 63 : 0;
        CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) == -EFAULT);
        CHECK(offender == 0);
    }
    CHECK(blocks_of(handle) == 0);
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* 4. A gather of nothing is done at once. */
static void test_a_gather_of_nothing_is_done_at_once(const char *path,
                                                     const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(64, 0);
    struct plan plan = {.count = 0};

    for (plan.count = 0; plan.count < 3; plan.count++) {
        for (int op = NVMEIO_OP_READ; op <= NVMEIO_OP_WRITE; op++) {
            struct nvmeio_gather what =
                gather_of((enum nvmeio_op)op, file, &memory, &plan);
            CHECK(gather(handle, &what).result == 0);
        }
    }
    CHECK(blocks_of(handle) == 0);
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* 5. With an empty pool, the page cache is used: records are transferred one by one
 * instead of merged, and all of a scatter in its second round. */
static void test_without_pool_memory_the_page_cache_is_used(const char *path,
                                                            const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(3 * PAGE, 5);
    struct plan plan = {
        .count = 3,
        .offsets = {0, PAGE, 2 * PAGE},
        .sizes = {PAGE, PAGE, PAGE},
        .places = {PAGE, 0, 2 * PAGE},
    };

    for (int op = NVMEIO_OP_READ; op <= NVMEIO_OP_WRITE; op++) {
        fill(memory.address, memory.size, 0, 2);
        struct nvmeio_gather what = gather_of((enum nvmeio_op)op, file, &memory, &plan);
        CHECK(gather(handle, &what).result == (int64_t)(3 * PAGE));
        for (size_t i = 0; i < plan.count; i++)
            CHECK(file_holds(path, memory.address + plan.places[i], PAGE,
                             plan.offsets[i]));
    }
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void *drain_on(void *argument)
{
    struct nvmeio_handle *handle = argument;

    while (nvmeio_handle_drain(handle, 0) == -ETIMEDOUT)
        ;
    return NULL;
}

/* 6. One thread cancels a gather while another waits for its end. */
static void test_cancel(const char *path, const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    config.queue_depth = 1;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(64 * 8, 0);
    struct plan plan = {.count = 64};
    struct nvmeio_request *request;
    pthread_t drainer;
    size_t offender;

    for (size_t i = 0; i < plan.count; i++) {
        plan.offsets[i] = (int64_t)(i * 16 * KIB);
        plan.sizes[i] = 8;
        plan.places[i] = (int64_t)(i * 8);
    }
    for (int round = 0; round < 50; round++) {
        struct nvmeio_gather what = gather_of(NVMEIO_OP_READ, file, &memory, &plan);
        CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) == 0);
        CHECK(pthread_create(&drainer, NULL, drain_on, handle) == 0);
        sched_yield();
        int dropped = nvmeio_request_cancel(request);
        int64_t result = finish(request).result;
        CHECK(result == (dropped ? -ECANCELED : (int64_t)total_of(&plan)));
        CHECK(pthread_join(drainer, NULL) == 0);
    }
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* The pool has so little left that small bounces do not fit. */
static void test_a_nearly_full_pool(const char *path, const char *name)
{
    const int64_t offsets[] = {100, 5000}, size = 64;
    const size_t part = 256 * KIB;
    struct nvmeio_config config = config_of(name);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(part, 1);
    struct nvmeio_request *request;
    size_t offender;
    void *others[7];

    config.block_bytes = part;
    nvmeio_pool_set_limit(2 * MIB);
    for (int i = 0; i < 7; i++)
        CHECK(nvmeio_pool_alloc(part, false, &others[i], NULL) == 0);
    struct nvmeio_handle *handle = open_handle(&config);
    const struct nvmeio_gather what = {.op = NVMEIO_OP_READ,
                                       .file = file,
                                       .address = memory.address,
                                       .size = memory.size,
                                       .count = 2,
                                       .offsets = offsets,
                                       .sizes = &size,
                                       .one_size = true,
                                       .gap_max = 8192};
    CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) == 0);
    CHECK(finish(request).result == 2 * size);
    CHECK(file_holds(path, memory.address + size, (size_t)size, offsets[1]));
    CHECK(read_at(handle, file, memory.address, part, 0).result == (int64_t)part);
    CHECK(file_holds(path, memory.address, part, 0));
    nvmeio_handle_close(handle);
    for (int i = 0; i < 7; i++)
        nvmeio_pool_free(others[i]);
    guarded_free(&memory);
    nvmeio_file_release(file);
}

/* An error of the lists themselves names no record. */
static void test_invalid_lists(void)
{
    int64_t one = 1;
    struct nvmeio_gather what = {.op = NVMEIO_OP_READ, .count = 1, .sizes = &one};
    size_t offender;

    CHECK(nvmeio_gather_check(&what, &offender) == -EINVAL && offender == SIZE_MAX);
    what.sizes = NULL;
    what.offsets = &one;
    CHECK(nvmeio_gather_check(&what, &offender) == -EINVAL && offender == SIZE_MAX);
    what.sizes = &one;
    what.done = 1; /* so the record is looked at, and does not fit into no memory */
    CHECK(nvmeio_gather_check(&what, &offender) == -EFAULT && offender == 0);
    what.done = 2;
    CHECK(nvmeio_gather_check(&what, &offender) == -EINVAL && offender == SIZE_MAX);
    /* Records of a scatter that were left out would be lost. */
    what.done = 1;
    what.op = NVMEIO_OP_WRITE;
    CHECK(nvmeio_gather_check(&what, &offender) == -EINVAL && offender == SIZE_MAX);
    what.op = NVMEIO_OP_READ;
    what.done = 0;
    what.count = SIZE_MAX / 2;
    CHECK(nvmeio_gather_check(&what, &offender) == -ENOMEM && offender == SIZE_MAX);
}

/* A transfer has no records. */
static void test_a_transfer_has_no_failures(const char *path, const char *name)
{
    struct nvmeio_config config = config_of(name);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(PAGE, 0);
    struct nvmeio_transfer what = {.op = NVMEIO_OP_READ,
                                   .file = file,
                                   .address = memory.address,
                                   .size = PAGE,
                                   .offset = FILE_BYTES};
    struct nvmeio_failure failure;
    struct nvmeio_request *request;

    CHECK(nvmeio_submit(handle, &what, &request) == 0);
    while (!nvmeio_request_done(request))
        sched_yield();
    CHECK(nvmeio_request_failures(request, &failure, 1) == 0);
    nvmeio_request_release(request);
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

int main(void)
{
    const char *name;

    begin();
    /* First, while the pool has mapped nothing. */
    nvmeio_pool_set_limit(1);
    FOR_EACH_ENGINE(name)
    {
        const char *path = path_in(test_folder());
        make_file(path, FILE_BYTES, 1);
        test_without_pool_memory_the_page_cache_is_used(path, name);
    }
    FOR_EACH_ENGINE(name)
    {
        const char *path = path_in(test_folder());
        make_file(path, FILE_BYTES, 1);
        test_a_nearly_full_pool(path, name);
    }
    nvmeio_pool_set_limit(0);
    test_invalid_lists();
    FOR_EACH_ENGINE(name)
    {
        const char *path = path_in(test_folder());
        test_records_take_the_expected_routes(path, name);
        make_file(path, FILE_BYTES, 1);
        test_neighbours_are_merged(path, name);
        test_short_and_long_records_within_a_longer_one(path, name);
        test_refusals(path, name);
        test_a_gather_of_nothing_is_done_at_once(path, name);
        test_cancel(path, name);
        test_a_transfer_has_no_failures(path, name);
    }
    return 0;
}
