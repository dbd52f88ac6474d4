/* Requests that start when others are done: in order, with their errors, or never. */
#include <sys/wait.h>

#include "file_internal.h"
#include "scripted.h"

static struct nvmeio_request *submit_after(struct nvmeio_transfer transfer,
                                           struct nvmeio_request *const *before,
                                           size_t count)
{
    transfer.after = (struct nvmeio_after){.requests = before, .count = count};
    return submit(stage.handle, &transfer);
}

static struct nvmeio_request *start_after(enum nvmeio_op op,
                                          struct nvmeio_request *before)
{
    return submit_after(whole(op), &before, 1);
}

static bool fail(struct nvmeio_block *block)
{
    block->result = -EIO;
    return true;
}

static bool perform_writes(struct nvmeio_block *block)
{
    return block->op == NVMEIO_OP_WRITE && perform(block);
}

static void test_a_request_starts_when_all_predecessors_are_done(void)
{
    stage_open(64);
    play(hold);
    struct nvmeio_request *before[] = {start(NVMEIO_OP_WRITE), start(NVMEIO_OP_READ)};
    struct nvmeio_request *request = submit_after(whole(NVMEIO_OP_READ), before, 2);
    struct nvmeio_request *free = start(NVMEIO_OP_READ);
    await(&in_flight, 3 * BLOCKS);
    play(perform_writes);
    CHECK(finish(before[0]).result == BLOCKS * BLOCK);
    await(&in_flight, 2 * BLOCKS);
    CHECK(nvmeio_handle_pending(stage.handle) == 3 && look(&pushes) == 3 * BLOCKS);
    play(perform);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == BLOCKS * BLOCK && outcome.blocker == SIZE_MAX);
    CHECK(memory_holds_file(BLOCKS * BLOCK));
    finish(before[1]);
    finish(free);
    stage_close();
}

static void *starters[10];
static unsigned started;

static bool note_starter(struct nvmeio_block *block)
{
    if (block->op == NVMEIO_OP_READ)
        starters[started++] = block->request->user;
    return perform(block);
}

static void test_dependents_start_in_the_order_of_submission(void)
{
    struct nvmeio_request *dependents[10];

    stage_open(64);
    play(hold);
    struct nvmeio_request *before = start(NVMEIO_OP_WRITE);
    for (size_t i = 0; i < 10; i++) {
        struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
        t.size = BLOCK;
        t.user = &starters[i];
        dependents[i] = submit_after(t, &before, 1);
    }
    play(note_starter);
    for (size_t i = 0; i < 10; i++)
        CHECK(finish(dependents[i]).result == BLOCK);
    for (size_t i = 0; i < 10; i++)
        CHECK(starters[i] == &starters[i]);
    finish(before);
    stage_close();
}

/* Writes and fsyncs of a few files in random order. */
static struct entry {
    struct nvmeio_file *file;
    enum nvmeio_op op;
    bool done;
} entries[300];

static bool perform_in_random_order(struct nvmeio_block *block)
{
    struct entry *entry = block->request->user;

    if (block->op == NVMEIO_OP_WRITE) {
        if (rand() % 4)
            return false;
        entry->done = true;
        return perform(block);
    }
    for (const struct entry *e = entries; e < entry; e++)
        CHECK(e->file != entry->file || e->op != NVMEIO_OP_WRITE || e->done);
    return perform(block);
}

static void test_an_fsync_waits_for_all_writes_of_its_file_before_it(void)
{
    struct nvmeio_file *files[5];
    struct nvmeio_request *requests[300];
    char memory[100] = {0};

    stage_open(16);
    play(hold);
    for (int i = 0; i < 5; i++) {
        const char *path = path_in(test_folder());
        make_file(path, 100, 1);
        files[i] = open_file(path, O_RDWR, NVMEIO_DIRECT_NEVER);
    }
    for (int i = 0; i < 300; i++) {
        struct entry *e = &entries[i];
        *e = (struct entry){files[rand() % 5],
                            rand() % 3 ? NVMEIO_OP_WRITE : NVMEIO_OP_FSYNC, false};
        struct nvmeio_transfer t = transfer_of(
            e->op, e->file, memory, e->op == NVMEIO_OP_WRITE ? sizeof(memory) : 0, 0);
        t.user = e;
        requests[i] = submit(stage.handle, &t);
    }
    /* Some end before their turn. */
    for (int i = 50; i < 300; i += 7)
        entries[i].done = nvmeio_request_cancel(requests[i]) == 1;
    play(perform_in_random_order);
    for (int i = 0; i < 300; i++) {
        int64_t result = finish(requests[i]).result;
        CHECK(result == -ECANCELED ||
              result == (entries[i].op == NVMEIO_OP_WRITE ? 100 : 0));
    }
    for (int i = 0; i < 5; i++)
        nvmeio_file_release(files[i]);
    stage_close();
}

/* A predecessor that was done before the submission delays nothing. */
static void test_finished_predecessors_delay_nothing(void)
{
    stage_open(4);
    struct nvmeio_request *before = start(NVMEIO_OP_WRITE);
    wait_for(before);
    CHECK(finish(start_after(NVMEIO_OP_READ, before)).result == BLOCKS * BLOCK);
    /* Nor does it release a request that others delay. */
    play(hold);
    struct nvmeio_request *held = start(NVMEIO_OP_WRITE);
    struct nvmeio_request *both[] = {before, held, before};
    struct nvmeio_request *request = submit_after(whole(NVMEIO_OP_READ), both, 3);
    await(&in_flight, 4);
    CHECK(look(&in_flight_of[NVMEIO_OP_READ]) == 0);
    play(perform);
    CHECK(finish(request).result == BLOCKS * BLOCK);
    finish(held);
    finish(before);
    play(fail);
    before = start(NVMEIO_OP_WRITE);
    wait_for(before);
    play(perform);
    struct nvmeio_outcome outcome = finish(start_after(NVMEIO_OP_READ, before));
    CHECK(outcome.result == -EIO && outcome.got == 0 && outcome.blocker == 0);
    finish(before);
    stage_close();
}

/* The second of three fails: the request, and what comes after that one, never start.
 */
static void test_a_failure_is_passed_on(bool cancel)
{
    stage_open(64);
    play(hold);
    struct nvmeio_request *before[] = {start(NVMEIO_OP_WRITE), NULL,
                                       start(NVMEIO_OP_READ)};
    await(&in_flight, 2 * BLOCKS);
    /* It waits itself, so that it can be cancelled in time. */
    before[1] = start_after(NVMEIO_OP_WRITE, before[0]);
    struct nvmeio_request *request = submit_after(whole(NVMEIO_OP_READ), before, 3);
    struct nvmeio_request *last = start_after(NVMEIO_OP_FSYNC, request);
    if (cancel)
        CHECK(nvmeio_request_cancel(before[1]) == 1);
    else
        play(fail);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == (cancel ? -ECANCELED : -EIO));
    CHECK(outcome.got == 0 && outcome.blocker <= 2);
    CHECK(!cancel || outcome.blocker == 1);
    CHECK(finish(last).result == (cancel ? -ECANCELED : -EIO));
    play(perform);
    for (int i = 0; i < 3; i++)
        finish(before[i]);
    CHECK(look(&pushes) == 2 * BLOCKS);
    CHECK(nvmeio_handle_drain(stage.handle, LONG_NS) == 0);
    stage_close();
}

/* A request that is cancelled while it waits is done at once, and is not started later.
 * */
static void test_a_waiting_request_can_be_cancelled(void)
{
    stage_open(64);
    play(hold);
    struct nvmeio_request *before = start(NVMEIO_OP_WRITE);
    struct nvmeio_request *first = start_after(NVMEIO_OP_READ, before);
    struct nvmeio_request *second = start_after(NVMEIO_OP_READ, before);
    struct nvmeio_request *third = start_after(NVMEIO_OP_READ, before);
    await(&in_flight, BLOCKS);
    CHECK(nvmeio_request_cancel(second) == 1 && nvmeio_request_done(second));
    struct nvmeio_outcome outcome = finish(second);
    CHECK(outcome.result == -ECANCELED && outcome.got == 0);
    CHECK(outcome.blocker == SIZE_MAX);
    play(perform);
    CHECK(finish(first).result > 0 && finish(third).result > 0);
    CHECK(finish(before).result > 0 && look(&pushes) == 3 * BLOCKS);
    stage_close();
}

/* An fsync covers an earlier write that has not begun. */
static void test_an_fsync_covers_a_write_that_waits(void)
{
    stage_open(64);
    play(hold);
    struct nvmeio_request *before = start(NVMEIO_OP_READ);
    struct nvmeio_request *write = start_after(NVMEIO_OP_WRITE, before);
    struct nvmeio_request *fsync = start(NVMEIO_OP_FSYNC);
    await(&in_flight, BLOCKS);
    CHECK(look(&in_flight_of[NVMEIO_OP_FSYNC]) == 0);
    play(perform);
    CHECK(finish(fsync).result == 0 && nvmeio_request_done(write));
    CHECK(finish(write).result > 0 && finish(before).result > 0);
    stage_close();
}

/* A worker must not walk such a long chain by recursion. */
static void test_a_long_chain(bool fails)
{
    enum { LENGTH = 20000 };
    static struct nvmeio_request *chain[LENGTH];
    struct nvmeio_transfer page = transfer_of(NVMEIO_OP_READ, NULL, NULL, PAGE, 0);

    stage_open(4);
    page.file = stage.file;
    page.address = stage.memory.address;
    play(hold);
    for (int i = 0; i < LENGTH; i++)
        chain[i] = submit_after(page, &chain[i > 0 ? i - 1 : 0], i > 0);
    play(fails ? fail : perform);
    for (int i = LENGTH - 1; i >= 0; i--)
        CHECK(finish(chain[i]).result == (fails ? -EIO : (int64_t)PAGE));
    CHECK(look(&pushes) == (fails ? 1 : LENGTH));
    stage_close();
}

/* close waits for requests that wait for others. */
static void *close_main(void *argument)
{
    nvmeio_handle_stop(argument);
    return NULL;
}

static void test_close_waits_for_waiting_requests(void)
{
    pthread_t thread;

    stage_open(64);
    play(hold);
    struct nvmeio_request *before = start(NVMEIO_OP_WRITE);
    struct nvmeio_request *request = start_after(NVMEIO_OP_READ, before);
    pthread_create(&thread, NULL, close_main, stage.handle);
    while (!is_drained(stage.handle))
        pause_ms(1);
    play(perform);
    pthread_join(thread, NULL);
    CHECK(finish(request).result > 0 && finish(before).result > 0);
    stage_close();
}

/* If the last worker dies, waiting requests fail like those in flight. */
static void test_waiting_requests_fail_with_the_last_worker(void)
{
    stage_open(64);
    play(hold);
    struct nvmeio_request *before = start(NVMEIO_OP_WRITE);
    struct nvmeio_request *request = start_after(NVMEIO_OP_READ, before);
    await(&in_flight, BLOCKS);
    pthread_mutex_lock(&mutex);
    death = -EIO;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&mutex);
    CHECK(finish(request).result == -EIO && finish(before).result == -EIO);
    CHECK(finish(start(NVMEIO_OP_READ)).result == -EIO);
    nvmeio_handle_close(stage.handle);
    nvmeio_file_release(stage.file);
}

static void test_refusals(void)
{
    struct nvmeio_request *request;
    int status;

    stage_open(4);
    struct nvmeio_request *before = start(NVMEIO_OP_READ);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    struct nvmeio_handle *other = open_handle(&stage.config);
    t.after = (struct nvmeio_after){.requests = &before, .count = 1};
    CHECK(nvmeio_submit(other, &t, &request) == -EXDEV);
    nvmeio_handle_close(other);
    pid_t child = fork();
    if (child == 0)
        _exit(nvmeio_submit(stage.handle, &t, &request) != -EOWNERDEAD);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    finish(before);
    stage_close();
}

/* A read of bytes that its predecessor writes: the size of the file is checked late
 * enough. */
static void test_a_read_of_bytes_that_its_predecessor_writes(const char *engine)
{
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    size_t size = MIB + 100;
    struct guarded memory = guarded_new(2 * size, 0);
    int64_t offsets[] = {0, (int64_t)PAGE}, one_size = 100;

    for (int round = 0; round < 20; round++) {
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_WRITE, file, memory.address, size, 0);
        fill(memory.address, size, 0, (unsigned)round);
        memset(memory.address + size, 0, size);
        struct nvmeio_request *write = submit(handle, &t), *gather;
        t = transfer_of(NVMEIO_OP_READ, file, memory.address + size, size, 0);
        t.after = (struct nvmeio_after){.requests = &write, .count = 1};
        struct nvmeio_request *read = submit(handle, &t);
        t.op = NVMEIO_OP_FSYNC;
        struct nvmeio_request *fsync = submit(handle, &t);
        CHECK(finish(read).result == (int64_t)size && finish(fsync).result == 0);
        CHECK(memcmp(memory.address, memory.address + size, size) == 0);
        /* The file is truncated meanwhile: records of a gather past its end fail. */
        const struct nvmeio_gather what = {.op = NVMEIO_OP_READ,
                                           .file = file,
                                           .address = memory.address + size,
                                           .size = size,
                                           .count = 2,
                                           .offsets = offsets,
                                           .sizes = &one_size,
                                           .one_size = true,
                                           .after = t.after};
        size_t offender;
        struct nvmeio_failure failure;
        CHECK(truncate(path, PAGE) == 0);
        CHECK(nvmeio_submit_gather(handle, &what, &gather, &offender) == 0);
        CHECK(wait_for(gather) == 0);
        CHECK(nvmeio_request_failures(gather, &failure, 1) == 1);
        CHECK(failure.index == 1 && failure.error == -ENODATA);
        CHECK(finish(gather).result == -ENODATA);
        CHECK(memcmp(memory.address, memory.address + size, 100) == 0);
        CHECK(truncate(path, 0) == 0);
        finish(write);
    }
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* It fails early by the first; the second fails while its parts, of a file of a server,
 * are being settled elsewhere. */
static void test_many_that_fail_early_end_once(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file =
        open_file(stage.path, O_RDWR | O_CREAT | O_TRUNC, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file *distant = open_file(stage.path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(MIB, 0);
    struct nvmeio_transfer parts[100];
    struct nvmeio_request *before[3], *many;
    size_t offender;

    distant->local = false;
    for (int round = 0; round < 30; round++) {
        struct nvmeio_transfer t[3] = {
            transfer_of(NVMEIO_OP_WRITE, file, memory.address, MIB, 0),
            transfer_of(NVMEIO_OP_READ, file, memory.address, PAGE, 1 << 30),
            transfer_of(NVMEIO_OP_READ, file, memory.address, PAGE, 0),
        };
        for (int i = 0; i < 3; i++) {
            if (i > 0)
                t[i].after = (struct nvmeio_after){&before[i - 1], 1};
            before[i] = submit(handle, &t[i]);
        }
        for (int i = 0; i < 100; i++)
            parts[i] = transfer_of(NVMEIO_OP_READ, distant, memory.address, PAGE, 0);
        const struct nvmeio_many what = {
            .transfers = parts, .count = 100, .after = {&before[1], 2}};
        CHECK(nvmeio_submit_many(handle, &what, &many, &offender) == 0);
        CHECK(finish(many).result == -ENODATA);
        CHECK(finish(before[2]).result == -ENODATA);
        CHECK(finish(before[1]).result == -ENODATA);
        CHECK(finish(before[0]).result == (int64_t)MIB);
        CHECK(nvmeio_file_truncate(file, 0) == 0);
    }
    guarded_free(&memory);
    nvmeio_file_release(distant);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

int main(void)
{
    const char *name;

    begin();
    stage.path = path_in(test_folder());
    test_a_request_starts_when_all_predecessors_are_done();
    test_dependents_start_in_the_order_of_submission();
    test_an_fsync_waits_for_all_writes_of_its_file_before_it();
    test_finished_predecessors_delay_nothing();
    test_a_failure_is_passed_on(false);
    test_a_failure_is_passed_on(true);
    test_a_waiting_request_can_be_cancelled();
    test_an_fsync_covers_a_write_that_waits();
    test_a_long_chain(false);
    test_a_long_chain(true);
    test_close_waits_for_waiting_requests();
    test_waiting_requests_fail_with_the_last_worker();
    test_refusals();
    FOR_EACH_ENGINE(name)
    if (strcmp(name, "sync") != 0)
        test_a_read_of_bytes_that_its_predecessor_writes(name);
    FOR_EACH_ENGINE(name)
    test_many_that_fail_early_end_once(name);
    return 0;
}
