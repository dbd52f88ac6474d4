/* The split of a transfer, compared with a plain model of which bytes are in pages that
 * it fills.
 *
 * tests/c/test_align.c enumerates small cases; these have any size. */
#include "../c/check.h"
#include "align.h"
#include "input.h"

#define PAGE 4096u
#define PIECES_MAX 500

struct situation {
    struct nvmeio_geometry geometry;
    enum nvmeio_op op;
    uint64_t address;
    uint64_t start, stop; /* in the file */
    size_t block_bytes;
};

/* The rule of docs/design.md: bytes [from, to) of the file take `route`, those before
 * and after them the page cache. */
struct model {
    enum nvmeio_route route;
    uint64_t from, to;
};

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static struct situation invent(struct input *input)
{
    struct situation s;
    unsigned flags = input_choice(input, 255);
    uint64_t unit;

    s.op = flags & 1 ? NVMEIO_OP_WRITE : NVMEIO_OP_READ;
    s.geometry.direct = (flags & 14) != 0;
    s.geometry.bounce = (enum nvmeio_bounce)((flags >> 4) % 3);
    s.geometry.memory_align = 1u << input_choice(input, 13);
    s.geometry.offset_align = 1u << input_choice(input, 16);
    s.geometry.edge = (uint32_t)larger(s.geometry.offset_align, PAGE)
                      << input_choice(input, 4);
    unit = larger(s.geometry.memory_align, s.geometry.edge);
    s.block_bytes = unit * (1 + input_size(input, NVMEIO_BLOCK_BYTES_MAX / unit - 1));
    s.start = input_size(input, INT64_MAX);
    s.stop = s.start + input_size(input, INT64_MAX - s.start) %
                           (PIECES_MAX * (uint64_t)s.block_bytes);
    s.address = input_size(input, UINT64_MAX - (s.stop - s.start));
    return s;
}

static struct model model_of(const struct situation *s)
{
    const struct nvmeio_geometry *geometry = &s->geometry;
    uint64_t sector = geometry->offset_align;
    uint64_t page = s->op == NVMEIO_OP_WRITE ? geometry->edge : larger(sector, PAGE);
    struct model model = {.from = s->start, .to = s->stop};
    bool congruent;

    /* The pages that the transfer fills; a read that begins or ends at a sector may
     * include part of a page. */
    if (s->start % page && (s->op == NVMEIO_OP_WRITE || s->start % sector))
        model.from = (s->start / page + 1) * page;
    if (s->stop % page && (s->op == NVMEIO_OP_WRITE || s->stop % sector))
        model.to = s->stop / page * page;
    congruent = model.from < model.to &&
                (s->address + (model.from - s->start)) % geometry->memory_align == 0;

    if (geometry->direct && congruent && geometry->bounce != NVMEIO_BOUNCE_ALWAYS) {
        model.route = NVMEIO_ROUTE_DIRECT;
    } else if (geometry->direct && geometry->bounce != NVMEIO_BOUNCE_NEVER &&
               s->op == NVMEIO_OP_READ) {
        model = (struct model){NVMEIO_ROUTE_BOUNCE, s->start, s->stop};
    } else if (geometry->direct && geometry->bounce != NVMEIO_BOUNCE_NEVER &&
               model.from < model.to) {
        model.route = NVMEIO_ROUTE_BOUNCE;
    } else {
        model = (struct model){NVMEIO_ROUTE_BUFFERED, s->start, s->stop};
    }
    return model;
}

/* A piece with this route is in the middle; others are on one side of it. */
static void check_route(const struct situation *s, const struct model *model,
                        const struct nvmeio_piece *piece)
{
    uint64_t from = s->start + piece->position, to = from + piece->wanted;

    if (from >= model->from && to <= model->to) {
        CHECK(piece->route == model->route);
    } else {
        CHECK(piece->route == NVMEIO_ROUTE_BUFFERED);
        CHECK(to <= model->from || from >= model->to);
    }
}

/* Check the kernel's request. */
static void check_io(const struct situation *s, const struct nvmeio_piece *piece)
{
    uint64_t from = s->start + piece->position, to = from + piece->wanted;
    uint64_t io_from = (uint64_t)piece->io_offset, io_to = io_from + piece->io_bytes;
    uint64_t sector = s->geometry.offset_align;

    CHECK(piece->wanted > 0 && piece->io_bytes <= s->block_bytes);
    CHECK(io_from <= from && io_from + piece->skip == from && to <= io_to);
    if (piece->route != NVMEIO_ROUTE_BUFFERED)
        CHECK(io_from % sector == 0 && io_to % sector == 0);
    if (piece->route == NVMEIO_ROUTE_DIRECT)
        CHECK((s->address + piece->position) % s->geometry.memory_align == 0);
    /* Only reads into our own memory may exceed the request, by less than a sector. */
    if (piece->route == NVMEIO_ROUTE_BOUNCE && s->op == NVMEIO_OP_READ)
        CHECK(from - io_from < sector && io_to - to < sector);
    else
        CHECK(io_from == from && io_to == to);
}

/* The blocks of a span are contiguous, and all but the first and the last have the
 * maximal size. */
static void check_span(const struct situation *s, const struct model *model,
                       const struct nvmeio_span *span)
{
    size_t position = span->begin;
    unsigned pieces = 0;

    CHECK(span->begin < span->end && span->end <= s->stop - s->start);
    while (position < span->end) {
        struct nvmeio_piece piece;
        nvmeio_plan_cut(&piece, span, position, (int64_t)s->start,
                        s->geometry.offset_align, s->block_bytes);
        CHECK(piece.position == position && piece.route == span->route);
        check_io(s, &piece);
        check_route(s, model, &piece);
        position += piece.wanted;
        CHECK(position <= span->end);
        if (pieces > 0 && position < span->end)
            CHECK(piece.io_bytes == s->block_bytes);
        if (pieces++ > 0 && piece.route == NVMEIO_ROUTE_BUFFERED)
            CHECK(piece.io_offset % PAGE == 0);
    }
    CHECK(pieces <= PIECES_MAX + 2);
}

/* The spans cover each byte of the transfer once: sorted, each begins where another
 * ends. */
static void check_cover(const struct situation *s, const struct nvmeio_plan *plan)
{
    size_t end = 0;

    for (unsigned found = 0; found < plan->count; found++) {
        unsigned next = 0;
        while (next < plan->count && plan->spans[next].begin != end)
            next++;
        CHECK(next < plan->count);
        end = plan->spans[next].end;
    }
    CHECK(end == s->stop - s->start);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {data, size};
    struct situation s = invent(&input);
    struct model model = model_of(&s);
    struct nvmeio_plan plan;

    nvmeio_plan_make(&plan, &s.geometry, s.op, s.address, s.stop - s.start,
                     (int64_t)s.start);
    CHECK(plan.count <= 3);
    check_cover(&s, &plan);
    /* The edges of a write wait until its middle is written. */
    for (unsigned i = 0; i < plan.count; i++)
        CHECK(s.op != NVMEIO_OP_WRITE ||
              (i > 0) == (plan.spans[i].route != model.route));
    for (unsigned i = 0; i < plan.count; i++)
        check_span(&s, &model, &plan.spans[i]);
    /* In file order, if that is required. */
    nvmeio_plan_sort(&plan);
    for (unsigned i = 0; i < plan.count; i++)
        CHECK(plan.spans[i].begin == (i > 0 ? plan.spans[i - 1].end : 0));
    return 0;
}
