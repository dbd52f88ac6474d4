"""The C library as Cython sees it: the headers of nvmeio without their prefix.

A module that cimports this links ``libnvmeio``, as ``nvmeio.get_library_dir()`` and
``nvmeio.pc`` say, and shares the copy that the package has loaded.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef extern from "nvmeio/nvmeio.h" nogil:
    int IO_BYTES_MAX "NVMEIO_IO_BYTES_MAX"
    size_t BLOCK_BYTES_MAX "NVMEIO_BLOCK_BYTES_MAX"
    unsigned QUEUE_DEPTH_MAX "NVMEIO_QUEUE_DEPTH_MAX"
    unsigned WORKERS_MAX "NVMEIO_WORKERS_MAX"
    size_t POOL_ALIGN "NVMEIO_POOL_ALIGN"
    int POOL_NODE_MAX "NVMEIO_POOL_NODE_MAX"
    enum:  # not a variable: it sizes arrays
        LATENCY_BUCKETS "NVMEIO_LATENCY_BUCKETS"

    enum nvmeio_op:
        OP_READ "NVMEIO_OP_READ"
        OP_WRITE "NVMEIO_OP_WRITE"
        OP_FSYNC "NVMEIO_OP_FSYNC"

    enum nvmeio_direct:
        DIRECT_AUTO "NVMEIO_DIRECT_AUTO"
        DIRECT_ALWAYS "NVMEIO_DIRECT_ALWAYS"
        DIRECT_NEVER "NVMEIO_DIRECT_NEVER"

    enum nvmeio_bounce:
        BOUNCE_AUTO "NVMEIO_BOUNCE_AUTO"
        BOUNCE_ALWAYS "NVMEIO_BOUNCE_ALWAYS"
        BOUNCE_NEVER "NVMEIO_BOUNCE_NEVER"

    struct nvmeio_engine_info:
        const char *name
        const char *library
        bint built
        int error
        char reason[256]

    struct nvmeio_file:
        pass

    struct nvmeio_file_info:
        bint direct
        bint readable
        bint writable
        uint32_t memory_align
        uint32_t offset_align
        uint64_t device
        uint64_t inode

    struct nvmeio_handle:
        pass

    struct nvmeio_request:
        pass

    struct nvmeio_after:
        nvmeio_request **requests
        size_t count

    struct nvmeio_transfer:
        nvmeio_op op
        nvmeio_file *file
        void *address
        size_t size
        int64_t offset
        bint data_only
        void *user
        nvmeio_after after

    struct nvmeio_many:
        const nvmeio_transfer *transfers
        size_t count
        void *user
        nvmeio_after after

    struct nvmeio_gather:
        nvmeio_op op
        nvmeio_file *file
        void *address
        size_t size
        size_t count
        const int64_t *offsets
        const int64_t *sizes
        bint one_size
        const int64_t *places
        size_t gap_max
        void *user
        nvmeio_after after

    struct nvmeio_failure:
        size_t index
        int error
        int64_t offset
        size_t size

    struct nvmeio_outcome:
        int64_t result
        int64_t got
        bint abandoned
        size_t blocker

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

    struct nvmeio_pool_stats:
        uint64_t bytes_limit
        uint64_t bytes_mapped
        uint64_t bytes_hugetlb
        uint64_t bytes_used
        uint64_t bytes_locked
        uint64_t allocations
        uint64_t reuses
        uint64_t pools

    const char *version "nvmeio_version"()
    unsigned engine_count "nvmeio_engine_count"()
    int engine_probe "nvmeio_engine_probe"(unsigned index, nvmeio_engine_info *info)
    uint32_t fork_generation "nvmeio_fork_generation"()
    int file_open "nvmeio_file_open"(
        const char *path, int flags, nvmeio_direct direct, nvmeio_file **file
    )
    int file_dup "nvmeio_file_dup"(int fd, nvmeio_direct direct, nvmeio_file **file)
    void file_retain "nvmeio_file_retain"(nvmeio_file *file)
    void file_release "nvmeio_file_release"(nvmeio_file *file)
    void file_get_info "nvmeio_file_get_info"(
        const nvmeio_file *file, nvmeio_file_info *info
    )
    int file_fd "nvmeio_file_fd"(nvmeio_file *file)
    int file_is_at "nvmeio_file_is_at"(const nvmeio_file *file, const char *path)
    int64_t file_size "nvmeio_file_size"(const nvmeio_file *file)
    int file_truncate "nvmeio_file_truncate"(nvmeio_file *file, int64_t size)
    int64_t cached_pages "nvmeio_cached_pages"(int fd, int64_t offset, size_t size)
    int file_compare "nvmeio_file_compare"(
        nvmeio_file *file, int64_t offset, const void *address, size_t size,
        size_t *position
    )
    int submit "nvmeio_submit"(
        nvmeio_handle *handle, const nvmeio_transfer *transfer, nvmeio_request **request
    )
    int submit_gather "nvmeio_submit_gather"(
        nvmeio_handle *handle, const nvmeio_gather *gather, nvmeio_request **request,
        size_t *offender
    )
    int submit_many "nvmeio_submit_many"(
        nvmeio_handle *handle, const nvmeio_many *many, nvmeio_request **request,
        size_t *offender
    )
    int gather_check "nvmeio_gather_check"(const nvmeio_gather *gather, size_t *offender)
    size_t request_failures "nvmeio_request_failures"(
        nvmeio_request *request, nvmeio_failure *failures, size_t count
    )
    int perform "nvmeio_perform"(
        nvmeio_handle *handle, const nvmeio_transfer *transfer, nvmeio_outcome *outcome
    )
    int request_wait "nvmeio_request_wait"(nvmeio_request *request, int64_t timeout_ns)
    bint request_done "nvmeio_request_done"(nvmeio_request *request)
    int request_outcome "nvmeio_request_outcome"(
        nvmeio_request *request, nvmeio_outcome *outcome
    )
    int request_cancel "nvmeio_request_cancel"(nvmeio_request *request)
    void request_release "nvmeio_request_release"(nvmeio_request *request)
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
    int pool_alloc "nvmeio_pool_alloc"(size_t size, bint lock, void **address, int *locked)
    int pool_alloc_on "nvmeio_pool_alloc_on"(
        int node, size_t size, bint lock, void **address, int *locked
    )
    void pool_set_limit "nvmeio_pool_set_limit"(uint64_t bytes)
    uint64_t pool_trim "nvmeio_pool_trim"()
    void pool_set_hugetlb "nvmeio_pool_set_hugetlb"(bint wanted)
    void pool_free "nvmeio_pool_free"(void *address)
    int pool_set_pinned "nvmeio_pool_set_pinned"(void *address, bint pinned)
    bint pool_has_room "nvmeio_pool_has_room"(size_t size)
    bint pool_holds "nvmeio_pool_holds"(const void *address)
    bint pool_is_pinned "nvmeio_pool_is_pinned"(const void *address, size_t size)
    int pool_use "nvmeio_pool_use"(const void *address, int change)
    void pool_get_stats "nvmeio_pool_get_stats"(nvmeio_pool_stats *stats)
    void copy "nvmeio_copy"(void *target, const void *source, size_t size)
    void copy_part "nvmeio_copy_part"(
        void *target, const void *source, size_t size, size_t total
    )
    bint copy_overlaps "nvmeio_copy_overlaps"(
        const void *target, const void *source, size_t size
    )
    const char *copy_kernel_at "nvmeio_copy_kernel_at"(unsigned index, int *works)
    int copy_select "nvmeio_copy_select"(const char *name)
    void copy_selected "nvmeio_copy_selected"(const char **small, const char **large)
    unsigned cpu_count "nvmeio_cpu_count"()
    unsigned team_size "nvmeio_team_size"(unsigned wanted)
    uint64_t memory_bytes "nvmeio_memory_bytes"()
