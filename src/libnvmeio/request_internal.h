/* request_internal.h -- the inside of a request: what is cut next, and its results.
 *
 * The queue's mutex guards its fields, except for those that never change after
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
    NVMEIO_STATE_ACTIVE,   /* has blocks to cut or in flight, or waits for others */
    NVMEIO_STATE_SETTLING, /* over, but its outcome or its file still needs work */
    /* The outcome is final. Stored with release, loaded with acquire: a thread that
     * sees it also sees the bytes. */
    NVMEIO_STATE_DONE,
};

/* More records or parts than these, and a request is planned and settled by a thread of
 * its own: with a system call for each, in half a millisecond or more. */
#define NVMEIO_STEPS_MAX 512u

/* Where a request is between submission and its first block. */
enum nvmeio_phase {
    NVMEIO_PHASE_WAITING,  /* for the requests that it comes after */
    NVMEIO_PHASE_PLANNING, /* plan() is running, without the mutex */
    NVMEIO_PHASE_PLANNED,
};

/* One request waits for another, and is in the other's list of dependents. */
struct nvmeio_link {
    struct nvmeio_request *dependent;
    struct nvmeio_link *next, **place; /* place: NULL once it is in no list */
    size_t index;                      /* of nvmeio_after */
};

/* How transfers, gathers and fsyncs differ. Once the request is submitted, the mutex is
 * held in all but plan(), settle(), load() and deliver(). */
struct nvmeio_request_ops {
    /* Look at the file, and plan what is cut. */
    void (*plan)(struct nvmeio_request *request);

    /* The current span is fully cut: go to the next one, or to the end of the plan. */
    void (*next)(struct nvmeio_request *request);

    /* Everything that was cut has landed, and nothing stopped the request: begin
     * another round of blocks, if there is one. May be NULL. */
    void (*next_round)(struct nvmeio_request *request);

    /* How many blocks are left to cut, for sharing them among workers. */
    size_t (*blocks_left)(const struct nvmeio_request *request);

    /* A block has failed, from this position on. */
    void (*fail)(struct nvmeio_request *request, const struct nvmeio_block *block,
                 size_t position);

    /* The request failed or was cancelled: find out how far it came. */
    void (*settle)(struct nvmeio_request *request);

    /* load() copies the data of a write to its bounce. deliver() copies the first
     * `landed` bytes of a read to their places, unless they are there already. */
    void (*load)(const struct nvmeio_block *block);
    void (*deliver)(const struct nvmeio_block *block, size_t landed);

    /* Does the work of nvmeio_request_failures() for a done request. May be NULL. */
    size_t (*failures)(const struct nvmeio_request *request,
                       struct nvmeio_failure *failures, size_t count);

    /* Free what only this kind of request has. May be NULL. */
    void (*free)(struct nvmeio_request *request);
};

/* What requests need from their handle. */
struct nvmeio_owner {
    void (*release)(struct nvmeio_handle *handle);            /* drop a reference */
    void (*pause)(struct nvmeio_handle *handle, size_t step); /* nvmeio_queue_pause() */
    /* nvmeio_queue_continue() */
    void (*continue_slowly)(struct nvmeio_request *request);
    enum nvmeio_bounce bounce;
    size_t block_bytes;        /* of one block, in whole pages */
    size_t ordered_bytes;      /* of one block that makes a file longer */
    size_t arena_bytes;        /* for the bounces of one worker */
    size_t bounce_bytes;       /* of one bounce */
    size_t large_bounce_bytes; /* of the bounce for blocks that make a file longer */
};

struct nvmeio_request {
    /* Never change after submission. */
    const struct nvmeio_request_ops *ops;
    struct nvmeio_handle *handle; /* holds a reference */
    const struct nvmeio_owner *owner;
    enum nvmeio_op op;
    bool data_only; /* of an fsync: fdatasync(2) */
    size_t total;   /* bytes, the result if nothing fails */
    size_t steps;   /* records or parts that plan() and settle() look at, or 1 */
    void *user;
    uint32_t generation; /* of the process that submitted it */
    /* A write makes the file longer from this offset on. Blocks beyond it land one by
     * one, in the order of the file. INT64_MAX if the file is long enough. */
    int64_t ordered_from;
    struct nvmeio_geometry geometry; /* the mutex guards its `bounce` */

    /* The whole that this request is a part of, or NULL. The whole owns the memory of
     * its parts. */
    struct nvmeio_request *whole;

    atomic_uint references;
    atomic_int state;         /* enum nvmeio_state */
    struct nvmeio_file *file; /* holds a reference until it is done */
    bool file_passed;         /* the caller's reference goes with it into the queue */

    /* What is being cut: the whole of a transfer, or the current extent of a gather.
     * The next block begins in plan.spans[span], `position` bytes from the start. */
    char *address; /* NULL: in several places; load() and deliver() copy */
    size_t size;
    int64_t offset;
    struct nvmeio_plan plan;
    unsigned span;
    size_t position;
    bool warm;      /* blocks may be in the page cache, which is looked up for each */
    bool barrier;   /* the next block waits until nothing is in flight */
    bool searching; /* next() is looking for the next span, and lets others go on */

    struct nvmeio_gathering *gathering; /* of a gather or scatter; freed with it */
    struct nvmeio_parts *parts;  /* of a request of several transfers; freed with it */
    struct nvmeio_extent extent; /* the extent that is being cut */

    /* Blocks that are cut and not yet recorded; of a whole: parts not yet done. */
    unsigned in_flight;
    unsigned
        parked; /* of those, blocks that wait for their claims, and may be dropped */
    int error;  /* the error at the lowest position, or 0 */
    bool cancelled;
    bool failed; /* some of it failed; a gather goes on with the rest */
    bool abandoned;
    bool closing;    /* the error is of close(2) */
    int close_error; /* what close(2) returned, or 0 */
    bool settled;    /* settle() was called, if it was needed */
    /* Once done: bytes transferred. Before that: the lowest position that failed. */
    size_t got;

    enum nvmeio_phase phase;
    size_t waits;              /* how many unfinished requests it waits for */
    struct nvmeio_link *links; /* to all requests that it comes after; owned */
    size_t link_count;
    struct nvmeio_link *dependents; /* from requests that come after this one */
    size_t blocker; /* the link to the request whose error it took over, or SIZE_MAX */
    bool ready;     /* its turn has come, or it must fail: once and for all */

    /* Lists of the queue: all active requests, in order of submission; those with
     * blocks to cut; writes of one file, and fsyncs that wait for them; done requests
     * that are not yet reported. */
    struct nvmeio_request *active_next, *active_previous;
    struct nvmeio_request *queue_next, *queue_previous;
    struct nvmeio_request *line_next, *line_previous;
    struct nvmeio_request *line_last, *lines_next; /* of the first in its line */
    bool in_line;           /* a write; or an fsync that waits for one */
    uint64_t device, inode; /* of its line, because its file may be closed before */
    struct nvmeio_request *done_next, *done_previous;
    /* Lists for nvmeio_queue_unlock(), which has them for itself. */
    struct nvmeio_request *ready_next, *settle_next, *begun_next, *drop_next;
    struct nvmeio_request *slow_next; /* in a lane of slow.c */
    bool queued; /* it is in the list of requests with blocks to cut; the two are for it
                  */
    bool comes_last;    /* it is in the second list */
    size_t turn_bytes;  /* cut in this turn */
    size_t blocks_left; /* when it was queued, less those that were cut since */
    bool listed;        /* done, and nvmeio_handle_pop() will report it */
    struct nvmeio_waiter *waiters; /* threads in nvmeio_request_wait() */
};

/* Initialize a request with one reference and nothing planned. The handle already
 * counts it. */
void nvmeio_request_init(struct nvmeio_request *request,
                         const struct nvmeio_request_ops *ops,
                         struct nvmeio_handle *handle, const struct nvmeio_owner *owner,
                         enum nvmeio_op op, struct nvmeio_file *file, void *user);

/* Set ordered_from, if a write up to `end` makes a file of this size longer. */
void nvmeio_request_note_end(struct nvmeio_request *request, int64_t file_size,
                             int64_t end);

/* Whether a parent of this process submitted it before the fork. */
bool nvmeio_request_before_fork(const struct nvmeio_request *request);

/* Whether a block may be cut now. */
bool nvmeio_request_has_block(const struct nvmeio_request *request);

/* Whether all blocks of this round are cut. */
bool nvmeio_request_is_cut(const struct nvmeio_request *request);

/* Whether it has failed or was cancelled: no more blocks are cut. */
bool nvmeio_request_is_stopped(const struct nvmeio_request *request);

/* Whether the next block lands alone, in the order of the file. */
bool nvmeio_request_is_ordered(const struct nvmeio_request *request);

/* Whether system calls on its file may wait for a server, as on FUSE and NFS; of a
 * whole, for any of its parts. */
bool nvmeio_request_is_distant(const struct nvmeio_request *request);

/* Whether plan() may take long. */
bool nvmeio_request_is_slow(const struct nvmeio_request *request);

/* Whether a request cannot change any more: it is being settled, or done. */
bool nvmeio_request_is_settling(const struct nvmeio_request *request);

/* The size of a bounce that holds all the rest of the span; 0 if the next block needs
 * none. With a smaller bounce, the block is cut shorter. */
size_t nvmeio_request_next_bounce(const struct nvmeio_request *request);

/* Cut the next block. It has at most block_bytes, rounded up to what the file needs.
 * nvmeio_request_has_block() must be true. */
void nvmeio_request_cut(struct nvmeio_request *request, struct nvmeio_block *block,
                        size_t block_bytes);

/* Record a block that has come back, or that never will because its engine is dead. If
 * it failed, its bytes are marked as failed. */
void nvmeio_request_book(struct nvmeio_request *request,
                         const struct nvmeio_block *block);

/* Mark everything from `position` on as failed, and cut no more blocks. Of several
 * errors, the one at the lowest position counts, because the outcome reports that the
 * transfer ended there. At the same position, the first one counts. */
void nvmeio_request_fail(struct nvmeio_request *request, int error, size_t position);

/* Whether nothing is in flight, and nothing will be. */
bool nvmeio_request_is_over(const struct nvmeio_request *request);

/* Whether memory is in small pages, so that a bounce, which is in huge pages, may be
 * faster for the device. Never true for memory of the pool, which is in huge pages
 * too. */
bool nvmeio_request_has_small_pages(const struct nvmeio_request *request,
                                    const void *address, size_t size);

/* transfer.c: a contiguous range of bytes, or an fsync. */

/* Check the arguments of a transfer. Returns 0 or the error for nvmeio_submit(). */
int nvmeio_transfer_check(const struct nvmeio_transfer *transfer);

/* Initialize a transfer, without planning it. */
void nvmeio_transfer_init(struct nvmeio_request *request, struct nvmeio_handle *handle,
                          const struct nvmeio_owner *owner,
                          const struct nvmeio_transfer *transfer);

/* Plan it for a file of this size. A read past the end fails here. */
void nvmeio_transfer_plan(struct nvmeio_request *request, int64_t file_size);

/* many.c: transfers of several files. */

/* Create a request of several transfers, which nvmeio_transfer_check() must have
 * accepted. Returns NULL if there is no memory. */
struct nvmeio_request *nvmeio_many_new(struct nvmeio_handle *handle,
                                       const struct nvmeio_owner *owner,
                                       const struct nvmeio_many *many);

struct nvmeio_parts {
    size_t count;
    struct nvmeio_request list[];
};

/* Return part `index` of a request. NULL past the last part, and for requests without
 * parts. */
static inline struct nvmeio_request *nvmeio_part(const struct nvmeio_request *request,
                                                 size_t index)
{
    struct nvmeio_parts *parts = request->parts;

    return parts && index < parts->count ? &parts->list[index] : NULL;
}

/* A part is done: record its result with the whole. */
void nvmeio_many_book(struct nvmeio_request *part);

/* gather.c: many records. */

struct nvmeio_records;

/* Create a gather or scatter. It takes ownership of the records, unless it returns
 * NULL, because there is no memory. */
struct nvmeio_request *nvmeio_gather_new(struct nvmeio_handle *handle,
                                         const struct nvmeio_owner *owner,
                                         const struct nvmeio_gather *gather,
                                         struct nvmeio_records *records);

#endif
