/* In which order blocks are handed over, how many at a time, and who carries them out.
 */
#include <sys/syscall.h>

#include "scripted.h"

/* A lane needs an eventfd, for which it has to wait as long as it is held up. */
static atomic_bool held_up, waits;

int eventfd(unsigned count, int flags)
{
    atomic_store(&waits, true);
    while (atomic_load(&held_up))
        sched_yield();
    return (int)syscall(SYS_eventfd2, count, flags);
}

static void test_no_more_blocks_are_in_flight_than_the_queue_holds(void)
{
    for (unsigned depth = 1; depth < 4; depth++) {
        stage_open(depth, depth & 1);
        struct nvmeio_request *requests[100];
        struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
        play(hold);
        for (int i = 0; i < 100; i++)
            requests[i] = submit(stage.handle, &t);
        await(&in_flight, depth);
        play(perform);
        for (int i = 0; i < 100; i++)
            CHECK(finish(requests[i]).result == BLOCKS * BLOCK);
        CHECK(look(&in_flight_max) == depth && look(&pushes) == 100 * BLOCKS);
        stage_close();
    }
}

static bool perform_one(struct nvmeio_block *block)
{
    return calls++ == 0 && perform(block);
}

static void test_overlapped_lanes_refill_at_once_and_others_when_all_is_back(void)
{
    for (int overlap = 0; overlap < 2; overlap++) {
        stage_open(4, overlap);
        play(hold);
        struct nvmeio_request *request = start(NVMEIO_OP_READ);
        await(&in_flight, 4);
        play(perform_one);
        await(&pushes, overlap ? 5 : 4);
        pause_ms(20);
        CHECK(look(&in_flight) == (overlap ? 4 : 3));
        play(perform);
        CHECK(finish(request).result == BLOCKS * BLOCK);
        stage_close();
    }
}

static void test_overlapped_lanes_take_new_requests_while_they_wait(void)
{
    stage_open(16, true);
    play(hold);
    struct nvmeio_request *first = start(NVMEIO_OP_READ);
    await(&in_flight, BLOCKS);
    struct nvmeio_request *second = start(NVMEIO_OP_READ);
    await(&in_flight, 2 * BLOCKS);
    play(perform);
    CHECK(finish(first).result > 0 && finish(second).result > 0);
    stage_close();
}

static atomic_bool handing_over, queued_meanwhile;

/* The lane comes here with its first block, before it waits. */
static bool hold_until_queued(struct nvmeio_block *block)
{
    atomic_store(&handing_over, true);
    while (!atomic_load(&queued_meanwhile))
        sched_yield();
    return hold(block);
}

/* Nobody wakes a lane that does not listen yet, so it has to look once more. */
static void test_what_is_queued_just_before_a_lane_waits_is_not_left_behind(void)
{
    stage_open(4, true);
    nvmeio_handle_close(stage.handle);
    stage.config.single_submit = true;
    stage.handle = open_handle(&stage.config);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.size = BLOCK;
    play(hold_until_queued);
    struct nvmeio_request *first = submit(stage.handle, &t);
    while (!atomic_load(&handing_over))
        sched_yield();
    struct nvmeio_request *second = submit(stage.handle, &t);
    atomic_store(&queued_meanwhile, true);
    await(&in_flight, 2);
    play(perform);
    CHECK(finish(first).result == BLOCK && finish(second).result == BLOCK);
    stage_close();
}

static void test_single_submit_hands_over_one_block_a_call(void)
{
    for (int single = 0; single < 2; single++) {
        stage_open(4, false);
        nvmeio_handle_close(stage.handle);
        stage.config.single_submit = single;
        stage.handle = open_handle(&stage.config);
        CHECK(finish(start(NVMEIO_OP_READ)).result == BLOCKS * BLOCK);
        CHECK(look(&pushed_max) == (single ? 1 : 4));
        stage_close();
    }
}

static void test_edges_of_a_write_wait_for_its_middle(void)
{
    struct nvmeio_file_info info;

    stage_open(16, true);
    nvmeio_file_get_info(stage.file, &info);
    if (info.direct && info.offset_align > 1) {
        struct nvmeio_transfer t = transfer_of(
            NVMEIO_OP_WRITE, stage.file, stage.memory.address + 1000, 4 * BLOCK, 1000);
        play(hold);
        struct nvmeio_request *request = submit(stage.handle, &t);
        await(&in_flight, 4);
        pause_ms(20);
        CHECK(look(&pushes) == 4);
        play(perform);
        CHECK(finish(request).result == 4 * BLOCK && look(&pushes) == 6);
        CHECK(file_holds(stage.path, t.address, t.size, t.offset));
    }
    stage_close();
}

static void test_an_fsync_waits_for_the_writes_before_it(void)
{
    stage_open(16, true);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = stage.file};
    struct nvmeio_file *again = open_file(stage.path, O_RDONLY, NVMEIO_DIRECT_NEVER);
    struct nvmeio_file *other =
        open_file(path_in(test_folder()), O_RDWR | O_CREAT, NVMEIO_DIRECT_NEVER);
    play(hold);
    struct nvmeio_request *write = start(NVMEIO_OP_WRITE);
    struct nvmeio_request *behind = submit(stage.handle, &sync);
    sync.file = again; /* the same file, opened twice */
    struct nvmeio_request *behind_too = submit(stage.handle, &sync);
    struct nvmeio_request *dropped = submit(stage.handle, &sync);
    await(&in_flight, BLOCKS);
    CHECK(nvmeio_request_cancel(dropped) == 1);
    CHECK(finish(dropped).result == -ECANCELED);
    sync.file = other;
    struct nvmeio_request *beside = submit(stage.handle, &sync);
    await(&in_flight_of[NVMEIO_OP_FSYNC], 1);
    pause_ms(20);
    CHECK(look(&in_flight_of[NVMEIO_OP_FSYNC]) == 1);
    play(perform);
    CHECK(finish(beside).result == 0 && finish(behind_too).result == 0);
    CHECK(nvmeio_request_done(write) && finish(write).result == BLOCKS * BLOCK);
    CHECK(finish(behind).result == 0);
    nvmeio_file_release(again);
    nvmeio_file_release(other);
    stage_close();
}

static bool perform_the_second_write(struct nvmeio_block *block)
{
    return block->op == NVMEIO_OP_WRITE && block->offset == BLOCK && perform(block);
}

static void test_an_fsync_waits_for_more_than_the_last_write(void)
{
    stage_open(16, true);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = stage.file};
    struct nvmeio_transfer t = whole(NVMEIO_OP_WRITE);
    t.size = BLOCK;
    play(perform_the_second_write);
    struct nvmeio_request *first = submit(stage.handle, &t);
    t.offset = BLOCK;
    struct nvmeio_request *second = submit(stage.handle, &t);
    struct nvmeio_request *behind = submit(stage.handle, &sync);
    CHECK(finish(second).result == BLOCK);
    /* The only lane takes requests in the order of the queue.  If the second write had
     * put the fsync there, it would be in flight before this read. */
    t.op = NVMEIO_OP_READ;
    struct nvmeio_request *read = submit(stage.handle, &t);
    await(&in_flight_of[NVMEIO_OP_READ], 1);
    CHECK(look(&in_flight_of[NVMEIO_OP_WRITE]) == 1);
    CHECK(look(&in_flight_of[NVMEIO_OP_FSYNC]) == 0);
    play(perform);
    CHECK(finish(behind).result == 0);
    CHECK(nvmeio_request_done(first) && finish(first).result == BLOCK);
    CHECK(finish(read).result == BLOCK);
    stage_close();
}

static void test_an_fsync_carries_out_a_write_that_nobody_waits_for(void)
{
    stage_open(4, true);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = stage.file};
    struct nvmeio_transfer t = whole(NVMEIO_OP_WRITE);
    t.caller = true;
    struct nvmeio_request *write = submit(stage.handle, &t);
    CHECK(carry_out(stage.handle, &sync).result == 0);
    CHECK(nvmeio_request_done(write) && finish(write).result == BLOCKS * BLOCK);
    stage_close();
}

static void *submit_main(void *argument)
{
    struct nvmeio_transfer t = whole(NVMEIO_OP_WRITE);
    t.caller = true;
    *(struct nvmeio_request **)argument = submit(stage.handle, &t);
    return NULL;
}

static void *finish_main(void *argument)
{
    CHECK(finish(argument).result == 0);
    return NULL;
}

/* Who waits for the fsync has found no lane to drive, and sleeps. */
static void test_an_fsync_carries_out_a_write_whose_lane_comes_late(void)
{
    struct nvmeio_request *write;
    pthread_t submitter, waiter;

    stage_open(4, true);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = stage.file};
    atomic_store(&waits, false);
    atomic_store(&held_up, true);
    pthread_create(&submitter, NULL, submit_main, &write);
    while (!atomic_load(&waits))
        sched_yield();
    struct nvmeio_request *request = submit(stage.handle, &sync);
    pthread_create(&waiter, NULL, finish_main, request);
    pause_ms(20);
    atomic_store(&held_up, false);
    pthread_join(submitter, NULL);
    pthread_join(waiter, NULL);
    CHECK(nvmeio_request_done(write) && finish(write).result == BLOCKS * BLOCK);
    stage_close();
}

static void test_a_deserted_request_is_finished_by_those_who_ask(void)
{
    char user;
    void *found = NULL;

    stage_open(4, true);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.caller = true;
    t.user = &user;
    play(hold);
    struct nvmeio_request *request = submit(stage.handle, &t);
    CHECK(nvmeio_request_wait(request, 1000000) == -ETIMEDOUT);
    CHECK(nvmeio_handle_pop(stage.handle, &found, 1) == 0);
    CHECK(nvmeio_handle_pop(stage.handle, &found, 1) == 0);
    play(perform);
    while (nvmeio_handle_pop(stage.handle, &found, 1) == 0)
        pause_ms(1);
    CHECK(found == &user && finish(request).result == BLOCKS * BLOCK);
    stage_close();
}

static void test_a_caller_that_only_looks_brings_its_request_forward(void)
{
    stage_open(16, true);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.caller = true;
    play(hold);
    struct nvmeio_request *request = submit(stage.handle, &t);
    CHECK(nvmeio_request_wait(request, 0) == -ETIMEDOUT);
    CHECK(look(&in_flight) == BLOCKS);
    play(perform);
    while (nvmeio_request_wait(request, 0) == -ETIMEDOUT)
        ;
    CHECK(finish(request).result == BLOCKS * BLOCK);
    request = submit(stage.handle, &t);
    while (nvmeio_handle_drain(stage.handle, 0) == -ETIMEDOUT)
        ;
    CHECK(nvmeio_request_done(request) && finish(request).result == BLOCKS * BLOCK);
    stage_close();
}

int main(void)
{
    begin();
    stage.path = path_in(test_folder());
    test_no_more_blocks_are_in_flight_than_the_queue_holds();
    test_overlapped_lanes_refill_at_once_and_others_when_all_is_back();
    test_overlapped_lanes_take_new_requests_while_they_wait();
    test_what_is_queued_just_before_a_lane_waits_is_not_left_behind();
    test_single_submit_hands_over_one_block_a_call();
    test_edges_of_a_write_wait_for_its_middle();
    test_an_fsync_waits_for_the_writes_before_it();
    test_an_fsync_waits_for_more_than_the_last_write();
    test_an_fsync_carries_out_a_write_that_nobody_waits_for();
    test_an_fsync_carries_out_a_write_whose_lane_comes_late();
    test_a_deserted_request_is_finished_by_those_who_ask();
    test_a_caller_that_only_looks_brings_its_request_forward();
    return 0;
}
