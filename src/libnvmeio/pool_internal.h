/* pool_internal.h -- for rings, which may keep huge pages of the pool registered.
 *
 * What is registered is pinned: it stays in memory also after the pool has unmapped it,
 * and a fork() copies it at once.  Hence the bound. */
#ifndef NVMEIO_POOL_INTERNAL_H
#define NVMEIO_POOL_INTERNAL_H

#include <nvmeio/pool.h>

/* The huge page of x86-64, and of arm64 with pages of 4 KiB.  The pool maps whole ones,
 * so that one with a byte of the pool is all the pool's. */
#define NVMEIO_HUGE_BYTES ((size_t)2 << 20)

/* Of all rings together.  A fork() takes 17 ms longer for it (2026-11-21). */
#define NVMEIO_REGISTERED_PAGES_MAX 16u

/* Whether the address may be in the pool: a quick look. */
bool nvmeio_pool_may_hold(const void *address);

/* Count one more huge page as registered: false where the address, which is in use, is
 * not of the pool, or as many as may be are (of RLIMIT_MEMLOCK a quarter, where it
 * holds), or there are pages of hugetlbfs: of pinned ones a fork() needs as many again,
 * and fails where none are free. */
bool nvmeio_pool_register(const void *address);
void nvmeio_pool_unregister(unsigned pages);

/* How often memory was unmapped so far.  What is registered of an address may be other
 * memory than what is there now, once the number has changed. */
uint64_t nvmeio_pool_unmappings(void);

#endif
