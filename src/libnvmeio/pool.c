/* pool.c -- aligned, populated memory in huge pages, kept and reused.
 *
 * Memory is mapped in chunks of whole huge pages and cut into extents. A tree of all
 * extents, ordered by address, finds the one that contains an address. Each arena has a
 * tree of its free extents, ordered by size. An allocation takes the best fit, and free
 * neighbours of one arena are joined.
 *
 * Small and large allocations have separate arenas, because a long-lived small one in
 * the middle of free memory would leave no room for the next large one. Each NUMA node
 * has its own arenas as well.
 *
 * One mutex guards all of it. Mapping, populating and locking pages may take long, so
 * that happens without it. Threads that want less than a huge page wait while one of
 * them maps one for all. */
#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <search.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <nvmeio/pool.h>
#include <nvmeio/system.h>

#include "fork.h"
#include "pages.h"

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << MAP_HUGE_SHIFT)
#endif

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; libc headers may be older */
#endif

struct extent {
    uintptr_t address; /* these two first: compare_extents() reads no others */
    size_t bytes;
    struct arena *arena;
    struct extent *left, *right; /* in the arena's tree of free extents */
    struct extent *next;         /* in a list of extents to unmap */
    bool used;
    bool locked;
    bool pinned;
    int uses;
};

/* Allocations of the same kind: small or large, on one node. */
struct arena {
    struct extent *free; /* the root of the tree */
    bool grows; /* a thread is mapping a huge page for all threads that want less */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
/* An arena grew, or could not. */
static pthread_cond_t grown = PTHREAD_COND_INITIALIZER;
static void *extents;                                       /* the root of tsearch(3) */
static struct arena small_arenas[NVMEIO_POOL_NODE_MAX + 2]; /* by node + 1 */
static struct arena large_arenas[NVMEIO_POOL_NODE_MAX + 2];
static size_t small_granule_bytes = NVMEIO_POOL_ALIGN; /* sizes are rounded up to it */
static struct nvmeio_pool_stats stats;
/* The part of bytes_mapped that threads are about to map. */
static size_t growing_bytes;
static bool hugetlb_wanted;

/* All chunks lie between these. They are written under the mutex, but out_of_bounds()
 * reads them without it. Relaxed order is enough: a thread that has an address of the
 * pool got it after the bounds included its chunk. */
static _Atomic uintptr_t lowest = UINTPTR_MAX;
static _Atomic uintptr_t highest;

static size_t round_up(size_t size, size_t granule_bytes)
{
    return (size + granule_bytes - 1) / granule_bytes * granule_bytes;
}

static bool out_of_bounds(const void *address)
{
    return (uintptr_t)address < atomic_load_explicit(&lowest, memory_order_relaxed) ||
           (uintptr_t)address >= atomic_load_explicit(&highest, memory_order_relaxed);
}

/* Extents that overlap compare equal, so a key of one byte finds the extent around
 * it. */
static int compare_extents(const void *left, const void *right)
{
    const struct extent *a = left;
    const struct extent *b = right;
    if (a->address + a->bytes <= b->address)
        return -1;
    return b->address + b->bytes <= a->address;
}

static struct extent *find_extent(uintptr_t address)
{
    struct extent key = {.address = address, .bytes = 1};
    struct extent **found = tfind(&key, &extents, compare_extents);
    return found ? *found : NULL;
}

static struct extent *find_used(const void *address)
{
    struct extent *extent = find_extent((uintptr_t)address);
    return extent && extent->used ? extent : NULL;
}

static struct extent *new_extent(struct arena *arena, uintptr_t address, size_t bytes)
{
    struct extent *extent = calloc(1, sizeof(*extent));
    if (!extent)
        return NULL;
    extent->address = address;
    extent->bytes = bytes;
    extent->arena = arena;
    if (!tsearch(extent, &extents, compare_extents)) {
        free(extent);
        return NULL;
    }
    return extent;
}

/* The free extents of an arena are a treap: a search tree by size and address, and a
 * heap by numbers that look random, so that its depth is logarithmic. */
static bool is_before(const struct extent *a, const struct extent *b)
{
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->address < b->address;
}

static uint32_t priority_of(const struct extent *extent)
{
    return (uint32_t)(extent->address * UINT64_C(0x9e3779b97f4a7c15) >> 32);
}

/* Divide a tree into those before `extent` and the others. */
static void split(struct extent *tree, const struct extent *extent,
                  struct extent **before, struct extent **others)
{
    while (tree) {
        if (is_before(tree, extent)) {
            *before = tree;
            before = &tree->right;
            tree = tree->right;
        } else {
            *others = tree;
            others = &tree->left;
            tree = tree->left;
        }
    }
    *before = *others = NULL;
}

static void add_free(struct extent *extent)
{
    struct extent **place = &extent->arena->free;

    while (*place && priority_of(*place) >= priority_of(extent))
        place = is_before(*place, extent) ? &(*place)->right : &(*place)->left;
    split(*place, extent, &extent->left, &extent->right);
    *place = extent;
}

static void remove_free(struct extent *extent)
{
    struct extent **place = &extent->arena->free;
    struct extent *left = extent->left, *right = extent->right;

    while (*place != extent)
        place = is_before(*place, extent) ? &(*place)->right : &(*place)->left;
    while (left && right) {
        if (priority_of(left) >= priority_of(right)) {
            *place = left;
            place = &left->right;
            left = left->right;
        } else {
            *place = right;
            place = &right->left;
            right = right->left;
        }
    }
    *place = left ? left : right;
}

/* Return the smallest free extent that is large enough; of several, the one with the
 * lowest address, so that the top of the memory stays in one piece. */
static struct extent *best_fit(const struct arena *arena, size_t bytes)
{
    struct extent *best = NULL, *extent = arena->free;

    while (extent) {
        if (extent->bytes >= bytes)
            best = extent;
        extent = extent->bytes >= bytes ? extent->left : extent->right;
    }
    return best;
}

/* Split an extent, which is not in a tree, after its first `bytes`, and return the
 * rest, which is free. Returns NULL, and changes nothing, if there is no memory for
 * another extent. */
static struct extent *cut(struct extent *extent, size_t bytes)
{
    size_t rest_bytes = extent->bytes - bytes;
    extent->bytes = bytes;
    struct extent *rest =
        new_extent(extent->arena, extent->address + bytes, rest_bytes);
    if (rest)
        add_free(rest);
    else
        extent->bytes += rest_bytes;
    return rest;
}

/* Hand out the first `bytes` of a free extent. */
static int take(struct extent *extent, size_t bytes)
{
    remove_free(extent);
    if (bytes < extent->bytes && !cut(extent, bytes)) {
        add_free(extent);
        return -ENOMEM;
    }
    extent->used = true;
    return 0;
}

/* Join `upper` to `lower`, which ends where `upper` begins. */
static void join(struct extent *lower, struct extent *upper)
{
    tdelete(upper, &extents, compare_extents);
    lower->bytes += upper->bytes;
    free(upper);
}

static bool is_free_in(const struct extent *extent, const struct arena *arena)
{
    return extent && !extent->used && extent->arena == arena;
}

static void put_back(struct extent *extent)
{
    extent->used = false;
    struct extent *upper = find_extent(extent->address + extent->bytes);
    if (is_free_in(upper, extent->arena)) {
        remove_free(upper);
        join(extent, upper);
    }
    struct extent *lower = find_extent(extent->address - 1);
    if (is_free_in(lower, extent->arena)) {
        remove_free(lower);
        join(lower, extent);
        extent = lower;
    }
    add_free(extent);
}

/* Populate every page now, with huge pages if the kernel has any. Small pages are only
 * slower. */
static int populate(char *chunk, size_t bytes)
{
    madvise(chunk, bytes, MADV_HUGEPAGE);
    if (madvise(chunk, bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL)
        return -ENOMEM;
    /* Kernels before 5.14 do not know this advice. */
    for (size_t position = 0; position < bytes; position += NVMEIO_POOL_ALIGN)
        *(volatile char *)(chunk + position) = 0;
    return 0;
}

/* Bind a chunk's memory to one node, by mbind(2). The system call is used directly,
 * because its wrapper is in libnuma. */
static int bind_to(char *chunk, size_t bytes, int node)
{
    unsigned long nodes = node < 0 ? 0 : 1ul << node;

    if (node < 0 || syscall(SYS_mbind, chunk, bytes, MPOL_BIND, &nodes,
                            sizeof(nodes) * CHAR_BIT + 1, 0ul) == 0)
        return 0;
    return -errno;
}

/* Map `bytes` from hugetlbfs, which reserves its pages at once. */
static char *map_hugetlb(size_t bytes)
{
    char *chunk = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB, -1, 0);
    return chunk == MAP_FAILED ? NULL : chunk;
}

/* Map, bind and populate a chunk. */
static int map_chunk(int node, size_t bytes, bool hugetlb, char **result)
{
    char *chunk = hugetlb ? map_hugetlb(bytes) : nvmeio_pages_map(bytes);

    if (!chunk)
        return -ENOMEM;
    int error = bind_to(chunk, bytes, node);
    if (error == 0)
        error = populate(chunk, bytes);
    if (error) {
        munmap(chunk, bytes);
        return error;
    }
    *result = chunk;
    return 0;
}

/* Add a chunk to the arena as a free extent. If there is no memory for the extent,
 * unmap the chunk and return NULL. */
static struct extent *adopt_chunk(struct arena *arena, char *chunk, size_t bytes)
{
    struct extent *extent = new_extent(arena, (uintptr_t)chunk, bytes);
    if (!extent) {
        munmap(chunk, bytes);
        return NULL;
    }
    add_free(extent);
    uintptr_t end = extent->address + bytes;
    if (extent->address < atomic_load_explicit(&lowest, memory_order_relaxed))
        atomic_store_explicit(&lowest, extent->address, memory_order_relaxed);
    if (end > atomic_load_explicit(&highest, memory_order_relaxed))
        atomic_store_explicit(&highest, end, memory_order_relaxed);
    return extent;
}

/* Where the whole huge pages of an extent begin and end. */
static uintptr_t whole_begin(const struct extent *extent)
{
    return round_up(extent->address, NVMEIO_HUGE_BYTES);
}

static uintptr_t whole_end(const struct extent *extent)
{
    return (extent->address + extent->bytes) / NVMEIO_HUGE_BYTES * NVMEIO_HUGE_BYTES;
}

/* List the free extents of a tree that contain whole huge pages, the largest first. */
static void list_free(struct extent *tree, struct extent **list)
{
    if (!tree)
        return;
    list_free(tree->left, list);
    if (whole_begin(tree) < whole_end(tree)) {
        tree->next = *list;
        *list = tree;
    }
    list_free(tree->right, list);
}

static uint64_t free_bytes(const struct arena *arenas)
{
    struct extent *list = NULL;
    uint64_t bytes = 0;

    for (int i = 0; i <= NVMEIO_POOL_NODE_MAX + 1; i++)
        list_free(arenas[i].free, &list);
    for (; list; list = list->next)
        bytes += whole_end(list) - whole_begin(list);
    return bytes;
}

/* Take the whole huge pages of a free extent out of the trees, as an extent of their
 * own. The memory around them stays free. NULL if there is no memory for an extent. */
static struct extent *take_whole(struct extent *extent)
{
    uintptr_t begin = whole_begin(extent), end = whole_end(extent);
    struct extent *whole = extent;

    remove_free(extent);
    if (end < extent->address + extent->bytes && !cut(extent, end - extent->address)) {
        add_free(extent);
        return NULL;
    }
    if (begin > extent->address) {
        whole = cut(extent, begin - extent->address);
        add_free(extent);
        if (whole)
            remove_free(whole);
    }
    if (whole)
        tdelete(whole, &extents, compare_extents);
    return whole;
}

/* Unmap extents that take_whole() returned, and return how many bytes. What the kernel
 * refuses to unmap is free again. The mutex is held, and unlocked during munmap(2) if
 * `unlock` is set: other threads may already map memory at the same addresses. */
static uint64_t unmap(struct extent *list, bool unlock)
{
    struct extent *kept = NULL, *next;
    uint64_t bytes = 0;

    if (unlock)
        pthread_mutex_unlock(&mutex);
    for (; list; list = next) {
        next = list->next;
        if (munmap((void *)list->address, list->bytes)) {
            list->next = kept;
            kept = list;
            continue;
        }
        bytes += list->bytes;
        free(list);
    }
    if (unlock)
        pthread_mutex_lock(&mutex);
    stats.bytes_mapped -= bytes;
    for (; kept; kept = next) {
        next = kept->next;
        /* Without memory for the tree it is lost, and stays counted. */
        if (tsearch(kept, &extents, compare_extents))
            put_back(kept);
    }
    return bytes;
}

/* Unmap free memory until `bytes` are left, or none is free. Returns how many bytes.
 * The mutex is held. */
static uint64_t unmap_down_to(struct arena *arenas, uint64_t bytes, bool unlock)
{
    struct extent *free = NULL, *whole = NULL, *next;
    uint64_t left = stats.bytes_mapped;

    for (int i = 0; i <= NVMEIO_POOL_NODE_MAX + 1; i++)
        list_free(arenas[i].free, &free);
    for (; free && left > bytes; free = next) {
        next = free->next;
        struct extent *extent = take_whole(free);
        if (!extent)
            continue;
        left -= extent->bytes;
        extent->next = whole;
        whole = extent;
    }
    return unmap(whole, unlock);
}

/* Whether `bytes` would fit under the limit after all free memory was unmapped. The
 * mutex is held. */
static bool has_room(size_t bytes)
{
    if (stats.bytes_limit == 0)
        stats.bytes_limit = nvmeio_memory_bytes() / 2;
    uint64_t kept =
        stats.bytes_mapped - free_bytes(large_arenas) - free_bytes(small_arenas);
    return bytes <= stats.bytes_limit && kept <= stats.bytes_limit - bytes;
}

/* Count `bytes` as mapped, if they fit under the limit. Free memory of other sizes or
 * nodes is unmapped for that, but only if it makes enough room. The mutex stays locked
 * during munmap(2), because this is rare. */
static bool reserve(size_t bytes)
{
    if (!has_room(bytes))
        return false;
    unmap_down_to(large_arenas, stats.bytes_limit - bytes, false);
    unmap_down_to(small_arenas, stats.bytes_limit - bytes, false);
    if (stats.bytes_mapped > stats.bytes_limit - bytes)
        return false;
    stats.bytes_mapped += bytes;
    return true;
}

/* Map a chunk of at least `bytes` for the arena. The mutex is held, and unlocked
 * meanwhile. */
static int grow(struct arena *arena, int node, size_t bytes, struct extent **result)
{
    size_t chunk_bytes = round_up(bytes, NVMEIO_HUGE_BYTES);
    bool hugetlb = hugetlb_wanted;
    char *chunk;

    if (!reserve(chunk_bytes))
        return -ENOMEM;
    growing_bytes += chunk_bytes;
    pthread_mutex_unlock(&mutex);
    int error = map_chunk(node, chunk_bytes, hugetlb, &chunk);
    if (error && hugetlb) {
        hugetlb = false;
        error = map_chunk(node, chunk_bytes, false, &chunk);
    }
    if (error == -ENOMEM && nvmeio_pool_trim() > 0)
        error = map_chunk(node, chunk_bytes, false, &chunk);
    pthread_mutex_lock(&mutex);
    growing_bytes -= chunk_bytes;
    if (error == 0) {
        *result = adopt_chunk(arena, chunk, chunk_bytes);
        error = *result ? 0 : -ENOMEM;
    }
    if (error)
        stats.bytes_mapped -= chunk_bytes;
    else if (hugetlb)
        stats.bytes_hugetlb += chunk_bytes;
    return error;
}

/* Find or map `bytes` and hand them out. Waiting for a thread that maps memory, and
 * opening files, are cancellation points. pthread_cancel(3) must not end the thread
 * there: the mutex would stay locked, or others would wait for ever for what this
 * thread maps. */
static int obtain(struct arena *arena, int node, size_t bytes, struct extent **result)
{
    int error = 0, cancelling;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
    pthread_mutex_lock(&mutex);
    struct extent *extent = best_fit(arena, bytes);
    /* Without this wait, 256 threads that want 4 KiB at once would map 2 MiB each. */
    while (!extent && arena->grows) {
        pthread_cond_wait(&grown, &mutex);
        extent = best_fit(arena, bytes);
    }
    bool reuse = extent != NULL;
    if (!extent) {
        arena->grows = bytes < NVMEIO_HUGE_BYTES;
        error = grow(arena, node, bytes, &extent);
        if (error == 0)
            error = take(extent, bytes);
        arena->grows = false;
        pthread_cond_broadcast(&grown);
    } else {
        error = take(extent, bytes);
    }
    if (error == 0) {
        stats.bytes_used += extent->bytes;
        stats.allocations++;
        stats.reuses += reuse;
        *result = extent;
    }
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(cancelling, NULL);
    return error;
}

int nvmeio_pool_alloc_on(int node, size_t size, bool lock, void **address, int *locked)
{
    struct extent *extent;

    if (size == 0 || node < -1 || node > NVMEIO_POOL_NODE_MAX)
        return -EINVAL;
    if (size > SIZE_MAX / 2)
        return -ENOMEM;
    bool small = size < NVMEIO_HUGE_BYTES;
    int error = obtain(small ? &small_arenas[node + 1] : &large_arenas[node + 1], node,
                       round_up(size, small ? small_granule_bytes : NVMEIO_HUGE_BYTES),
                       &extent);
    if (error)
        return error;
    *address = (void *)extent->address;
    bool is_locked = lock && mlock(*address, extent->bytes) == 0;
    if (lock && !is_locked)
        munlock(*address, extent->bytes); /* it may have locked a part */
    if (is_locked) {
        pthread_mutex_lock(&mutex);
        extent->locked = true;
        stats.bytes_locked += extent->bytes;
        pthread_mutex_unlock(&mutex);
    }
    if (locked)
        *locked = is_locked;
    return 0;
}

int nvmeio_pool_alloc(size_t size, bool lock, void **address, int *locked)
{
    return nvmeio_pool_alloc_on(-1, size, lock, address, locked);
}

bool nvmeio_pool_has_room(size_t size)
{
    if (size > SIZE_MAX / 2)
        return false;
    pthread_mutex_lock(&mutex);
    bool room = has_room(round_up(size, NVMEIO_HUGE_BYTES));
    pthread_mutex_unlock(&mutex);
    return room;
}

void nvmeio_pool_set_limit(uint64_t bytes)
{
    pthread_mutex_lock(&mutex);
    stats.bytes_limit = bytes ? bytes : nvmeio_memory_bytes() / 2;
    pthread_mutex_unlock(&mutex);
}

uint64_t nvmeio_pool_trim(void)
{
    int cancelling;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
    pthread_mutex_lock(&mutex);
    uint64_t bytes = unmap_down_to(large_arenas, 0, true);
    bytes += unmap_down_to(small_arenas, 0, true);
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(cancelling, NULL);
    return bytes;
}

void nvmeio_pool_set_hugetlb(bool wanted)
{
    pthread_mutex_lock(&mutex);
    hugetlb_wanted = wanted;
    pthread_mutex_unlock(&mutex);
}

void nvmeio_pool_free(void *address)
{
    if (!address)
        return;
    pthread_mutex_lock(&mutex);
    struct extent *extent = find_used(address);
    assert(extent && extent->address == (uintptr_t)address);
    extent->pinned = false;
    if (extent->locked) {
        /* The extent is still in use, so no other thread touches it while the mutex is
         * unlocked. */
        extent->locked = false;
        stats.bytes_locked -= extent->bytes;
        pthread_mutex_unlock(&mutex);
        munlock(address, extent->bytes);
        pthread_mutex_lock(&mutex);
    }
    extent->uses = 0;
    stats.bytes_used -= extent->bytes;
    put_back(extent);
    pthread_mutex_unlock(&mutex);
}

int nvmeio_pool_set_pinned(void *address, bool pinned)
{
    int result;
    pthread_mutex_lock(&mutex);
    struct extent *extent = find_used(address);
    if (!extent || extent->address != (uintptr_t)address) {
        result = -EINVAL;
    } else if (!pinned && extent->pinned && extent->uses > 0) {
        result = -EBUSY;
    } else {
        result = extent->pinned != pinned;
        extent->pinned = pinned;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

bool nvmeio_pool_is_pinned(const void *address, size_t size)
{
    if (out_of_bounds(address))
        return false;
    pthread_mutex_lock(&mutex);
    const struct extent *extent = find_used(address);
    bool pinned = extent && extent->pinned &&
                  size <= extent->address + extent->bytes - (uintptr_t)address;
    pthread_mutex_unlock(&mutex);
    return pinned;
}

int nvmeio_pool_use(const void *address, int change)
{
    if (out_of_bounds(address))
        return 0;
    int uses = 0;
    pthread_mutex_lock(&mutex);
    struct extent *extent = find_used(address);
    if (extent) {
        /* A forked child may release requests of its parent, whose uses are no longer
         * counted: see forget_parent(). */
        uses = extent->uses + change;
        extent->uses = uses = uses > 0 ? uses : 0;
    }
    pthread_mutex_unlock(&mutex);
    return uses;
}

bool nvmeio_pool_holds(const void *address)
{
    if (out_of_bounds(address))
        return false;
    pthread_mutex_lock(&mutex);
    bool held = find_extent((uintptr_t)address) != NULL;
    pthread_mutex_unlock(&mutex);
    return held;
}

void nvmeio_pool_get_stats(struct nvmeio_pool_stats *copy)
{
    pthread_mutex_lock(&mutex);
    *copy = stats;
    pthread_mutex_unlock(&mutex);
    if (copy->bytes_limit == 0)
        copy->bytes_limit = nvmeio_memory_bytes() / 2;
}

static void lock_pool(void)
{
    pthread_mutex_lock(&mutex);
}

static void unlock_pool(void)
{
    pthread_mutex_unlock(&mutex);
}

static void forget_parent(const void *node, VISIT visit, int depth)
{
    (void)visit;
    (void)depth;
    struct extent *extent = *(struct extent *const *)node;
    extent->locked = false;
    extent->uses = 0;
}

/* A forked child does not inherit memory locks (mlock(2)), and its parent's requests
 * never end in it. */
static void unlock_pool_in_child(void)
{
    stats.bytes_locked = 0;
    /* The threads that were about to map these bytes do not exist here. */
    stats.bytes_mapped -= growing_bytes;
    growing_bytes = 0;
    for (int i = 0; i <= NVMEIO_POOL_NODE_MAX + 1; i++)
        small_arenas[i].grows = false;
    grown = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    twalk(extents, forget_parent);
    pthread_mutex_unlock(&mutex);
}

static struct nvmeio_fork_hooks fork_hooks = {
    .prepare = lock_pool,
    .parent = unlock_pool,
    .child = unlock_pool_in_child,
};

__attribute__((constructor)) static void start_pool(void)
{
    /* mlock(2) works on whole pages, so no two allocations may share one. */
    size_t page_bytes = sysconf(_SC_PAGESIZE);
    if (page_bytes > small_granule_bytes)
        small_granule_bytes = page_bytes;
    nvmeio_fork_hook(&fork_hooks);
}
