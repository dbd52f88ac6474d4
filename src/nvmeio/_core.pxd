"""The C library as the other modules see it: its types and its functions."""

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


cdef int64_t check(int64_t result, object path=*) except -1

cdef const char *version() noexcept nogil
cdef unsigned engine_count() noexcept nogil
cdef int engine_probe(unsigned index, nvmeio_engine_info *info) noexcept nogil
cdef uint32_t fork_generation() noexcept nogil

cdef int file_open(
    const char *path, int flags, nvmeio_direct direct, nvmeio_file **file
) noexcept nogil
cdef int file_dup(int fd, nvmeio_direct direct, nvmeio_file **file) noexcept nogil
cdef void file_retain(nvmeio_file *file) noexcept nogil
cdef void file_release(nvmeio_file *file) noexcept nogil
cdef void file_get_info(const nvmeio_file *file, nvmeio_file_info *info) noexcept nogil
cdef int file_fd(nvmeio_file *file) noexcept nogil
cdef int file_is_at(const nvmeio_file *file, const char *path) noexcept nogil
cdef int64_t file_size(const nvmeio_file *file) noexcept nogil
cdef int file_truncate(nvmeio_file *file, int64_t size) noexcept nogil
cdef int file_compare(
    nvmeio_file *file, int64_t offset, const void *address, size_t size, size_t *position
) noexcept nogil

cdef int submit(
    nvmeio_handle *handle, const nvmeio_transfer *transfer, nvmeio_request **request
) noexcept nogil
cdef int submit_gather(
    nvmeio_handle *handle, const nvmeio_gather *gather, nvmeio_request **request,
    size_t *offender
) noexcept nogil
cdef int submit_many(
    nvmeio_handle *handle, const nvmeio_many *many, nvmeio_request **request,
    size_t *offender
) noexcept nogil
cdef int gather_check(const nvmeio_gather *gather, size_t *offender) noexcept nogil
cdef size_t request_failures(
    nvmeio_request *request, nvmeio_failure *failures, size_t count
) noexcept nogil
cdef int perform(
    nvmeio_handle *handle, const nvmeio_transfer *transfer, nvmeio_outcome *outcome
) noexcept nogil
cdef int request_wait(nvmeio_request *request, int64_t timeout_ns) noexcept nogil
cdef bint request_done(nvmeio_request *request) noexcept nogil
cdef int request_outcome(nvmeio_request *request, nvmeio_outcome *outcome) noexcept nogil
cdef int request_cancel(nvmeio_request *request) noexcept nogil
cdef void request_release(nvmeio_request *request) noexcept nogil

cdef void config_default(nvmeio_config *config) noexcept nogil
cdef int handle_open(const nvmeio_config *config, nvmeio_handle **handle) noexcept nogil
cdef void handle_stop(nvmeio_handle *handle) noexcept nogil
cdef void handle_close(nvmeio_handle *handle) noexcept nogil
cdef int handle_drain(nvmeio_handle *handle, int64_t timeout_ns) noexcept nogil
cdef unsigned handle_pop(nvmeio_handle *handle, void **users, unsigned count) noexcept nogil
cdef int handle_watch(nvmeio_handle *handle, int fd) noexcept nogil
cdef void handle_unwatch(nvmeio_handle *handle, int fd) noexcept nogil
cdef unsigned handle_pending(nvmeio_handle *handle) noexcept nogil
cdef const char *handle_engine(nvmeio_handle *handle) noexcept nogil
cdef const char *handle_fallback(nvmeio_handle *handle) noexcept nogil
cdef void handle_stats(nvmeio_handle *handle, nvmeio_stats *stats) noexcept nogil
cdef void handle_latencies(nvmeio_handle *handle, uint64_t *counts) noexcept nogil
cdef int64_t latency_ns(unsigned bucket) noexcept nogil

cdef int pool_alloc(size_t size, bint lock, void **address, int *locked) noexcept nogil
cdef int pool_alloc_on(
    int node, size_t size, bint lock, void **address, int *locked
) noexcept nogil
cdef void pool_set_limit(uint64_t bytes) noexcept nogil
cdef void pool_set_hugetlb(bint wanted) noexcept nogil
cdef void pool_free(void *address) noexcept nogil
cdef int pool_set_pinned(void *address, bint pinned) noexcept nogil
cdef bint pool_has_room(size_t size) noexcept nogil
cdef bint pool_holds(const void *address) noexcept nogil
cdef bint pool_is_pinned(const void *address, size_t size) noexcept nogil
cdef int pool_use(const void *address, int change) noexcept nogil
cdef void pool_get_stats(nvmeio_pool_stats *stats) noexcept nogil

cdef void copy(void *target, const void *source, size_t size) noexcept nogil
cdef void copy_part(
    void *target, const void *source, size_t size, size_t total
) noexcept nogil
cdef bint copy_overlaps(
    const void *target, const void *source, size_t size
) noexcept nogil
cdef const char *copy_kernel_at(unsigned index, int *works) noexcept nogil
cdef int copy_select(const char *name) noexcept nogil
cdef void copy_selected(const char **small, const char **large) noexcept nogil

cdef unsigned cpu_count() noexcept nogil
cdef unsigned team_size(unsigned wanted) noexcept nogil
cdef uint64_t memory_bytes() noexcept nogil
