/* gather.c -- a gather or scatter as a request, which is cut extent by extent.
 *
 * records.c decides which records form an extent, and request.c cuts it into blocks. */
#include <errno.h>
#include <stdlib.h>

#include "copy_internal.h"
#include "file_internal.h"
#include "pages.h"
#include "records.h"
#include "request_internal.h"

/* How many records, at most, are sampled to find out whether the page cache has any of
 * the file. */
#define CACHED_SAMPLES 16u

/* The records are gone through once, and for some requests once more. */
enum round {
    ROUND_FIRST, /* everything, but of a scatter only what is not late */
    ROUND_LATE,  /* of a scatter, once all that has landed: see is_late() */
    ROUND_ALONE, /* of a gather, once all has landed: the records that were read
                    together and failed, each on its own */
};

struct nvmeio_gathering {
    struct nvmeio_records *records; /* owned */
    size_t merged_bytes;            /* the largest extent that uses one bounce */
    bool small_pages;               /* the memory of the records is in small pages */
    enum round round;
    bool late_left; /* an extent has spans for ROUND_LATE */
};

/* Whether the current extent makes the file longer. It then lands in order. */
static bool grows_file(const struct nvmeio_request *request)
{
    return request->ordered_from < INT64_MAX &&
           request->offset + (int64_t)request->size > request->ordered_from;
}

/* In a scatter, page-cache writes wait for all direct writes, because a large folio of
 * the page cache may span the pages of neighbours. Writes that extend the file land one
 * at a time anyway. */
static bool is_late(const struct nvmeio_request *request, unsigned span)
{
    return request->op == NVMEIO_OP_WRITE && request->geometry.direct &&
           request->plan.spans[span].route == NVMEIO_ROUTE_BUFFERED &&
           !grows_file(request);
}

/* Choose the route of an extent. Merged records use a bounce. So do reads with ragged
 * ends, because those ends are rarely in the page cache. */
static void plan_extent(struct nvmeio_request *request)
{
    const struct nvmeio_gathering *gathering = request->gathering;
    const struct nvmeio_extent *extent = &request->extent;
    struct nvmeio_geometry geometry = request->geometry;
    uint64_t ends = (uint64_t)extent->offset | extent->size;
    bool ragged = request->op == NVMEIO_OP_READ && ends % geometry.offset_align &&
                  extent->size < gathering->merged_bytes;

    request->address = extent->home;
    request->size = extent->size;
    request->offset = extent->offset;
    request->span = 0;
    if (gathering->records->list[extent->first].cached)
        geometry.direct = false;
    if (geometry.bounce == NVMEIO_BOUNCE_AUTO && (ragged || !extent->home))
        geometry.bounce = NVMEIO_BOUNCE_ALWAYS;
    nvmeio_plan_make(&request->plan, &geometry, request->op, (uintptr_t)extent->home,
                     extent->size, extent->offset);
    if (gathering->small_pages && extent->size >= NVMEIO_PAGES_BYTES_MIN &&
        request->plan.spans[0].route == NVMEIO_ROUTE_DIRECT)
        request->plan.spans[0].route = NVMEIO_ROUTE_BOUNCE;
    if (grows_file(request))
        nvmeio_plan_sort(&request->plan);
}

/* Skip to the extent's first span for this round, beginning with the current one. */
static bool find_span(struct nvmeio_request *request)
{
    struct nvmeio_gathering *gathering = request->gathering;

    for (; request->span < request->plan.count; request->span++) {
        bool late = is_late(request, request->span);
        gathering->late_left |= late;
        if (late == (gathering->round == ROUND_LATE)) {
            request->position = request->plan.spans[request->span].begin;
            return true;
        }
    }
    return false;
}

static bool next_extent(struct nvmeio_request *request)
{
    const struct nvmeio_gathering *gathering = request->gathering;
    const struct nvmeio_extent_limits limits = {
        .op = request->op,
        .align = request->geometry.direct ? request->geometry.offset_align : 1,
        .merged_bytes = gathering->merged_bytes,
    };

    if (gathering->round == ROUND_ALONE)
        return nvmeio_records_next_alone(gathering->records, &request->extent);
    return nvmeio_records_next(gathering->records, &limits, &request->extent);
}

static void mark_cached(struct nvmeio_records *records,
                        const struct nvmeio_extent *extent, bool cached)
{
    for (size_t i = 0; i < extent->count; i++)
        records->list[extent->first + i].cached = cached;
}

/* If the kernel does not say what is cached: whether all of a few samples are. */
static bool seems_cached(struct nvmeio_request *request, size_t step)
{
    const struct nvmeio_records *records = request->gathering->records;
    int64_t places[CACHED_SAMPLES];
    size_t count = 0;

    for (size_t i = 0; i < records->count && count < CACHED_SAMPLES; i += step)
        places[count++] = records->list[i].offset;
    return nvmeio_file_has_bytes(request->file, places, count);
}

/* Mark the extents that the page cache has whole, so that they are read from there. If
 * it has none of a few samples, the others are not looked up, so that a cold gather
 * takes no longer. */
static void find_cached(struct nvmeio_request *request)
{
    struct nvmeio_records *records = request->gathering->records;
    struct nvmeio_file *file = request->file;
    const struct nvmeio_extent all = {.count = records->count};
    size_t step = records->count / CACHED_SAMPLES + 1;
    int found = 0;

    for (size_t i = 0; i < records->count && found == 0; i += step)
        found =
            nvmeio_file_is_cached(file, records->list[i].offset, records->list[i].size);
    if (found < 0)
        mark_cached(records, &all, seems_cached(request, step));
    if (found <= 0 || !nvmeio_file_try_buffered(file))
        return;
    while (next_extent(request)) {
        const struct nvmeio_extent *extent = &request->extent;
        mark_cached(records, extent,
                    nvmeio_file_is_cached(file, extent->offset, extent->size) == 1);
    }
    records->next = 0;
}

/* Let other threads go on during a long search. Not while it is being planned, because
 * the mutex is not held; nor if nothing is in flight, because it could end meanwhile.
 */
static void pause_search(struct nvmeio_request *request, size_t step)
{
    if (request->phase != NVMEIO_PHASE_PLANNED || request->in_flight == 0)
        return;
    request->searching = true;
    request->owner->pause(request->handle, step);
    request->searching = false;
}

/* Go to the next extent that has a span for this round. If there is none, all of the
 * round is cut. */
static bool find_in_round(struct nvmeio_request *request)
{
    for (size_t i = 0; next_extent(request); i++) {
        plan_extent(request);
        if (find_span(request))
            return true;
        pause_search(request, i);
    }
    request->span = request->plan.count;
    return false;
}

static void begin_round(struct nvmeio_request *request, enum round round)
{
    request->gathering->round = round;
    request->gathering->records->next = 0;
    find_in_round(request);
}

/* Go to the next extent that has a span to cut, in this round or else in the late one.
 */
static void find_extent(struct nvmeio_request *request)
{
    const struct nvmeio_gathering *gathering = request->gathering;

    if (find_in_round(request) || gathering->round != ROUND_FIRST ||
        !gathering->late_left)
        return;
    request->barrier = true;
    begin_round(request, ROUND_LATE);
}

static void gather_next(struct nvmeio_request *request)
{
    request->span++;
    if (!find_span(request))
        find_extent(request);
}

/* After all of a gather has landed: if records failed that were read together, read
 * each of them again alone, because the bytes of another may have caused the error. */
static void gather_next_round(struct nvmeio_request *request)
{
    const struct nvmeio_gathering *gathering = request->gathering;

    if (request->op == NVMEIO_OP_READ && gathering->round == ROUND_FIRST &&
        gathering->records->shared)
        begin_round(request, ROUND_ALONE);
}

static size_t gather_blocks_left(const struct nvmeio_request *request)
{
    const struct nvmeio_records *records = request->gathering->records;
    return records->count - records->next + 1;
}

static void gather_fail(struct nvmeio_request *request,
                        const struct nvmeio_block *block, size_t position)
{
    const struct nvmeio_piece *piece = &block->piece;

    request->failed = true;
    nvmeio_records_fail(request->gathering->records, &block->extent, position,
                        piece->position + piece->wanted, (int)block->result);
    /* Drop the rest of the extent, because it would leave a gap in the file. */
    if (grows_file(request) && !nvmeio_request_is_cut(request) && !request->searching &&
        request->extent.first == block->extent.first) {
        nvmeio_records_fail(request->gathering->records, &request->extent, position,
                            request->extent.size, (int)block->result);
        find_extent(request);
    }
}

/* Mark the records that were never cut as failed. */
static void fail_uncut(struct nvmeio_request *request)
{
    struct nvmeio_records *records = request->gathering->records;
    int error = request->error ? request->error : -ECANCELED;

    if (request->gathering->round == ROUND_ALONE)
        /* The bytes before this extent have landed, or have their own errors. */
        nvmeio_records_fail(records, &request->extent, 0, request->extent.size, error);
    else if (request->op == NVMEIO_OP_WRITE)
        nvmeio_records_fail_from(records, 0, error);
    else
        nvmeio_records_fail_from(records, request->extent.first, error);
}

static void gather_settle(struct nvmeio_request *request)
{
    struct nvmeio_records *records = request->gathering->records;

    if (nvmeio_request_is_stopped(request) && !nvmeio_request_is_cut(request))
        fail_uncut(request);
    request->got = nvmeio_records_settle(records);
    if (!request->error)
        request->error = records->error;
}

static void gather_load(const struct nvmeio_block *block)
{
    const struct nvmeio_piece *piece = &block->piece;

    if (block->memory)
        nvmeio_copy_cold(block->bounce, block->memory, piece->wanted);
    else
        nvmeio_records_collect(block->request->gathering->records, &block->extent,
                               block->bounce, piece->position,
                               piece->position + piece->wanted);
}

static void gather_deliver(const struct nvmeio_block *block, size_t landed)
{
    const struct nvmeio_piece *piece = &block->piece;
    const char *source =
        block->bounce ? (char *)block->bounce + piece->skip : block->memory;

    if (block->bounce && block->memory)
        nvmeio_copy_cold(block->memory, source, landed);
    if (block->extent.copied)
        nvmeio_records_spread(block->request->gathering->records, &block->extent,
                              source, piece->position, piece->position + landed);
}

static void gather_plan(struct nvmeio_request *request)
{
    const struct nvmeio_geometry *geometry = &request->geometry;
    struct nvmeio_gathering *gathering = request->gathering;
    const struct nvmeio_records *records = gathering->records;
    bool buffered = !geometry->direct || geometry->bounce == NVMEIO_BOUNCE_NEVER ||
                    (request->op == NVMEIO_OP_WRITE && records->ends % geometry->edge);
    int error = buffered ? nvmeio_file_need_buffered(request->file) : 0;

    if (error)
        nvmeio_request_fail(request, error, 0);
    if (request->op == NVMEIO_OP_WRITE && records->count > 0) {
        const struct nvmeio_record *last = &records->list[records->count - 1];
        nvmeio_request_note_end(request, nvmeio_file_size(request->file),
                                last->offset + (int64_t)last->size);
    }
    if (request->op == NVMEIO_OP_READ && geometry->direct)
        find_cached(request);
    find_extent(request);
}

static size_t gather_failures(const struct nvmeio_request *request,
                              struct nvmeio_failure *failures, size_t count)
{
    return nvmeio_records_failures(request->gathering->records, failures, count);
}

static void gather_free(struct nvmeio_request *request)
{
    free(request->gathering->records);
    free(request->gathering);
}

static const struct nvmeio_request_ops gather_ops = {
    .plan = gather_plan,
    .next = gather_next,
    .next_round = gather_next_round,
    .blocks_left = gather_blocks_left,
    .fail = gather_fail,
    .settle = gather_settle,
    .load = gather_load,
    .deliver = gather_deliver,
    .failures = gather_failures,
    .free = gather_free,
};

/* Whether the memory is in small pages. Of records that are given by address, the
 * largest stands for all, because what is between them is not borrowed. */
static bool has_small_pages(const struct nvmeio_request *request,
                            const struct nvmeio_gather *gather,
                            const struct nvmeio_records *records)
{
    const void *address = NULL;
    size_t size = 0;

    if (!nvmeio_gather_is_by_address(gather))
        return nvmeio_request_has_small_pages(request, gather->address, gather->size);
    for (size_t i = 0; i < records->count; i++) {
        if (records->list[i].size > size) {
            address = records->list[i].place;
            size = records->list[i].size;
        }
    }
    return nvmeio_request_has_small_pages(request, address, size);
}

struct nvmeio_request *nvmeio_gather_new(struct nvmeio_handle *handle,
                                         const struct nvmeio_owner *owner,
                                         const struct nvmeio_gather *gather,
                                         struct nvmeio_records *records)
{
    struct nvmeio_request *request = malloc(sizeof(*request));
    struct nvmeio_gathering *gathering = calloc(1, sizeof(*gathering));

    if (!request || !gathering) {
        free(request);
        free(gathering);
        return NULL;
    }
    nvmeio_request_init(request, &gather_ops, handle, owner, gather->op, gather->file,
                        gather->user);
    request->gathering = gathering;
    request->file_passed = gather->pass_file;
    request->total = records->bytes;
    request->steps = records->count;
    gathering->records = records;
    if (request->geometry.bounce != NVMEIO_BOUNCE_NEVER)
        gathering->merged_bytes = owner->bounce_bytes < owner->block_bytes
                                      ? owner->bounce_bytes
                                      : owner->block_bytes;
    gathering->small_pages = has_small_pages(request, gather, records);
    return request;
}
