from libc.stdint cimport int64_t, uint32_t, uint64_t

from nvmeio._libnvmeio.c_base cimport nvmeio_direct


cdef extern from "nvmeio/file.h" nogil:
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

    int file_open "nvmeio_file_open"(
        const char *path, int flags, nvmeio_direct direct, nvmeio_file **file
    )
    int file_dup "nvmeio_file_dup"(int fd, nvmeio_direct direct, nvmeio_file **file)
    void file_retain "nvmeio_file_retain"(nvmeio_file *file)
    int file_release "nvmeio_file_release"(nvmeio_file *file)
    void file_remember "nvmeio_file_remember"(nvmeio_file *file)
    void file_forget "nvmeio_file_forget"(nvmeio_file *file)
    bint file_try_retain "nvmeio_file_try_retain"(nvmeio_file *file)
    bint file_is_open "nvmeio_file_is_open"(const nvmeio_file *file)
    void file_get_info "nvmeio_file_get_info"(
        const nvmeio_file *file, nvmeio_file_info *info
    )
    int file_fd "nvmeio_file_fd"(nvmeio_file *file)
    int file_is_at "nvmeio_file_is_at"(const nvmeio_file *file, const char *path)
    void file_write_last "nvmeio_file_write_last"(nvmeio_file *file)
    int64_t file_size "nvmeio_file_size"(const nvmeio_file *file)
    int file_truncate "nvmeio_file_truncate"(nvmeio_file *file, int64_t size)
    int64_t cached_pages "nvmeio_cached_pages"(int fd, int64_t offset, size_t size)
    int try_cached "nvmeio_try_cached"(int fd, int64_t offset)
    int file_compare "nvmeio_file_compare"(
        nvmeio_file *file, int64_t offset, const void *address, size_t size,
        size_t *position
    )
