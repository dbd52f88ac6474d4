cdef extern from "nvmeio/copy.h" nogil:
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
