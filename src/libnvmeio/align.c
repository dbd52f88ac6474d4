/* align.c -- the head, middle and tail of a transfer, and the blocks it is cut into.
 *
 * A device transfers whole sectors at aligned addresses; a caller may want any bytes
 * anywhere. Aligned bytes go straight to the device. If only the ends are ragged, the
 * ends go through the page cache. If the address is not congruent with the file offset,
 * the data passes through a bounce: aligned memory of our own. */
#include "align.h"

uint64_t nvmeio_round_down(uint64_t value, uint64_t align)
{
    return value & ~(align - 1);
}

uint64_t nvmeio_round_up(uint64_t value, uint64_t align)
{
    return (value + align - 1) & ~(align - 1);
}

static void plan_add(struct nvmeio_plan *plan, enum nvmeio_route route, uint64_t begin,
                     uint64_t end)
{
    if (begin == end)
        return;
    plan->spans[plan->count++] = (struct nvmeio_span){route, begin, end};
}

void nvmeio_plan_make(struct nvmeio_plan *plan, const struct nvmeio_geometry *geometry,
                      enum nvmeio_op op, uintptr_t address, size_t size, int64_t offset)
{
    *plan = (struct nvmeio_plan){0};
    if (!geometry->direct) {
        plan_add(plan, NVMEIO_ROUTE_BUFFERED, 0, size);
        return;
    }

    uint64_t align = geometry->offset_align;
    uint64_t edge = op == NVMEIO_OP_WRITE       ? geometry->edge
                    : align > NVMEIO_EDGE_BYTES ? align
                                                : NVMEIO_EDGE_BYTES;
    uint64_t start = (uint64_t)offset;
    uint64_t stop = start + size;
    /* A write sends the pages and blocks that it does not fill through the page cache.
     * Another write may change the rest of one there. If this one bypassed the page
     * cache, the two would overwrite each other's bytes. */
    uint64_t whole = op == NVMEIO_OP_WRITE ? edge : align;
    uint64_t middle = start % whole ? nvmeio_round_up(start, edge) : start;
    uint64_t tail = stop % whole ? nvmeio_round_down(stop, edge) : stop;

    bool bounce_allowed = geometry->bounce != NVMEIO_BOUNCE_NEVER;
    bool has_middle = middle < tail;
    bool reachable = has_middle &&
                     (address + (middle - start)) % geometry->memory_align == 0 &&
                     geometry->bounce != NVMEIO_BOUNCE_ALWAYS;

    /* A read into a bounce may fetch more bytes than were asked for. A write must write
     * only the bytes that it was given, so its ends always go through the page
     * cache. */
    if (!reachable && (!bounce_allowed || (!has_middle && op == NVMEIO_OP_WRITE))) {
        plan_add(plan, NVMEIO_ROUTE_BUFFERED, 0, size);
        return;
    }
    if (!reachable && op == NVMEIO_OP_READ) {
        plan_add(plan, NVMEIO_ROUTE_BOUNCE, 0, size);
        return;
    }
    plan_add(plan, reachable ? NVMEIO_ROUTE_DIRECT : NVMEIO_ROUTE_BOUNCE,
             middle - start, tail - start);
    plan_add(plan, NVMEIO_ROUTE_BUFFERED, 0, middle - start);
    plan_add(plan, NVMEIO_ROUTE_BUFFERED, tail - start, size);
}

void nvmeio_plan_sort(struct nvmeio_plan *plan)
{
    /* nvmeio_plan_make() puts a head after the middle. A tail is already last. */
    if (plan->count > 1 && plan->spans[1].begin < plan->spans[0].begin) {
        struct nvmeio_span middle = plan->spans[0];
        plan->spans[0] = plan->spans[1];
        plan->spans[1] = middle;
    }
}

void nvmeio_plan_cut(struct nvmeio_piece *piece, const struct nvmeio_span *span,
                     size_t position, int64_t offset, uint32_t offset_align,
                     size_t block_bytes)
{
    /* Buffered blocks begin at page boundaries, except for the first. Bounced blocks
     * cover whole sectors. Direct spans are already aligned. */
    uint64_t align = span->route == NVMEIO_ROUTE_BUFFERED ? NVMEIO_EDGE_BYTES
                     : span->route == NVMEIO_ROUTE_BOUNCE ? offset_align
                                                          : 1;
    uint64_t start = (uint64_t)offset + position;
    uint64_t cover = nvmeio_round_down(start, align);
    uint64_t room = block_bytes - (start - cover);
    size_t left = span->end - position;

    piece->route = span->route;
    piece->position = position;
    piece->wanted = left < room ? left : room;
    if (span->route == NVMEIO_ROUTE_BOUNCE) {
        piece->skip = start - cover;
        piece->io_offset = (int64_t)cover;
        piece->io_bytes = nvmeio_round_up(start + piece->wanted, align) - cover;
    } else {
        piece->skip = 0;
        piece->io_offset = (int64_t)start;
        piece->io_bytes = piece->wanted;
    }
}
