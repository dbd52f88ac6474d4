/* copy_kernels.h -- the copies that copy.c chooses from. */
#ifndef NVMEIO_COPY_KERNELS_H
#define NVMEIO_COPY_KERNELS_H

#include <stdbool.h>
#include <stddef.h>

/* The cache line of x86-64 and of nearly every arm64. */
#define NVMEIO_LINE_BYTES 64

/* A page, as far as copies are concerned: a good distance even where pages are
 * larger. */
#define NVMEIO_COPY_PAGE_BYTES 4096

typedef void nvmeio_copy_function(void *target, const void *source, size_t size);

/* For any addresses and sizes that do not overlap. When a copy has returned, its stores
 * are ordered like ordinary ones. */
struct nvmeio_copy_kernel {
    const char *name;
    bool (*works)(void);          /* on this processor */
    nvmeio_copy_function *cached; /* its stores use the caches */
    nvmeio_copy_function *stream; /* its stores bypass them */
};

/* Each belongs to one architecture. On the others, `works` returns false. */
extern const struct nvmeio_copy_kernel nvmeio_copy_avx512;
extern const struct nvmeio_copy_kernel nvmeio_copy_avx2;
extern const struct nvmeio_copy_kernel nvmeio_copy_movsb;
extern const struct nvmeio_copy_kernel nvmeio_copy_neon;
extern const struct nvmeio_copy_kernel nvmeio_copy_portable;

#endif
