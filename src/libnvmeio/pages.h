/* pages.h -- whether memory is in small pages, as far as the kernel tells.
 *
 * A device that takes each page by itself, as virtual ones do, moves memory in small
 * pages at half its speed where they are scattered (bench_transfer.py). */
#ifndef NVMEIO_PAGES_H
#define NVMEIO_PAGES_H

#include <nvmeio/base.h>

/* Less is not worth the question. */
#define NVMEIO_PAGES_BYTES_MIN (64u << 10)

/* Whether most of the memory, by samples, is in pages that are not huge; false where
 * that is not known, as before Linux 6.7.  What was never touched counts as huge for
 * reading into, for the kernel then finds pages in one go, and is looked at after the
 * kernel has found some for writing from. */
bool nvmeio_pages_are_small(const void *address, size_t size, enum nvmeio_op op);

#endif
