/* request.h -- one transfer, from submission to result.
 *
 * The memory must exist until the request is done: you may release a request early,
 * but not free its memory.  All functions are thread-safe. */
#ifndef NVMEIO_REQUEST_H
#define NVMEIO_REQUEST_H

#include <nvmeio/base.h>
#include <nvmeio/file.h>

#ifdef __cplusplus
extern "C" {
#endif

struct nvmeio_handle;
struct nvmeio_request;

/* Requests of the same handle that must be done before a request starts.  The file's
 * size is checked only then.  If one of them fails or is cancelled, the request fails
 * with the same error and does not start. */
struct nvmeio_after {
    struct nvmeio_request *const *requests;
    size_t count; /* 0: it starts at once */
};

struct nvmeio_transfer {
    enum nvmeio_op op;
    struct nvmeio_file *file; /* the request takes a reference of its own */
    bool pass_file;           /* or the caller's, unless an error is returned */
    void *address;            /* borrowed until the request is done; ignored by fsync */
    size_t size;
    int64_t offset;
    bool data_only; /* of an fsync: only the data and what is needed to read them, as
                     * fdatasync(2) */
    bool buffered;  /* nvmeio_perform() only if it goes through the page cache */
    bool more;      /* nvmeio_perform(): others of the same request follow, of which the
                     * last one is counted */
    void *user;     /* returned by nvmeio_handle_pop(); NULL: not reported there */
    struct nvmeio_after after;
};

/* Transfers of several files in one request. */
struct nvmeio_many {
    const struct nvmeio_transfer *transfers; /* their `user` and `after` are ignored */
    size_t count;
    void *user; /* as for nvmeio_transfer */
    struct nvmeio_after after;
};

/* A failed part of a request. */
struct nvmeio_failure {
    size_t index; /* of the transfer or record, in the order of submission */
    int error;    /* -errno */
    int64_t offset;
    size_t size;
};

struct nvmeio_outcome {
    int64_t result;  /* bytes, or -errno: -ECANCELED, -ENODATA past the end, ...; if
                      * several blocks failed, that of the lowest offset */
    int64_t got;     /* after a failure: bytes transferred from the start; after
                      * -ENODATA, the bytes that the file has there */
    bool closing;    /* the error is of close(2), after all bytes were transferred: this
                      * request held the last reference to a file that was open for
                      * writing, and its bytes may be lost */
    int close_error; /* what that close(2) returned, or 0; the result does not say so
                      * if the request itself failed or was cancelled */
    bool abandoned;  /* the kernel may still use the memory: never free it */
    size_t
        blocker; /* index in `after` of the request that failed; SIZE_MAX: none did */
};

/* Start a transfer.  Returns errors only for arguments (-EINVAL; -EBADF for an
 * operation that the file was not opened for; -EOVERFLOW; -EXDEV for `after` of another
 * handle; -EOWNERDEAD for one from before a fork), for a closed handle (-EPIPE) and for
 * lack of memory (-ENOMEM).  Errors of the I/O are in the outcome.  An fsync covers
 * every earlier write of this handle to the same file.  A request that holds the last
 * reference to its file is done only when the file is closed.
 * The caller releases *request.  It is stored before nvmeio_handle_pop() can report the
 * request to another thread. */
NVMEIO_API int nvmeio_submit(struct nvmeio_handle *handle,
                             const struct nvmeio_transfer *transfer,
                             struct nvmeio_request **request);

/* Start many reads, writes and fsyncs as one request, which is done when all of them
 * are, and the files that only they held are closed.  Returns errors as nvmeio_submit()
 * does, with the index of the first invalid transfer in *offender (SIZE_MAX if the
 * error is not of a transfer); then nothing was started.  The transfers are not
 * ordered, but an fsync covers earlier writes.  A failed one does not affect the
 * others: the outcome's result is the sum of bytes, or the error of the lowest index;
 * `got` then counts the bytes of those that succeeded.
 */
NVMEIO_API int nvmeio_submit_many(struct nvmeio_handle *handle,
                                  const struct nvmeio_many *many,
                                  struct nvmeio_request **request, size_t *offender);

/* Store at most `count` failures, lowest index first, and return how many there are.
 * Returns 0 before the request is done, and for a single transfer. */
NVMEIO_API size_t nvmeio_request_failures(struct nvmeio_request *request,
                                          struct nvmeio_failure *failures,
                                          size_t count);

/* Carry out a transfer in this thread with pread(2) or pwrite(2), if it is one block of
 * at most 1 MiB that needs no bounce, of a file on a local file system.  Returns 1 with
 * its outcome; 0 if it must be submitted instead, with `file` still the caller's;
 * -errno if nvmeio_submit() would fail. Signals do not interrupt it and it has no
 * timeout, but it only waits for a local device.  It counts as a request of the handle.
 * Ignores `after`. */
NVMEIO_API int nvmeio_perform(struct nvmeio_handle *handle,
                              const struct nvmeio_transfer *transfer,
                              struct nvmeio_outcome *outcome);

/* Wait until the request is done.  Returns 0; 1 if this call reports the completion, so
 * that nvmeio_handle_pop() will not (never without `user`); -ETIMEDOUT after timeout_ns
 * (negative: no limit); -EOWNERDEAD if it was submitted before a fork(). */
NVMEIO_API int nvmeio_request_wait(struct nvmeio_request *request, int64_t timeout_ns);

/* Return whether the request is done, successfully or not, without waiting.  In a
 * forked child, a request that was in flight at the fork() never is. */
NVMEIO_API bool nvmeio_request_done(struct nvmeio_request *request);

/* Store the outcome.  Returns 0, -EINPROGRESS, or -EOWNERDEAD as above.  A child can
 * read the outcome of requests that were done before the fork(). */
NVMEIO_API int nvmeio_request_outcome(struct nvmeio_request *request,
                                      struct nvmeio_outcome *outcome);

/* Drop the blocks that the kernel does not have yet; the others complete.  Returns 1 if
 * anything was dropped (the result will be -ECANCELED), else 0; -EOWNERDEAD if it was
 * submitted before a fork(). */
NVMEIO_API int nvmeio_request_cancel(struct nvmeio_request *request);

/* Release the caller's reference; NULL is ignored.  A request in flight goes on, and
 * its memory must stay until it is done. */
NVMEIO_API void nvmeio_request_release(struct nvmeio_request *request);

#ifdef __cplusplus
}
#endif
#endif
