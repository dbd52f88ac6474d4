/* Small blocks use memory and files that the ring has registered, always the right
 * ones, and go on without where the kernel refuses.  Liburing's functions are replaced
 * by ones that count and fail on demand. */
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "pool_internal.h"
#include "transfer.h"

#if __has_include(<liburing.h>)
#include <liburing.h>

static atomic_int refuse_prepare, refuse_pages, refuse_files; /* errno, 0: go on */
static atomic_uint files_held, files_dropped;

static int registered(const struct io_uring *ring, unsigned opcode, const void *what,
                      unsigned count)
{
    long result =
        syscall(SYS_io_uring_register, ring->ring_fd, opcode, what, (long)count);
    return result < 0 ? -errno : (int)result;
}

int io_uring_register_buffers_sparse(struct io_uring *ring, unsigned count)
{
    struct io_uring_rsrc_register table = {.nr = count,
                                           .flags = IORING_RSRC_REGISTER_SPARSE};
    if (refuse_prepare)
        return -refuse_prepare;
    return registered(ring, IORING_REGISTER_BUFFERS2, &table, sizeof(table));
}

int io_uring_register_buffers_update_tag(struct io_uring *ring, unsigned first,
                                         const struct iovec *memory, const __u64 *tags,
                                         unsigned count)
{
    struct io_uring_rsrc_update2 update = {.offset = first,
                                           .data = (uintptr_t)memory,
                                           .tags = (uintptr_t)tags,
                                           .nr = count};
    if (refuse_pages)
        return -refuse_pages;
    return registered(ring, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof(update));
}

int io_uring_register_files_update(struct io_uring *ring, unsigned first,
                                   const int *files, unsigned count)
{
    struct io_uring_files_update update = {.offset = first, .fds = (uintptr_t)files};
    bool drop = count == 1 && files[0] == -1;

    if (refuse_files && !drop)
        return -refuse_files;
    files_held += !drop;
    files_dropped += drop;
    return registered(ring, IORING_REGISTER_FILES_UPDATE, &update, count);
}

static struct nvmeio_config small_blocks(void)
{
    struct nvmeio_config config = config_of("io_uring");
    config.block_bytes = 4 * KIB;
    config.queue_depth = 128;
    return config;
}

static struct nvmeio_stats stats_of(struct nvmeio_handle *handle)
{
    struct nvmeio_stats stats;
    nvmeio_handle_stats(handle, &stats);
    return stats;
}

static uint64_t bytes_registered(void)
{
    struct nvmeio_pool_stats stats;
    nvmeio_pool_get_stats(&stats);
    return stats.bytes_registered;
}

static char *pool_alloc(size_t size)
{
    void *address;
    CHECK(nvmeio_pool_alloc(size, false, &address, NULL) == 0);
    return address;
}

/* Read a file made with `seed`, and look whether all of it came. */
static void read_from(struct nvmeio_handle *handle, struct nvmeio_file *file,
                      char *memory, size_t size, unsigned seed)
{
    char *expected = malloc(size);

    CHECK(expected);
    fill(expected, size, 0, seed);
    memset(memory, CANARY, size);
    struct nvmeio_outcome outcome = read_at(handle, file, memory, size, 0);
    CHECK(outcome.result == (int64_t)size);
    CHECK(memcmp(memory, expected, size) == 0);
    free(expected);
}

static void read_and_check(struct nvmeio_handle *handle, const char *path, char *memory,
                           size_t size, unsigned seed)
{
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);

    read_from(handle, file, memory, size, seed);
    nvmeio_file_release(file);
}

static bool as_nobody(void)
{
    CHECK(geteuid() != 0 || setuid(65534) == 0);
    return true;
}

/* Who has every capability there, and none here.  Forbidden in some containers, and to
 * processes with threads, of which TSan has one. */
static bool as_root_of_a_namespace(void)
{
    return unshare(CLONE_NEWUSER) == 0;
}

static bool as_who_runs_this(void)
{
    return true;
}

/* In a process without threads. */
static void with_memlock(const char *path, rlim_t most, bool (*become)(void))
{
    struct rlimit little;
    struct nvmeio_config config = small_blocks();
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    char *memory = pool_alloc(16 * MIB);

    CHECK(getrlimit(RLIMIT_MEMLOCK, &little) == 0);
    little.rlim_max = little.rlim_cur = most < little.rlim_max ? most : little.rlim_max;
    CHECK(setrlimit(RLIMIT_MEMLOCK, &little) == 0);
    if (!become())
        return;
    /* Not mlock(), of which sanitizers make nothing. */
    bool limited = syscall(SYS_mlock, memory, 16 * MIB) != 0;
    CHECK(limited || become == as_who_runs_this);
    CHECK(syscall(SYS_munlock, memory, 16 * MIB) == 0);
    struct nvmeio_handle *handle = open_handle(&config);
    read_from(handle, file, memory, 4 * MIB, 1);
    uint64_t bytes = bytes_registered();
    if (stats_of(handle).blocks_registered > 0)
        CHECK(bytes > 0 && (limited ? bytes <= little.rlim_cur / 4 : bytes == 4 * MIB));
    nvmeio_handle_close(handle);
    nvmeio_file_release(file);
    nvmeio_pool_free(memory);
}

/* Rings are charged to the same limit: most of it is left to them.  The kernel takes
 * its time to give back what was charged to the user by a process before: 8 MiB last.
 */
static void test_little_memory_may_be_locked(const char *path)
{
    bool (*const who[])(void) = {as_nobody, as_root_of_a_namespace, as_who_runs_this};
    const rlim_t limits[] = {MIB, 8 * MIB};
    int status;

    for (int i = 0; i < 6; i++) {
        pid_t child = fork();
        if (child == 0) {
            with_memlock(path, limits[i / 3], who[i % 3]);
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
}

static void test_many_small_blocks_in_the_pool_are_registered(const char *folder)
{
    const char *path = path_in(folder);
    char *bytes = pool_alloc(8 * MIB);
    char *back = pool_alloc(8 * MIB);

    fill(bytes, 8 * MIB, 0, 5);
    for (int caller = 0; caller < 2; caller++) {
        struct nvmeio_config config = small_blocks();
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file =
            open_file(path, O_RDWR | O_CREAT | O_TRUNC, NVMEIO_DIRECT_AUTO);
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_WRITE, file, bytes, 8 * MIB, 0);
        unsigned held_before = files_held;
        t.caller = caller;
        CHECK(carry_out(handle, &t).result == 8 * MIB);
        t.op = NVMEIO_OP_READ;
        t.address = back;
        memset(back, CANARY, 8 * MIB);
        CHECK(carry_out(handle, &t).result == 8 * MIB);
        CHECK(memcmp(bytes, back, 8 * MIB) == 0);
        struct nvmeio_stats stats = stats_of(handle);
        CHECK(stats.blocks == 4096);
        CHECK(stats.blocks_registered > 3 * stats.blocks / 4);
        CHECK(bytes_registered() >= 8 * MIB);
        CHECK(bytes_registered() <= NVMEIO_REGISTERED_PAGES_MAX * NVMEIO_HUGE_BYTES);
        CHECK(caller || files_held > held_before);
        CHECK(files_held == files_dropped);
        nvmeio_file_release(file);
        nvmeio_handle_close(handle);
        CHECK(bytes_registered() == 0);
    }
    nvmeio_pool_free(bytes);
    nvmeio_pool_free(back);
}

static void test_bounces_are_registered(const char *path)
{
    struct nvmeio_config config = small_blocks();
    config.bounce = NVMEIO_BOUNCE_ALWAYS;
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new(4 * MIB, 1);

    read_and_check(handle, path, memory.address, 4 * MIB, 1);
    CHECK(stats_of(handle).blocks_registered > 512);
    guarded_free(&memory);
    nvmeio_handle_close(handle);
}

static void test_large_blocks_and_foreign_memory_are_not(const char *path)
{
    struct nvmeio_config config = small_blocks();
    config.bounce = NVMEIO_BOUNCE_NEVER;
    struct nvmeio_handle *small = open_handle(&config);
    config.block_bytes = 128 * KIB;
    struct nvmeio_handle *large = open_handle(&config);
    struct guarded foreign = guarded_new(4 * MIB, 0);
    char *memory = pool_alloc(4 * MIB);

    read_and_check(small, path, foreign.address, 4 * MIB, 1);
    CHECK(stats_of(small).blocks_registered == 0);
    for (int i = 0; i < 8; i++)
        read_and_check(large, path, memory, 4 * MIB, 1);
    CHECK(stats_of(large).blocks_registered == 0);
    CHECK(bytes_registered() == 0);
    guarded_free(&foreign);
    nvmeio_pool_free(memory);
    nvmeio_handle_close(small);
    nvmeio_handle_close(large);
}

/* More pages than places: each is registered in its turn, and the bound is kept. */
static void test_pages_take_turns(void)
{
    const size_t size = 3 * NVMEIO_REGISTERED_PAGES_MAX / 2 * NVMEIO_HUGE_BYTES;
    const char *path = path_in("/dev/shm");
    struct nvmeio_config config = small_blocks();
    struct nvmeio_handle *first = open_handle(&config);
    struct nvmeio_handle *second = open_handle(&config);
    char *memory = pool_alloc(size);

    make_file(path, size, 7);
    for (int i = 0; i < 2; i++) {
        read_and_check(first, path, memory, size, 7);
        read_and_check(second, path, memory, size, 7);
        CHECK(bytes_registered() == NVMEIO_REGISTERED_PAGES_MAX * NVMEIO_HUGE_BYTES);
    }
    CHECK(stats_of(first).blocks_registered > stats_of(first).blocks / 2);
    nvmeio_handle_close(first);
    /* What is used no more loses its place. */
    struct nvmeio_stats before = stats_of(second);
    char *last = memory + NVMEIO_REGISTERED_PAGES_MAX * NVMEIO_HUGE_BYTES;
    for (int i = 0; i < 4; i++)
        read_and_check(second, path, last, 4 * MIB, 7);
    struct nvmeio_stats after = stats_of(second);
    CHECK(after.blocks_registered - before.blocks_registered > 3 * 1024);
    nvmeio_handle_close(second);
    CHECK(bytes_registered() == 0);
    nvmeio_pool_free(memory);
}

/* Blocks in one page are prepared, but not yet submitted, when another takes its place:
 * both are the right ones. */
static void test_a_page_loses_its_place_to_what_comes_behind_it(const char *path)
{
    struct nvmeio_config config = small_blocks();
    config.queue_depth = 512;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    const size_t apart = NVMEIO_REGISTERED_PAGES_MAX * NVMEIO_HUGE_BYTES;
    char *memory = pool_alloc(apart + 4 * MIB);
    char *expected = malloc(2 * MIB);
    char *pages[2] = {memory, memory + apart};

    fill(expected, 2 * MIB, 0, 1);
    for (unsigned round = 0; round < 20; round++) {
        char *own = pages[round % 2], *other = pages[1 - round % 2];
        for (int i = 0; i < 4; i++)
            CHECK(read_at(handle, file, own, 2 * MIB, 0).result == 2 * MIB);
        uint64_t registered = stats_of(handle).blocks_registered;
        CHECK(read_at(handle, file, own, MIB, 0).result == MIB);
        CHECK(stats_of(handle).blocks_registered - registered == 256);
        memset(memory, CANARY, apart + 4 * MIB);
        /* The lane is busy with the first while the others come, and takes those at
         * once. */
        struct nvmeio_transfer t[3] = {
            transfer_of(NVMEIO_OP_READ, file, memory + 2 * MIB, 2 * MIB, 0),
            transfer_of(NVMEIO_OP_READ, file, own, 512 * KIB, 0),
            transfer_of(NVMEIO_OP_READ, file, other, MIB, 0)};
        struct nvmeio_request *requests[3];
        for (int i = 0; i < 3; i++)
            requests[i] = submit(handle, &t[i]);
        for (int i = 0; i < 3; i++) {
            CHECK(finish(requests[i]).result == (int64_t)t[i].size);
            CHECK(memcmp(t[i].address, expected, t[i].size) == 0);
        }
    }
    free(expected);
    nvmeio_file_release(file);
    nvmeio_pool_free(memory);
    nvmeio_handle_close(handle);
}

/* Memory of others that lies between chunks of the pool, in the place of a page that is
 * registered already, and is given back and mapped anew behind our back. */
static void test_foreign_memory_between_ours_is_let_alone(const char *path)
{
    const size_t span = 4 * NVMEIO_REGISTERED_PAGES_MAX * NVMEIO_HUGE_BYTES;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    struct nvmeio_config config = small_blocks();
    config.bounce = NVMEIO_BOUNCE_NEVER; /* in small pages, maybe */
    struct nvmeio_handle *handle = open_handle(&config);
    char *ours = pool_alloc(NVMEIO_REGISTERED_PAGES_MAX * NVMEIO_HUGE_BYTES);
    char *foreign = mmap(NULL, span, PROT_READ | PROT_WRITE, flags, -1, 0);
    char *beyond = pool_alloc(span);

    CHECK(foreign != MAP_FAILED);
    CHECK(nvmeio_pool_may_hold(foreign + span / 2));
    for (unsigned i = 0; i < NVMEIO_REGISTERED_PAGES_MAX; i++)
        read_and_check(handle, path, ours + i * NVMEIO_HUGE_BYTES, MIB, 1);
    uint64_t registered = stats_of(handle).blocks_registered;
    CHECK(registered > 0);
    char *place = foreign + span / 2 - (uintptr_t)foreign % NVMEIO_HUGE_BYTES;
    for (int i = 0; i < 8; i++) {
        read_and_check(handle, path, place, 2 * MIB, 1);
        CHECK(mmap(place, 2 * MIB, PROT_READ | PROT_WRITE, flags | MAP_FIXED, -1, 0) ==
              place);
    }
    CHECK(stats_of(handle).blocks_registered == registered);
    nvmeio_handle_close(handle);
    munmap(foreign, span);
    nvmeio_pool_free(ours);
    nvmeio_pool_free(beyond);
}

/* A block that lies in two pages is in neither's place. */
static void test_blocks_in_two_pages_are_right(const char *path)
{
    struct nvmeio_config config = small_blocks();
    config.block_bytes = 64 * KIB;
    struct nvmeio_handle *handle = open_handle(&config);
    char *memory = pool_alloc(8 * MIB);

    for (int i = 0; i < 6; i++)
        read_and_check(handle, path, memory + 20 * KIB, 4 * MIB, 1);
    struct nvmeio_stats stats = stats_of(handle);
    CHECK(stats.blocks_registered > 0 && stats.blocks_registered < stats.blocks);
    nvmeio_pool_free(memory);
    nvmeio_handle_close(handle);
}

/* The pool unmaps what is registered, and maps other memory where it was. */
static void test_memory_that_was_mapped_anew_is_the_new(const char *path)
{
    struct nvmeio_config config = small_blocks();
    struct nvmeio_handle *handle = open_handle(&config);
    unsigned returns = 0;

    for (int i = 0; i < 8; i++) {
        char *memory = pool_alloc(4 * MIB);
        read_and_check(handle, path, memory, 4 * MIB, 1);
        CHECK(bytes_registered() > 0);
        nvmeio_pool_free(memory);
        /* One that only fits when all the rest has gone. */
        struct nvmeio_pool_stats stats;
        nvmeio_pool_get_stats(&stats);
        uint64_t unmappings = nvmeio_pool_unmappings();
        nvmeio_pool_set_limit(stats.bytes_mapped + NVMEIO_HUGE_BYTES);
        char *other = pool_alloc(stats.bytes_mapped + NVMEIO_HUGE_BYTES);
        CHECK(nvmeio_pool_unmappings() > unmappings);
        nvmeio_pool_set_limit(0);
        returns += other <= memory && memory < other + 4 * MIB;
        read_and_check(handle, path, other, 4 * MIB, 1);
        nvmeio_pool_free(other);
    }
    CHECK(returns > 0);
    CHECK(stats_of(handle).blocks_registered > 0);
    nvmeio_handle_close(handle);
    CHECK(bytes_registered() == 0);
}

/* Nobody else has the file open: so says the kernel when it grants a lease. */
static void check_closed(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK(fcntl(fd, F_SETLEASE, F_WRLCK) == 0);
    close(fd);
}

static void test_files_are_let_go_and_never_mistaken(void)
{
    enum { COUNT = 4 };
    const char *paths[COUNT];
    struct nvmeio_config config = small_blocks();
    config.lanes = 2;
    config.overlap_events = true;
    struct nvmeio_handle *handle = open_handle(&config);
    char *memory = pool_alloc(2 * MIB);

    for (unsigned i = 0; i < COUNT; i++) {
        paths[i] = path_in(test_folder());
        make_file(paths[i], 2 * MIB, 20 + i);
    }
    unsigned held_before = files_held;
    for (unsigned i = 0; i < 8 * COUNT; i++) {
        /* With the descriptors of the file before. */
        read_and_check(handle, paths[i % COUNT], memory, 2 * MIB, 20 + i % COUNT);
        check_closed(paths[i % COUNT]);
    }
    CHECK(files_held > held_before + COUNT);
    nvmeio_pool_free(memory);
    nvmeio_handle_close(handle);
    CHECK(files_held == files_dropped);
}

/* More files in flight at once than there are places. */
static void test_many_files_at_once(void)
{
    enum { COUNT = 20 };
    struct nvmeio_config config = small_blocks();
    config.queue_depth = 1024;
    config.overlap_events = true;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *files[COUNT];
    struct nvmeio_request *requests[COUNT];
    char *memory = pool_alloc(COUNT * 256 * KIB);
    char *expected = malloc(256 * KIB);
    const char *folder = test_folder();
    char paths[COUNT][256];

    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(paths[i], sizeof(paths[i]), "%s/nvmeio-test-%d-many-%u", folder,
                 (int)getpid(), i);
        make_file(paths[i], 256 * KIB, 50 + i);
        files[i] = open_file(paths[i], O_RDONLY, NVMEIO_DIRECT_AUTO);
        unlink(paths[i]);
    }
    for (unsigned round = 0; round < 4; round++) {
        memset(memory, CANARY, COUNT * 256 * KIB);
        for (unsigned i = 0; i < COUNT; i++) {
            struct nvmeio_transfer t = transfer_of(
                NVMEIO_OP_READ, files[i], memory + i * 256 * KIB, 256 * KIB, 0);
            requests[i] = submit(handle, &t);
        }
        for (unsigned i = 0; i < COUNT; i++) {
            CHECK(finish(requests[i]).result == 256 * KIB);
            fill(expected, 256 * KIB, 0, 50 + i);
            CHECK(memcmp(memory + i * 256 * KIB, expected, 256 * KIB) == 0);
        }
    }
    for (unsigned i = 0; i < COUNT; i++)
        nvmeio_file_release(files[i]);
    nvmeio_handle_close(handle);
    nvmeio_pool_free(memory);
    free(expected);
}

static void test_what_the_kernel_refuses_is_done_without(const char *path,
                                                         atomic_int *refusal,
                                                         bool memory_works)
{
    struct nvmeio_config config = small_blocks();
    struct nvmeio_handle *handle = open_handle(&config);
    char *memory = pool_alloc(4 * MIB);
    unsigned held_before = files_held;

    *refusal = EPERM;
    read_and_check(handle, path, memory, 4 * MIB, 1);
    read_and_check(handle, path, memory, 4 * MIB, 1);
    CHECK((stats_of(handle).blocks_registered > 0) == memory_works);
    CHECK((bytes_registered() > 0) == memory_works);
    CHECK((files_held > held_before) != memory_works);
    *refusal = 0;
    nvmeio_pool_free(memory);
    nvmeio_handle_close(handle);
    CHECK(bytes_registered() == 0);
}

int main(void)
{
    begin();
    const char *path = path_in(test_folder());
    make_file(path, 4 * MIB, 1);
    if (!engine_works("io_uring"))
        SKIP("io_uring does not work here");
    test_little_memory_may_be_locked(path);
    test_many_small_blocks_in_the_pool_are_registered(test_folder());
    test_many_small_blocks_in_the_pool_are_registered("/dev/shm");
    test_bounces_are_registered(path);
    test_large_blocks_and_foreign_memory_are_not(path);
    test_pages_take_turns();
    test_a_page_loses_its_place_to_what_comes_behind_it(path);
    test_foreign_memory_between_ours_is_let_alone(path);
    test_blocks_in_two_pages_are_right(path);
    test_memory_that_was_mapped_anew_is_the_new(path);
    test_files_are_let_go_and_never_mistaken();
    test_many_files_at_once();
    test_what_the_kernel_refuses_is_done_without(path, &refuse_prepare, false);
    test_what_the_kernel_refuses_is_done_without(path, &refuse_pages, false);
    test_what_the_kernel_refuses_is_done_without(path, &refuse_files, true);
    return 0;
}

#else

int main(void)
{
    SKIP("io_uring does not work here");
}

#endif
