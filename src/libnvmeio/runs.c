/* runs.c -- a gather or scatter as a request: cut run by run, in one round or two.
 *
 * Which records make a run is records.c's; how a run is cut into blocks, request.c's.
 */
#include "runs.h"

#include <errno.h>

#include "pages.h"

/* Choose the way of a run's bytes.  What is to be merged is bounced, and so are the
 * ragged ends of a read, which are hardly in the page cache; what of a scatter goes
 * through the page cache is left to the second round. */
static void plan_run(struct nvmeio_request *request)
{
    const struct nvmeio_run *run = &request->run;
    struct nvmeio_geometry geometry = request->geometry;
    uint64_t ends = (uint64_t)run->offset | run->size;
    bool ragged = request->op == NVMEIO_OP_READ && ends % geometry.offset_align &&
                  run->size < request->merged_bytes;

    request->address = run->home;
    request->size = run->size;
    request->offset = run->offset;
    request->bounce_optional = false;
    if (geometry.bounce == NVMEIO_BOUNCE_AUTO && (ragged || !run->home))
        geometry.bounce = NVMEIO_BOUNCE_ALWAYS;
    nvmeio_plan_make(&request->plan, &geometry, request->op, (uintptr_t)run->home,
                     run->size, run->offset);
    if (request->op == NVMEIO_OP_WRITE && geometry.direct &&
        request->plan.spans[0].route == NVMEIO_ROUTE_BUFFERED)
        request->plan.edges = 0;
    if (request->small_pages && run->size >= NVMEIO_PAGES_BYTES_MIN &&
        request->plan.spans[0].route == NVMEIO_ROUTE_DIRECT)
        nvmeio_request_prefer_bounce(request);
}

unsigned nvmeio_runs_round_end(const struct nvmeio_request *request)
{
    const struct nvmeio_plan *plan = &request->plan;

    if (!request->records || request->second_round || plan->edges > plan->count)
        return plan->count;
    return plan->edges;
}

void nvmeio_runs_next(struct nvmeio_request *request)
{
    struct nvmeio_records *records = request->records;
    struct nvmeio_run_limits limits = {
        .op = request->op,
        .align = request->geometry.direct ? request->geometry.offset_align : 1,
        .merged_bytes = request->merged_bytes,
    };

    for (;;) {
        while (request->alone ? nvmeio_records_next_alone(records, &request->run)
                              : nvmeio_records_next(records, &limits, &request->run)) {
            plan_run(request);
            request->span = request->second_round ? request->plan.edges : 0;
            request->edges_left |= request->plan.edges < request->plan.count;
            if (request->span < nvmeio_runs_round_end(request)) {
                request->position = request->plan.spans[request->span].begin;
                return;
            }
        }
        if (request->second_round || !request->edges_left)
            break;
        request->second_round = true;
        records->next = 0;
    }
    request->span = request->plan.count;
}

struct nvmeio_request *nvmeio_request_new_gather(struct nvmeio_handle *handle,
                                                 const struct nvmeio_gather *gather,
                                                 struct nvmeio_records *records)
{
    struct nvmeio_request *request =
        nvmeio_request_alloc(handle, gather->op, gather->file, gather->user);

    if (!request)
        return NULL;
    request->records = records;
    request->total = records->bytes;
    if (request->geometry.bounce != NVMEIO_BOUNCE_NEVER)
        request->merged_bytes = handle->bounce_bytes < handle->block_bytes
                                    ? handle->bounce_bytes
                                    : handle->block_bytes;
    request->small_pages =
        nvmeio_request_has_small_pages(request, gather->address, gather->size);
    nvmeio_runs_next(request);
    /* There are edges alone, which wait for nothing. */
    request->gate_open = request->second_round;
    return request;
}

bool nvmeio_runs_unmerge(struct nvmeio_request *request)
{
    bool begun = request->span > (request->second_round ? request->plan.edges : 0) ||
                 request->position > request->plan.spans[request->span].begin;

    if (begun || request->geometry.bounce != NVMEIO_BOUNCE_AUTO)
        return false;
    request->geometry.bounce = NVMEIO_BOUNCE_NEVER;
    request->merged_bytes = 0;
    request->small_pages = false;
    request->records->next = request->run.first;
    nvmeio_runs_next(request);
    return true;
}

bool nvmeio_runs_retry(struct nvmeio_request *request)
{
    struct nvmeio_records *records = request->records;

    if (!records || !records->shared || request->alone ||
        request->op != NVMEIO_OP_READ || request->in_flight > 0 ||
        nvmeio_request_is_stopped(request) || !nvmeio_request_is_cut(request))
        return false;
    request->alone = true;
    records->next = 0;
    nvmeio_runs_next(request);
    return true;
}

/* It was stopped before all was cut: what is left has failed. */
static void fail_uncut(struct nvmeio_request *request)
{
    struct nvmeio_records *records = request->records;
    int error = request->error ? request->error : -ECANCELED;

    if (request->alone)
        /* Those behind this one have landed, or still have their errors. */
        nvmeio_records_fail(records, &request->run, 0, request->run.size, error);
    else if (request->op == NVMEIO_OP_WRITE)
        nvmeio_records_fail_from(records, 0, error);
    else
        nvmeio_records_fail_from(records, request->run.first, error);
}

void nvmeio_runs_settle(struct nvmeio_request *request)
{
    if (nvmeio_request_is_stopped(request) && !nvmeio_request_is_cut(request))
        fail_uncut(request);
    request->got = nvmeio_records_settle(request->records);
}
