/* pool.h -- one process-wide pool of aligned memory, in huge pages where there are any.
 *
 * Memory is populated once, given back to the pool and handed out again.  It is
 * unmapped only to make room for other sizes below the limit, and by
 * nvmeio_pool_trim().  In a forked child the pool goes on with its copy, of which
 * nothing is locked or counted as in use.  Thread-safe. */
#ifndef NVMEIO_POOL_H
#define NVMEIO_POOL_H

#include <nvmeio/base.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NVMEIO_POOL_ALIGN 4096u

/* Memory may be asked for on one NUMA node, up to this number. */
#define NVMEIO_POOL_NODE_MAX 63

struct nvmeio_pool_stats {
    uint64_t bytes_limit;   /* of bytes_mapped */
    uint64_t bytes_mapped;  /* taken from the system */
    uint64_t bytes_hugetlb; /* mapped from hugetlbfs so far */
    uint64_t bytes_used;    /* handed out now, in whole pages or huge pages */
    uint64_t bytes_locked;  /* of them, mlock'ed */
    uint64_t allocations;   /* handed out so far */
    uint64_t reuses;        /* of them, from memory that was mapped before */
    uint64_t pools; /* copies of this library in the process, each with a pool */
};

/* Hand out at least `size` bytes (1 or more), aligned to NVMEIO_POOL_ALIGN, populated.
 * `lock`: mlock them where RLIMIT_MEMLOCK allows; *locked (may be NULL) tells.
 * What they hold is undefined.  -ENOMEM where the limit is met or the system has not so
 * much, -EINVAL for no bytes.  Owned by the caller until nvmeio_pool_free(). */
NVMEIO_API int nvmeio_pool_alloc(size_t size, bool lock, void **address, int *locked);

/* The same on a NUMA node; -1: wherever the system likes.  -EINVAL for a node that
 * there is not; what else mbind(2) says where it is refused, as in containers. */
NVMEIO_API int nvmeio_pool_alloc_on(int node, size_t size, bool lock, void **address,
                                    int *locked);

/* Whether the limit leaves room to map so much: tells whose limit an -ENOMEM was. */
NVMEIO_API bool nvmeio_pool_has_room(size_t size);

/* Map no more than this; 0: half of nvmeio_memory_bytes(), as it is from the start. */
NVMEIO_API void nvmeio_pool_set_limit(uint64_t bytes);

/* Unmap the free memory, but for parts of huge pages that are in use; return how many
 * bytes that was.  Allocations of other threads wait meanwhile. */
NVMEIO_API uint64_t nvmeio_pool_trim(void);

/* Take what is mapped from now on from hugetlbfs, as long as it has pages to give.  A
 * forked child that writes to such memory needs pages of its own, or gets SIGBUS. */
NVMEIO_API void nvmeio_pool_set_hugetlb(bool wanted);

/* Give back.  `address` must come from nvmeio_pool_alloc(); NULL is ignored. */
NVMEIO_API void nvmeio_pool_free(void *address);

/* Pinned ranges: memory that the pool vouches for as pinned.  Marked by its owner,
 * found by any slice of it.  Setting returns 1 if it changed anything, else 0; -EINVAL
 * where no allocation begins at `address`, -EBUSY for taking the mark from memory that
 * is in use. */
NVMEIO_API int nvmeio_pool_set_pinned(void *address, bool pinned);
NVMEIO_API bool nvmeio_pool_is_pinned(const void *address, size_t size);

/* Whether the address is in memory of the pool, handed out or not. */
NVMEIO_API bool nvmeio_pool_holds(const void *address);

/* Count a request's use of the allocation that holds `address` (+1, -1); memory that is
 * not of the pool is ignored.  Returns the uses after the change, never less than 0. */
NVMEIO_API int nvmeio_pool_use(const void *address, int change);

NVMEIO_API void nvmeio_pool_get_stats(struct nvmeio_pool_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
