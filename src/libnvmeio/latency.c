/* latency.c -- which bucket a latency falls into, and how many each has seen.
 *
 * Arithmetic and counting alone; when a block begins and ends is lane.c's.  The layout
 * is that of fio and of HdrHistogram (hdrhistogram.org): powers of two, each cut into
 * buckets of one width. */
#include "latency.h"

/* Below 2 * WIDE each nanosecond has a bucket of its own. */
#define WIDE_BITS 5u
#define WIDE (1u << WIDE_BITS)
#define LAST (NVMEIO_LATENCY_BUCKETS - 1)

unsigned nvmeio_latency_bucket(uint64_t ns)
{
    if (ns < 2 * WIDE)
        return (unsigned)ns;
    /* What is left of the bits is WIDE or more, and below 2 * WIDE. */
    unsigned shift = 63 - (unsigned)__builtin_clzll(ns) - WIDE_BITS;
    uint64_t bucket = shift * WIDE + (ns >> shift);
    return bucket < LAST ? (unsigned)bucket : LAST;
}

int64_t nvmeio_latency_ns(unsigned bucket)
{
    if (bucket >= LAST)
        return INT64_MAX;
    if (bucket < 2 * WIDE)
        return bucket;
    unsigned shift = bucket / WIDE - 1;
    int64_t next = (int64_t)(bucket - shift * WIDE + 1) << shift;
    return next - 1;
}

void nvmeio_latency_count(struct nvmeio_latencies *latencies, uint64_t ns)
{
    _Atomic uint64_t *count = &latencies->counts[nvmeio_latency_bucket(ns)];
    uint64_t before = atomic_load_explicit(count, memory_order_relaxed);

    /* Not in one step, which costs more: nobody else writes. */
    atomic_store_explicit(count, before + 1, memory_order_relaxed);
}

void nvmeio_latency_add(const struct nvmeio_latencies *latencies, uint64_t *counts)
{
    for (unsigned i = 0; i < NVMEIO_LATENCY_BUCKETS; i++)
        counts[i] += atomic_load_explicit(&latencies->counts[i], memory_order_relaxed);
}
