/* request.c -- a request from its plan to its outcome.
 *
 * What came of a block is block.c's, lists, threads and locks are handle.c's; how
 * blocks get to the kernel is the engines'. */
#include "request_internal.h"

#include <errno.h>
#include <stdlib.h>

#include "file_internal.h"
#include "handle_internal.h"
#include "pages.h"
#include "pool_internal.h"
#include "runs.h"

/* Below this, reserving space costs more than it saves.  A new file written in blocks
 * of 128 KiB: 1.6 GB/s without, 4.0 with (docs/design.md). */
#define PREALLOCATE_BYTES_MIN (128u << 10)

bool nvmeio_request_has_small_pages(const struct nvmeio_request *request,
                                    const void *address, size_t size)
{
    return request->geometry.bounce == NVMEIO_BOUNCE_AUTO &&
           size >= NVMEIO_PAGES_BYTES_MIN && !request->file->in_memory &&
           !nvmeio_pool_holds(address) &&
           nvmeio_pages_are_small(address, size, request->op);
}

void nvmeio_request_prefer_bounce(struct nvmeio_request *request)
{
    request->bounce_optional = true;
    request->plan.spans[0].route = NVMEIO_ROUTE_BOUNCE;
}

/* Choose the way of a transfer's bytes. */
static void plan(struct nvmeio_request *request)
{
    nvmeio_plan_make(&request->plan, &request->geometry, request->op,
                     (uintptr_t)request->address, request->size, request->offset);
    if (request->plan.spans[0].route == NVMEIO_ROUTE_DIRECT &&
        nvmeio_request_has_small_pages(request, request->address, request->size))
        nvmeio_request_prefer_bounce(request);
}

struct nvmeio_request *nvmeio_request_alloc(struct nvmeio_handle *handle,
                                            enum nvmeio_op op, struct nvmeio_file *file,
                                            void *user)
{
    struct nvmeio_request *request = calloc(1, sizeof(*request));

    if (!request)
        return NULL;
    request->handle = handle;
    request->file = file;
    request->op = op;
    request->user = user;
    request->generation = nvmeio_fork_generation();
    request->got = SIZE_MAX;
    request->geometry.bounce = handle->config.bounce;
    /* Where the size cannot be told, nothing is cut back. */
    request->size_before = INT64_MAX;
    atomic_init(&request->references, 1);
    atomic_init(&request->state, NVMEIO_STATE_ACTIVE);
    nvmeio_file_retain(request->file);
    nvmeio_file_geometry(request->file, &request->geometry);
    return request;
}

struct nvmeio_request *nvmeio_request_new(struct nvmeio_handle *handle,
                                          const struct nvmeio_transfer *transfer)
{
    struct nvmeio_request *request =
        nvmeio_request_alloc(handle, transfer->op, transfer->file, transfer->user);

    if (!request)
        return NULL;
    if (request->op == NVMEIO_OP_FSYNC) {
        /* One block behind a gate, which opens when the earlier writes are done. */
        request->plan.count = 1;
        return request;
    }
    request->address = transfer->address;
    request->size = request->total = transfer->size;
    request->offset = transfer->offset;
    plan(request);
    request->position = request->plan.spans[0].begin;
    request->gate_open = request->plan.edges == 0;
    return request;
}

bool nvmeio_request_waive_bounce(struct nvmeio_request *request)
{
    if (request->records && nvmeio_runs_unmerge(request))
        return true;
    bool waived = request->bounce_optional;
    if (waived)
        request->plan.spans[0].route = NVMEIO_ROUTE_DIRECT;
    request->bounce_optional = false;
    return waived;
}

bool nvmeio_request_before_fork(const struct nvmeio_request *request)
{
    return request->generation != nvmeio_fork_generation();
}

static void check_read(struct nvmeio_request *request)
{
    int64_t size = nvmeio_file_size(request->file);

    if (size < 0)
        nvmeio_request_fail(request, (int)size, 0);
    else if (request->size > 0 && request->offset + (int64_t)request->size > size)
        nvmeio_request_fail(request, -ENODATA, 0);
}

static int64_t end_of(const struct nvmeio_request *request)
{
    if (request->records)
        return request->records->end;
    return request->offset + (int64_t)request->size;
}

static void check_write(struct nvmeio_request *request)
{
    struct nvmeio_file *file = request->file;

    /* Noted by all: another open may have made the file, and cut it back. */
    int64_t size = nvmeio_file_is_ours(file) ? nvmeio_file_size(file) : -1;
    nvmeio_file_note_end(file, end_of(request));
    if (size < 0)
        return;
    /* The records of a scatter may be anywhere, and some may land where others fail. */
    if (request->records)
        return;
    request->size_before = size;
    if (request->size < PREALLOCATE_BYTES_MIN || end_of(request) <= size)
        return;
    int error = nvmeio_file_preallocate(file, request->offset, (int64_t)request->size);
    if (error)
        nvmeio_request_fail(request, error, 0);
}

void nvmeio_request_check(struct nvmeio_request *request)
{
    if (request->op == NVMEIO_OP_READ && !request->records)
        check_read(request);
    else if (request->op == NVMEIO_OP_WRITE)
        check_write(request);
}

bool nvmeio_request_is_stopped(const struct nvmeio_request *request)
{
    return request->error || request->cancelled;
}

bool nvmeio_request_has_block(const struct nvmeio_request *request)
{
    return !nvmeio_request_is_stopped(request) && request->span < request->plan.count &&
           (request->span < request->plan.edges || request->gate_open);
}

bool nvmeio_request_is_buffered(const struct nvmeio_request *request)
{
    if (request->records)
        return !request->geometry.direct ||
               (request->op == NVMEIO_OP_WRITE && !request->records->whole);
    for (unsigned i = 0; i < request->plan.count; i++) {
        if (request->plan.spans[i].route == NVMEIO_ROUTE_BUFFERED)
            return true;
    }
    return false;
}

size_t nvmeio_request_blocks_left(const struct nvmeio_request *request,
                                  size_t block_bytes)
{
    unsigned end = request->gate_open ? request->plan.count : request->plan.edges;
    size_t count = 0;

    if (!nvmeio_request_has_block(request))
        return 0;
    if (request->records)
        return request->records->count - request->records->next + 1;
    if (end > request->plan.count)
        end = request->plan.count;
    for (unsigned i = request->span; i < end; i++) {
        const struct nvmeio_span *span = &request->plan.spans[i];
        size_t begin = i == request->span ? request->position : span->begin;
        count += (span->end - begin) / block_bytes + 1;
    }
    return count;
}

size_t nvmeio_request_next_bounce(const struct nvmeio_request *request)
{
    const struct nvmeio_span *span = &request->plan.spans[request->span];

    if (request->op == NVMEIO_OP_FSYNC)
        return 0;
    if (span->route != NVMEIO_ROUTE_BOUNCE && (!request->records || request->address))
        return 0;
    uint64_t align = request->geometry.offset_align;
    uint64_t begin = (uint64_t)request->offset + request->position;
    uint64_t end = (uint64_t)request->offset + span->end;
    return nvmeio_round_up(end, align) - nvmeio_round_down(begin, align);
}

bool nvmeio_request_is_cut(const struct nvmeio_request *request)
{
    return request->span == request->plan.count;
}

void nvmeio_request_cut(struct nvmeio_request *request, struct nvmeio_block *block,
                        size_t block_bytes)
{
    const struct nvmeio_span *span = &request->plan.spans[request->span];

    block->request = request;
    block->op = request->op;
    block->piece = (struct nvmeio_piece){0};
    block->run = request->run;
    if (request->op != NVMEIO_OP_FSYNC)
        /* No block is smaller than what the file can take. */
        nvmeio_plan_cut(&block->piece, span, request->position, request->offset,
                        request->geometry.offset_align,
                        nvmeio_round_up(block_bytes, request->geometry.offset_align));
    block->lent = request->address ? request->address + block->piece.position : NULL;
    request->in_flight++;
    request->position += block->piece.wanted;
    if (request->position < span->end)
        return;
    request->span++;
    if (request->span < nvmeio_runs_round_end(request))
        request->position = request->plan.spans[request->span].begin;
    else if (request->records)
        nvmeio_runs_next(request);
}

void nvmeio_request_book(struct nvmeio_request *request,
                         const struct nvmeio_block *block)
{
    const struct nvmeio_piece *piece = &block->piece;
    size_t landed = block->moved > piece->skip ? block->moved - piece->skip : 0;

    request->in_flight--;
    if (block->result >= 0)
        return;
    if (request->records)
        nvmeio_records_fail(request->records, &block->run, piece->position + landed,
                            piece->position + piece->wanted, (int)block->result);
    else
        nvmeio_request_fail(request, (int)block->result, piece->position + landed);
}

void nvmeio_request_fail(struct nvmeio_request *request, int error, size_t position)
{
    if (position >= request->got)
        return;
    request->error = error;
    request->got = position;
}

bool nvmeio_request_is_over(const struct nvmeio_request *request)
{
    return request->in_flight == 0 &&
           (nvmeio_request_is_stopped(request) || nvmeio_request_is_cut(request));
}

/* How many bytes from the start on have been transferred, without a gap. */
static size_t prefix(const struct nvmeio_request *request)
{
    size_t lowest = request->got < request->size ? request->got : request->size;

    for (unsigned i = request->span; i < request->plan.count; i++) {
        size_t uncut =
            i == request->span ? request->position : request->plan.spans[i].begin;
        if (uncut < lowest)
            lowest = uncut;
    }
    return lowest;
}

/* Whether no block was ever cut. */
static bool untouched(const struct nvmeio_request *request)
{
    return request->span == 0 && request->position == request->plan.spans[0].begin;
}

void nvmeio_request_settle(struct nvmeio_request *request)
{
    if (request->records) {
        nvmeio_runs_settle(request);
        return;
    }
    request->got = prefix(request);
    if (request->error == -ENODATA) {
        /* Blocks past the end may have met it first; the file knows where it is. */
        int64_t left = nvmeio_file_size(request->file) - request->offset;
        size_t there = left < 0                       ? 0
                       : (size_t)left < request->size ? (size_t)left
                                                      : request->size;
        /* Unless refused before a block was cut, what lies below may have been left
         * uncut. */
        if (untouched(request) || there < request->got)
            request->got = there;
    }
    /* Only what this request has made longer: others may have made it that long. */
    if (nvmeio_request_is_stopped(request) && request->op == NVMEIO_OP_WRITE &&
        nvmeio_file_is_ours(request->file)) {
        int64_t kept = request->offset + (int64_t)request->got;
        if (kept < request->size_before)
            kept = request->size_before;
        nvmeio_file_cut_back(request->file, kept, end_of(request));
    }
}

bool nvmeio_request_done(struct nvmeio_request *request)
{
    return atomic_load_explicit(&request->state, memory_order_acquire) ==
           NVMEIO_STATE_DONE;
}

int nvmeio_request_outcome(struct nvmeio_request *request,
                           struct nvmeio_outcome *outcome)
{
    if (!nvmeio_request_done(request))
        return nvmeio_request_before_fork(request) ? -EOWNERDEAD : -EINPROGRESS;
    outcome->got = (int64_t)request->got;
    outcome->abandoned = request->abandoned;
    int error = request->error;
    if (!error && request->records)
        error = request->records->error;
    /* What cancel() answered stands, whatever came of the blocks still in flight. */
    outcome->result = request->cancelled ? -ECANCELED
                      : error            ? error
                                         : (int64_t)request->total;
    return 0;
}

size_t nvmeio_request_failures(struct nvmeio_request *request,
                               struct nvmeio_failure *failures, size_t count)
{
    if (!request->records || !nvmeio_request_done(request))
        return 0;
    return nvmeio_records_failures(request->records, failures, count);
}
