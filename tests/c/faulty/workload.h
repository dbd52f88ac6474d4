/* workload.h -- a fixed workload on one engine: files, transfers, records, dropped
 * requests and memory of the pool.
 *
 * An operation that is reported as done is done; one that fails has an errno of
 * allowed[]. */
#ifndef NVMEIO_TESTS_WORKLOAD_H
#define NVMEIO_TESTS_WORKLOAD_H

#include "transfer.h"

#define MEMORY (256 * KIB)
#define BLOCK (16 * KIB)
#define RECORDS 24
#define ALLOWED_MAX 12

static char spec[256]; /* what NVMEIO_FAULTS says */
static const char *engine;
static const char *path;
static int allowed[ALLOWED_MAX]; /* -errno that the fault may end in */
static unsigned failures;        /* operations that ended with it */
static bool abandoned;           /* a dead engine has memory, and may write */
static bool direct;              /* the file system has O_DIRECT */
static bool performs;            /* a transfer was carried out in this thread */
static bool many_nodes;          /* memory of a NUMA node can be requested */

/* Whether it succeeded; an error must be the fault's. */
static bool fine(int64_t result)
{
    if (result >= 0)
        return true;
    for (unsigned i = 0; i < ALLOWED_MAX; i++) {
        if (allowed[i] && result == allowed[i]) {
            failures++;
            return false;
        }
    }
    fprintf(stderr, "%s %s: %s\n", engine, spec, strerror((int)-result));
    exit(1);
}

static bool done(struct nvmeio_request *request, struct nvmeio_outcome *outcome)
{
    wait_for(request);
    CHECK(nvmeio_request_outcome(request, outcome) == 0);
    abandoned |= outcome->abandoned;
    nvmeio_request_release(request);
    return fine(outcome->result);
}

/* Transfers that qualify run in this thread. */
static bool transfer(struct nvmeio_handle *handle, const struct nvmeio_transfer *t)
{
    struct nvmeio_outcome outcome;
    struct nvmeio_request *request;
    int performed = nvmeio_perform(handle, t, &outcome);

    performs |= performed == 1;
    if (!fine(performed))
        return false;
    if (performed == 0 &&
        (!fine(nvmeio_submit(handle, t, &request)) || !done(request, &outcome)))
        return false;
    if (!fine(outcome.result))
        return false;
    CHECK(outcome.result == (int64_t)t->size);
    return true;
}

/* Bytes must be right, unless a dead engine may still write to the file: a failed write
 * may land after a later one. */
static void check_bytes(bool equal)
{
    CHECK(equal || abandoned);
}

/* Keep memory to which a dead engine may still write. */
static void give_back(struct guarded *memory)
{
    if (abandoned)
        check_canaries(memory);
    else
        guarded_free(memory);
}

/* A write, checked by an ordinary read and read back: aligned, ragged and bounced. */
static void write_and_read(struct nvmeio_handle *handle, struct nvmeio_file *file,
                           size_t size, size_t residue, int64_t offset)
{
    struct guarded out = guarded_new(size, residue);
    struct guarded in = guarded_new(size, residue);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_WRITE, file, out.address, out.size, offset);

    fill(out.address, out.size, (uint64_t)offset, (unsigned)residue);
    bool written = transfer(handle, &t);
    if (written)
        check_bytes(file_holds(path, out.address, out.size, offset));
    t.op = NVMEIO_OP_READ;
    t.address = in.address;
    if (written && transfer(handle, &t))
        check_bytes(memcmp(in.address, out.address, in.size) == 0);
    give_back(&in);
    give_back(&out);
}

static void plan_records(struct nvmeio_gather *gather, int64_t *offsets, int64_t *sizes)
{
    for (int i = 0; i < RECORDS; i++) {
        int j = (i * 7) % RECORDS;
        offsets[i] = j * (int64_t)(j % 3 ? 5000 : 8192);
        sizes[i] = 100 + 171 * (j % 3) * 7;
    }
    gather->count = RECORDS;
    gather->offsets = offsets;
    gather->sizes = sizes;
    gather->gap_max = 4096;
}

/* Records are scattered and gathered again. */
static void scatter_and_gather(struct nvmeio_handle *handle, struct nvmeio_file *file)
{
    int64_t offsets[RECORDS], sizes[RECORDS];
    struct guarded out = guarded_new(MEMORY, 3);
    struct guarded in = guarded_new(MEMORY, 0);
    struct nvmeio_request *request;
    struct nvmeio_outcome outcome;
    size_t offender, total = 0;
    struct nvmeio_gather gather = {
        .op = NVMEIO_OP_WRITE, .file = file, .address = out.address, .size = out.size};

    plan_records(&gather, offsets, sizes);
    fill(out.address, out.size, 0, 77);
    bool written = fine(nvmeio_submit_gather(handle, &gather, &request, &offender)) &&
                   done(request, &outcome);
    for (int i = 0; i < RECORDS && written; total += (size_t)sizes[i++])
        check_bytes(
            file_holds(path, out.address + total, (size_t)sizes[i], offsets[i]));
    gather.op = NVMEIO_OP_READ;
    gather.address = in.address;
    if (written && fine(nvmeio_submit_gather(handle, &gather, &request, &offender)) &&
        done(request, &outcome))
        check_bytes(memcmp(in.address, out.address, total) == 0);
    give_back(&in);
    give_back(&out);
}

/* Requests, some of them cancelled, then an fsync, and a close meanwhile. */
static void leave_in_flight(struct nvmeio_handle *handle, struct nvmeio_file *file,
                            struct guarded *memory)
{
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = file};
    struct nvmeio_request *requests[5] = {0};
    size_t part = MEMORY / 4;

    for (int i = 0; i < 4; i++) {
        struct nvmeio_transfer t =
            transfer_of(i & 1 ? NVMEIO_OP_WRITE : NVMEIO_OP_READ, file,
                        memory->address + (size_t)i * part, part, i * (int64_t)part);
        if (!fine(nvmeio_submit(handle, &t, &requests[i])))
            requests[i] = NULL;
    }
    if (!fine(nvmeio_submit(handle, &sync, &requests[4])))
        requests[4] = NULL;
    if (requests[2])
        nvmeio_request_cancel(requests[2]);
    nvmeio_handle_close(handle);
    for (int i = 0; i < 5; i++) {
        struct nvmeio_outcome outcome;
        if (!requests[i])
            continue;
        CHECK(nvmeio_request_outcome(requests[i], &outcome) == 0);
        abandoned |= outcome.abandoned;
        if (outcome.result != -ECANCELED || i != 2)
            fine(outcome.result);
        nvmeio_request_release(requests[i]);
    }
}

static bool take_from_pool(int node, size_t size, char **memory)
{
    int locked;
    return fine(nvmeio_pool_alloc_on(node, size, true, (void **)memory, &locked));
}

static void use_pool(size_t size)
{
    char *memory;

    if (!take_from_pool(-1, size, &memory))
        return;
    memory[0] = memory[size - 1] = 1;
    nvmeio_pool_free(memory);
}

/* Write and read memory of the pool with so many requests that some meet a busy worker.
 * */
static void move_pages(struct nvmeio_handle *handle, struct nvmeio_file *file)
{
    enum { COUNT = 96 };
    struct nvmeio_request *requests[COUNT];
    struct nvmeio_outcome outcome;
    const size_t half = COUNT * PAGE, part = PAGE;
    char *memory;

    /* Whole huge pages, or the pool could not unmap them. */
    if (!take_from_pool(-1, 2 * MIB, &memory))
        return;
    fill(memory, half, 0, 5);
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_WRITE, file, memory, half, 0);
    bool whole = transfer(handle, &t);
    t.op = NVMEIO_OP_READ;
    t.size = part;
    for (size_t i = 0; i < COUNT && whole; i++) {
        t.offset = (int64_t)(i * part);
        t.address = memory + half + i * part;
        if (!fine(nvmeio_submit(handle, &t, &requests[i])))
            requests[i] = NULL;
    }
    for (size_t i = 0; i < COUNT && whole; i++) {
        const char *at = memory + i * part;
        if (requests[i] && done(requests[i], &outcome))
            check_bytes(memcmp(at + half, at, part) == 0);
    }
    if (!abandoned)
        nvmeio_pool_free(memory);
}

/* The same memory is requested again after the pool has unmapped it. */
static void use_small_blocks(struct nvmeio_file *file)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle;

    config.block_bytes = PAGE;
    config.queue_depth = 64;
    if (!fine(nvmeio_handle_open(&config, &handle)))
        return;
    move_pages(handle, file);
    use_pool(5 * MIB);
    move_pages(handle, file);
    nvmeio_handle_close(handle);
}

/* The caller's descriptor, which has to be opened again. */
static void use_descriptor(void)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct nvmeio_file *file;

    CHECK(fd >= 0);
    if (fine(nvmeio_file_dup(fd, NVMEIO_DIRECT_AUTO, &file)))
        nvmeio_file_release(file);
    close(fd);
}

static void work(void)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_file_info info;
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    struct guarded memory = guarded_new(MEMORY, 0);
    char *bytes;

    config.block_bytes = BLOCK;
    config.queue_depth = 8;
    unlink(path);
    abandoned = false;
    if (many_nodes && take_from_pool(0, MIB, &bytes))
        nvmeio_pool_free(bytes);
    use_pool(7 * MIB);
    CHECK(nvmeio_team_size(3) <= 3 && nvmeio_cpu_count() >= 1);
    if (fine(nvmeio_file_open(path, O_RDWR | O_CREAT | O_TRUNC, NVMEIO_DIRECT_AUTO,
                              &file))) {
        nvmeio_file_get_info(file, &info);
        direct = info.direct;
        fine(nvmeio_file_is_at(file, path));
        use_descriptor();
        if (fine(nvmeio_handle_open(&config, &handle))) {
            write_and_read(handle, file, MEMORY, 0, 0);
            write_and_read(handle, file, MEMORY, 1000, 1000);
            write_and_read(handle, file, MEMORY, 1, 0);
            write_and_read(handle, file, BLOCK, 0, 0);
            scatter_and_gather(handle, file);
            scatter_and_gather(handle, file);
            leave_in_flight(handle, file, &memory);
        }
        use_small_blocks(file);
        nvmeio_file_release(file);
    }
    give_back(&memory);
}

#endif
