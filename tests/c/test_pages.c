/* Memory in small pages is distinguished from huge pages, and goes through bounces. */
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "pages.h"
#include "transfer.h"

#define HUGE ((size_t)2 << 20)
#define BYTES (4 * HUGE)

/* Verdicts on memory count for a quarter of a second: let time pass for them. */
static _Atomic time_t seconds_passed;

static void forget(void)
{
    seconds_passed++;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);

    if (clock == CLOCK_MONOTONIC_COARSE)
        now->tv_sec += seconds_passed;
    return result;
}

/* Untouched memory that begins at a huge page. */
static char *map(int advice)
{
    forget();
    char *mapped = mmap(NULL, BYTES + HUGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    char *memory = mapped + -(uintptr_t)mapped % HUGE;
    CHECK(madvise(memory, BYTES, advice) == 0);
    return memory;
}

static bool small(const char *memory, enum nvmeio_op op)
{
    return nvmeio_pages_are_small(memory, BYTES, op);
}

static void test_small_and_huge_pages_are_distinguished(void)
{
    char *memory = map(MADV_NOHUGEPAGE);

    CHECK(!small(memory, NVMEIO_OP_READ));
    CHECK(small(memory, NVMEIO_OP_WRITE));
    CHECK(*memory == 0);
    memset(memory, 1, BYTES);
    CHECK(small(memory, NVMEIO_OP_READ) && small(memory, NVMEIO_OP_WRITE));
    CHECK(nvmeio_pages_are_small(memory + 1, 1, NVMEIO_OP_READ));
    munmap(memory, BYTES);

    memory = map(MADV_HUGEPAGE);
    CHECK(!small(memory, NVMEIO_OP_READ));
    memset(memory, 1, BYTES);
    CHECK(!small(memory, NVMEIO_OP_READ) && !small(memory, NVMEIO_OP_WRITE));
    /* The larger part decides. */
    CHECK(madvise(memory, HUGE, MADV_DONTNEED) == 0);
    CHECK(madvise(memory, HUGE, MADV_NOHUGEPAGE) == 0);
    memset(memory, 1, HUGE);
    forget();
    CHECK(!small(memory, NVMEIO_OP_READ));
    CHECK(madvise(memory, 3 * HUGE, MADV_DONTNEED) == 0);
    CHECK(madvise(memory, 3 * HUGE, MADV_NOHUGEPAGE) == 0);
    memset(memory, 1, 3 * HUGE);
    forget();
    CHECK(small(memory, NVMEIO_OP_READ));
    munmap(memory, BYTES);
}

/* The kernel is asked once in a while about each huge page. */
static void test_a_verdict_counts_for_a_moment(void)
{
    char *memory = map(MADV_NOHUGEPAGE);

    memset(memory, 1, BYTES);
    /* At the end of a term it is found out anew. */
    for (int tries = 0; tries < 3; tries++) {
        CHECK(small(memory, NVMEIO_OP_READ));
        CHECK(madvise(memory, BYTES, MADV_DONTNEED) == 0);
        if (small(memory, NVMEIO_OP_READ))
            break;
        CHECK(tries < 2);
        memset(memory, 1, BYTES);
    }
    forget();
    CHECK(!small(memory, NVMEIO_OP_READ));
    munmap(memory, BYTES);
}

/* Inaccessible memory is not touched. */
static void test_inaccessible_memory_is_not_touched(void)
{
    char *memory = map(MADV_NOHUGEPAGE);

    CHECK(mprotect(memory, BYTES, PROT_NONE) == 0);
    CHECK(!small(memory, NVMEIO_OP_READ) && !small(memory, NVMEIO_OP_WRITE));
    munmap(memory, BYTES);
    forget();
    CHECK(!small(memory, NVMEIO_OP_READ) && !small(memory, NVMEIO_OP_WRITE));
}

/* Write and read memory; return the direct and the bounced bytes. */
static void move(struct nvmeio_handle *handle, const char *path, char *memory,
                 size_t size, uint64_t *direct, uint64_t *bounced)
{
    struct nvmeio_file *file =
        open_file(path, O_RDWR | O_CREAT | O_TRUNC, NVMEIO_DIRECT_AUTO);
    struct nvmeio_stats before, after;
    struct nvmeio_file_info info;

    nvmeio_file_get_info(file, &info);
    if (!info.direct)
        SKIP("the file system has no O_DIRECT");
    nvmeio_handle_stats(handle, &before);
    fill(memory, size, 0, 3);
    CHECK(write_at(handle, file, memory, size, 0).result == (int64_t)size);
    CHECK(file_holds(path, memory, size, 0));
    memset(memory, 0, size);
    cool(path);
    CHECK(read_at(handle, file, memory, size, 0).result == (int64_t)size);
    CHECK(file_holds(path, memory, size, 0));
    nvmeio_handle_stats(handle, &after);
    *direct = after.bytes_direct - before.bytes_direct;
    *bounced = after.bytes_bounced - before.bytes_bounced;
    nvmeio_file_release(file);
}

static void check_routes(struct nvmeio_handle *handle, enum nvmeio_bounce bounce,
                         const char *path)
{
    char *small_pages = map(MADV_NOHUGEPAGE), *huge_pages = map(MADV_HUGEPAGE);
    bool all = bounce == NVMEIO_BOUNCE_ALWAYS;
    bool by_pages = all || bounce == NVMEIO_BOUNCE_AUTO;
    uint64_t direct, bounced;
    void *pool;

    move(handle, path, huge_pages, BYTES, &direct, &bounced);
    CHECK(direct == (all ? 0 : 2 * BYTES) && bounced == (all ? 2 * BYTES : 0));
    move(handle, path, small_pages, BYTES, &direct, &bounced);
    CHECK(direct == (by_pages ? 0 : 2 * BYTES) &&
          bounced == (by_pages ? 2 * BYTES : 0));
    /* Too small for the check. */
    move(handle, path, small_pages, NVMEIO_PAGES_BYTES_MIN - PAGE, &direct, &bounced);
    CHECK((direct > 0) == !all && (bounced > 0) == all);
    /* Bounces would have the same pages. */
    CHECK(nvmeio_pool_alloc(BYTES, false, &pool, NULL) == 0);
    CHECK(madvise(pool, BYTES, MADV_DONTNEED) == 0);
    CHECK(madvise(pool, BYTES, MADV_NOHUGEPAGE) == 0);
    forget();
    move(handle, path, pool, BYTES, &direct, &bounced);
    CHECK(direct == (all ? 0 : 2 * BYTES) && bounced == (all ? 2 * BYTES : 0));
    CHECK(madvise(pool, BYTES, MADV_HUGEPAGE) == 0);
    nvmeio_pool_free(pool);
    munmap(small_pages, BYTES);
    munmap(huge_pages, BYTES);
}

/* Gather two records by address, the second of them larger; return the direct bytes. */
static uint64_t gather_apart(struct nvmeio_handle *handle, const char *path, char *one,
                             char *larger)
{
    const int64_t offsets[] = {0, BYTES / 2}, sizes[] = {BYTES / 4, BYTES / 2};
    const int64_t places[] = {(intptr_t)one, (intptr_t)larger};
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_ALWAYS);
    const struct nvmeio_gather what = {.op = NVMEIO_OP_READ,
                                       .file = file,
                                       .size = SIZE_MAX,
                                       .count = 2,
                                       .offsets = offsets,
                                       .sizes = sizes,
                                       .places = places};
    struct nvmeio_stats before, after;
    struct nvmeio_request *request;
    size_t offender;

    nvmeio_handle_stats(handle, &before);
    CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) == 0);
    CHECK(finish(request).result == sizes[0] + sizes[1]);
    CHECK(file_holds(path, one, (size_t)sizes[0], offsets[0]));
    CHECK(file_holds(path, larger, (size_t)sizes[1], offsets[1]));
    nvmeio_handle_stats(handle, &after);
    nvmeio_file_release(file);
    return after.bytes_direct - before.bytes_direct;
}

/* Memory between records by address is not checked, and may not even be mapped. */
static void test_the_largest_of_records_by_address_decides(void)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of("sync");
    struct nvmeio_handle *handle = open_handle(&config);
    char *small_pages = map(MADV_NOHUGEPAGE), *huge_pages = map(MADV_HUGEPAGE);
    uint64_t direct, bounced;

    move(handle, path, huge_pages, BYTES, &direct, &bounced);
    fill(small_pages, BYTES, 0, 1);
    CHECK(gather_apart(handle, path, huge_pages, small_pages) == 0);
    CHECK(gather_apart(handle, path, small_pages, huge_pages) == BYTES / 4 * 3);
    munmap(small_pages, BYTES);
    munmap(huge_pages, BYTES);
    nvmeio_handle_close(handle);
}

static void test_small_pages_are_bounced_unless_disabled(enum nvmeio_bounce bounce)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of("sync");

    config.bounce = bounce;
    struct nvmeio_handle *handle = open_handle(&config);
    check_routes(handle, bounce, path);
    nvmeio_handle_close(handle);
}

/* The pool has nothing left for bounces: each worker uses its reserve. */
static void test_without_the_pool_bounces_come_from_the_reserve(unsigned workers)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of("threads");
    uint64_t direct, bounced;
    void *all;

    config.workers = workers;
    struct nvmeio_handle *handle = open_handle(&config);
    char *memory = map(MADV_NOHUGEPAGE);
    struct nvmeio_pool_stats stats;
    nvmeio_pool_get_stats(&stats);
    nvmeio_pool_set_limit(stats.bytes_mapped + 4 * HUGE);
    while (nvmeio_pool_alloc(4 * HUGE, false, &all, NULL) == 0)
        ;
    while (nvmeio_pool_alloc(1, false, &all, NULL) == 0)
        ;
    move(handle, path, memory, BYTES, &direct, &bounced);
    CHECK(direct == 0 && bounced == 2 * BYTES);
    nvmeio_pool_set_limit(0);
    munmap(memory, BYTES);
    nvmeio_handle_close(handle);
}

static void test_an_idle_worker_returns_its_bounces(const char *engine)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_pool_stats before, after;
    uint64_t direct, bounced;

    config.bounce = NVMEIO_BOUNCE_ALWAYS;
    config.workers = 2;
    struct nvmeio_handle *handle = open_handle(&config);
    char *memory = map(MADV_NOHUGEPAGE);
    nvmeio_pool_get_stats(&before);
    for (int round = 0; round < 2; round++) {
        move(handle, path, memory, BYTES, &direct, &bounced);
        CHECK(bounced == 2 * BYTES);
        /* The watchdog ends an endless wait. */
        do {
            nvmeio_pool_get_stats(&after);
            sched_yield();
        } while (after.bytes_used > before.bytes_used);
    }
    munmap(memory, BYTES);
    nvmeio_handle_close(handle);
}

/* A child must check its own pages, not its parent's. */
static void test_children_check_their_own_pages(void)
{
    char *memory = map(MADV_HUGEPAGE);
    int status;

    memset(memory, 1, BYTES);
    CHECK(!small(memory, NVMEIO_OP_READ));
    pid_t child = fork();
    if (child == 0) {
        CHECK(madvise(memory, BYTES, MADV_DONTNEED) == 0);
        CHECK(madvise(memory, BYTES, MADV_NOHUGEPAGE) == 0);
        memset(memory, 1, BYTES);
        forget();
        CHECK(small(memory, NVMEIO_OP_READ));
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(!small(memory, NVMEIO_OP_READ));
    munmap(memory, BYTES);
}

int main(void)
{
    const char *engine;

    begin();
    char *memory = map(MADV_NOHUGEPAGE);
    memset(memory, 1, BYTES);
    if (!small(memory, NVMEIO_OP_READ))
        SKIP("the kernel does not tell pages apart");
    munmap(memory, BYTES);
    memory = map(MADV_HUGEPAGE);
    memset(memory, 1, BYTES);
    if (small(memory, NVMEIO_OP_READ))
        SKIP("the kernel has no huge pages to give");
    munmap(memory, BYTES);
    test_children_check_their_own_pages();
    test_small_and_huge_pages_are_distinguished();
    test_a_verdict_counts_for_a_moment();
    test_inaccessible_memory_is_not_touched();
    test_small_pages_are_bounced_unless_disabled(NVMEIO_BOUNCE_AUTO);
    test_small_pages_are_bounced_unless_disabled(NVMEIO_BOUNCE_ALWAYS);
    test_small_pages_are_bounced_unless_disabled(NVMEIO_BOUNCE_NEVER);
    test_the_largest_of_records_by_address_decides();
    test_without_the_pool_bounces_come_from_the_reserve(1);
    test_without_the_pool_bounces_come_from_the_reserve(3);
    FOR_EACH_ENGINE(engine)
    test_an_idle_worker_returns_its_bounces(engine);
    return 0;
}
