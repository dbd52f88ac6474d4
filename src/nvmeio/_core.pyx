"""The only caller of libnvmeio, which is linked here and nowhere else.

Every other module cimports these functions and so shares one library: one pool, one fork
handler.  A negative errno leaves them as an integer; check() makes it an OSError.
"""

import os

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef extern from "nvmeio/nvmeio.h" nogil:
    const char *nvmeio_version()
    unsigned nvmeio_engine_count()
    int nvmeio_engine_probe(unsigned index, nvmeio_engine_info *info)
    uint32_t nvmeio_fork_generation()
    int nvmeio_file_open(
        const char *path, int flags, nvmeio_direct direct, nvmeio_file **file
    )
    int nvmeio_file_dup(int fd, nvmeio_direct direct, nvmeio_file **file)
    void nvmeio_file_retain(nvmeio_file *file)
    void nvmeio_file_release(nvmeio_file *file)
    void nvmeio_file_get_info(const nvmeio_file *file, nvmeio_file_info *info)
    int nvmeio_file_fd(nvmeio_file *file)
    int nvmeio_file_is_at(const nvmeio_file *file, const char *path)
    int64_t nvmeio_file_size(const nvmeio_file *file)
    int nvmeio_file_truncate(nvmeio_file *file, int64_t size)
    int nvmeio_file_compare(
        nvmeio_file *file, int64_t offset, const void *address, size_t size,
        size_t *position
    )
    int nvmeio_submit(
        nvmeio_handle *handle, const nvmeio_transfer *transfer, nvmeio_request **request
    )
    int nvmeio_submit_gather(
        nvmeio_handle *handle, const nvmeio_gather *gather, nvmeio_request **request,
        size_t *offender
    )
    int nvmeio_submit_many(
        nvmeio_handle *handle, const nvmeio_many *many, nvmeio_request **request,
        size_t *offender
    )
    int nvmeio_gather_check(const nvmeio_gather *gather, size_t *offender)
    size_t nvmeio_request_failures(
        nvmeio_request *request, nvmeio_failure *failures, size_t count
    )
    int nvmeio_request_wait(nvmeio_request *request, int64_t timeout_ns)
    bint nvmeio_request_done(nvmeio_request *request)
    int nvmeio_request_outcome(nvmeio_request *request, nvmeio_outcome *outcome)
    int nvmeio_request_cancel(nvmeio_request *request)
    void nvmeio_request_release(nvmeio_request *request)
    void nvmeio_config_default(nvmeio_config *config)
    int nvmeio_handle_open(const nvmeio_config *config, nvmeio_handle **handle)
    void nvmeio_handle_stop(nvmeio_handle *handle)
    void nvmeio_handle_close(nvmeio_handle *handle)
    int nvmeio_handle_drain(nvmeio_handle *handle, int64_t timeout_ns)
    int nvmeio_perform(
        nvmeio_handle *handle, const nvmeio_transfer *transfer, nvmeio_outcome *outcome
    )
    unsigned nvmeio_handle_pop(nvmeio_handle *handle, void **users, unsigned count)
    int nvmeio_handle_watch(nvmeio_handle *handle, int fd)
    void nvmeio_handle_unwatch(nvmeio_handle *handle, int fd)
    unsigned nvmeio_handle_pending(nvmeio_handle *handle)
    const char *nvmeio_handle_engine(nvmeio_handle *handle)
    const char *nvmeio_handle_fallback(nvmeio_handle *handle)
    void nvmeio_handle_stats(nvmeio_handle *handle, nvmeio_stats *stats)
    void nvmeio_handle_latencies(nvmeio_handle *handle, uint64_t *counts)
    int64_t nvmeio_latency_ns(unsigned bucket)
    int nvmeio_pool_alloc(size_t size, bint lock, void **address, int *locked)
    int nvmeio_pool_alloc_on(
        int node, size_t size, bint lock, void **address, int *locked
    )
    void nvmeio_pool_set_limit(uint64_t bytes)
    void nvmeio_pool_set_hugetlb(bint wanted)
    void nvmeio_pool_free(void *address)
    int nvmeio_pool_set_pinned(void *address, bint pinned)
    bint nvmeio_pool_has_room(size_t size)
    bint nvmeio_pool_holds(const void *address)
    bint nvmeio_pool_is_pinned(const void *address, size_t size)
    int nvmeio_pool_use(const void *address, int change)
    void nvmeio_pool_get_stats(nvmeio_pool_stats *stats)
    void nvmeio_copy(void *target, const void *source, size_t size)
    void nvmeio_copy_part(void *target, const void *source, size_t size, size_t total)
    bint nvmeio_copy_overlaps(const void *target, const void *source, size_t size)
    const char *nvmeio_copy_kernel_at(unsigned index, int *works)
    int nvmeio_copy_select(const char *name)
    void nvmeio_copy_selected(const char **small, const char **large)
    unsigned nvmeio_cpu_count()
    unsigned nvmeio_team_size(unsigned wanted)
    uint64_t nvmeio_memory_bytes()


cdef int64_t check(int64_t result, object path=None) except -1:
    """Return ``result``, or raise the OSError that a negative errno stands for."""
    if result >= 0:
        return result
    if path is None:
        raise OSError(-result, os.strerror(-result))
    raise OSError(-result, os.strerror(-result), path)


cdef const char *version() noexcept nogil:
    return nvmeio_version()


cdef unsigned engine_count() noexcept nogil:
    return nvmeio_engine_count()


cdef int engine_probe(unsigned index, nvmeio_engine_info *info) noexcept nogil:
    return nvmeio_engine_probe(index, info)


cdef uint32_t fork_generation() noexcept nogil:
    return nvmeio_fork_generation()


cdef int file_open(
    const char *path, int flags, nvmeio_direct direct, nvmeio_file **file
) noexcept nogil:
    return nvmeio_file_open(path, flags, direct, file)


cdef int file_dup(int fd, nvmeio_direct direct, nvmeio_file **file) noexcept nogil:
    return nvmeio_file_dup(fd, direct, file)


cdef void file_retain(nvmeio_file *file) noexcept nogil:
    nvmeio_file_retain(file)


cdef void file_release(nvmeio_file *file) noexcept nogil:
    nvmeio_file_release(file)


cdef void file_get_info(const nvmeio_file *file, nvmeio_file_info *info) noexcept nogil:
    nvmeio_file_get_info(file, info)


cdef int file_fd(nvmeio_file *file) noexcept nogil:
    return nvmeio_file_fd(file)


cdef int file_is_at(const nvmeio_file *file, const char *path) noexcept nogil:
    return nvmeio_file_is_at(file, path)


cdef int64_t file_size(const nvmeio_file *file) noexcept nogil:
    return nvmeio_file_size(file)


cdef int file_truncate(nvmeio_file *file, int64_t size) noexcept nogil:
    return nvmeio_file_truncate(file, size)


cdef int file_compare(
    nvmeio_file *file, int64_t offset, const void *address, size_t size, size_t *position
) noexcept nogil:
    return nvmeio_file_compare(file, offset, address, size, position)


cdef int submit(
    nvmeio_handle *handle, const nvmeio_transfer *transfer, nvmeio_request **request
) noexcept nogil:
    return nvmeio_submit(handle, transfer, request)


cdef int submit_gather(
    nvmeio_handle *handle, const nvmeio_gather *gather, nvmeio_request **request,
    size_t *offender
) noexcept nogil:
    return nvmeio_submit_gather(handle, gather, request, offender)


cdef int submit_many(
    nvmeio_handle *handle, const nvmeio_many *many, nvmeio_request **request,
    size_t *offender
) noexcept nogil:
    return nvmeio_submit_many(handle, many, request, offender)


cdef int gather_check(const nvmeio_gather *gather, size_t *offender) noexcept nogil:
    return nvmeio_gather_check(gather, offender)


cdef size_t request_failures(
    nvmeio_request *request, nvmeio_failure *failures, size_t count
) noexcept nogil:
    return nvmeio_request_failures(request, failures, count)


cdef int request_wait(nvmeio_request *request, int64_t timeout_ns) noexcept nogil:
    return nvmeio_request_wait(request, timeout_ns)


cdef bint request_done(nvmeio_request *request) noexcept nogil:
    return nvmeio_request_done(request)


cdef int request_outcome(nvmeio_request *request, nvmeio_outcome *outcome) noexcept nogil:
    return nvmeio_request_outcome(request, outcome)


cdef int request_cancel(nvmeio_request *request) noexcept nogil:
    return nvmeio_request_cancel(request)


cdef void request_release(nvmeio_request *request) noexcept nogil:
    nvmeio_request_release(request)


cdef void config_default(nvmeio_config *config) noexcept nogil:
    nvmeio_config_default(config)


cdef int handle_open(const nvmeio_config *config, nvmeio_handle **handle) noexcept nogil:
    return nvmeio_handle_open(config, handle)


cdef void handle_stop(nvmeio_handle *handle) noexcept nogil:
    nvmeio_handle_stop(handle)


cdef void handle_close(nvmeio_handle *handle) noexcept nogil:
    nvmeio_handle_close(handle)


cdef int handle_drain(nvmeio_handle *handle, int64_t timeout_ns) noexcept nogil:
    return nvmeio_handle_drain(handle, timeout_ns)


cdef int perform(
    nvmeio_handle *handle, const nvmeio_transfer *transfer, nvmeio_outcome *outcome
) noexcept nogil:
    return nvmeio_perform(handle, transfer, outcome)


cdef unsigned handle_pop(
    nvmeio_handle *handle, void **users, unsigned count
) noexcept nogil:
    return nvmeio_handle_pop(handle, users, count)


cdef int handle_watch(nvmeio_handle *handle, int fd) noexcept nogil:
    return nvmeio_handle_watch(handle, fd)


cdef void handle_unwatch(nvmeio_handle *handle, int fd) noexcept nogil:
    nvmeio_handle_unwatch(handle, fd)


cdef unsigned handle_pending(nvmeio_handle *handle) noexcept nogil:
    return nvmeio_handle_pending(handle)


cdef const char *handle_engine(nvmeio_handle *handle) noexcept nogil:
    return nvmeio_handle_engine(handle)


cdef const char *handle_fallback(nvmeio_handle *handle) noexcept nogil:
    return nvmeio_handle_fallback(handle)


cdef void handle_stats(nvmeio_handle *handle, nvmeio_stats *stats) noexcept nogil:
    nvmeio_handle_stats(handle, stats)


cdef void handle_latencies(nvmeio_handle *handle, uint64_t *counts) noexcept nogil:
    nvmeio_handle_latencies(handle, counts)


cdef int64_t latency_ns(unsigned bucket) noexcept nogil:
    return nvmeio_latency_ns(bucket)


cdef int pool_alloc(size_t size, bint lock, void **address, int *locked) noexcept nogil:
    return nvmeio_pool_alloc(size, lock, address, locked)


cdef int pool_alloc_on(
    int node, size_t size, bint lock, void **address, int *locked
) noexcept nogil:
    return nvmeio_pool_alloc_on(node, size, lock, address, locked)


cdef void pool_set_limit(uint64_t bytes) noexcept nogil:
    nvmeio_pool_set_limit(bytes)


cdef void pool_set_hugetlb(bint wanted) noexcept nogil:
    nvmeio_pool_set_hugetlb(wanted)


cdef void pool_free(void *address) noexcept nogil:
    nvmeio_pool_free(address)


cdef int pool_set_pinned(void *address, bint pinned) noexcept nogil:
    return nvmeio_pool_set_pinned(address, pinned)


cdef bint pool_has_room(size_t size) noexcept nogil:
    return nvmeio_pool_has_room(size)


cdef bint pool_holds(const void *address) noexcept nogil:
    return nvmeio_pool_holds(address)


cdef bint pool_is_pinned(const void *address, size_t size) noexcept nogil:
    return nvmeio_pool_is_pinned(address, size)


cdef int pool_use(const void *address, int change) noexcept nogil:
    return nvmeio_pool_use(address, change)


cdef void pool_get_stats(nvmeio_pool_stats *stats) noexcept nogil:
    nvmeio_pool_get_stats(stats)


cdef void copy(void *target, const void *source, size_t size) noexcept nogil:
    nvmeio_copy(target, source, size)


cdef void copy_part(
    void *target, const void *source, size_t size, size_t total
) noexcept nogil:
    nvmeio_copy_part(target, source, size, total)


cdef bint copy_overlaps(
    const void *target, const void *source, size_t size
) noexcept nogil:
    return nvmeio_copy_overlaps(target, source, size)


cdef const char *copy_kernel_at(unsigned index, int *works) noexcept nogil:
    return nvmeio_copy_kernel_at(index, works)


cdef int copy_select(const char *name) noexcept nogil:
    return nvmeio_copy_select(name)


cdef void copy_selected(const char **small, const char **large) noexcept nogil:
    nvmeio_copy_selected(small, large)


cdef unsigned cpu_count() noexcept nogil:
    return nvmeio_cpu_count()


cdef unsigned team_size(unsigned wanted) noexcept nogil:
    return nvmeio_team_size(wanted)


cdef uint64_t memory_bytes() noexcept nogil:
    return nvmeio_memory_bytes()
