from libc.stdint cimport int64_t

from nvmeio._libnvmeio.c_base cimport nvmeio_op
from nvmeio._libnvmeio.c_file cimport nvmeio_file


cdef extern from "nvmeio/request.h" nogil:
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
        bint pass_file
        void *address
        size_t size
        int64_t offset
        bint data_only
        bint buffered
        bint more
        void *user
        nvmeio_after after

    struct nvmeio_many:
        const nvmeio_transfer *transfers
        size_t count
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
        bint closing
        int close_error
        bint abandoned
        size_t blocker

    int submit "nvmeio_submit"(
        nvmeio_handle *handle, const nvmeio_transfer *transfer, nvmeio_request **request
    )
    int submit_many "nvmeio_submit_many"(
        nvmeio_handle *handle, const nvmeio_many *many, nvmeio_request **request,
        size_t *offender
    )
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
