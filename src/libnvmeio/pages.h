/* pages.h -- whether memory is in small pages, as far as the kernel tells.
 *
 * Devices that handle each page separately, as virtual ones do, transfer scattered
 * small pages at half their speed (bench_transfer.py). */
#ifndef NVMEIO_PAGES_H
#define NVMEIO_PAGES_H

#include <nvmeio/base.h>

/* For less than this, the question costs more than the answer saves. */
#define NVMEIO_PAGES_BYTES_MIN (64u << 10)

/* Whether most of the memory, by samples, is in small pages. False if that is not
 * known, as before Linux 6.7. For reading into it, untouched memory counts as huge,
 * because the kernel then allocates pages in one go. For writing from it, such memory
 * is populated first. */
bool nvmeio_pages_are_small(const void *address, size_t size, enum nvmeio_op op);

#endif
