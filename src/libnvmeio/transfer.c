/* transfer.c -- a request of one contiguous range of bytes, or an fsync. */
#include <errno.h>

#include "copy_internal.h"
#include "file_internal.h"
#include "request_internal.h"

int nvmeio_transfer_check(const struct nvmeio_transfer *transfer)
{
    if (!transfer->file)
        return -EINVAL;
    const struct nvmeio_file_info *info = &transfer->file->info;
    switch (transfer->op) {
    case NVMEIO_OP_FSYNC:
        return 0;
    case NVMEIO_OP_READ:
        if (!info->readable)
            return -EBADF;
        break;
    case NVMEIO_OP_WRITE:
        if (!info->writable)
            return -EBADF;
        break;
    default:
        return -EINVAL;
    }
    if (transfer->offset < 0 || (transfer->size > 0 && !transfer->address))
        return -EINVAL;
    if (transfer->size > (uint64_t)(INT64_MAX - transfer->offset))
        return -EOVERFLOW;
    return 0;
}

/* The edges of a write wait for its middle, because a large folio of the page cache can
 * span both. */
static void transfer_next(struct nvmeio_request *request)
{
    request->span++;
    if (nvmeio_request_is_cut(request))
        return;
    request->position = request->plan.spans[request->span].begin;
    request->barrier = request->op == NVMEIO_OP_WRITE;
}

static size_t transfer_blocks_left(const struct nvmeio_request *request)
{
    size_t count = 0;

    if (nvmeio_request_is_ordered(request))
        return 1;
    for (unsigned i = request->span; i < request->plan.count; i++) {
        const struct nvmeio_span *span = &request->plan.spans[i];
        size_t begin = i == request->span ? request->position : span->begin;
        count += (span->end - begin) / request->owner->block_bytes + 1;
    }
    return count;
}

static void transfer_fail(struct nvmeio_request *request,
                          const struct nvmeio_block *block, size_t position)
{
    nvmeio_request_fail(request, (int)block->result, position);
}

/* How many bytes were transferred without a gap, counted from the start. */
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

static void transfer_settle(struct nvmeio_request *request)
{
    /* A request that was never planned has transferred nothing. */
    request->got = request->phase == NVMEIO_PHASE_PLANNED ? prefix(request) : 0;
    if (request->error != -ENODATA || request->blocker != SIZE_MAX)
        return;
    /* A read met the end of the file. Blocks past the end may have completed first, so
     * ask the file for its size. */
    int64_t left = nvmeio_file_size(request->file) - request->offset;
    size_t there = left < 0                       ? 0
                   : (size_t)left < request->size ? (size_t)left
                                                  : request->size;
    /* If the read failed before a block was cut, `got` is only the position of the
     * error. Otherwise it may only become lower, because bytes before the end may never
     * have been cut. */
    if (untouched(request) || there < request->got)
        request->got = there;
}

static void transfer_load(const struct nvmeio_block *block)
{
    nvmeio_copy_cold(block->bounce, block->memory, block->piece.wanted);
}

static void transfer_deliver(const struct nvmeio_block *block, size_t landed)
{
    if (block->piece.route == NVMEIO_ROUTE_BOUNCE)
        nvmeio_copy_cold(block->memory, (char *)block->bounce + block->piece.skip,
                         landed);
}

static int64_t end_of(const struct nvmeio_request *request)
{
    return request->offset + (int64_t)request->size;
}

static void look_at_file(struct nvmeio_request *request, int64_t size)
{
    int64_t end = end_of(request);

    if (request->op == NVMEIO_OP_WRITE)
        nvmeio_request_note_end(request, size, end);
    else if (size < 0)
        nvmeio_request_fail(request, (int)size, 0);
    else if (request->size > 0 && end > size)
        nvmeio_request_fail(request, -ENODATA, 0);
}

static void fail_without_page_cache(struct nvmeio_request *request)
{
    int error = nvmeio_file_need_buffered(request->file);

    if (error)
        nvmeio_request_fail(request, error, 0);
}

void nvmeio_transfer_plan(struct nvmeio_request *request, int64_t file_size)
{
    struct nvmeio_geometry geometry = request->geometry;

    look_at_file(request, file_size);
    if (request->op == NVMEIO_OP_READ && geometry.direct && !request->failed &&
        request->size > 0) {
        enum nvmeio_warmth warmth =
            nvmeio_file_warmth(request->file, request->offset, request->size);
        request->warm = warmth == NVMEIO_WARM;
        geometry.direct = warmth != NVMEIO_HOT;
    }
    nvmeio_plan_make(&request->plan, &geometry, request->op,
                     (uintptr_t)request->address, request->size, request->offset);
    if (request->plan.spans[0].route == NVMEIO_ROUTE_DIRECT && !request->failed &&
        nvmeio_request_has_small_pages(request, request->address, request->size))
        request->plan.spans[0].route = NVMEIO_ROUTE_BOUNCE;
    /* Open the page cache's descriptor before any byte moves, because that may fail. */
    for (unsigned i = 0; i < request->plan.count; i++)
        if (request->plan.spans[i].route == NVMEIO_ROUTE_BUFFERED && !request->failed)
            fail_without_page_cache(request);
    /* Blocks that extend the file land in the order of the file. */
    if (request->ordered_from < INT64_MAX)
        nvmeio_plan_sort(&request->plan);
    request->position = request->plan.spans[0].begin;
}

static void transfer_plan(struct nvmeio_request *request)
{
    nvmeio_transfer_plan(request,
                         request->op == NVMEIO_OP_READ
                             ? nvmeio_file_size_for_read(request->file, end_of(request))
                             : nvmeio_file_size(request->file));
}

static void fsync_plan(struct nvmeio_request *request)
{
    request->plan.count = 1;
}

static const struct nvmeio_request_ops transfer_ops = {
    .plan = transfer_plan,
    .next = transfer_next,
    .blocks_left = transfer_blocks_left,
    .fail = transfer_fail,
    .settle = transfer_settle,
    .load = transfer_load,
    .deliver = transfer_deliver,
};

static const struct nvmeio_request_ops fsync_ops = {
    .plan = fsync_plan,
    .next = transfer_next,
    .blocks_left = transfer_blocks_left,
    .fail = transfer_fail,
    .settle = transfer_settle,
    .load = transfer_load,
    .deliver = transfer_deliver,
};

void nvmeio_transfer_init(struct nvmeio_request *request, struct nvmeio_handle *handle,
                          const struct nvmeio_owner *owner,
                          const struct nvmeio_transfer *transfer)
{
    bool fsync = transfer->op == NVMEIO_OP_FSYNC;

    nvmeio_request_init(request, fsync ? &fsync_ops : &transfer_ops, handle, owner,
                        transfer->op, transfer->file, transfer->user);
    request->data_only = transfer->data_only;
    request->file_passed = transfer->pass_file;
    if (fsync)
        return;
    request->address = transfer->address;
    request->size = request->total = transfer->size;
    request->offset = transfer->offset;
}
