/* request_internal.h -- a request from within: its states, and who may change what.
 *
 * Fields are guarded by the handle's mutex, but for those that never change after
 * submission and `state`, which is read without it. */
#ifndef NVMEIO_REQUEST_INTERNAL_H
#define NVMEIO_REQUEST_INTERNAL_H

#include <nvmeio/request.h>
#include <stdatomic.h>

#include "align.h"
#include "engine.h"

struct nvmeio_lane;

enum nvmeio_state {
    /* Submitted: blocks are being cut, are in flight, or wait for others (the edges of
     * a write for its middle, an fsync for earlier writes). */
    NVMEIO_STATE_ACTIVE,
    /* No block is in flight and none will be: what a failed write left is tidied up. */
    NVMEIO_STATE_SETTLING,
    /* The outcome stands.  Stored with release, loaded with acquire: whoever sees it
     * sees the bytes. */
    NVMEIO_STATE_DONE,
};

struct nvmeio_request {
    /* Never change after submission. */
    struct nvmeio_handle *handle; /* holds a reference */
    struct nvmeio_file *file;     /* holds a reference */
    enum nvmeio_op op;
    size_t total; /* bytes, the result if all goes well */
    void *user;
    uint32_t generation;             /* of the process that submitted it */
    int64_t size_before;             /* of the file, for a write to one that is ours */
    struct nvmeio_geometry geometry; /* its `bounce` is guarded like what follows */

    /* What is being cut: all of the transfer, or one run of `records` after another. */
    char *address; /* NULL for a run whose records are in many places */
    size_t size;
    int64_t offset;
    struct nvmeio_plan plan;

    struct nvmeio_records *records; /* of a gather or scatter, else NULL; owned */
    struct nvmeio_run run;
    size_t merged_bytes; /* of a run that goes through one bounce */
    bool small_pages;    /* the memory of the records is in them */
    bool edges_left;     /* a run has left its edges for the second round */
    bool second_round;   /* of a scatter: the edges of all runs */
    bool alone;          /* of a gather: what has failed with others, by itself */

    atomic_uint references;
    atomic_int state; /* enum nvmeio_state */

    /* Where the next block is cut: in plan.spans[span], `position` bytes from the start
     * of the transfer. */
    unsigned span;
    size_t position;
    bool gate_open;                      /* spans from plan.edges on may start */
    struct nvmeio_request *write_before; /* an fsync's, for which it waits */
    struct nvmeio_request *gated_next;   /* of the fsyncs that wait */
    bool queued;                         /* in the handle's queue */
    bool bounce_optional; /* spans[0] could go direct as well, and may be slower so */
    unsigned in_flight;   /* blocks cut and not yet booked */
    unsigned waiters;     /* threads in nvmeio_request_wait() */
    int error;            /* the first one, or 0 */
    bool cancelled;
    bool abandoned;
    size_t got; /* once done; before, the lowest position that failed */

    struct nvmeio_lane *caller_lane; /* that runs it in the threads that wait */

    /* Lists of the handle: all that are active, in order of submission; those with
     * blocks to cut; those that are done and not yet popped. */
    struct nvmeio_request *active_next, *active_previous;
    struct nvmeio_request *queue_next;
    struct nvmeio_request *done_next, *done_previous;
    bool listed; /* among those that are done */
};

/* A request with one reference, planned and ready to be submitted; NULL: no memory. */
struct nvmeio_request *nvmeio_request_new(struct nvmeio_handle *handle,
                                          const struct nvmeio_transfer *transfer);

/* Look at the file before the first block: a read past the end and a file that cannot
 * be made as long as it has to be fail here, before a byte moves.  Not submitted yet.
 */
void nvmeio_request_check(struct nvmeio_request *request);

/* Whether another process submitted it, of which this one is a child. */
bool nvmeio_request_before_fork(const struct nvmeio_request *request);

/* Whether a block may be cut now.  The mutex is held, as in the next three. */
bool nvmeio_request_has_block(const struct nvmeio_request *request);

/* Whether any of it goes through the page cache.  Needs no mutex. */
bool nvmeio_request_is_buffered(const struct nvmeio_request *request);

/* How many blocks could be cut now, for sharing them out. */
size_t nvmeio_request_blocks_left(const struct nvmeio_request *request,
                                  size_t block_bytes);

/* How much memory the block that nvmeio_request_cut() would give needs for a bounce, if
 * that much is allowed; 0: none. */
size_t nvmeio_request_next_bounce(const struct nvmeio_request *request);

/* Whether there is nothing left to cut.  The mutex is held. */
bool nvmeio_request_is_cut(const struct nvmeio_request *request);

/* There is no memory for bounces: have what is left go direct, if it can.  The mutex is
 * held. */
bool nvmeio_request_waive_bounce(struct nvmeio_request *request);

/* Cut the next block, of at most block_bytes or the file's alignment if that is more;
 * has_block() was true. */
void nvmeio_request_cut(struct nvmeio_request *request, struct nvmeio_block *block,
                        size_t block_bytes);

/* A block that was cut has come back, or never will: note what of it has failed.  The
 * mutex is held. */
void nvmeio_request_book(struct nvmeio_request *request,
                         const struct nvmeio_block *block);

/* Mark as failed from `position` on: what is not yet cut is dropped.  Of several errors
 * that at the lowest position counts, which is where the outcome says that it ended, or
 * the first of those there.  The mutex is held, or the request not submitted. */
void nvmeio_request_fail(struct nvmeio_request *request, int error, size_t position);

/* Whether nothing is left to do, and none will come.  The mutex is held. */
bool nvmeio_request_is_over(const struct nvmeio_request *request);

/* Find how far it came, and cut back a file that a failed write has made and not
 * filled.  Without the mutex, once it is over. */
void nvmeio_request_settle(struct nvmeio_request *request);

/* For runs.c, which plans the runs of a gather. */

/* A request with one reference and nothing planned; NULL: no memory. */
struct nvmeio_request *nvmeio_request_alloc(struct nvmeio_handle *handle,
                                            enum nvmeio_op op, struct nvmeio_file *file,
                                            void *user);

/* Whether memory is such that a bounce, which is in huge pages, may be faster for the
 * device; the pool's, of which bounces are, is not. */
bool nvmeio_request_has_small_pages(const struct nvmeio_request *request,
                                    const void *address, size_t size);

/* Send the first span, which could go direct, through a bounce if the pool has one. */
void nvmeio_request_prefer_bounce(struct nvmeio_request *request);

/* Whether it has failed or was cancelled: no more blocks are cut. */
bool nvmeio_request_is_stopped(const struct nvmeio_request *request);

#endif
