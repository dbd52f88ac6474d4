/* handle.h -- configuration, workers and queue: what transfers are submitted to. */
#ifndef NVMEIO_HANDLE_H
#define NVMEIO_HANDLE_H

#include <nvmeio/base.h>
#include <nvmeio/request.h>

#ifdef __cplusplus
extern "C" {
#endif

struct nvmeio_config {
    size_t block_bytes;   /* 1 to NVMEIO_BLOCK_BYTES_MAX; rounded up to whole pages */
    unsigned queue_depth; /* blocks in flight a worker, 1 to NVMEIO_QUEUE_DEPTH_MAX */
    unsigned workers;     /* threads with an engine each, 1 to NVMEIO_WORKERS_MAX */
    bool single_submit;   /* one block a submission call */
    enum nvmeio_bounce bounce;
    const char *engine; /* "auto" or a name; copied */
};

struct nvmeio_stats {
    uint64_t requests; /* submitted */
    uint64_t blocks;   /* finished */
    uint64_t bytes_direct;
    uint64_t bytes_buffered;
    uint64_t bytes_bounced;   /* direct too, through our memory; not in bytes_direct */
    uint64_t short_transfers; /* continued */
    uint64_t retries;         /* EINTR, EAGAIN and the like, of blocks and of calls */
};

/* Of a histogram of latencies: 32 for each power of two of nanoseconds; the last has
 * all above 67 s. */
#define NVMEIO_LATENCY_BUCKETS 1024

/* Values of the documented defaults: 1 MiB x 128, one worker. */
NVMEIO_API void nvmeio_config_default(struct nvmeio_config *config);

/* Start a handle.  -EINVAL for a value out of its limits or an unknown engine,
 * -ENOSYS where the named engine is not built, else what the engine said, or -EAGAIN,
 * -EMFILE, -ENFILE or -ENOMEM for want of what every engine needs: threads,
 * descriptors, memory.  With "auto" the engines are tried in order;
 * nvmeio_handle_fallback() tells why one was passed over. */
NVMEIO_API int nvmeio_handle_open(const struct nvmeio_config *config,
                                  struct nvmeio_handle **handle);

/* Wait for all that is in flight and stop the workers; from the start on, submissions
 * get -EPIPE.  May be called again, and by several threads: all return when it is done.
 */
NVMEIO_API void nvmeio_handle_stop(struct nvmeio_handle *handle);

/* Stop, and release the caller's reference.  Requests stay readable until they are
 * released. */
NVMEIO_API void nvmeio_handle_close(struct nvmeio_handle *handle);

/* Wait until no request is in flight: 0, or -ETIMEDOUT after timeout_ns (negative: no
 * limit). */
NVMEIO_API int nvmeio_handle_drain(struct nvmeio_handle *handle, int64_t timeout_ns);

/* Up to `count` finished requests' `user` pointers.  Each completion is reported once:
 * here, or to a thread by nvmeio_request_wait(). */
NVMEIO_API unsigned nvmeio_handle_pop(struct nvmeio_handle *handle, void **users,
                                      unsigned count);

/* Have an eventfd signalled once, when a request of the handle is done next.  The
 * caller owns it, non-blocking, and asks again for each further signal; asking twice is
 * no error.  What was done before is not told: whoever wakes up clears the eventfd,
 * asks again, and only then looks for what is done (nvmeio_handle_pop(), or
 * nvmeio_request_done() of each request), and so misses nothing.  After a fork the
 * child has to ask anew.  0 or -ENOMEM. */
NVMEIO_API int nvmeio_handle_watch(struct nvmeio_handle *handle, int fd);

/* Forget an eventfd: once this has returned it may be closed.  Does nothing for one
 * that is not watched. */
NVMEIO_API void nvmeio_handle_unwatch(struct nvmeio_handle *handle, int fd);

/* Requests in flight.  After a fork the child counts none. */
NVMEIO_API unsigned nvmeio_handle_pending(struct nvmeio_handle *handle);

NVMEIO_API const char *nvmeio_handle_engine(struct nvmeio_handle *handle);

/* Why engines that stand before this one were passed over; "" if none was.  Lent. */
NVMEIO_API const char *nvmeio_handle_fallback(struct nvmeio_handle *handle);

NVMEIO_API void nvmeio_handle_stats(struct nvmeio_handle *handle,
                                    struct nvmeio_stats *stats);

/* How many blocks took how long, from when an engine was given one until it was seen to
 * be finished, whatever became of it: with what was continued and repeated, without the
 * copies from and to bounces.  Every finished block is counted, but for fsyncs, which
 * transfer nothing. */
NVMEIO_API void nvmeio_handle_latencies(struct nvmeio_handle *handle,
                                        uint64_t counts[NVMEIO_LATENCY_BUCKETS]);

/* The longest latency that is counted in a bucket, in nanoseconds; the shortest is one
 * more than the longest of the bucket before.  INT64_MAX for the last, and beyond. */
NVMEIO_API int64_t nvmeio_latency_ns(unsigned bucket);

#ifdef __cplusplus
}
#endif
#endif
