/* request.c -- what all requests share: cutting blocks and recording their results.
 *
 * transfer.c, gather.c and many.c contain what differs. queue.c decides when a request
 * may go on, and block.c evaluates what came back. */
#include "request_internal.h"

#include <errno.h>
#include <nvmeio/pool.h>
#include <stdlib.h>

#include "file_internal.h"
#include "pages.h"

void nvmeio_request_init(struct nvmeio_request *request,
                         const struct nvmeio_request_ops *ops,
                         struct nvmeio_handle *handle, const struct nvmeio_owner *owner,
                         enum nvmeio_op op, struct nvmeio_file *file, void *user)
{
    *request = (struct nvmeio_request){
        .ops = ops,
        .handle = handle,
        .owner = owner,
        .op = op,
        .steps = 1,
        .user = user,
        .generation = nvmeio_fork_generation(),
        .ordered_from = INT64_MAX,
        .geometry.bounce = owner->bounce,
        .file = file,
        .got = SIZE_MAX,
        .blocker = SIZE_MAX,
    };
    atomic_init(&request->references, 1);
    atomic_init(&request->state, NVMEIO_STATE_ACTIVE);
    if (file) {
        nvmeio_file_retain(file);
        nvmeio_file_geometry(file, &request->geometry);
    }
}

void nvmeio_request_note_end(struct nvmeio_request *request, int64_t file_size,
                             int64_t end)
{
    nvmeio_file_note_end(request->file, end);
    /* If the size is not known (-errno), the write may extend the file. */
    if (end > file_size)
        request->ordered_from = file_size < 0 ? 0 : file_size;
}

void nvmeio_request_release(struct nvmeio_request *request)
{
    /* Acquire and release: the last owner sees everything that the others did. */
    if (!request ||
        atomic_fetch_sub_explicit(&request->references, 1, memory_order_acq_rel) != 1)
        return;
    nvmeio_file_release(request->file);
    request->owner->release(request->handle);
    if (request->ops->free)
        request->ops->free(request);
    free(request->links);
    free(request);
}

bool nvmeio_request_before_fork(const struct nvmeio_request *request)
{
    return request->generation != nvmeio_fork_generation();
}

bool nvmeio_request_is_stopped(const struct nvmeio_request *request)
{
    return request->error || request->cancelled;
}

bool nvmeio_request_is_cut(const struct nvmeio_request *request)
{
    return request->phase == NVMEIO_PHASE_PLANNED && !request->searching &&
           request->span == request->plan.count;
}

/* Blocks have a multiple of this, so none is smaller: of the file's alignment, or of
 * the edge of a write, so that no two direct blocks share a block of the file system.
 */
static uint64_t unit_of(const struct nvmeio_request *request)
{
    return request->op == NVMEIO_OP_WRITE ? request->geometry.edge
                                          : request->geometry.offset_align;
}

bool nvmeio_request_is_ordered(const struct nvmeio_request *request)
{
    size_t end = request->position +
                 nvmeio_round_up(request->owner->block_bytes, unit_of(request));

    if (request->ordered_from == INT64_MAX)
        return false;
    if (end > request->plan.spans[request->span].end)
        end = request->plan.spans[request->span].end;
    return request->offset + (int64_t)end > request->ordered_from;
}

bool nvmeio_request_has_block(const struct nvmeio_request *request)
{
    if (request->phase != NVMEIO_PHASE_PLANNED || nvmeio_request_is_stopped(request) ||
        nvmeio_request_is_cut(request) || request->searching ||
        (request->op == NVMEIO_OP_FSYNC && request->in_line))
        return false;
    return request->in_flight == 0 ||
           !(request->barrier || nvmeio_request_is_ordered(request));
}

size_t nvmeio_request_next_bounce(const struct nvmeio_request *request)
{
    const struct nvmeio_span *span = &request->plan.spans[request->span];

    /* Bytes that belong in several places need a bounce on the page-cache route too. An
     * fsync has no bytes at all. */
    if (span->route != NVMEIO_ROUTE_BOUNCE && (request->address || span->end == 0))
        return 0;
    uint64_t align = request->geometry.offset_align;
    uint64_t begin = (uint64_t)request->offset + request->position;
    uint64_t end = (uint64_t)request->offset + span->end;
    return nvmeio_round_up(end, align) - nvmeio_round_down(begin, align);
}

void nvmeio_request_cut(struct nvmeio_request *request, struct nvmeio_block *block,
                        size_t block_bytes)
{
    const struct nvmeio_span *span = &request->plan.spans[request->span];

    block->request = request;
    block->op = request->op;
    block->data_only = request->data_only;
    block->extent = request->extent;
    block->piece = (struct nvmeio_piece){0};
    if (request->op != NVMEIO_OP_FSYNC)
        nvmeio_plan_cut(&block->piece, span, request->position, request->offset,
                        request->geometry.offset_align,
                        nvmeio_round_up(block_bytes, unit_of(request)));
    block->memory = request->address ? request->address + block->piece.position : NULL;
    request->in_flight++;
    request->barrier = false;
    request->position += block->piece.wanted;
    if (request->position >= span->end)
        request->ops->next(request);
}

void nvmeio_request_book(struct nvmeio_request *request,
                         const struct nvmeio_block *block)
{
    const struct nvmeio_piece *piece = &block->piece;
    size_t landed = block->moved > piece->skip ? block->moved - piece->skip : 0;

    request->in_flight--;
    if (block->result < 0)
        request->ops->fail(request, block, piece->position + landed);
}

void nvmeio_request_fail(struct nvmeio_request *request, int error, size_t position)
{
    if (position >= request->got)
        return;
    request->error = error;
    request->got = position;
    request->failed = true;
}

bool nvmeio_request_is_over(const struct nvmeio_request *request)
{
    return request->phase != NVMEIO_PHASE_PLANNING && request->in_flight == 0 &&
           (nvmeio_request_is_stopped(request) || nvmeio_request_is_cut(request));
}

bool nvmeio_request_is_distant(const struct nvmeio_request *request)
{
    const struct nvmeio_request *part;

    if (request->file)
        return !request->file->local;
    for (size_t i = 0; (part = nvmeio_part(request, i)); i++)
        if (part->file && !part->file->local)
            return true;
    return false;
}

bool nvmeio_request_is_slow(const struct nvmeio_request *request)
{
    return request->steps > NVMEIO_STEPS_MAX || nvmeio_request_is_distant(request);
}

bool nvmeio_request_is_settling(const struct nvmeio_request *request)
{
    return atomic_load_explicit(&request->state, memory_order_relaxed) !=
           NVMEIO_STATE_ACTIVE;
}

bool nvmeio_request_has_small_pages(const struct nvmeio_request *request,
                                    const void *address, size_t size)
{
    return request->geometry.bounce == NVMEIO_BOUNCE_AUTO &&
           size >= NVMEIO_PAGES_BYTES_MIN && !request->file->in_memory &&
           nvmeio_pages_are_small(address, size, request->op) &&
           !nvmeio_pool_holds(address);
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
    outcome->closing = request->closing;
    outcome->close_error = request->close_error;
    outcome->abandoned = request->abandoned;
    outcome->blocker = request->blocker;
    /* The result is -ECANCELED once nvmeio_request_cancel() has returned 1, whatever
     * becomes of the blocks still in flight. */
    outcome->result = request->cancelled ? -ECANCELED
                      : request->error   ? request->error
                                         : (int64_t)request->total;
    return 0;
}

size_t nvmeio_request_failures(struct nvmeio_request *request,
                               struct nvmeio_failure *failures, size_t count)
{
    if (!request->ops->failures || !nvmeio_request_done(request))
        return 0;
    return request->ops->failures(request, failures, count);
}
