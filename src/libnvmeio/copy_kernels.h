/* copy_kernels.h -- the copies among which copy.c chooses. */
#ifndef NVMEIO_COPY_KERNELS_H
#define NVMEIO_COPY_KERNELS_H

#include <stdbool.h>
#include <stddef.h>

/* The cache line of x86-64 and of nearly every arm64. */
#define NVMEIO_LINE_BYTES 64

/* Of memory, as far as copies go: a good distance even where pages are larger. */
#define NVMEIO_COPY_PAGE_BYTES 4096

typedef void nvmeio_copy_function(void *target, const void *source, size_t size);

/* Any addresses and sizes that do not overlap.  Other threads see the stores like
 * ordinary ones once a copy has returned. */
struct nvmeio_copy_kernel {
    const char *name;
    bool (*works)(void);          /* on this processor */
    nvmeio_copy_function *cached; /* stores go through the caches */
    nvmeio_copy_function *stream; /* and past them, which leaves them to others */
};

/* Those of one architecture each; a file for another one has them all fail `works`. */
extern const struct nvmeio_copy_kernel nvmeio_copy_avx512;
extern const struct nvmeio_copy_kernel nvmeio_copy_avx2;
extern const struct nvmeio_copy_kernel nvmeio_copy_movsb;
extern const struct nvmeio_copy_kernel nvmeio_copy_neon;
extern const struct nvmeio_copy_kernel nvmeio_copy_portable;

#endif
