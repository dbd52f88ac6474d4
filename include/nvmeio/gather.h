/* gather.h -- many records of one file in one request.
 *
 * A gather reads them, a scatter writes them.  Neighbours in the file are merged into
 * one I/O if that is cheaper, and bytes that several records share are read once.  A
 * record that fails does not affect the others. */
#ifndef NVMEIO_GATHER_H
#define NVMEIO_GATHER_H

#include <nvmeio/base.h>
#include <nvmeio/request.h>

#ifdef __cplusplus
extern "C" {
#endif

struct nvmeio_gather {
    enum nvmeio_op op;        /* NVMEIO_OP_READ gathers, NVMEIO_OP_WRITE scatters */
    struct nvmeio_file *file; /* the request takes a reference of its own */
    bool pass_file;           /* as for nvmeio_transfer */
    void *address;            /* borrowed until the request is done */
    size_t size;              /* of that memory; see nvmeio_submit_gather() */
    size_t count;             /* of records */
    size_t done;              /* of a gather: the first records, which nvmeio_perform()
                               * has read already; -EINVAL if there are fewer */
    const int64_t *offsets;   /* in the file; the arrays need only exist for the call */
    const int64_t *sizes;     /* of each record, or with `one_size` one for all */
    bool one_size;
    const int64_t *places; /* in the memory; NULL: one after the other */
    size_t gap_max;        /* most unneeded bytes to read between two records */
    void *user;            /* as for nvmeio_transfer */
    struct nvmeio_after after;
};

/* Start a gather or a scatter.  If `address` is NULL and `size` is SIZE_MAX, `places`
 * are addresses, and only the records themselves are borrowed.  A gather takes from the
 * page cache what it has, unless the file was opened with NVMEIO_DIRECT_ALWAYS. Returns
 * the errors of nvmeio_submit(), and for records these, with the index of the first
 * invalid record in *offender (else SIZE_MAX): -EINVAL for a negative offset, size or
 * place; -EOVERFLOW if offset plus size is too large; -EFAULT for a record outside of
 * the memory; -ENODATA for a read past the end of the file; -EEXIST for a record that
 * shares bytes with another (of the memory in a gather, of the file in a scatter). With
 * `after` the file's size is not checked here: records past its end fail later. The
 * outcome's result is the sum of bytes, or the error of the failed record with the
 * lowest index, or of a dead engine; `got` then counts the bytes of the records that
 * succeeded.  nvmeio_request_failures() lists those that failed. */
NVMEIO_API int nvmeio_submit_gather(struct nvmeio_handle *handle,
                                    const struct nvmeio_gather *gather,
                                    struct nvmeio_request **request, size_t *offender);

/* Check records as nvmeio_submit_gather() does, except for the file's size.  Returns 0,
 * or -errno with *offender as there, or -ENOMEM.  Ignores `file`, `user` and `after`.
 */
NVMEIO_API int nvmeio_gather_check(const struct nvmeio_gather *gather,
                                   size_t *offender);

#ifdef __cplusplus
}
#endif
#endif
