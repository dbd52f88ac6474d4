/* pool.h -- a process-wide pool of aligned memory, in huge pages if possible.
 *
 * Memory is populated once and reused after it is freed.  It is unmapped only to make
 * room for other sizes below the limit, where the system has no memory for them, and by
 * nvmeio_pool_trim().  A forked child
 * continues with its copy of the pool, of which nothing is locked or counted as in use.
 * Thread-safe. */
#ifndef NVMEIO_POOL_H
#define NVMEIO_POOL_H

#include <nvmeio/base.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NVMEIO_POOL_ALIGN 4096u

/* The highest number of a NUMA node. */
#define NVMEIO_POOL_NODE_MAX 63

struct nvmeio_pool_stats {
    uint64_t bytes_limit;   /* of bytes_mapped */
    uint64_t bytes_mapped;  /* taken from the system */
    uint64_t bytes_hugetlb; /* mapped from hugetlbfs so far */
    uint64_t bytes_used;    /* allocated now, in whole pages or huge pages */
    uint64_t bytes_locked;  /* of those, locked by mlock(2) */
    uint64_t allocations;   /* so far */
    uint64_t reuses;        /* of those, from memory that was already mapped */
};

/* Allocate at least `size` bytes (1 or more), aligned to NVMEIO_POOL_ALIGN and
 * populated, with undefined content.  `lock`: lock them if RLIMIT_MEMLOCK allows;
 * *locked (may be NULL) is the result.  Returns 0; -ENOMEM if the limit is reached or
 * the system is out of memory; -EINVAL for 0 bytes.  Free with nvmeio_pool_free(). */
NVMEIO_API int nvmeio_pool_alloc(size_t size, bool lock, void **address, int *locked);

/* The same on a NUMA node; -1: any.  Also returns -EINVAL for a node that does not
 * exist, and errors of mbind(2), which containers may refuse. */
NVMEIO_API int nvmeio_pool_alloc_on(int node, size_t size, bool lock, void **address,
                                    int *locked);

/* Whether the limit permits mapping so much: after -ENOMEM, whether the system, not the
 * limit, is the cause. */
NVMEIO_API bool nvmeio_pool_has_room(size_t size);

/* Limit the mapped memory; 0: half of nvmeio_memory_bytes(), the default. */
NVMEIO_API void nvmeio_pool_set_limit(uint64_t bytes);

/* Unmap the free memory, except parts of huge pages that are in use, and return how
 * many bytes that was.  Allocations of other threads wait meanwhile. */
NVMEIO_API uint64_t nvmeio_pool_trim(void);

/* Map further memory from hugetlbfs, while it has free pages.  A forked child that
 * writes to such memory needs pages of its own, or gets SIGBUS. */
NVMEIO_API void nvmeio_pool_set_hugetlb(bool wanted);

/* Free an allocation of nvmeio_pool_alloc(); NULL is ignored. */
NVMEIO_API void nvmeio_pool_free(void *address);

/* Mark an allocation as pinned, or remove the mark; any slice of a pinned allocation is
 * pinned.  Setting returns 1 if it changed anything, else 0; -EINVAL if no allocation
 * begins at `address`; -EBUSY if the mark of memory in use would be removed. */
NVMEIO_API int nvmeio_pool_set_pinned(void *address, bool pinned);

/* Return whether all of a range is in one pinned allocation. */
NVMEIO_API bool nvmeio_pool_is_pinned(const void *address, size_t size);

/* Whether the address is in the pool's memory, allocated or free. */
NVMEIO_API bool nvmeio_pool_holds(const void *address);

/* Change by +1 or -1 how many requests use the allocation that contains `address`;
 * other memory is ignored.  Returns the number of uses afterwards, at least 0. */
NVMEIO_API int nvmeio_pool_use(const void *address, int change);

/* Store a snapshot of the pool's sizes and counters. */
NVMEIO_API void nvmeio_pool_get_stats(struct nvmeio_pool_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
