/* pages.c -- finds out the size of pages, by PAGEMAP_SCAN of /proc/self/pagemap. */
#include "pages.h"

#include <fcntl.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
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

struct region {
    uint64_t start, end, categories;
};

struct scan {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

enum kind { UNKNOWN, ABSENT, SMALL, HUGE };

/* The kind of one page. */
static enum kind kind_of(int fd, uintptr_t page, size_t page_bytes)
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

/* How many of the sampled pages are small; 0 if the kernel cannot tell. */
static size_t count_small(int fd, uintptr_t address, size_t size, size_t samples,
                          enum nvmeio_op op)
{
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    size_t small = 0;

    for (size_t i = 0; i < samples; i++) {
        uintptr_t middle = address + size / samples * i + size / samples / 2;
        uintptr_t page = middle / page_bytes * page_bytes;
        enum kind kind = kind_of(fd, page, page_bytes);
        if (kind == ABSENT && op == NVMEIO_OP_WRITE &&
            madvise((void *)page, page_bytes, MADV_POPULATE_READ) == 0)
            kind = kind_of(fd, page, page_bytes);
        if (kind == UNKNOWN)
            return 0;
        small += kind == SMALL;
    }
    return small;
}

bool nvmeio_pages_are_small(const void *address, size_t size, enum nvmeio_op op)
{
    size_t samples = size / SAMPLE_BYTES;

    if (samples > SAMPLES_MAX)
        samples = SAMPLES_MAX;
    if (samples == 0)
        samples = 1;
    /* Open it each time, which takes 1 us: in a forked child, a descriptor that was
     * kept would still show the parent's memory. */
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    size_t small = count_small(fd, (uintptr_t)address, size, samples, op);
    close(fd);
    return small > samples / 2;
}
