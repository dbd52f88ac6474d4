/* pages.h -- memory for huge pages, and whether memory is in small ones.
 *
 * Devices that handle each page separately, as virtual ones do, transfer scattered
 * small pages at half their speed (bench_transfer.py). */
#ifndef NVMEIO_PAGES_H
#define NVMEIO_PAGES_H

#include <nvmeio/base.h>

/* The huge page of x86-64, and of arm64 with 4 KiB pages. */
#define NVMEIO_HUGE_BYTES ((size_t)2 << 20)

/* Map private memory for whole pages, aligned to a huge page. NULL if there is not
 * enough. */
char *nvmeio_pages_map(size_t bytes);

/* For less memory than this, finding out costs more than it saves. */
#define NVMEIO_PAGES_BYTES_MIN (64u << 10)

/* Whether most of the memory is in small pages, judged by samples. False if the kernel
 * cannot tell (before Linux 6.7). `op` is the transfer that will use the memory. For a
 * read, untouched memory counts as huge, because the kernel then allocates its pages in
 * one go. For a write, untouched samples are populated first. */
bool nvmeio_pages_are_small(const void *address, size_t size, enum nvmeio_op op);

#endif
