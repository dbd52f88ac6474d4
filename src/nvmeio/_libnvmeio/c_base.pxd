from libc.stdint cimport uint32_t


cdef extern from "nvmeio/base.h" nogil:
    int IO_BYTES_MAX "NVMEIO_IO_BYTES_MAX"
    size_t BLOCK_BYTES_MAX "NVMEIO_BLOCK_BYTES_MAX"
    unsigned QUEUE_DEPTH_MAX "NVMEIO_QUEUE_DEPTH_MAX"
    unsigned WORKERS_MAX "NVMEIO_WORKERS_MAX"

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

    const char *version "nvmeio_version"()
    unsigned engine_count "nvmeio_engine_count"()
    int engine_probe "nvmeio_engine_probe"(unsigned index, nvmeio_engine_info *info)
    uint32_t fork_generation "nvmeio_fork_generation"()
