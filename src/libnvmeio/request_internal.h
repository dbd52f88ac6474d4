/* request_internal.h -- a request from within: what is cut next, and what came of it.
 *
 * Fields are guarded by the queue's mutex, but for those that never change after
 * submission and `state`, which is read without it. */
#ifndef NVMEIO_REQUEST_INTERNAL_H
#define NVMEIO_REQUEST_INTERNAL_H

#include <nvmeio/gather.h>
#include <nvmeio/request.h>
#include <stdatomic.h>

#include "align.h"
#include "engine.h"
#include "waiter.h"

enum nvmeio_state {
    NVMEIO_STATE_ACTIVE, /* blocks are to be cut or in flight, or it waits for others */
    NVMEIO_STATE_SETTLING, /* over, with something left to find out or to close */
    /* The outcome stands.  Stored with release, loaded with acquire: whoever sees it
     * sees the bytes. */
    NVMEIO_STATE_DONE,
};

/* How far a request is that others may hold back. */
enum nvmeio_phase {
    NVMEIO_PHASE_WAITING,  /* for the requests that it is to come after */
    NVMEIO_PHASE_PLANNING, /* plan() is at work, without the mutex */
    NVMEIO_PHASE_PLANNED,
};

/* That one request waits for another, in the list of the other's dependents. */
struct nvmeio_link {
    struct nvmeio_request *dependent;
    struct nvmeio_link *next, **place; /* place: NULL once it is not in a list */
    size_t index;                      /* of nvmeio_after */
};

/* In which transfers, gathers and fsyncs differ.  The mutex is held once the request is
 * submitted, but for plan(), settle(), load() and deliver(). */
struct nvmeio_request_ops {
    /* Look at the file, and plan what is cut. */
    void (*plan)(struct nvmeio_request *request);

    /* The current span is cut: go to the next, or to the end of the plan. */
    void (*next)(struct nvmeio_request *request);

    /* Everything that was cut has landed, and nothing has stopped the request: whether
     * there is another round of blocks to cut.  May be NULL. */
    bool (*next_round)(struct nvmeio_request *request);

    /* How many blocks could be cut, for sharing them out among workers. */
    size_t (*blocks_left)(const struct nvmeio_request *request);

    /* A block has failed from this position in the plan on. */
    void (*fail)(struct nvmeio_request *request, const struct nvmeio_block *block,
                 size_t position);

    /* It failed or was cancelled: find how far it came. */
    void (*settle)(struct nvmeio_request *request);

    /* Fill the bounce of a write; bring the first `landed` bytes of a read to where
     * they belong, which may be where they are. */
    void (*load)(const struct nvmeio_block *block);
    void (*deliver)(const struct nvmeio_block *block, size_t landed);

    /* What nvmeio_request_failures() tells of a request that is done.  May be NULL. */
    size_t (*failures)(const struct nvmeio_request *request,
                       struct nvmeio_failure *failures, size_t count);

    /* Free what is of this kind alone.  May be NULL. */
    void (*free)(struct nvmeio_request *request);
};

/* What requests know of their handle. */
struct nvmeio_owner {
    void (*release)(struct nvmeio_handle *handle); /* drop a reference */
    enum nvmeio_bounce bounce;
    size_t block_bytes;        /* of a block, in whole pages */
    size_t ordered_bytes;      /* of one that makes a file longer */
    size_t bounce_bytes;       /* of one bounce */
    size_t large_bounce_bytes; /* of the one for blocks that make a file longer */
};

struct nvmeio_request {
    /* Never change after submission. */
    const struct nvmeio_request_ops *ops;
    struct nvmeio_handle *handle; /* holds a reference */
    const struct nvmeio_owner *owner;
    enum nvmeio_op op;
    bool data_only; /* an fsync: fdatasync(2) */
    size_t total;   /* bytes, the result if all goes well */
    void *user;
    uint32_t generation; /* of the process that submitted it */
    /* A write makes the file longer from here on: blocks beyond land one by one, in the
     * order of the file.  INT64_MAX where the file is long enough. */
    int64_t ordered_from;
    struct nvmeio_geometry geometry; /* its `bounce` is guarded like what follows */

    /* The request of many of which this is one, or NULL; it holds this one's memory. */
    struct nvmeio_request *whole;

    atomic_uint references;
    atomic_int state;         /* enum nvmeio_state */
    struct nvmeio_file *file; /* holds a reference until it is done */

    /* What is being cut: all of a transfer, or one extent of a gather after another;
     * and where the next block begins: in plan.spans[span], `position` bytes from the
     * start. */
    char *address; /* NULL: in many places, and brought there by load() or deliver() */
    size_t size;
    int64_t offset;
    struct nvmeio_plan plan;
    unsigned span;
    size_t position;
    bool barrier; /* the next block waits until nothing is in flight */

    struct nvmeio_gathering *gathering;  /* of a gather or scatter; freed with it */
    struct nvmeio_parts *parts;          /* of one of many; freed with it */
    struct nvmeio_extent extent;         /* which of it is being cut */
    struct nvmeio_request *write_before; /* an fsync's, for which it waits */

    unsigned in_flight; /* blocks cut and not yet booked; of many: parts not yet done */
    int error;          /* that at the lowest position, or 0 */
    bool cancelled;
    bool failed; /* some of it did; a gather goes on with the rest */
    bool abandoned;
    size_t got; /* once done; before, the lowest position that failed */

    enum nvmeio_phase phase;
    size_t waits;              /* requests that are not done, and hold it back */
    struct nvmeio_link *links; /* to all that it is to come after; owned */
    size_t link_count;
    struct nvmeio_link *dependents; /* of requests that are to come after this one */
    size_t blocker;                 /* of its links, whose error it has; or SIZE_MAX */
    bool ready;                     /* in the queue's list of those */
    struct nvmeio_request *ready_next;

    /* Lists of the queue: all that are active, in order of submission; those with
     * blocks to cut; fsyncs that wait for writes; those that are done, and not yet
     * reported. */
    struct nvmeio_request *active_next, *active_previous;
    struct nvmeio_request *queue_next, *queue_previous;
    struct nvmeio_request *gated_next;
    struct nvmeio_request *done_next, *done_previous;
    bool queued;                   /* it has blocks to cut, and is in the queue */
    bool listed;                   /* done, and to be reported by nvmeio_handle_pop() */
    struct nvmeio_waiter *waiters; /* threads in nvmeio_request_wait() */
};

/* Make a request with one reference and nothing planned, of a handle that has counted
 * it. */
void nvmeio_request_init(struct nvmeio_request *request,
                         const struct nvmeio_request_ops *ops,
                         struct nvmeio_handle *handle, const struct nvmeio_owner *owner,
                         enum nvmeio_op op, struct nvmeio_file *file, void *user);

/* The file is as long as this: note whether a write to `end` makes it longer. */
void nvmeio_request_note_end(struct nvmeio_request *request, int64_t file_size,
                             int64_t end);

/* Whether another process submitted it, of which this one is a child. */
bool nvmeio_request_before_fork(const struct nvmeio_request *request);

/* Whether a block may be cut now. */
bool nvmeio_request_has_block(const struct nvmeio_request *request);

/* Whether everything was cut, of this round. */
bool nvmeio_request_is_cut(const struct nvmeio_request *request);

/* Whether it has failed or was cancelled: no more blocks are cut. */
bool nvmeio_request_is_stopped(const struct nvmeio_request *request);

/* Whether the next block lands alone, in the order of the file. */
bool nvmeio_request_is_ordered(const struct nvmeio_request *request);

/* How much memory the next block needs for a bounce, if that much is allowed; 0: none.
 */
size_t nvmeio_request_next_bounce(const struct nvmeio_request *request);

/* Cut the next block, of at most block_bytes or the file's alignment if that is more;
 * has_block() was true. */
void nvmeio_request_cut(struct nvmeio_request *request, struct nvmeio_block *block,
                        size_t block_bytes);

/* A block that was cut has come back, or never will: note what of it has failed. */
void nvmeio_request_book(struct nvmeio_request *request,
                         const struct nvmeio_block *block);

/* Mark as failed from `position` on: what is not yet cut is dropped.  Of several errors
 * that at the lowest position counts, which is where the outcome says that it ended, or
 * the first of those there. */
void nvmeio_request_fail(struct nvmeio_request *request, int error, size_t position);

/* Nothing is in flight, and none will be. */
bool nvmeio_request_is_over(const struct nvmeio_request *request);

/* Whether memory is such that a bounce, which is in huge pages, may be faster for the
 * device; the pool's, of which bounces are, is not. */
bool nvmeio_request_has_small_pages(const struct nvmeio_request *request,
                                    const void *address, size_t size);

/* transfer.c: one run of bytes, or an fsync. */

/* What nvmeio_submit() refuses. */
int nvmeio_transfer_check(const struct nvmeio_transfer *transfer);

/* Make a transfer that is not planned. */
void nvmeio_transfer_init(struct nvmeio_request *request, struct nvmeio_handle *handle,
                          const struct nvmeio_owner *owner,
                          const struct nvmeio_transfer *transfer);

/* Plan it, of a file of this size: a read past the end fails here. */
void nvmeio_transfer_plan(struct nvmeio_request *request, int64_t file_size);

/* many.c: transfers of several files. */

/* A request of many, which nvmeio_transfer_check() has not refused.  NULL: no memory.
 */
struct nvmeio_request *nvmeio_many_new(struct nvmeio_handle *handle,
                                       const struct nvmeio_owner *owner,
                                       const struct nvmeio_many *many);

struct nvmeio_parts {
    size_t count;
    struct nvmeio_request list[];
};

/* Part `index` of a request, or NULL past the last one, and of other requests. */
static inline struct nvmeio_request *nvmeio_part(const struct nvmeio_request *request,
                                                 size_t index)
{
    struct nvmeio_parts *parts = request->parts;

    return parts && index < parts->count ? &parts->list[index] : NULL;
}

/* A part is done. */
void nvmeio_many_book(struct nvmeio_request *part);

/* gather.c: many records. */

struct nvmeio_records;

/* The same for a gather or scatter; takes over the records.  NULL: no memory. */
struct nvmeio_request *nvmeio_gather_new(struct nvmeio_handle *handle,
                                         const struct nvmeio_owner *owner,
                                         const struct nvmeio_gather *gather,
                                         struct nvmeio_records *records);

#endif
