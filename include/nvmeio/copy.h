/* copy.h -- copies between the caller's memory and ours. */
#ifndef NVMEIO_COPY_H
#define NVMEIO_COPY_H

#include <nvmeio/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Copy `size` bytes; the ranges must not overlap. */
NVMEIO_API void nvmeio_copy(void *target, const void *source, size_t size);

#ifdef __cplusplus
}
#endif
#endif
