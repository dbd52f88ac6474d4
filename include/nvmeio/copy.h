/* copy.h -- copies of memory, by the kernel that suits this processor and the size.
 *
 * All functions are thread-safe. */
#ifndef NVMEIO_COPY_H
#define NVMEIO_COPY_H

#include <nvmeio/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Copy `size` bytes.  Ranges that overlap give what memmove(3) gives. */
NVMEIO_API void nvmeio_copy(void *target, const void *source, size_t size);

/* Copy a part of a copy of `total` bytes, of which other threads copy the rest.  The
 * ranges of the whole do not overlap, and it decides how the part is copied. */
NVMEIO_API void nvmeio_copy_part(void *target, const void *source, size_t size,
                                 size_t total);

/* Whether two ranges of `size` bytes have a byte in common. */
NVMEIO_API bool nvmeio_copy_overlaps(const void *target, const void *source,
                                     size_t size);

/* The kernels by name, NULL past the last; *works tells which this processor can run.
 */
NVMEIO_API const char *nvmeio_copy_kernel_at(unsigned index, int *works);

/* Use one kernel for all copies of this process, the engine's included; "auto", as it
 * is from the start, takes the best for each size.  -EINVAL: no such kernel; -ENOTSUP:
 * this processor cannot run it. */
NVMEIO_API int nvmeio_copy_select(const char *name);

/* The kernels in use for small copies and for large ones. */
NVMEIO_API void nvmeio_copy_selected(const char **small, const char **large);

#ifdef __cplusplus
}
#endif
#endif
