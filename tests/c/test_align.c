/* The plan of a transfer, by enumeration: every byte is covered once, by a route that
 * can carry it, and the blocks that it is cut into stay within their limits. */
#include <string.h>

#include "align.h"
#include "check.h"

#define SIZE_MAX_TRIED 24577
#define PAGE 4096u

static unsigned char covered[SIZE_MAX_TRIED];
static unsigned char page_routes[SIZE_MAX_TRIED / PAGE + 16];
static unsigned long plans;

/* No thread shares these, and race detection for each byte would take minutes. */
#define ONE_THREAD __attribute__((no_sanitize("thread")))

struct situation {
    struct nvmeio_geometry geometry;
    enum nvmeio_op op;
    uintptr_t address;
    size_t size;
    int64_t offset;
    size_t block_bytes;
};

static bool aligned(uint64_t value, uint64_t align)
{
    return value % align == 0;
}

/* Requests to the device are aligned. */
static void check_direct_piece(const struct situation *s, const struct nvmeio_piece *p)
{
    CHECK(aligned((uint64_t)p->io_offset, s->geometry.offset_align));
    CHECK(aligned(p->io_bytes, s->geometry.offset_align));
    if (p->route == NVMEIO_ROUTE_DIRECT) {
        CHECK(s->geometry.bounce != NVMEIO_BOUNCE_ALWAYS);
        CHECK(aligned(s->address + p->position, s->geometry.memory_align));
    } else {
        CHECK(s->geometry.bounce != NVMEIO_BOUNCE_NEVER);
    }
    CHECK(s->geometry.direct);
    /* A write leaves pages and blocks that it does not fill to the page cache. */
    if (s->op == NVMEIO_OP_WRITE)
        CHECK(aligned((uint64_t)p->io_offset, s->geometry.edge) &&
              aligned(p->io_bytes, s->geometry.edge));
}

ONE_THREAD static void check_piece(const struct situation *s,
                                   const struct nvmeio_piece *p)
{
    CHECK(p->wanted > 0);
    CHECK(p->io_bytes <= s->block_bytes);
    CHECK(p->position + p->wanted <= s->size);
    CHECK(p->io_offset + (int64_t)p->skip == s->offset + (int64_t)p->position);
    CHECK(p->skip + p->wanted <= p->io_bytes);
    if (p->route == NVMEIO_ROUTE_BUFFERED)
        CHECK(p->skip == 0 && p->io_bytes == p->wanted);
    else
        check_direct_piece(s, p);
    /* A write puts only the caller's bytes into the file. */
    if (s->op == NVMEIO_OP_WRITE)
        CHECK(p->skip == 0 && p->io_bytes == p->wanted);
    /* Bytes that a read transfers beyond the request land only in our memory. */
    if (p->route == NVMEIO_ROUTE_DIRECT)
        CHECK(p->io_bytes == p->wanted);
    for (size_t i = 0; i < p->wanted; i++)
        CHECK(covered[p->position + i]++ == 0);
}

/* Which routes touch which page of the file: 1 the page cache, 2 the device. */
static void note_pages(const struct situation *s, const struct nvmeio_piece *p)
{
    uint64_t base = (uint64_t)s->offset / PAGE;
    uint64_t first = (uint64_t)p->io_offset / PAGE - base;
    uint64_t last = ((uint64_t)p->io_offset + p->io_bytes - 1) / PAGE - base;

    for (uint64_t page = first; page <= last; page++)
        page_routes[page] |= p->route == NVMEIO_ROUTE_BUFFERED ? 1 : 2;
}

ONE_THREAD static void check_plan(const struct situation *s)
{
    struct nvmeio_plan plan;

    plans++;
    memset(covered, 0, s->size);
    memset(page_routes, 0, sizeof(page_routes));
    nvmeio_plan_make(&plan, &s->geometry, s->op, s->address, s->size, s->offset);
    CHECK(plan.count <= 3);
    for (unsigned i = 0; i < plan.count; i++) {
        const struct nvmeio_span *span = &plan.spans[i];
        CHECK(span->begin < span->end && span->end <= s->size);
        for (size_t at = span->begin; at < span->end;) {
            struct nvmeio_piece piece;
            nvmeio_plan_cut(&piece, span, at, s->offset, s->geometry.offset_align,
                            s->block_bytes);
            CHECK(piece.route == span->route && piece.position == at);
            CHECK(at + piece.wanted <= span->end);
            check_piece(s, &piece);
            if (s->op == NVMEIO_OP_WRITE)
                note_pages(s, &piece);
            at += piece.wanted;
        }
        /* Buffered parts follow the direct part. */
        if (plan.count > 1)
            CHECK((span->route == NVMEIO_ROUTE_BUFFERED) == (i > 0));
    }
    nvmeio_plan_sort(&plan);
    for (unsigned i = 0; i < plan.count; i++)
        CHECK(plan.spans[i].begin == (i > 0 ? plan.spans[i - 1].end : 0));
    for (size_t i = 0; i < s->size; i++)
        CHECK(covered[i] == 1);
    for (size_t i = 0; i < sizeof(page_routes); i++)
        CHECK(page_routes[i] != 3);
}

static const size_t sizes[] = {1,    7,    511,  512,  1000,  4095,  4096,
                               4097, 4608, 8192, 8193, 12800, 16385, 24577};
static const int64_t offsets[] = {0,    1,    511,  512,  1024,
                                  4095, 4096, 5000, 7680, (INT64_C(1) << 40) + 513};
static const uintptr_t addresses[] = {0x10000, 0x10001, 0x10040,
                                      0x10200, 0x10201, 0x10fff};

static void for_all_places(struct situation s)
{
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (size_t j = 0; j < sizeof(offsets) / sizeof(offsets[0]); j++)
            for (size_t k = 0; k < sizeof(addresses) / sizeof(addresses[0]); k++) {
                s.size = sizes[i];
                s.offset = offsets[j];
                s.address = addresses[k];
                check_plan(&s);
            }
}

static void test_every_byte_takes_one_possible_route(void)
{
    static const uint32_t memory_aligns[] = {4, 512};
    static const uint32_t offset_aligns[] = {1, 512, 4096};
    static const uint32_t edges[] = {4096, 16384};
    static const size_t blocks[] = {4096, 65536};

    for (int m = 0; m < 2; m++)
        for (int o = 0; o < 3; o++)
            for (int b = 0; b < 2; b++)
                for (int rest = 0; rest < 2 * 2 * 3; rest++)
                    for_all_places((struct situation){
                        .geometry = {.direct = rest & 1,
                                     .memory_align = memory_aligns[m],
                                     .offset_align = offset_aligns[o],
                                     .edge = edges[b],
                                     .bounce = (enum nvmeio_bounce)(rest / 4)},
                        .op = rest & 2 ? NVMEIO_OP_WRITE : NVMEIO_OP_READ,
                        .block_bytes = blocks[b],
                    });
    CHECK(plans > 100000);
}

static void test_every_size_and_offset_of_the_first_pages(void)
{
    struct situation s = {
        .geometry = {.direct = true,
                     .memory_align = 512,
                     .offset_align = 512,
                     .edge = 4096},
        .block_bytes = 4096,
    };
    for (int op = 0; op < 2; op++)
        for (s.offset = 0; s.offset < 9000; s.offset += 127)
            for (s.size = 1; s.size < 9000; s.size += 61)
                for (int bounce = 0; bounce < 3; bounce++) {
                    s.op = op ? NVMEIO_OP_WRITE : NVMEIO_OP_READ;
                    s.geometry.bounce = (enum nvmeio_bounce)bounce;
                    s.address = 0x10000 + (uintptr_t)s.offset % 512;
                    check_plan(&s);
                }
}

static void test_an_aligned_transfer_is_one_direct_span(void)
{
    struct nvmeio_geometry geometry = {true, 512, 512, 4096, NVMEIO_BOUNCE_AUTO};
    struct nvmeio_plan plan;

    nvmeio_plan_make(&plan, &geometry, NVMEIO_OP_WRITE, 0x200, 8192, 4096);
    CHECK(plan.count == 1 && plan.spans[0].route == NVMEIO_ROUTE_DIRECT);
    CHECK(plan.spans[0].begin == 0 && plan.spans[0].end == 8192);
}

static void test_a_large_alignment_is_kept(void)
{
    struct nvmeio_geometry geometry = {true, 4096, 65536, 65536, NVMEIO_BOUNCE_AUTO};
    struct nvmeio_plan plan;

    nvmeio_plan_make(&plan, &geometry, NVMEIO_OP_WRITE, 0x1000, 300000, 4096);
    CHECK(plan.count == 3);
    CHECK((plan.spans[0].begin + 4096) % 65536 == 0);
    CHECK((plan.spans[0].end + 4096) % 65536 == 0);
}

static void test_nothing_needs_no_span(void)
{
    struct nvmeio_geometry geometry = {true, 512, 512, 4096, NVMEIO_BOUNCE_AUTO};
    struct nvmeio_plan plan;

    nvmeio_plan_make(&plan, &geometry, NVMEIO_OP_READ, 0x201, 0, 77);
    CHECK(plan.count == 0);
}

int main(void)
{
    test_every_byte_takes_one_possible_route();
    test_every_size_and_offset_of_the_first_pages();
    test_an_aligned_transfer_is_one_direct_span();
    test_a_large_alignment_is_kept();
    test_nothing_needs_no_span();
    return 0;
}
