/* align.h -- which route each byte of a transfer takes, and where it is cut.
 *
 * Pure arithmetic: no system call, no memory, no state. */
#ifndef NVMEIO_ALIGN_H
#define NVMEIO_ALIGN_H

#include <nvmeio/base.h>

/* No file has a smaller edge (struct nvmeio_geometry). */
#define NVMEIO_EDGE_BYTES 4096u

enum nvmeio_route {
    NVMEIO_ROUTE_BUFFERED, /* between the caller's memory and the page cache */
    NVMEIO_ROUTE_DIRECT,   /* between the caller's memory and the device */
    NVMEIO_ROUTE_BOUNCE    /* between a bounce and the device, and a copy */
};

/* The limits that a file and a handle set to a plan. */
struct nvmeio_geometry {
    bool direct;
    uint32_t memory_align; /* powers of two */
    uint32_t offset_align;
    /* Writes are split between O_DIRECT and the page cache at multiples of this size,
     * so that a buffered and a direct write never share a page, a block of the file
     * system or a sector. A power of two, and no smaller than the alignments. */
    uint32_t edge;
    enum nvmeio_bounce bounce;
};

/* Bytes [begin, end) of the transfer. */
struct nvmeio_span {
    enum nvmeio_route route;
    size_t begin;
    size_t end;
};

/* The spans in the order in which they are carried out. A write begins a span only
 * after all spans before it have landed. */
struct nvmeio_plan {
    struct nvmeio_span spans[3];
    unsigned count;
};

/* One I/O: `io_bytes` at file offset `io_offset`. It contains the `wanted` bytes that
 * begin at `position` in the transfer. They begin `skip` bytes into the I/O, because a
 * bounced read covers whole sectors. */
struct nvmeio_piece {
    enum nvmeio_route route;
    size_t position;
    size_t wanted;
    size_t skip;
    size_t io_bytes;
    int64_t io_offset;
};

/* Round up or down to a multiple of a power of two. */
uint64_t nvmeio_round_down(uint64_t value, uint64_t align);
uint64_t nvmeio_round_up(uint64_t value, uint64_t align);

/* Divide a transfer into spans, and choose the route of each. offset + size must not
 * overflow. */
void nvmeio_plan_make(struct nvmeio_plan *plan, const struct nvmeio_geometry *geometry,
                      enum nvmeio_op op, uintptr_t address, size_t size,
                      int64_t offset);

/* Sort the spans by file offset, for a write that makes the file longer. */
void nvmeio_plan_sort(struct nvmeio_plan *plan);

/* Cut the piece of `span` that begins at `position`. It has at most block_bytes, which
 * must be a multiple of NVMEIO_EDGE_BYTES and of the file's alignments, and of its edge
 * for a write. */
void nvmeio_plan_cut(struct nvmeio_piece *piece, const struct nvmeio_span *span,
                     size_t position, int64_t offset, uint32_t offset_align,
                     size_t block_bytes);

#endif
