/* request.h -- one transfer that a caller asked for, from submission to result.
 *
 * The memory and the request live until the request is done: releasing a request
 * early is allowed, freeing its memory is not.  All functions are thread-safe. */
#ifndef NVMEIO_REQUEST_H
#define NVMEIO_REQUEST_H

#include <nvmeio/base.h>
#include <nvmeio/file.h>

#ifdef __cplusplus
extern "C" {
#endif

struct nvmeio_handle;
struct nvmeio_request;

/* Requests of the same handle that are to be done before a request starts.  What
 * depends on the file's size is looked at only then.  Where one of them has failed or
 * was cancelled, so does the request, with the same error, and nothing of it is carried
 * out. */
struct nvmeio_after {
    struct nvmeio_request *const *requests;
    size_t count; /* 0: it starts at once */
};

struct nvmeio_transfer {
    enum nvmeio_op op;
    struct nvmeio_file *file; /* the request takes a reference of its own */
    void *address;            /* lent until the request is done; ignored by fsync */
    size_t size;
    int64_t offset;
    bool data_only; /* an fsync: the data and what it takes to read them, but no times,
                     * modes and owners, as fdatasync(2) */
    void *user;     /* given back by nvmeio_handle_pop(); NULL: not reported there */
    struct nvmeio_after after;
};

/* Transfers of several files in one request. */
struct nvmeio_many {
    const struct nvmeio_transfer *transfers; /* their `user` and `after` are ignored */
    size_t count;
    void *user; /* as for nvmeio_transfer */
    struct nvmeio_after after;
};

/* What of a request has failed. */
struct nvmeio_failure {
    size_t index; /* of the transfer or the record, as it was submitted */
    int error;    /* -errno */
    int64_t offset;
    size_t size;
};

struct nvmeio_outcome {
    int64_t result; /* bytes, or -errno: -ECANCELED, -ENODATA past the end, ...; where
                     * several blocks have failed, that of the lowest */
    int64_t got;    /* after a failure: bytes transferred from the start on; where a
                     * read was refused with -ENODATA, those that the file has there */
    bool abandoned; /* the kernel may still use the memory: never free it */
    size_t
        blocker; /* of `after`, the one whose error this is; SIZE_MAX: it is its own */
};

/* Start a transfer.  Fails only for arguments (-EINVAL, -EBADF for an operation that
 * the file was not opened for, -EOVERFLOW, -EXDEV for `after` of another handle,
 * -EOWNERDEAD for one from before a fork), a closed handle (-EPIPE) or want of memory;
 * what goes wrong with the I/O is in the outcome.  An fsync covers every
 * write to the same file that was submitted to this handle before it.
 * *request is a reference that the caller releases; it is stored before
 * nvmeio_handle_pop() can report the request to another thread. */
NVMEIO_API int nvmeio_submit(struct nvmeio_handle *handle,
                             const struct nvmeio_transfer *transfer,
                             struct nvmeio_request **request);

/* Start many reads, writes and fsyncs as one request, which is done when all of them
 * are.  Refused as nvmeio_submit() refuses them, with the index of the first at fault
 * in *offender (SIZE_MAX where it is none of them); then nothing was started.  They are
 * not ordered among each other, but an fsync covers the writes before it.  One that
 * fails leaves the others alone: the outcome's result is all bytes, or the error of the
 * one with the lowest index; `got` then counts the bytes of those that did not fail. */
NVMEIO_API int nvmeio_submit_many(struct nvmeio_handle *handle,
                                  const struct nvmeio_many *many,
                                  struct nvmeio_request **request, size_t *offender);

/* What of it has failed, the lowest indices first: how many in all, of which at most
 * `count` are stored.  0 before the request is done, and for one transfer. */
NVMEIO_API size_t nvmeio_request_failures(struct nvmeio_request *request,
                                          struct nvmeio_failure *failures,
                                          size_t count);

/* Carry out a transfer in this thread, by pread(2) or pwrite(2), if it is one block, of
 * 1 MiB at most, that goes straight between memory and a file on a local file system:
 * 1, with its outcome. 0 where it is not, and has to be submitted.  -errno where
 * nvmeio_submit() would fail. No signal interrupts it and it has no timeout, but what
 * it waits for is a local device; it counts as a request of the handle in all else.
 * `after` is ignored. */
NVMEIO_API int nvmeio_perform(struct nvmeio_handle *handle,
                              const struct nvmeio_transfer *transfer,
                              struct nvmeio_outcome *outcome);

/* Wait until done: 0, or 1 where the completion is reported to this thread and will not
 * be by nvmeio_handle_pop() (never without `user`).  -ETIMEDOUT after timeout_ns
 * (negative: no limit), or -EOWNERDEAD if it was submitted before a fork(). */
NVMEIO_API int nvmeio_request_wait(struct nvmeio_request *request, int64_t timeout_ns);

NVMEIO_API bool nvmeio_request_done(struct nvmeio_request *request);

/* What became of it: 0, or -EINPROGRESS, or -EOWNERDEAD as above.  What was done before
 * the fork() can be asked for in the child too. */
NVMEIO_API int nvmeio_request_outcome(struct nvmeio_request *request,
                                      struct nvmeio_outcome *outcome);

/* Drop the blocks that are not yet with the kernel; the others run to their end.
 * 1 if anything was dropped (the result will be -ECANCELED), else 0; -EOWNERDEAD if it
 * was submitted before a fork(). */
NVMEIO_API int nvmeio_request_cancel(struct nvmeio_request *request);

NVMEIO_API void nvmeio_request_release(struct nvmeio_request *request);

#ifdef __cplusplus
}
#endif
#endif
