/* copy.h -- copies of memory, with the fastest kernel for this processor and size.
 *
 * All functions are thread-safe. */
#ifndef NVMEIO_COPY_H
#define NVMEIO_COPY_H

#include <nvmeio/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Copy `size` bytes; the ranges may overlap, as for memmove(3). */
NVMEIO_API void nvmeio_copy(void *target, const void *source, size_t size);

/* Copy a part of a copy of `total` bytes, while other threads copy the rest.  `total`
 * chooses the kernel.  The ranges of the whole copy must not overlap. */
NVMEIO_API void nvmeio_copy_part(void *target, const void *source, size_t size,
                                 size_t total);

/* Whether two ranges of `size` bytes have a byte in common. */
NVMEIO_API bool nvmeio_copy_overlaps(const void *target, const void *source,
                                     size_t size);

/* Return the name of a kernel, NULL past the last; *works is whether this processor can
 * run it. */
NVMEIO_API const char *nvmeio_copy_kernel_at(unsigned index, int *works);

/* Use one kernel for all copies of this process, including the engine's; "auto", the
 * default, chooses by size.  Returns 0; -EINVAL: no such kernel; -ENOTSUP: this
 * processor cannot run it. */
NVMEIO_API int nvmeio_copy_select(const char *name);

/* The kernels in use for small copies and for large ones. */
NVMEIO_API void nvmeio_copy_selected(const char **small, const char **large);

#ifdef __cplusplus
}
#endif
#endif
