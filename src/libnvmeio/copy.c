/* copy.c -- chooses how bytes are copied between the caller's memory and ours. */
#include <string.h>

#include <nvmeio/copy.h>

#include "copy_kernels.h"

/* From here on copies go past the caches.  Blocks copied in turn between buffers of
 * 256 MiB to 1 GiB, of which no cache holds anything useful: memcpy 5.5 to 6.5 GB/s,
 * AVX-512 9.8 to 9.9, AVX2 9.0 to 9.5, alike from 256 KiB to 4 MiB (Xeon with AVX-512,
 * 2 MiB of L2 a core, 2026-11-21).  Smaller copies are more often of data that is in
 * L2, where memcpy is the faster. */
#define STREAM_BYTES_MIN ((size_t)256 << 10)

void nvmeio_copy(void *target, const void *source, size_t size)
{
    nvmeio_copy_kernel *stream =
        size >= STREAM_BYTES_MIN ? nvmeio_copy_stream_kernel(0) : NULL;

    if (stream)
        stream(target, source, size);
    else
        memcpy(target, source, size);
}
