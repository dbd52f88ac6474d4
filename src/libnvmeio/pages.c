/* pages.c -- maps memory for huge pages, and finds out the size of pages, by
 * PAGEMAP_SCAN of /proc/self/pagemap. */
#include "pages.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* Linux 6.7, ioctl_pagemap_scan(2). Older headers have none of this. */
#define SCAN _IOWR('f', 16, struct scan)
#define SCAN_PRESENT (UINT64_C(1) << 3)
#define SCAN_HUGE (UINT64_C(1) << 6)

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

/* One page is looked up per this many bytes, but no more pages than SAMPLES_MAX. */
#define SAMPLE_BYTES ((size_t)256 << 10)
#define SAMPLES_MAX 8u

/* A verdict counts for the huge page around it, for up to a quarter of a second. A
 * wrong one, because memory was mapped anew, costs speed alone. */
#define REGION_BITS 21u
#define TERM_BITS 28u /* in nanoseconds */
#define VERDICTS 1024u

struct region {
    uint64_t start, end, categories;
};

struct scan {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

enum kind { UNKNOWN, ABSENT, SMALL, HUGE };

static _Atomic uint64_t verdicts[VERDICTS];

/* What a verdict of this moment on a page looks like, apart from its kind. */
static uint64_t verdict_on(uintptr_t page)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    uint64_t ns = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    return (uint64_t)(page >> REGION_BITS) << 28 | (ns >> TERM_BITS & 0xffffff) << 4;
}

/* The kind of one page, as the kernel sees it. */
static enum kind look_up(int fd, uintptr_t page, size_t page_bytes)
{
    struct region region = {0};
    struct scan scan = {
        .size = sizeof(scan),
        .start = page,
        .end = page + page_bytes,
        .vec = (uintptr_t)&region,
        .vec_len = 1,
        .category_mask = SCAN_PRESENT,
        .return_mask = SCAN_PRESENT | SCAN_HUGE,
    };
    int count = ioctl(fd, SCAN, &scan);

    if (count < 0)
        return UNKNOWN;
    if (count == 0)
        return ABSENT;
    return region.categories & SCAN_HUGE ? HUGE : SMALL;
}

/* The kind of one page. The descriptor is opened when it is first needed: in a forked
 * child, one that was kept would still show the parent's memory. */
static enum kind kind_of(int *fd, uintptr_t page, size_t page_bytes, enum nvmeio_op op)
{
    _Atomic uint64_t *known = &verdicts[(page >> REGION_BITS) % VERDICTS];
    uint64_t verdict = verdict_on(page);
    uint64_t found = atomic_load_explicit(known, memory_order_relaxed);

    if (found - verdict == SMALL || found - verdict == HUGE)
        return (enum kind)(found - verdict);
    if (*fd < 0)
        *fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    enum kind kind = *fd < 0 ? UNKNOWN : look_up(*fd, page, page_bytes);
    if (kind == ABSENT && op == NVMEIO_OP_WRITE &&
        madvise((void *)page, page_bytes, MADV_POPULATE_READ) == 0)
        kind = look_up(*fd, page, page_bytes);
    if (kind == SMALL || kind == HUGE)
        atomic_store_explicit(known, verdict + kind, memory_order_relaxed);
    return kind;
}

char *nvmeio_pages_map(size_t bytes)
{
    char *mapped = mmap(NULL, bytes + NVMEIO_HUGE_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (mapped == MAP_FAILED)
        return NULL;
    size_t head_bytes = -(uintptr_t)mapped % NVMEIO_HUGE_BYTES;
    char *chunk = mapped + head_bytes;
    if (head_bytes)
        munmap(mapped, head_bytes);
    munmap(chunk + bytes, NVMEIO_HUGE_BYTES - head_bytes);
    return chunk;
}

bool nvmeio_pages_are_small(const void *address, size_t size, enum nvmeio_op op)
{
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    size_t samples = size / SAMPLE_BYTES, small = 0;
    int fd = -1;

    if (samples > SAMPLES_MAX)
        samples = SAMPLES_MAX;
    if (samples == 0)
        samples = 1;
    for (size_t i = 0; i < samples; i++) {
        uintptr_t middle = (uintptr_t)address + size / samples * i + size / samples / 2;
        uintptr_t page = middle / page_bytes * page_bytes;
        small += kind_of(&fd, page, page_bytes, op) == SMALL;
    }
    if (fd >= 0)
        close(fd);
    return small > samples / 2;
}
