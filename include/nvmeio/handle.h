/* handle.h -- a handle: configuration, workers, and a queue of requests. */
#ifndef NVMEIO_HANDLE_H
#define NVMEIO_HANDLE_H

#include <nvmeio/base.h>
#include <nvmeio/request.h>

#ifdef __cplusplus
extern "C" {
#endif

struct nvmeio_config {
    size_t block_bytes;   /* 1 to NVMEIO_BLOCK_BYTES_MAX; rounded up to whole pages */
    unsigned queue_depth; /* blocks in flight per worker, 1 to NVMEIO_QUEUE_DEPTH_MAX */
    unsigned workers;     /* threads, each with an engine; 1 to NVMEIO_WORKERS_MAX */
    bool single_submit;   /* one block per submission call */
    enum nvmeio_bounce bounce;
    const char *engine; /* "auto" or a name; copied */
};

struct nvmeio_stats {
    uint64_t requests; /* submitted */
    uint64_t blocks;   /* finished */
    uint64_t bytes_direct;
    uint64_t bytes_buffered;
    uint64_t bytes_bounced;   /* direct, through bounces; not in bytes_direct */
    uint64_t short_transfers; /* continued */
    uint64_t retries; /* of blocks and calls, after EINTR, EAGAIN and the like */
};

/* Buckets of a latency histogram: 32 for each power of two of nanoseconds.  The last
 * one counts everything above 67 s. */
#define NVMEIO_LATENCY_BUCKETS 1024

/* Set the defaults: 1 MiB x 128, one worker. */
NVMEIO_API void nvmeio_config_default(struct nvmeio_config *config);

/* Start a handle.  Returns 0; -EINVAL for a value out of range or an unknown engine;
 * -ENOSYS if the named engine is not built; the engine's own error; or -EAGAIN,
 * -EMFILE, -ENFILE or -ENOMEM if there are not enough threads, descriptors or memory.
 * "auto" tries the engines in order; nvmeio_handle_fallback() returns why one was
 * skipped. */
NVMEIO_API int nvmeio_handle_open(const struct nvmeio_config *config,
                                  struct nvmeio_handle **handle);

/* Refuse further submissions with -EPIPE, wait for the requests in flight, and stop
 * the workers.  May be called again, and by several threads: all return when it is
 * done. */
NVMEIO_API void nvmeio_handle_stop(struct nvmeio_handle *handle);

/* Stop the handle, and release the caller's reference.  Requests stay readable until
 * they are released. */
NVMEIO_API void nvmeio_handle_close(struct nvmeio_handle *handle);

/* Wait until no request is in flight.  Returns 0, or -ETIMEDOUT after timeout_ns
 * (negative: no limit). */
NVMEIO_API int nvmeio_handle_drain(struct nvmeio_handle *handle, int64_t timeout_ns);

/* Store the `user` pointers of at most `count` finished requests, and return how many.
 * Each completion is reported once: here, or to a thread by nvmeio_request_wait(). */
NVMEIO_API unsigned nvmeio_handle_pop(struct nvmeio_handle *handle, void **users,
                                      unsigned count);

/* Signal an eventfd once, when the next request of the handle is done.  Returns 0 or
 * -ENOMEM.  The eventfd is the caller's, and non-blocking.  Call again for each further
 * signal; calling twice is no error.  Requests that are already done do not signal.  To
 * miss nothing, after a wake-up clear the eventfd, call this again, and only then look
 * for finished requests (nvmeio_handle_pop(), or nvmeio_request_done() of each).
 * A forked child must call it anew. */
NVMEIO_API int nvmeio_handle_watch(struct nvmeio_handle *handle, int fd);

/* Stop signalling an eventfd, which the caller may then close.  Does nothing if it is
 * not watched. */
NVMEIO_API void nvmeio_handle_unwatch(struct nvmeio_handle *handle, int fd);

/* Return the number of requests in flight; 0 in a forked child. */
NVMEIO_API unsigned nvmeio_handle_pending(struct nvmeio_handle *handle);

/* Return the name of the engine in use, such as "io_uring"; a static string. */
NVMEIO_API const char *nvmeio_handle_engine(struct nvmeio_handle *handle);

/* Return why better engines were skipped; "" if none was.  Valid while the handle
 * is. */
NVMEIO_API const char *nvmeio_handle_fallback(struct nvmeio_handle *handle);

/* Store a consistent snapshot of the counters.  A forked child counts from zero. */
NVMEIO_API void nvmeio_handle_stats(struct nvmeio_handle *handle,
                                    struct nvmeio_stats *stats);

/* Count blocks by latency, from the hand-over to the engine until the completion is
 * seen, including continued and retried parts, without copies to and from bounces.
 * Counts every finished block, also failed ones, except fsyncs. */
NVMEIO_API void nvmeio_handle_latencies(struct nvmeio_handle *handle,
                                        uint64_t counts[NVMEIO_LATENCY_BUCKETS]);

/* Return the longest latency that a bucket counts, in nanoseconds; the shortest is one
 * more than the longest of the bucket before.  INT64_MAX for the last bucket and
 * beyond. */
NVMEIO_API int64_t nvmeio_latency_ns(unsigned bucket);

#ifdef __cplusplus
}
#endif
#endif
