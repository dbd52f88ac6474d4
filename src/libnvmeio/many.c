/* many.c -- transfers of several files as one request.
 *
 * Each is a request of its own, called a part. Parts are neither referenced nor
 * reported; only the whole is. The whole has no blocks, and is done when its last part
 * is. */
#include <stdlib.h>

#include "file_internal.h"
#include "request_internal.h"

/* Look up the size of a file once for neighbouring writes, which mostly go to the same
 * one. */
static void many_plan(struct nvmeio_request *request)
{
    const struct nvmeio_file *file = NULL;
    struct nvmeio_request *part;
    int64_t size = 0;

    for (size_t i = 0; (part = nvmeio_part(request, i)); i++) {
        if (part->op != NVMEIO_OP_WRITE) {
            part->ops->plan(part);
            continue;
        }
        if (part->file != file)
            size = nvmeio_file_size(part->file);
        file = part->file;
        nvmeio_transfer_plan(part, size);
    }
}

void nvmeio_many_book(struct nvmeio_request *part)
{
    struct nvmeio_request *whole = part->whole;
    size_t index = (size_t)(part - whole->parts->list);

    whole->in_flight--;
    whole->abandoned |= part->abandoned;
    if (!whole->close_error && !part->closing)
        whole->close_error = part->close_error;
    /* A cancelled part counts too: the flag is in the whole. */
    if (part->error)
        nvmeio_request_fail(whole, part->error, index);
}

static void many_settle(struct nvmeio_request *request)
{
    struct nvmeio_request *part;

    request->got = 0;
    for (size_t i = 0; (part = nvmeio_part(request, i)); i++)
        if (!nvmeio_request_is_stopped(part))
            request->got += part->total;
}

static size_t many_failures(const struct nvmeio_request *request,
                            struct nvmeio_failure *failures, size_t count)
{
    const struct nvmeio_request *part;
    size_t found = 0;

    for (size_t i = 0; (part = nvmeio_part(request, i)); i++) {
        if (!part->error)
            continue;
        if (found < count)
            failures[found] = (struct nvmeio_failure){.index = i,
                                                      .error = part->error,
                                                      .offset = part->offset,
                                                      .size = part->total};
        found++;
    }
    return found;
}

static void many_free(struct nvmeio_request *request)
{
    /* If the handle refused the request, the parts still hold their files. */
    for (size_t i = 0; i < request->parts->count; i++)
        nvmeio_file_release(request->parts->list[i].file);
    free(request->parts);
}

static const struct nvmeio_request_ops many_ops = {
    .plan = many_plan,
    .settle = many_settle,
    .failures = many_failures,
    .free = many_free,
};

struct nvmeio_request *nvmeio_many_new(struct nvmeio_handle *handle,
                                       const struct nvmeio_owner *owner,
                                       const struct nvmeio_many *many)
{
    struct nvmeio_request *request = malloc(sizeof(*request));
    struct nvmeio_parts *parts =
        many->count < SIZE_MAX / sizeof(*request) - 1
            ? malloc(sizeof(*parts) + many->count * sizeof(*request))
            : NULL;

    if (!request || !parts) {
        free(request);
        free(parts);
        return NULL;
    }
    /* The operation of the whole does not matter: an fsync that looks for earlier
     * writes finds the parts. */
    nvmeio_request_init(request, &many_ops, handle, owner, NVMEIO_OP_READ, NULL,
                        many->user);
    request->parts = parts;
    parts->count = request->steps = many->count;
    for (size_t i = 0; i < many->count; i++) {
        nvmeio_transfer_init(&parts->list[i], handle, owner, &many->transfers[i]);
        parts->list[i].user = NULL;
        parts->list[i].whole = request;
        request->total += parts->list[i].total;
    }
    return request;
}
