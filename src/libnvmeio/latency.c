/* latency.c -- the buckets of the latency histogram.
 *
 * Pure arithmetic; worker.c decides when a block begins and ends. The layout is the
 * same as in fio and HdrHistogram (hdrhistogram.org): powers of two, each divided into
 * equal buckets. */
#include "block.h"

/* Below 2 * WIDE, each nanosecond has its own bucket. */
#define WIDE_BITS 5u
#define WIDE (1u << WIDE_BITS)
#define LAST (NVMEIO_LATENCY_BUCKETS - 1)

unsigned nvmeio_latency_bucket(uint64_t ns)
{
    if (ns < 2 * WIDE)
        return (unsigned)ns;
    /* The remaining bits are at least WIDE and below 2 * WIDE. */
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
