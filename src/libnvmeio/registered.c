/* registered.c -- which pool memory and files an io_uring has registered, and since
 * when.
 *
 * Both tables are found by a remainder, in which one entry has one place.  A page earns
 * its place by being used, and loses it to another that is used more; a file has it as
 * long as blocks of it are in flight. */
#include "registered.h"

/* Uses before a page is registered, which costs as much as 30 blocks gain, and the most
 * that count for it when others want its place. */
#define USES_MIN 64u
#define USES_MAX 128u

/* Blocks of one file in flight before it is registered. */
#define IN_FLIGHT_MIN 32u

/* Linux 6.14.  What leaves a table is let go at once from 6.13 on; before, up to a
 * second later, and before 5.13 a ring with anything in flight takes no table. */
#ifndef IORING_FEAT_RW_ATTR
#define IORING_FEAT_RW_ATTR (1U << 16)
#endif

#define PAGES NVMEIO_REGISTERED_PAGES_MAX
#define FILES NVMEIO_REGISTERED_FILES

/* Liburing before 2.2 has no sparse tables. */
#ifdef IORING_RSRC_REGISTER_SPARSE
static int prepare_pages(struct io_uring *ring)
{
    return io_uring_register_buffers_sparse(ring, PAGES);
}

static int update_pages(struct io_uring *ring, unsigned first,
                        const struct iovec *memory, unsigned count)
{
    __u64 tags[PAGES] = {0};
    return io_uring_register_buffers_update_tag(ring, first, memory, tags, count);
}
#else
static int prepare_pages(struct io_uring *ring)
{
    (void)ring;
    return -ENOSYS;
}

static int update_pages(struct io_uring *ring, unsigned first,
                        const struct iovec *memory, unsigned count)
{
    (void)ring, (void)first, (void)memory, (void)count;
    return -ENOSYS;
}
#endif

/* What was prepared may name a place that is to be changed: hand it over first. */
static bool hand_over(struct io_uring *ring)
{
    return io_uring_sq_ready(ring) == 0 ||
           (io_uring_submit(ring) >= 0 && io_uring_sq_ready(ring) == 0);
}

/* The pool has unmapped something: none of the pages may be what it was. */
static void forget_pages(struct nvmeio_registered *registered)
{
    static const struct iovec none[PAGES];
    bool gone = registered->pages_ready && hand_over(registered->ring) &&
                update_pages(registered->ring, 0, none, PAGES) == PAGES;
    unsigned held = 0;

    for (unsigned i = 0; i < PAGES; i++) {
        struct nvmeio_registered_page *page = &registered->pages[i];
        held += page->held;
        *page = (struct nvmeio_registered_page){.held = page->held && !gone};
    }
    if (gone)
        nvmeio_pool_unregister(held);
}

static bool register_page(struct nvmeio_registered *registered, unsigned place)
{
    struct nvmeio_registered_page *page = &registered->pages[place];
    struct iovec memory = {(void *)(page->number * NVMEIO_HUGE_BYTES),
                           NVMEIO_HUGE_BYTES};

    if (registered->pages_refused)
        return false;
    if (!registered->pages_ready && prepare_pages(registered->ring)) {
        registered->pages_refused = true;
        return false;
    }
    registered->pages_ready = true;
    if (!hand_over(registered->ring))
        return false;
    /* The quick look that came before may take foreign memory for the pool's. */
    if (page->held ? !nvmeio_pool_holds(memory.iov_base)
                   : !nvmeio_pool_register(memory.iov_base))
        return false;
    if (update_pages(registered->ring, place, &memory, 1) != 1) {
        /* Out of locked memory, most likely. */
        registered->pages_refused = true;
        if (!page->held)
            nvmeio_pool_unregister(1);
        return false;
    }
    page->held = true;
    return true;
}

void nvmeio_registered_open(struct nvmeio_registered *registered, struct io_uring *ring)
{
    bool prompt = ring->features & IORING_FEAT_RW_ATTR;

    *registered = (struct nvmeio_registered){.ring = ring,
                                             .unmappings = nvmeio_pool_unmappings(),
                                             .pages_refused = !prompt,
                                             .files_refused = !prompt};
}

void nvmeio_registered_close(struct nvmeio_registered *registered)
{
    unsigned held = 0;
    for (unsigned i = 0; i < PAGES; i++)
        held += registered->pages[i].held;
    nvmeio_pool_unregister(held);
}

static bool is_small(const struct nvmeio_block *block)
{
    return block->op != NVMEIO_OP_FSYNC && block->bytes <= NVMEIO_REGISTERED_BLOCK_MAX;
}

int nvmeio_registered_memory(struct nvmeio_registered *registered,
                             const struct nvmeio_block *block)
{
    uintptr_t first = (uintptr_t)block->address;
    uintptr_t number = first / NVMEIO_HUGE_BYTES;
    unsigned place = number % PAGES;
    struct nvmeio_registered_page *page = &registered->pages[place];

    if (!is_small(block) || !nvmeio_pool_may_hold(block->address) ||
        (first + block->bytes - 1) / NVMEIO_HUGE_BYTES != number)
        return -1;
    uint64_t unmappings = nvmeio_pool_unmappings();
    if (registered->unmappings != unmappings) {
        registered->unmappings = unmappings;
        forget_pages(registered);
    }
    if (page->number != number) {
        if (page->uses > 0 && --page->uses > 0)
            return -1;
        page->number = number;
        page->valid = false;
    }
    if (page->uses < USES_MAX)
        page->uses++;
    if (!page->valid && page->uses >= USES_MIN) {
        page->valid = register_page(registered, place);
        if (!page->valid)
            page->uses = 0;
    }
    return page->valid ? (int)place : -1;
}

static bool hold_file(struct nvmeio_registered *registered, unsigned place)
{
    static const int none[FILES] = {-1, -1, -1, -1, -1, -1, -1, -1};

    if (registered->files_refused)
        return false;
    if (!registered->files_ready &&
        io_uring_register_files(registered->ring, none, FILES)) {
        registered->files_refused = true;
        return false;
    }
    registered->files_ready = true;
    int fd = registered->files[place].fd;
    registered->files_refused =
        io_uring_register_files_update(registered->ring, place, &fd, 1) != 1;
    registered->files_held += !registered->files_refused;
    return !registered->files_refused;
}

int nvmeio_registered_file(struct nvmeio_registered *registered,
                           struct nvmeio_block *block)
{
    unsigned place = (unsigned)block->fd % FILES;
    struct nvmeio_registered_file *file = &registered->files[place];

    block->place = -1;
    if (!is_small(block) || (file->in_flight > 0 && file->fd != block->fd))
        return -1;
    block->place = (int)place;
    file->fd = block->fd;
    file->in_flight++;
    if (!file->held && file->in_flight == IN_FLIGHT_MIN)
        file->held = hold_file(registered, place);
    return file->held ? (int)place : -1;
}

void nvmeio_registered_done(struct nvmeio_registered *registered,
                            const struct nvmeio_block *block)
{
    if (block->place >= 0)
        registered->files[block->place].in_flight--;
}

void nvmeio_registered_let_go(struct nvmeio_registered *registered)
{
    for (unsigned i = 0; i < FILES && registered->files_held > 0; i++) {
        struct nvmeio_registered_file *file = &registered->files[i];
        int none = -1;
        if (!file->held || file->in_flight > 0)
            continue;
        io_uring_register_files_update(registered->ring, i, &none, 1);
        file->held = false;
        registered->files_held--;
    }
}
