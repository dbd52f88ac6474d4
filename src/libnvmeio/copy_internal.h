/* copy_internal.h -- when copies bypass the caches, and the engine's own copy. */
#ifndef NVMEIO_COPY_INTERNAL_H
#define NVMEIO_COPY_INTERNAL_H

#include <nvmeio/copy.h>

/* Copies of at least so many bytes bypass the caches, which could hardly hold the data;
 * at least NVMEIO_COPY_STREAM_BYTES_MIN. Repeated copies: 4 MiB at 14.5 GB/s (memcpy
 * 12.5), 2 MiB at 17.8 (13.0), 1 MiB at 19.6 (24.9), on the machine named below. The
 * limit is higher than these figures suggest, because a caller is likely to use the
 * data that it copied. Where few cores share a fast third cache, it is half of that: 8
 * MiB on two threads at 21.5 GB/s (memcpy 45), 16 MiB at 30 to 35 (27), on one at 17.4
 * (12.1; EPYC with 32 MiB for 8 cores, 2026-11-27). */
#define NVMEIO_COPY_STREAM_BYTES_MIN ((size_t)4 << 20)
size_t nvmeio_copy_stream_bytes(void);

/* The same limit for data that is in no cache. Measured on blocks copied in turn
 * between buffers of 256 MiB to 1 GiB: memcpy 5.5 to 6.5 GB/s, AVX-512 9.8 to 9.9, AVX2
 * 9.0 to 9.5, the same from 256 KiB to 4 MiB (Xeon with AVX-512, 2 MiB of L2 per core,
 * 2026-11-21). Smaller copies are more often in L2, where memcpy is faster. */
#define NVMEIO_COPY_COLD_STREAM_BYTES ((size_t)256 << 10)

/* Copy between a bounce and the caller's memory, which do not overlap. The device has
 * just written one of them, or is about to read it. */
void nvmeio_copy_cold(void *target, const void *source, size_t size);

#endif
