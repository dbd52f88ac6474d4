/* gather.h -- many records of one file in one request.
 *
 * A gather reads them, a scatter writes them.  Neighbours in the file are merged into
 * one I/O where that is cheaper, and what several records ask for is read once.  A
 * record that fails leaves the others alone. */
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
    void *address;            /* lent until the request is done */
    size_t size;              /* of that memory */
    size_t count;             /* of records */
    const int64_t *offsets;   /* in the file; these arrays only for the call */
    const int64_t *sizes;     /* of each record, or with `one_size` of all of them */
    bool one_size;
    const int64_t *places; /* in the memory; NULL: one behind another */
    size_t gap_max;        /* read for nothing between two records, at most */
    void *user;            /* as for nvmeio_transfer */
    struct nvmeio_after after;
};

/* Start a gather or a scatter.  A gather of a file that may bypass the page cache, and
 * need not (NVMEIO_DIRECT_AUTO), takes from there what it has.  Refused, besides what
 * nvmeio_submit() refuses, with the index of the first record at fault in *offender
 * (SIZE_MAX where it is none of them): -EINVAL for a negative offset, size or place,
 * -EOVERFLOW where an offset and a size are too much together, -EFAULT for a record
 * that is not within the memory, -ENODATA for one to be read past the end of the file,
 * -EEXIST for one that shares bytes with another (of the memory in a gather, of the
 * file in a scatter).  With `after` the file's size is not looked at: what is past its
 * end then fails. The outcome's result is all bytes, or the error of the failed record
 * with the lowest index, or of an engine that has died; `got` then counts the bytes of
 * the records that did not fail.  nvmeio_request_failures() tells which have failed. */
NVMEIO_API int nvmeio_submit_gather(struct nvmeio_handle *handle,
                                    const struct nvmeio_gather *gather,
                                    struct nvmeio_request **request, size_t *offender);

/* Whether nvmeio_submit_gather() would refuse records, whatever the file's size: 0, or
 * -errno and *offender as there, or -ENOMEM.  `file` and `user` are not looked at. */
NVMEIO_API int nvmeio_gather_check(const struct nvmeio_gather *gather,
                                   size_t *offender);

#ifdef __cplusplus
}
#endif
#endif
