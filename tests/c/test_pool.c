/* The pool allocates aligned, populated memory and gets all of it back, with many
 * threads and forks.  Replaced madvise() and mlock() record calls and fail on demand;
 * that also bypasses the sanitizers' mlock(), which does nothing. */
#include <errno.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nvmeio/pool.h>
#include <nvmeio/system.h>

#include "check.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define POPULATE_WRITE 23 /* MADV_POPULATE_WRITE of Linux 5.14 */

static atomic_int populate_error; /* errno of populating, or 0 */
static atomic_int lock_error;
static atomic_int populate_refusals;
static atomic_int lock_refusals;
static _Atomic(char *) populated;
static atomic_int huge_requests;
static atomic_bool mapping; /* populating waits until this is false */
static atomic_bool unmapping, unmapping_begun;

int madvise(void *address, size_t size, int advice)
{
    int error = atomic_load(&populate_error);
    while (advice == POPULATE_WRITE && atomic_load(&mapping))
        ;
    if (advice == POPULATE_WRITE) {
        atomic_store(&populated, address);
        if (error) {
            atomic_fetch_add(&populate_refusals, 1);
            errno = error;
            return -1;
        }
    }
    if (advice == MADV_HUGEPAGE)
        atomic_fetch_add(&huge_requests, 1);
    return syscall(SYS_madvise, address, size, advice);
}

int munmap(void *address, size_t size)
{
    if (atomic_load(&unmapping))
        atomic_store(&unmapping_begun, true);
    while (atomic_load(&unmapping))
        ;
    return (int)syscall(SYS_munmap, address, size);
}

int mlock(const void *address, size_t size)
{
    int error = atomic_load(&lock_error);
    if (error) {
        atomic_fetch_add(&lock_refusals, 1);
        errno = error;
        return -1;
    }
    return syscall(SYS_mlock, address, size);
}

int munlock(const void *address, size_t size)
{
    return syscall(SYS_munlock, address, size);
}

static struct nvmeio_pool_stats get_stats(void)
{
    struct nvmeio_pool_stats stats;
    nvmeio_pool_get_stats(&stats);
    return stats;
}

static void *alloc(size_t size)
{
    void *address = NULL;
    CHECK(nvmeio_pool_alloc(size, false, &address, NULL) == 0);
    return address;
}

static bool is_resident(void *address, size_t size)
{
    size_t page_bytes = sysconf(_SC_PAGESIZE);
    size_t pages = (size + page_bytes - 1) / page_bytes;
    unsigned char *vector = malloc(pages);
    bool resident = true;
    CHECK(vector && mincore(address, size, vector) == 0);
    for (size_t page = 0; page < pages; page++)
        resident = resident && vector[page] & 1;
    free(vector);
    return resident;
}

/* Bytes locked in this process, from the kernel. */
static size_t locked_by_kernel(void)
{
    char line[256];
    size_t locked_kib = SIZE_MAX;
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status);
    while (fgets(line, sizeof(line), status))
        if (sscanf(line, "VmLck: %zu kB", &locked_kib) == 1)
            break;
    fclose(status);
    CHECK(locked_kib != SIZE_MAX);
    return locked_kib * KIB;
}

static void wait_for_child(pid_t child)
{
    int status;
    CHECK(child > 0);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_memory_is_aligned_populated_and_apart(void)
{
    static const size_t sizes[] = {1,       4095,        4096,        4097,
                                   MIB,     2 * MIB - 1, 2 * MIB,     2 * MIB + 1,
                                   3 * MIB, 64 * KIB,    64 * MIB + 1};
    enum { COUNT = sizeof(sizes) / sizeof(*sizes) };
    unsigned char *memory[COUNT];
    uint64_t used_before = get_stats().bytes_used;
    int huge_before = atomic_load(&huge_requests);

    for (size_t i = 0; i < COUNT; i++) {
        memory[i] = alloc(sizes[i]);
        size_t align = sizes[i] < 2 * MIB ? NVMEIO_POOL_ALIGN : 2 * MIB;
        CHECK((uintptr_t)memory[i] % align == 0);
        CHECK(is_resident(memory[i], sizes[i]));
        memset(memory[i], (int)i + 1, sizes[i]);
    }
    CHECK(atomic_load(&huge_requests) > huge_before);
    for (size_t i = 0; i < COUNT; i++) {
        for (size_t j = 0; j < sizes[i]; j++)
            CHECK(memory[i][j] == i + 1);
        nvmeio_pool_free(memory[i]);
    }
    CHECK(get_stats().bytes_used == used_before);
}

static void test_freed_memory_is_reused_without_a_new_mapping(void)
{
    void *first = alloc(5 * MIB);
    nvmeio_pool_free(first);
    struct nvmeio_pool_stats before = get_stats();
    for (int i = 0; i < 100; i++) {
        void *again = alloc(5 * MIB);
        CHECK(again == first);
        nvmeio_pool_free(again);
    }
    struct nvmeio_pool_stats after = get_stats();
    CHECK(after.bytes_mapped == before.bytes_mapped);
    CHECK(after.allocations == before.allocations + 100);
    CHECK(after.reuses == before.reuses + 100);
}

/* Pieces of one extent, freed in any order, are one extent again. */
static void test_free_neighbours_are_joined(void)
{
    static const int orders[][4] = {
        {0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 1, 3}, {1, 3, 0, 2}};
    char *whole = alloc(256 * MIB);
    nvmeio_pool_free(whole);
    uint64_t mapped_before = get_stats().bytes_mapped;

    for (size_t i = 0; i < sizeof(orders) / sizeof(*orders); i++) {
        void *pieces[4];
        for (int j = 0; j < 4; j++)
            pieces[j] = alloc(64 * MIB);
        for (int j = 0; j < 4; j++)
            nvmeio_pool_free(pieces[orders[i][j]]);
        char *again = alloc(256 * MIB);
        CHECK(again == whole);
        nvmeio_pool_free(again);
    }
    CHECK(get_stats().bytes_mapped == mapped_before);
}

/* A long-lived small allocation must not fragment large free memory. */
static void test_small_allocations_leave_large_memory_whole(void)
{
    void *large = alloc(128 * MIB);
    void *small[1024];
    nvmeio_pool_free(large);
    for (int i = 0; i < 1024; i++)
        small[i] = alloc(4 * KIB);
    CHECK(alloc(128 * MIB) == large);
    nvmeio_pool_free(large);
    for (int i = 0; i < 1024; i++)
        nvmeio_pool_free(small[i]);

    uint64_t mapped_before = get_stats().bytes_mapped;
    for (int i = 0; i < 1024; i++)
        small[i] = alloc(4 * KIB);
    CHECK(get_stats().bytes_mapped == mapped_before);
    for (int i = 0; i < 1024; i++)
        nvmeio_pool_free(small[i]);
}

static void test_rounding_wastes_less_than_a_page_or_a_huge_page(void)
{
    static const size_t sizes[][2] = {{1, 4 * KIB},           {4097, 8 * KIB},
                                      {2 * MIB - 1, 2 * MIB}, {2 * MIB, 2 * MIB},
                                      {2 * MIB + 1, 4 * MIB}, {100 * MIB, 100 * MIB}};
    if (sysconf(_SC_PAGESIZE) != 4096)
        return;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        uint64_t used_before = get_stats().bytes_used;
        void *memory = alloc(sizes[i][0]);
        CHECK(get_stats().bytes_used - used_before == sizes[i][1]);
        nvmeio_pool_free(memory);
    }
}

static void test_impossible_sizes_are_refused(void)
{
    static const size_t sizes[] = {SIZE_MAX,         SIZE_MAX - 4096, SIZE_MAX / 2 + 1,
                                   SIZE_MAX / 2 - 1, SIZE_MAX / 2,    (size_t)1 << 50};
    struct nvmeio_pool_stats before = get_stats();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        void *memory = &before;
        CHECK(nvmeio_pool_alloc(sizes[i], true, &memory, NULL) == -ENOMEM);
        CHECK(!nvmeio_pool_has_room(sizes[i]));
        CHECK(memory == &before);
    }
    void *memory;
    CHECK(nvmeio_pool_alloc(0, false, &memory, NULL) == -EINVAL);
    struct nvmeio_pool_stats after = get_stats();
    CHECK(memcmp(&before, &after, sizeof(before)) == 0);
    nvmeio_pool_free(NULL);
}

static void test_memory_that_cannot_be_populated_is_an_error(void)
{
    nvmeio_pool_trim();
    struct nvmeio_pool_stats before = get_stats();
    int refusals_before = atomic_load(&populate_refusals);
    void *memory;
    atomic_store(&populate_error, ENOMEM);
    CHECK(nvmeio_pool_alloc(512 * MIB, false, &memory, NULL) == -ENOMEM);
    atomic_store(&populate_error, 0);
    CHECK(atomic_load(&populate_refusals) == refusals_before + 1);
    struct nvmeio_pool_stats after = get_stats();
    CHECK(memcmp(&before, &after, sizeof(before)) == 0);
    /* Nothing stays mapped for it. */
    CHECK(msync(atomic_load(&populated), 4096, MS_ASYNC) == -1 && errno == ENOMEM);
    /* With free memory, it is unmapped for a second attempt. */
    nvmeio_pool_free(alloc(4 * MIB));
    CHECK(get_stats().bytes_mapped > before.bytes_mapped);
    atomic_store(&populate_error, ENOMEM);
    CHECK(nvmeio_pool_alloc(512 * MIB, false, &memory, NULL) == -ENOMEM);
    atomic_store(&populate_error, 0);
    CHECK(atomic_load(&populate_refusals) == refusals_before + 3);
    CHECK(get_stats().bytes_mapped == before.bytes_mapped);
}

static void test_kernels_without_populate_get_touched_pages(void)
{
    size_t size = 300 * MIB;
    int refusals_before = atomic_load(&populate_refusals);
    atomic_store(&populate_error, EINVAL);
    void *memory = alloc(size);
    atomic_store(&populate_error, 0);
    CHECK(atomic_load(&populate_refusals) == refusals_before + 1);
    CHECK(is_resident(memory, size));
    nvmeio_pool_free(memory);
}

static void test_locking_is_real_and_ends_with_the_allocation(size_t size)
{
    size_t kernel_before = locked_by_kernel();
    struct nvmeio_pool_stats before = get_stats();
    void *memory;
    int locked = -1;
    CHECK(nvmeio_pool_alloc(size, true, &memory, &locked) == 0);
    if (!locked)
        SKIP("RLIMIT_MEMLOCK is too small to lock memory");
    uint64_t bytes = get_stats().bytes_used - before.bytes_used;
    CHECK(get_stats().bytes_locked == before.bytes_locked + bytes);
    CHECK(locked_by_kernel() == kernel_before + bytes);
    nvmeio_pool_free(memory);
    CHECK(get_stats().bytes_locked == before.bytes_locked);
    CHECK(locked_by_kernel() == kernel_before);
}

static struct nvmeio_pool_stats stats_now(void)
{
    struct nvmeio_pool_stats now;
    nvmeio_pool_get_stats(&now);
    return now;
}

/* The first test, while nothing is mapped. */
static void test_the_limit_of_mapped_memory_is_kept(void)
{
    void *large, *small, *behind, *other;

    CHECK(stats_now().bytes_mapped == 0);
    CHECK(stats_now().bytes_limit == nvmeio_memory_bytes() / 2);
    nvmeio_pool_set_limit(64 * MIB);
    CHECK(stats_now().bytes_limit == 64 * MIB);
    CHECK(nvmeio_pool_alloc(65 * MIB, false, &large, NULL) == -ENOMEM);
    CHECK(nvmeio_pool_alloc(64 * MIB, false, &large, NULL) == 0);
    memset(large, 1, 64 * MIB);
    CHECK(nvmeio_pool_alloc(1, false, &small, NULL) == -ENOMEM);
    nvmeio_pool_free(large);
    CHECK(stats_now().bytes_mapped == 64 * MIB);
    /* Free memory of another size makes room. */
    CHECK(nvmeio_pool_alloc(1, false, &small, NULL) == 0);
    CHECK(stats_now().bytes_mapped == 2 * MIB && stats_now().bytes_used == 4 * KIB);
    CHECK(nvmeio_pool_alloc(64 * MIB, false, &large, NULL) == -ENOMEM);
    CHECK(nvmeio_pool_alloc(40 * MIB, false, &large, NULL) == 0);
    CHECK(nvmeio_pool_alloc(22 * MIB, false, &other, NULL) == 0);
    memset(large, 2, 40 * MIB);
    memset(other, 3, 22 * MIB);
    CHECK(stats_now().bytes_mapped == 64 * MIB && stats_now().allocations == 4);
    nvmeio_pool_free(large);
    /* A huge page that is partly used is not unmapped. */
    CHECK(nvmeio_pool_alloc(1, false, &behind, NULL) == 0);
    nvmeio_pool_free(small);
    /* Free memory is kept if unmapping it would not be enough. */
    CHECK(!nvmeio_pool_has_room(44 * MIB) && nvmeio_pool_has_room(40 * MIB));
    CHECK(nvmeio_pool_alloc(44 * MIB, false, &large, NULL) == -ENOMEM);
    CHECK(stats_now().bytes_mapped == 64 * MIB);
    nvmeio_pool_free(other);
    nvmeio_pool_free(behind);
    CHECK(stats_now().bytes_used == 0);
    nvmeio_pool_set_limit(0);
    CHECK(stats_now().bytes_limit == nvmeio_memory_bytes() / 2);
}

/* Used memory stays, with the rest of its huge page, for any order of frees. */
static void test_trimming_unmaps_free_memory(void)
{
    char *small[64], *large = alloc(64 * MIB);

    nvmeio_pool_trim();
    uint64_t before = get_stats().bytes_mapped, used = get_stats().bytes_used;
    for (int i = 0; i < 64; i++)
        small[i] = alloc(MIB);
    char *other = alloc(32 * MIB);
    CHECK(nvmeio_pool_trim() == 0);
    memset(small[20], 5, MIB);
    memset(large, 6, 64 * MIB);
    for (int i = 0; i < 64; i++)
        if (i != 20)
            nvmeio_pool_free(small[i]);
    nvmeio_pool_free(other);
    uint64_t free_bytes = get_stats().bytes_mapped - before;
    CHECK(nvmeio_pool_trim() == free_bytes - 2 * MIB);
    CHECK(get_stats().bytes_mapped == before + 2 * MIB);
    CHECK(get_stats().bytes_used == used + MIB);
    CHECK(!nvmeio_pool_holds(other) && !nvmeio_pool_holds(small[30]));
    for (size_t i = 0; i < MIB; i++)
        CHECK(small[20][i] == 5);
    CHECK(large[0] == 6 && large[64 * MIB - 1] == 6);
    /* The pool works as before. */
    other = alloc(32 * MIB);
    memset(other, 7, 32 * MIB);
    nvmeio_pool_free(other);
    nvmeio_pool_free(small[20]);
    nvmeio_pool_free(large);
    CHECK(nvmeio_pool_trim() >= 34 * MIB);
    CHECK(nvmeio_pool_trim() == 0);
}

static void *trim(void *unused)
{
    (void)unused;
    nvmeio_pool_trim();
    return NULL;
}

static void test_a_thread_that_trims_holds_up_no_other(void)
{
    pthread_t thread;
    char *kept = alloc(4 * KIB);

    nvmeio_pool_trim();
    nvmeio_pool_free(alloc(64 * MIB));
    uint64_t before = get_stats().bytes_mapped;
    atomic_store(&unmapping, true);
    CHECK(pthread_create(&thread, NULL, trim, NULL) == 0);
    while (!atomic_load(&unmapping_begun))
        ;
    char *other = alloc(4 * KIB);
    CHECK(nvmeio_pool_holds(kept) && nvmeio_pool_holds(other));
    atomic_store(&unmapping, false);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(get_stats().bytes_mapped == before - 64 * MIB);
    nvmeio_pool_free(other);
    nvmeio_pool_free(kept);
}

#define PIECES 100
#define PIECE_PAGES 4

/* Against a model: pieces side by side in one huge page, of 1 to 4 pages each. */
static void test_the_smallest_piece_that_is_large_enough_is_taken(void)
{
    static char *pieces[PIECES];
    static size_t pages[PIECES];
    unsigned random = 1;

    nvmeio_pool_trim();

    for (int i = 0; i < PIECES; i++) {
        random = random * 1103515245 + 12345;
        pages[i] = 1 + (random >> 16) % PIECE_PAGES;
        pieces[i] = alloc(pages[i] * 4 * KIB);
    }
    CHECK(get_stats().bytes_mapped == 2 * MIB);
    /* Every other piece is freed, so that no two of them are joined. */
    for (int i = 0; i < PIECES; i += 2)
        nvmeio_pool_free(pieces[i]);
    for (int i = 0; i < PIECES; i += 2) {
        int best = -1;
        random = random * 1103515245 + 12345;
        size_t wanted = 1 + (random >> 16) % PIECE_PAGES;
        for (int j = 0; j < PIECES; j += 2)
            if (pages[j] == wanted && (best < 0 || pieces[j] < pieces[best]))
                best = j;
        if (best < 0)
            continue;
        char *found = alloc(wanted * 4 * KIB);
        CHECK(found == pieces[best]);
        pages[best] = 0;
    }
    for (int i = 0; i < PIECES; i += 2)
        if (pages[i] == 0)
            nvmeio_pool_free(pieces[i]);
    for (int i = 1; i < PIECES; i += 2)
        nvmeio_pool_free(pieces[i]);
    CHECK(get_stats().bytes_used == 0);
}

static void test_memory_comes_from_the_requested_node(void)
{
    void *memory;
    int node = -1;

    CHECK(nvmeio_pool_alloc_on(0, 8 * MIB, false, &memory, NULL) == 0);
    CHECK(syscall(SYS_get_mempolicy, &node, NULL, 0ul, memory,
                  MPOL_F_NODE | MPOL_F_ADDR) == 0);
    CHECK(node == 0);
    nvmeio_pool_free(memory);
    CHECK(nvmeio_pool_alloc_on(NVMEIO_POOL_NODE_MAX, MIB, false, &memory, NULL) ==
          -EINVAL);
    CHECK(nvmeio_pool_alloc_on(NVMEIO_POOL_NODE_MAX + 1, MIB, false, &memory, NULL) ==
          -EINVAL);
    CHECK(nvmeio_pool_alloc_on(-2, MIB, false, &memory, NULL) == -EINVAL);
}

static unsigned long free_huge_pages(void)
{
    unsigned long count = 0;
    FILE *file = fopen("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "r");

    if (file && fscanf(file, "%lu", &count) != 1)
        count = 0;
    if (file)
        fclose(file);
    return count;
}

/* There is memory with or without reserved pages.  The second test, while nothing this
 * large is mapped; in a child, because our children could not write to such memory. */
static void use_hugetlbfs(void)
{
    bool reserved = free_huge_pages() >= 64;
    uint64_t before = stats_now().bytes_hugetlb;
    void *memory;

    nvmeio_pool_set_hugetlb(true);
    CHECK(nvmeio_pool_alloc(128 * MIB, false, &memory, NULL) == 0);
    memset(memory, 3, 128 * MIB);
    nvmeio_pool_set_hugetlb(false);
    CHECK(stats_now().bytes_hugetlb - before == (reserved ? 128 * MIB : 0));
    nvmeio_pool_free(memory);
}

static void test_hugetlbfs_is_used_as_far_as_pages_are_reserved(void)
{
    pid_t child = fork();
    int status;

    if (child == 0) {
        use_hugetlbfs();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void test_refused_locks_are_no_error(void)
{
    static const int errors[] = {EPERM, ENOMEM, EAGAIN};
    uint64_t locked_before = get_stats().bytes_locked;
    int refusals_before = atomic_load(&lock_refusals);
    for (int i = 0; i < 3; i++) {
        void *memory;
        int locked = -1;
        atomic_store(&lock_error, errors[i]);
        CHECK(nvmeio_pool_alloc(MIB, true, &memory, &locked) == 0);
        atomic_store(&lock_error, 0);
        CHECK(locked == 0 && get_stats().bytes_locked == locked_before);
        memset(memory, 1, MIB);
        nvmeio_pool_free(memory);
    }
    CHECK(atomic_load(&lock_refusals) == refusals_before + 3);
}

static void test_pinned_memory_is_found_by_any_slice(void)
{
    size_t size = 4 * MIB;
    char *memory = alloc(size);
    char *neighbour = alloc(size);

    CHECK(!nvmeio_pool_is_pinned(memory, size));
    CHECK(nvmeio_pool_set_pinned(memory, true) == 1);
    CHECK(nvmeio_pool_set_pinned(memory, true) == 0);
    CHECK(nvmeio_pool_is_pinned(memory, size));
    CHECK(nvmeio_pool_is_pinned(memory + size - 1, 1));
    CHECK(nvmeio_pool_is_pinned(memory + 5, 1000));
    CHECK(!nvmeio_pool_is_pinned(memory, size + 1));
    CHECK(!nvmeio_pool_is_pinned(memory + 5, SIZE_MAX));
    CHECK(!nvmeio_pool_is_pinned(memory - 1, 2));
    CHECK(!nvmeio_pool_is_pinned(neighbour, 1));
    CHECK(!nvmeio_pool_is_pinned(&memory, 1));
    CHECK(nvmeio_pool_set_pinned(memory + 4096, true) == -EINVAL);
    CHECK(nvmeio_pool_set_pinned(&memory, true) == -EINVAL);
    CHECK(nvmeio_pool_set_pinned((void *)UINTPTR_MAX, true) == -EINVAL);
    CHECK(nvmeio_pool_set_pinned(memory, false) == 1);
    CHECK(nvmeio_pool_set_pinned(memory, false) == 0);
    CHECK(!nvmeio_pool_is_pinned(memory, size));

    CHECK(nvmeio_pool_set_pinned(memory, true) == 1);
    nvmeio_pool_free(memory);
    CHECK(!nvmeio_pool_is_pinned(memory, size));
    CHECK(nvmeio_pool_set_pinned(memory, false) == -EINVAL);
    CHECK(alloc(size) == memory && !nvmeio_pool_is_pinned(memory, size));
    nvmeio_pool_free(memory);
    nvmeio_pool_free(neighbour);
}

static void test_uses_are_counted_and_keep_the_pin(void)
{
    char *memory = alloc(MIB);
    CHECK(nvmeio_pool_set_pinned(memory, true) == 1);
    CHECK(nvmeio_pool_use(memory + 100, 1) == 1);
    CHECK(nvmeio_pool_use(memory + MIB - 1, 1) == 2);
    CHECK(nvmeio_pool_set_pinned(memory, false) == -EBUSY);
    CHECK(nvmeio_pool_use(memory, -1) == 1);
    CHECK(nvmeio_pool_set_pinned(memory, false) == -EBUSY);
    CHECK(nvmeio_pool_is_pinned(memory, MIB));
    CHECK(nvmeio_pool_use(memory, -1) == 0);
    CHECK(nvmeio_pool_use(memory, -1) == 0);
    CHECK(nvmeio_pool_set_pinned(memory, false) == 1);
    CHECK(nvmeio_pool_use(&memory, 1) == 0);
    CHECK(nvmeio_pool_use(NULL, 1) == 0);
    CHECK(nvmeio_pool_use(memory, 1) == 1);
    nvmeio_pool_free(memory);
    CHECK(nvmeio_pool_use(memory, 1) == 0);
    /* Its next user starts without uses. */
    CHECK(alloc(MIB) == memory && nvmeio_pool_use(memory, 1) == 1);
    nvmeio_pool_free(memory);
}

static void test_a_child_counts_the_fork_and_forgets_locks_and_uses(void)
{
    uint32_t generation = nvmeio_fork_generation();
    void *memory;
    CHECK(nvmeio_pool_alloc(MIB, true, &memory, NULL) == 0);
    uint64_t locked_before = get_stats().bytes_locked;
    CHECK(nvmeio_pool_set_pinned(memory, true) == 1);
    CHECK(nvmeio_pool_use(memory, 1) == 1);
    memset(memory, 7, MIB);
    pid_t child = fork();
    if (child == 0) {
        alarm(30); /* a mutex that nobody will unlock must not hang the test */
        CHECK(nvmeio_fork_generation() == generation + 1);
        CHECK(get_stats().bytes_locked == 0 && locked_by_kernel() == 0);
        CHECK(nvmeio_pool_is_pinned(memory, MIB));
        CHECK(nvmeio_pool_set_pinned(memory, false) == 1);
        CHECK(((char *)memory)[MIB - 1] == 7);
        nvmeio_pool_free(memory);
        pid_t grandchild = fork();
        if (grandchild == 0)
            _exit(nvmeio_fork_generation() != generation + 2);
        wait_for_child(grandchild);
        _exit(0);
    }
    wait_for_child(child);
    CHECK(nvmeio_fork_generation() == generation);
    CHECK(get_stats().bytes_locked == locked_before);
    CHECK(nvmeio_pool_set_pinned(memory, false) == -EBUSY);
    CHECK(nvmeio_pool_use(memory, -1) == 0);
    nvmeio_pool_free(memory);
}

/* A fork happens while a thread maps more memory for the pool than there is. */
static void *map_slowly(void *argument)
{
    nvmeio_pool_free(alloc(*(uint64_t *)argument + 2 * MIB));
    return NULL;
}

static void test_a_child_does_not_count_what_a_thread_was_mapping(void)
{
    pthread_t thread;
    uint64_t mapped_before = get_stats().bytes_mapped;

    atomic_store(&mapping, true);
    CHECK(pthread_create(&thread, NULL, map_slowly, &mapped_before) == 0);
    while (get_stats().bytes_mapped == mapped_before)
        ;
    pid_t child = fork();
    if (child == 0)
        _exit(get_stats().bytes_mapped != mapped_before);
    atomic_store(&mapping, false);
    wait_for_child(child);
    pthread_join(thread, NULL);
}

static void *alloc_small(void *unused)
{
    (void)unused;
    nvmeio_pool_free(alloc(4096));
    return NULL;
}

/* One thread maps memory, and another waits for it. */
static void test_cancelled_threads_leave_the_pool_usable(void)
{
    static const struct timespec pause = {0, 50000000};
    pthread_t mapper, waiter;

    alarm(30); /* a mutex that nobody will unlock must not hang the test */
    nvmeio_pool_trim();
    atomic_store(&mapping, true);
    CHECK(pthread_create(&mapper, NULL, alloc_small, NULL) == 0);
    while (get_stats().bytes_mapped == 0)
        ;
    CHECK(pthread_create(&waiter, NULL, alloc_small, NULL) == 0);
    nanosleep(&pause, NULL);
    pthread_cancel(waiter);
    pthread_cancel(mapper);
    nanosleep(&pause, NULL);
    atomic_store(&mapping, false);
    pthread_join(waiter, NULL);
    pthread_join(mapper, NULL);
    nvmeio_pool_free(alloc(4096));
    alarm(0);
}

#define HELD 8

static atomic_bool stop;
static pthread_barrier_t started;

struct held {
    unsigned char *memory;
    size_t size;
};

/* Memory that was allocated twice would have lost its marks. */
static void release_held(struct held *held, unsigned char mark)
{
    CHECK(held->memory[0] == mark && held->memory[held->size - 1] == mark);
    CHECK(nvmeio_pool_use(held->memory, -1) == 0);
    nvmeio_pool_free(held->memory);
    held->memory = NULL;
}

/* Allocate, mark and free memory of mixed sizes until asked to stop. */
static void *hammer(void *argument)
{
    unsigned char mark = (unsigned char)(uintptr_t)argument;
    unsigned seed = mark;
    struct held all[HELD] = {{NULL, 0}};

    pthread_barrier_wait(&started);
    while (!atomic_load(&stop)) {
        struct held *held = &all[rand_r(&seed) % HELD];
        if (held->memory) {
            release_held(held, mark);
            continue;
        }
        bool small = rand_r(&seed) % 4;
        bool lock = rand_r(&seed) % 8 == 0;
        held->size = small ? 1 + rand_r(&seed) % (256 * KIB)
                           : 2 * MIB + rand_r(&seed) % (4 * MIB);
        void *address;
        CHECK(nvmeio_pool_alloc(held->size, lock, &address, NULL) == 0);
        held->memory = address;
        held->memory[0] = held->memory[held->size - 1] = mark;
        CHECK(nvmeio_pool_use(address, 1) == 1);
    }
    for (int i = 0; i < HELD; i++)
        if (all[i].memory)
            release_held(&all[i], mark);
    return NULL;
}

/* Runs in a child; the parent's other threads may have been anywhere in the pool. */
static void use_pool_in_child(void)
{
    alarm(30);
    for (int i = 0; i < 50; i++) {
        size_t size = (size_t)1 << (10 + i % 14);
        uint64_t used_before = get_stats().bytes_used;
        unsigned char *memory = alloc(size);
        memset(memory, i, size);
        CHECK(memory[size - 1] == i);
        nvmeio_pool_free(memory);
        CHECK(get_stats().bytes_used == used_before);
    }
    _exit(0);
}

static void test_threads_and_forked_children_share_the_pool(void)
{
    enum { THREADS = 4, FORKS = 40 };
    struct nvmeio_pool_stats before = get_stats();
    pthread_t threads[THREADS];

    pthread_barrier_init(&started, NULL, THREADS + 1);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, hammer, (void *)(i + 1)) == 0);
    /* ASan allocates in AsanThread::ThreadStart(), and the one of gcc 12 does not hold
     * its allocator's locks over a fork: a child that is forked while a thread starts
     * may wait for such a lock for ever. */
    pthread_barrier_wait(&started);
    for (int i = 0; i < FORKS; i++) {
        pid_t child = fork();
        if (child == 0)
            use_pool_in_child();
        wait_for_child(child);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    pthread_barrier_destroy(&started);
    struct nvmeio_pool_stats after = get_stats();
    CHECK(after.allocations > before.allocations);
    CHECK(after.bytes_used == before.bytes_used);
    CHECK(after.bytes_locked == before.bytes_locked);
}

int main(void)
{
    test_the_limit_of_mapped_memory_is_kept();
    test_hugetlbfs_is_used_as_far_as_pages_are_reserved();
    test_memory_is_aligned_populated_and_apart();
    test_freed_memory_is_reused_without_a_new_mapping();
    test_free_neighbours_are_joined();
    test_trimming_unmaps_free_memory();
    test_a_thread_that_trims_holds_up_no_other();
    test_the_smallest_piece_that_is_large_enough_is_taken();
    test_small_allocations_leave_large_memory_whole();
    test_rounding_wastes_less_than_a_page_or_a_huge_page();
    test_impossible_sizes_are_refused();
    test_memory_that_cannot_be_populated_is_an_error();
    test_kernels_without_populate_get_touched_pages();
    test_refused_locks_are_no_error();
    test_memory_comes_from_the_requested_node();
    test_pinned_memory_is_found_by_any_slice();
    test_uses_are_counted_and_keep_the_pin();
    test_a_child_does_not_count_what_a_thread_was_mapping();
    test_a_child_counts_the_fork_and_forgets_locks_and_uses();
    test_cancelled_threads_leave_the_pool_usable();
    test_threads_and_forked_children_share_the_pool();
    /* Last, because these skip the rest if memory cannot be locked. */
    test_locking_is_real_and_ends_with_the_allocation(64 * KIB);
    test_locking_is_real_and_ends_with_the_allocation(6 * MIB);
    return 0;
}
