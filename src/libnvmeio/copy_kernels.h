/* copy_kernels.h -- the kernels that copy.c chooses from. */
#ifndef NVMEIO_COPY_KERNELS_H
#define NVMEIO_COPY_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The cache line of x86-64 and of nearly every arm64. */
#define NVMEIO_LINE_BYTES 64

/* The distance between the streams of a kernel that copies several pages at once. It
 * works well even if pages are larger. */
#define NVMEIO_COPY_PAGE_BYTES 4096

/* Whether a target is less than `bytes` above the source, modulo a page. */
static inline bool nvmeio_copy_is_above(const void *target, const void *source,
                                        size_t bytes)
{
    size_t distance = ((uintptr_t)target - (uintptr_t)source) % NVMEIO_COPY_PAGE_BYTES;
    return distance > 0 && distance < bytes;
}

typedef void nvmeio_copy_function(void *target, const void *source, size_t size);

/* One way to copy. Addresses and sizes may be any, but the ranges must not overlap.
 * When a copy returns, its stores are ordered like ordinary ones. */
struct nvmeio_copy_kernel {
    const char *name;
    bool (*works)(void);          /* on this processor */
    nvmeio_copy_function *cached; /* its stores use the caches */
    nvmeio_copy_function *stream; /* its stores bypass them */
};

/* On processors without the instructions of a kernel, its works() returns false. The
 * portable one works everywhere. */
extern const struct nvmeio_copy_kernel nvmeio_copy_avx512;
extern const struct nvmeio_copy_kernel nvmeio_copy_avx2;
extern const struct nvmeio_copy_kernel nvmeio_copy_neon;
extern const struct nvmeio_copy_kernel nvmeio_copy_portable;

/* Whether few cores share a third cache, nearly as fast as the second: on AMD's. */
bool nvmeio_copy_has_near_cache(void);

#endif
