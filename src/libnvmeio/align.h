/* align.h -- which route each byte of a transfer takes, and where it is cut.
 *
 * Pure arithmetic: no system call, no memory, no state. */
#ifndef NVMEIO_ALIGN_H
#define NVMEIO_ALIGN_H

#include <nvmeio/base.h>

/* A buffered and a direct write never share a page of the page cache of this size. */
#define NVMEIO_EDGE_BYTES 4096u

enum nvmeio_route {
    NVMEIO_ROUTE_BUFFERED, /* the caller's memory, through the page cache */
    NVMEIO_ROUTE_DIRECT,   /* the caller's memory, by the device */
    NVMEIO_ROUTE_BOUNCE    /* a bounce by the device, and a copy */
};

/* What a file and a handle allow. */
struct nvmeio_geometry {
    bool direct;
    uint32_t memory_align; /* powers of two */
    uint32_t offset_align;
    enum nvmeio_bounce bounce;
};

/* Bytes [begin, end) of the transfer. */
struct nvmeio_span {
    enum nvmeio_route route;
    size_t begin;
    size_t end;
};

/* The spans in the order in which they are carried out. A span of a write begins when
 * all spans before it have landed. */
struct nvmeio_plan {
    struct nvmeio_span spans[3];
    unsigned count;
};

/* One I/O. The `wanted` bytes of the transfer from `position` on are at `skip` within
 * the `io_bytes` at file offset `io_offset`. */
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

/* Offset and size together must not overflow. */
void nvmeio_plan_make(struct nvmeio_plan *plan, const struct nvmeio_geometry *geometry,
                      enum nvmeio_op op, uintptr_t address, size_t size,
                      int64_t offset);

/* Put the spans into the order of the file. */
void nvmeio_plan_sort(struct nvmeio_plan *plan);

/* The piece of `span` that begins at `position`, of at most block_bytes (a multiple of
 * NVMEIO_EDGE_BYTES and of the file's alignments). */
void nvmeio_plan_cut(struct nvmeio_piece *piece, const struct nvmeio_span *span,
                     size_t position, int64_t offset, uint32_t offset_align,
                     size_t block_bytes);

#endif
