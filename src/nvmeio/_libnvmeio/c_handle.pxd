from libc.stdint cimport int64_t, uint64_t

from nvmeio._libnvmeio.c_base cimport nvmeio_bounce
from nvmeio._libnvmeio.c_request cimport nvmeio_handle


cdef extern from "nvmeio/handle.h" nogil:
    enum:  # not a variable: it sizes arrays
        LATENCY_BUCKETS "NVMEIO_LATENCY_BUCKETS"

    struct nvmeio_config:
        size_t block_bytes
        unsigned queue_depth
        unsigned workers
        bint single_submit
        nvmeio_bounce bounce
        const char *engine

    struct nvmeio_stats:
        uint64_t requests
        uint64_t blocks
        uint64_t bytes_direct
        uint64_t bytes_buffered
        uint64_t bytes_bounced
        uint64_t short_transfers
        uint64_t retries

    void config_default "nvmeio_config_default"(nvmeio_config *config)
    int handle_open "nvmeio_handle_open"(
        const nvmeio_config *config, nvmeio_handle **handle
    )
    void handle_stop "nvmeio_handle_stop"(nvmeio_handle *handle)
    void handle_close "nvmeio_handle_close"(nvmeio_handle *handle)
    int handle_drain "nvmeio_handle_drain"(nvmeio_handle *handle, int64_t timeout_ns)
    unsigned handle_pop "nvmeio_handle_pop"(
        nvmeio_handle *handle, void **users, unsigned count
    )
    int handle_watch "nvmeio_handle_watch"(nvmeio_handle *handle, int fd)
    void handle_unwatch "nvmeio_handle_unwatch"(nvmeio_handle *handle, int fd)
    unsigned handle_pending "nvmeio_handle_pending"(nvmeio_handle *handle)
    const char *handle_engine "nvmeio_handle_engine"(nvmeio_handle *handle)
    const char *handle_fallback "nvmeio_handle_fallback"(nvmeio_handle *handle)
    void handle_stats "nvmeio_handle_stats"(nvmeio_handle *handle, nvmeio_stats *stats)
    void handle_latencies "nvmeio_handle_latencies"(nvmeio_handle *handle, uint64_t *counts)
    int64_t latency_ns "nvmeio_latency_ns"(unsigned bucket)
