from libc.stdint cimport uint64_t


cdef extern from "nvmeio/pool.h" nogil:
    size_t POOL_ALIGN "NVMEIO_POOL_ALIGN"
    int POOL_NODE_MAX "NVMEIO_POOL_NODE_MAX"

    struct nvmeio_pool_stats:
        uint64_t bytes_limit
        uint64_t bytes_mapped
        uint64_t bytes_hugetlb
        uint64_t bytes_used
        uint64_t bytes_locked
        uint64_t allocations
        uint64_t reuses

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
