/* Many transfers of several files as one request. */
#include "scripted.h"

enum { COUNT = 300, FILES = 3 };

/* Transfers of several sizes, aligned and not, in alternating files. */
struct set {
    const char *paths[FILES];
    struct nvmeio_file *files[FILES];
    struct nvmeio_transfer transfers[COUNT];
    struct guarded memory;
    size_t bytes;
};

static void set_make(struct set *set, enum nvmeio_op op)
{
    int64_t ends[FILES] = {0};

    set->bytes = 0;
    for (size_t i = 0; i < COUNT; i++)
        set->bytes += i % 7 == 3 ? 777 : (i % 5) * 2 * PAGE;
    set->memory = guarded_new(set->bytes, 0);
    fill(set->memory.address, set->bytes, 0, 5);
    for (int i = 0; i < FILES; i++) {
        set->paths[i] = path_in(test_folder());
        set->files[i] = open_file(set->paths[i], O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    }
    char *at = set->memory.address;
    for (size_t i = 0; i < COUNT; i++) {
        size_t size = i % 7 == 3 ? 777 : (i % 5) * 2 * PAGE;
        int64_t *end = &ends[i % FILES];
        set->transfers[i] = transfer_of(op, set->files[i % FILES], at, size, *end);
        at += size;
        *end += (int64_t)size;
    }
}

static void set_free(struct set *set)
{
    guarded_free(&set->memory);
    for (int i = 0; i < FILES; i++)
        nvmeio_file_release(set->files[i]);
}

static struct nvmeio_request *submit_many(struct nvmeio_handle *handle,
                                          const struct nvmeio_transfer *transfers,
                                          size_t count)
{
    const struct nvmeio_many many = {.transfers = transfers, .count = count};
    struct nvmeio_request *request;
    size_t offender;

    CHECK(nvmeio_submit_many(handle, &many, &request, &offender) == 0);
    CHECK(offender == SIZE_MAX);
    return request;
}

/* Written by one request and read back by another, each counted once. */
static void test_all_transfers_land(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_stats stats;
    static struct set set;

    config.workers = 2;
    struct nvmeio_handle *handle = open_handle(&config);
    set_make(&set, NVMEIO_OP_WRITE);
    CHECK(finish(submit_many(handle, set.transfers, COUNT)).result ==
          (int64_t)set.bytes);
    for (size_t i = 0; i < COUNT; i++) {
        struct nvmeio_transfer *t = &set.transfers[i];
        CHECK(file_holds(set.paths[i % FILES], t->address, t->size, t->offset));
        t->op = NVMEIO_OP_READ;
    }
    memset(set.memory.address, 0, set.bytes);
    struct nvmeio_request *request = submit_many(handle, set.transfers, COUNT);
    CHECK(finish(request).result == (int64_t)set.bytes);
    for (size_t i = 0; i < COUNT; i++) {
        struct nvmeio_transfer *t = &set.transfers[i];
        CHECK(file_holds(set.paths[i % FILES], t->address, t->size, t->offset));
    }
    nvmeio_handle_stats(handle, &stats);
    CHECK(stats.requests == 2 && nvmeio_handle_pending(handle) == 0);
    CHECK(finish(submit_many(handle, NULL, 0)).result == 0);
    set_free(&set);
    nvmeio_handle_close(handle);
}

/* Transfers past the end fail, and the others land. */
static void test_failed_transfers_leave_the_others(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_failure failures[COUNT];
    struct nvmeio_outcome outcome;
    static struct set set;
    size_t failed = 0, bytes = 0;

    set_make(&set, NVMEIO_OP_WRITE);
    finish(submit_many(handle, set.transfers, COUNT));
    CHECK(truncate(set.paths[1], 20000) == 0);
    memset(set.memory.address, 0, set.bytes);
    for (size_t i = 0; i < COUNT; i++)
        set.transfers[i].op = NVMEIO_OP_READ;
    struct nvmeio_request *request = submit_many(handle, set.transfers, COUNT);
    wait_for(request);
    size_t count = nvmeio_request_failures(request, failures, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        const struct nvmeio_transfer *t = &set.transfers[i];
        int64_t end = t->offset + (int64_t)t->size;
        if (i % FILES == 1 && end > 20000 && t->size > 0) {
            CHECK(failed < count && failures[failed].index == i);
            CHECK(failures[failed].error == -ENODATA &&
                  failures[failed].offset == t->offset &&
                  failures[failed].size == t->size);
            failed++;
        } else {
            bytes += t->size;
            CHECK(file_holds(set.paths[i % FILES], t->address, t->size, t->offset));
        }
    }
    CHECK(failed == count && failed > 10);
    CHECK(nvmeio_request_failures(request, failures, 2) == count);
    CHECK(nvmeio_request_outcome(request, &outcome) == 0);
    CHECK(outcome.result == -ENODATA && outcome.got == (int64_t)bytes);
    nvmeio_request_release(request);
    set_free(&set);
    nvmeio_handle_close(handle);
}

static void test_refusals(void)
{
    struct nvmeio_transfer transfers[3];
    struct nvmeio_many many = {.transfers = transfers, .count = 3};
    struct nvmeio_request *request;
    size_t offender;

    stage_open(4);
    for (int i = 0; i < 3; i++)
        transfers[i] = whole(NVMEIO_OP_READ);
    transfers[1].offset = -1;
    CHECK(nvmeio_submit_many(stage.handle, &many, &request, &offender) == -EINVAL);
    CHECK(offender == 1 && look(&pushes) == 0);
    transfers[1].offset = 0;
    nvmeio_handle_stop(stage.handle);
    CHECK(nvmeio_submit_many(stage.handle, &many, &request, &offender) == -EPIPE);
    CHECK(offender == SIZE_MAX);
    stage_close();
}

static bool fail_second(struct nvmeio_block *block)
{
    if (block->offset < (int64_t)BLOCK || block->offset >= 2 * (int64_t)BLOCK)
        return perform(block);
    block->result = -EIO;
    return true;
}

/* One block for each transfer; they share no bytes. */
static struct nvmeio_request *start_blocks(enum nvmeio_op op,
                                           struct nvmeio_request *after)
{
    struct nvmeio_transfer transfers[BLOCKS];
    const struct nvmeio_many many = {.transfers = transfers,
                                     .count = BLOCKS,
                                     .user = &stage,
                                     .after = {&after, after != NULL}};
    struct nvmeio_request *request;
    size_t offender;

    for (int i = 0; i < BLOCKS; i++)
        transfers[i] = transfer_of(op, stage.file, stage.memory.address + i * BLOCK,
                                   BLOCK, i * (int64_t)BLOCK);
    CHECK(nvmeio_submit_many(stage.handle, &many, &request, &offender) == 0);
    return request;
}

static void test_a_failed_block_leaves_the_other_transfers(void)
{
    struct nvmeio_failure failure;
    void *user;

    stage_open(64);
    play(fail_second);
    struct nvmeio_request *request = start_blocks(NVMEIO_OP_READ, NULL);
    while (nvmeio_handle_pop(stage.handle, &user, 1) == 0)
        pause_ms(1);
    CHECK(user == &stage && nvmeio_handle_pop(stage.handle, &user, 1) == 0);
    CHECK(nvmeio_request_failures(request, &failure, 1) == 1);
    CHECK(failure.index == 1 && failure.error == -EIO);
    CHECK(file_holds(stage.path, stage.memory.address, BLOCK, 0));
    CHECK(file_holds(stage.path, stage.memory.address + 2 * BLOCK, 6 * BLOCK,
                     2 * (int64_t)BLOCK));
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -EIO && outcome.got == 7 * BLOCK);
    stage_close();
}

/* Blocks in flight end, and the others are dropped. */
static void test_cancel(void)
{
    stage_open(3);
    play(hold);
    struct nvmeio_request *request = start_blocks(NVMEIO_OP_READ, NULL);
    await(&in_flight, 3);
    CHECK(nvmeio_request_cancel(request) == 1);
    CHECK(nvmeio_request_cancel(request) == 0 && !nvmeio_request_done(request));
    play(perform);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -ECANCELED && outcome.got == 3 * BLOCK);
    CHECK(look(&pushes) == 3 && memory_holds_file(3 * BLOCK));
    stage_close();
}

/* An fsync covers all of them, and they can come after other requests. */
static void test_order(bool fails)
{
    stage_open(64);
    play(hold);
    struct nvmeio_request *before = start(NVMEIO_OP_READ);
    struct nvmeio_request *request = start_blocks(NVMEIO_OP_WRITE, before);
    struct nvmeio_request *fsync = start(NVMEIO_OP_FSYNC);
    await(&in_flight, BLOCKS);
    CHECK(look(&pushes) == BLOCKS);
    play(fails ? fail_second : perform);
    CHECK(finish(fsync).result == 0 && nvmeio_request_done(request));
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.blocker == (fails ? 0 : SIZE_MAX));
    CHECK(outcome.result == (fails ? -EIO : (int64_t)(BLOCKS * BLOCK)));
    CHECK(outcome.got == (fails ? 0 : (int64_t)(BLOCKS * BLOCK)));
    CHECK(fails || memory_holds_file(BLOCKS * BLOCK));
    finish(before);
    stage_close();
}

static void test_a_dead_engine(void)
{
    stage_open(64);
    play(hold);
    struct nvmeio_request *request = start_blocks(NVMEIO_OP_READ, NULL);
    await(&in_flight, BLOCKS);
    pthread_mutex_lock(&mutex);
    death = -EIO;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&mutex);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -EIO && outcome.got == 0 && outcome.abandoned);
    nvmeio_handle_close(stage.handle);
    nvmeio_file_release(stage.file);
}

int main(void)
{
    const char *name;

    begin();
    stage.path = path_in(test_folder());
    test_refusals();
    test_a_failed_block_leaves_the_other_transfers();
    test_cancel();
    test_order(false);
    test_order(true);
    test_a_dead_engine();
    FOR_EACH_ENGINE(name)
    {
        /* "sync" is the scripted engine here. */
        if (strcmp(name, "sync") == 0)
            continue;
        test_all_transfers_land(name);
        test_failed_transfers_leave_the_others(name);
    }
    return 0;
}
