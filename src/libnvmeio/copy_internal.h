/* copy_internal.h -- when copies go past the caches, and the engine's own copy. */
#ifndef NVMEIO_COPY_INTERNAL_H
#define NVMEIO_COPY_INTERNAL_H

#include <nvmeio/copy.h>

/* From here on copies go past the caches: what was copied would hardly be found in
 * them. Copied again and again, 4 MiB at 14.5 GB/s where memcpy has 12.5, 2 MiB at 17.8
 * and 13.0, 1 MiB at 19.6 and 24.9 (the same machine as below); above that whoever
 * copies is likely to go on with what was copied. */
#define NVMEIO_COPY_STREAM_BYTES ((size_t)4 << 20)

/* The same where no cache holds anything of it: blocks copied in turn between buffers
 * of 256 MiB to 1 GiB.  memcpy 5.5 to 6.5 GB/s, AVX-512 9.8 to 9.9, AVX2 9.0 to 9.5,
 * alike from 256 KiB to 4 MiB (Xeon with AVX-512, 2 MiB of L2 a core, 2026-11-21).
 * Smaller copies are more often of data that is in L2, where memcpy is the faster. */
#define NVMEIO_COPY_COLD_STREAM_BYTES ((size_t)256 << 10)

/* Copy between a bounce and the caller's memory, which do not overlap: one of them was
 * or will be the device's. */
void nvmeio_copy_cold(void *target, const void *source, size_t size);

#endif
