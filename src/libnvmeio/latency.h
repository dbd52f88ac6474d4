/* latency.h -- how long blocks took: a histogram, counted while they come back.
 *
 * 32 buckets for each power of two of nanoseconds: 3 % at most lie between the ends of
 * one, and 1024 of them reach beyond a minute, in 8 KiB a lane. */
#ifndef NVMEIO_LATENCY_H
#define NVMEIO_LATENCY_H

#include <nvmeio/handle.h>
#include <stdatomic.h>

/* Written by one thread at a time, which is that of the lane, or for a caller lane the
 * one that drives it; read by anyone, relaxed: figures, no order. */
struct nvmeio_latencies {
    _Atomic uint64_t counts[NVMEIO_LATENCY_BUCKETS];
};

/* The bucket for so many nanoseconds; the last for all that is longer. */
unsigned nvmeio_latency_bucket(uint64_t ns);

void nvmeio_latency_count(struct nvmeio_latencies *latencies, uint64_t ns);

/* Add what was counted to `counts`, NVMEIO_LATENCY_BUCKETS of them. */
void nvmeio_latency_add(const struct nvmeio_latencies *latencies, uint64_t *counts);

#endif
