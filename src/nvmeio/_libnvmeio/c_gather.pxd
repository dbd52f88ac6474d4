from libc.stdint cimport int64_t

from nvmeio._libnvmeio.c_base cimport nvmeio_op
from nvmeio._libnvmeio.c_file cimport nvmeio_file
from nvmeio._libnvmeio.c_request cimport nvmeio_after, nvmeio_handle, nvmeio_request


cdef extern from "nvmeio/gather.h" nogil:
    struct nvmeio_gather:
        nvmeio_op op
        nvmeio_file *file
        bint pass_file
        void *address
        size_t size
        size_t count
        size_t done
        const int64_t *offsets
        const int64_t *sizes
        bint one_size
        const int64_t *places
        size_t gap_max
        void *user
        nvmeio_after after

    int submit_gather "nvmeio_submit_gather"(
        nvmeio_handle *handle, const nvmeio_gather *gather, nvmeio_request **request,
        size_t *offender
    )
    int gather_check "nvmeio_gather_check"(const nvmeio_gather *gather, size_t *offender)
