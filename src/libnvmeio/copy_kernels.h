/* copy_kernels.h -- the copies among which copy.c chooses. */
#ifndef NVMEIO_COPY_KERNELS_H
#define NVMEIO_COPY_KERNELS_H

#include <stddef.h>

typedef void nvmeio_copy_kernel(void *target, const void *source, size_t size);

/* Kernels for large copies, whose stores go past the caches: of those that this
 * processor can run the best (index 0), the next best, ..., and NULL after the last.
 * They take any address and size, and the stores of a copy are visible to other threads
 * like ordinary ones once it has returned. */
#if defined(__x86_64__)
nvmeio_copy_kernel *nvmeio_copy_stream_kernel(unsigned index);
#else
static inline nvmeio_copy_kernel *nvmeio_copy_stream_kernel(unsigned index)
{
    (void)index;
    return NULL;
}
#endif

#endif
