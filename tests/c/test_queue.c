/* The order in which blocks are submitted, how many at a time, and reports of
 * completions. */
#include "scripted.h"

static void test_no_more_blocks_are_in_flight_than_the_queue_holds(void)
{
    for (unsigned depth = 1; depth < 4; depth++) {
        stage_open(depth);
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

static void test_a_block_is_submitted_when_another_returns(void)
{
    stage_open(4);
    play(hold);
    struct nvmeio_request *request = start(NVMEIO_OP_READ);
    await(&in_flight, 4);
    play(perform_one);
    await(&pushes, 5);
    CHECK(look(&in_flight) == 4);
    play(perform);
    CHECK(finish(request).result == BLOCKS * BLOCK);
    stage_close();
}

static void test_a_worker_takes_new_requests_while_it_waits(void)
{
    stage_open(16);
    play(hold);
    struct nvmeio_request *first = start(NVMEIO_OP_READ);
    await(&in_flight, BLOCKS);
    struct nvmeio_request *second = start(NVMEIO_OP_READ);
    await(&in_flight, 2 * BLOCKS);
    play(perform);
    CHECK(finish(first).result > 0 && finish(second).result > 0);
    stage_close();
}

static bool perform_reads(struct nvmeio_block *block)
{
    return block->op == NVMEIO_OP_READ && perform(block);
}

/* There is one large bounce, which must not become an ordinary one after its return. */
static void test_a_large_bounce_serves_one_block_at_a_time(void)
{
    struct nvmeio_file_info info;
    const char *path = path_in(test_folder());

    stage_open(16);
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    nvmeio_file_get_info(file, &info);
    if (info.direct && info.memory_align > 1) {
        char *source = stage.memory.address + 1;
        CHECK(write_at(stage.handle, file, source, 4 * BLOCK, 0).result == 4 * BLOCK);
        CHECK(look(&pushes) == 1);
        play(perform_reads);
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_WRITE, file, source, 4 * BLOCK, 4 * BLOCK);
        struct nvmeio_request *write = submit(stage.handle, &t);
        await(&in_flight, 1);
        t = transfer_of(NVMEIO_OP_READ, stage.file, source + 5 * BLOCK, BLOCK, 0);
        CHECK(carry_out(stage.handle, &t).result == BLOCK);
        play(perform);
        CHECK(finish(write).result == 4 * BLOCK);
        CHECK(file_holds(path, source, 4 * BLOCK, 4 * BLOCK));
    }
    nvmeio_file_release(file);
    stage_close();
}

static atomic_bool handing_over, queued_meanwhile;

/* The worker calls this when it submits its first block, before it waits. */
static void hold_up_the_worker(void)
{
    atomic_store(&handing_over, true);
    while (!atomic_load(&queued_meanwhile))
        sched_yield();
}

/* The wake-up comes before the wait, with a call in between that does not wait. */
static void test_a_request_queued_just_before_a_worker_waits_is_not_missed(void)
{
    stage_open(4);
    stage.config.single_submit = true;
    stage_reopen();
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.size = BLOCK;
    play(hold);
    atomic_store(&on_push, hold_up_the_worker);
    struct nvmeio_request *first = submit(stage.handle, &t);
    while (!atomic_load(&handing_over))
        sched_yield();
    atomic_store(&on_push, NULL);
    struct nvmeio_request *second = submit(stage.handle, &t);
    atomic_store(&queued_meanwhile, true);
    await(&in_flight, 2);
    play(perform);
    CHECK(finish(first).result == BLOCK && finish(second).result == BLOCK);
    stage_close();
}

#define LARGE (4 * MIB)

static struct nvmeio_file *large_file(size_t bytes)
{
    const char *path = path_in(test_folder());

    make_file(path, bytes, 1);
    return open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
}

/* Submit a large read, of which two blocks are in flight and held. */
static struct nvmeio_request *hold_large(struct nvmeio_file *file,
                                         const struct guarded *memory)
{
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_READ, file, memory->address, LARGE, 0);

    play(hold);
    struct nvmeio_request *request = submit(stage.handle, &t);
    await(&in_flight, 2);
    return request;
}

static unsigned pushed_before_small;

static bool note_small(struct nvmeio_block *block)
{
    if (block->bytes == 512)
        pushed_before_small = calls;
    calls++;
    return perform(block);
}

static void test_a_small_request_behind_a_large_one_has_its_turn_soon(void)
{
    struct guarded memory = guarded_in_pool(LARGE);

    stage_open(2);
    struct nvmeio_file *file = large_file(LARGE);
    struct nvmeio_request *large = hold_large(file, &memory);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_READ, stage.file, stage.memory.address, 512, 0);
    struct nvmeio_request *small = submit(stage.handle, &t);
    play(note_small);
    CHECK(finish(small).result == 512 && finish(large).result == LARGE);
    CHECK(look(&calls) == LARGE / BLOCK + 1);
    /* What is in flight, and the rest of a turn. */
    CHECK(pushed_before_small <= NVMEIO_TURN_BYTES / BLOCK + 2);
    nvmeio_file_release(file);
    nvmeio_pool_free(memory.base);
    stage_close();
}

static unsigned ahead, ahead_of_the_last;

static bool note_order(struct nvmeio_block *block)
{
    if (block->offset < (int64_t)LARGE)
        ahead++;
    else
        ahead_of_the_last = ahead;
    return perform(block);
}

static void *wait_main(void *request)
{
    wait_for(request);
    return NULL;
}

/* What is read ahead of need does not delay the request that a thread waits for. */
static void test_an_awaited_request_is_done_before_those_submitted_with_it(void)
{
    struct guarded memory = guarded_in_pool(2 * LARGE);
    pthread_t waiting;

    stage_open(2);
    struct nvmeio_file *file = large_file(2 * LARGE);
    struct nvmeio_request *later = hold_large(file, &memory);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_READ, file, memory.address + LARGE, LARGE, LARGE);
    struct nvmeio_request *awaited = submit(stage.handle, &t);
    CHECK(pthread_create(&waiting, NULL, wait_main, awaited) == 0);
    while (!is_awaited(awaited))
        pause_ms(1);
    play(note_order);
    pthread_join(waiting, NULL);
    CHECK(finish(awaited).result == LARGE && finish(later).result == LARGE);
    CHECK(look(&ahead) == LARGE / BLOCK);
    /* What is in flight, and the rest of a turn. */
    CHECK(look(&ahead_of_the_last) <= NVMEIO_TURN_BYTES / BLOCK + 2);
    nvmeio_file_release(file);
    nvmeio_pool_free(memory.base);
    stage_close();
}

static unsigned written, written_before_a_read, read_before_a_write;

static bool note_kinds(struct nvmeio_block *block)
{
    if (block->op == NVMEIO_OP_WRITE) {
        written++;
        read_before_a_write = calls;
    } else {
        calls++;
        written_before_a_read = written;
    }
    return perform(block);
}

/* Submit a read, then a write that comes last, then more reads. */
static void test_some_writes_come_last(bool awaited)
{
    struct guarded memory = guarded_in_pool(5 * LARGE);
    struct nvmeio_request *reads[4];
    const char *path = path_in(test_folder());
    pthread_t waiting;

    stage_open(2);
    written = 0;
    make_file(path, LARGE, 1);
    struct nvmeio_file *scratch = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file *file = large_file(4 * LARGE);
    nvmeio_file_write_last(scratch);
    reads[0] = hold_large(file, &memory);
    char *source = memory.address + 4 * LARGE;
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_WRITE, scratch, source, LARGE, 0);
    struct nvmeio_request *write = submit(stage.handle, &t);
    for (int i = 1; i < 4; i++) {
        t = transfer_of(NVMEIO_OP_READ, file, memory.address + i * LARGE, LARGE,
                        i * (int64_t)LARGE);
        reads[i] = submit(stage.handle, &t);
    }
    if (awaited) {
        CHECK(pthread_create(&waiting, NULL, wait_main, write) == 0);
        while (!is_awaited(write))
            pause_ms(1);
    }
    play(note_kinds);
    if (awaited)
        pthread_join(waiting, NULL);
    else
        await(&calls, 4 * LARGE / BLOCK);
    for (int i = 0; i < 4; i++)
        CHECK(finish(reads[i]).result == LARGE);
    CHECK(finish(write).result == LARGE);
    CHECK(look(&calls) == 4 * LARGE / BLOCK && look(&written) == LARGE / BLOCK);
    /* A turn of each of the others, and what is in flight. */
    if (awaited)
        CHECK(look(&read_before_a_write) <= 4 * NVMEIO_TURN_BYTES / BLOCK + 2);
    else
        CHECK(look(&written_before_a_read) <=
              4 * LARGE / BLOCK / NVMEIO_LAST_SHARE + 2);
    /* They come, if slowly. */
    CHECK(look(&written_before_a_read) > 0);
    nvmeio_file_release(scratch);
    nvmeio_file_release(file);
    nvmeio_pool_free(memory.base);
    stage_close();
}

/* Beside another request, no more is in flight than keeps a drive busy. */
static void test_a_large_request_leaves_room_for_others(void)
{
    const char *path = path_in(test_folder());
    struct guarded memory = guarded_in_pool(64 * MIB);

    stage_open(64);
    stage.config.block_bytes = MIB;
    stage_reopen();
    make_file(path, LARGE, 1);
    CHECK(truncate(path, 64 * MIB) == 0);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    play(hold);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_READ, stage.file, stage.memory.address, 512, 0);
    struct nvmeio_request *small = submit(stage.handle, &t);
    await(&in_flight, 1);
    t = transfer_of(NVMEIO_OP_READ, file, memory.address, 64 * MIB, 0);
    struct nvmeio_request *large = submit(stage.handle, &t);
    await(&in_flight, 25);
    pause_ms(20);
    CHECK(look(&in_flight) == 25);
    play(perform);
    CHECK(finish(small).result == 512 && finish(large).result == 64 * MIB);
    nvmeio_file_release(file);
    nvmeio_pool_free(memory.base);
    stage_close();
}

static void test_single_submit_submits_one_block_per_call(void)
{
    for (int single = 0; single < 2; single++) {
        stage_open(4);
        stage.config.single_submit = single;
        stage_reopen();
        CHECK(finish(start(NVMEIO_OP_READ)).result == BLOCKS * BLOCK);
        CHECK(look(&pushed_max) == (single ? 1 : 4));
        stage_close();
    }
}

static void test_edges_of_a_write_wait_for_its_middle(void)
{
    struct nvmeio_file_info info;

    stage_open(16);
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

/* Each record of a scatter is such a write; edges wait for the middles of all. */
static void test_edges_of_a_scatter_wait_for_its_middles(void)
{
    const int64_t offsets[] = {1000, 4 * BLOCK + 1000}, places[] = {1000, 4 * BLOCK};
    const int64_t size = 2 * BLOCK;
    struct nvmeio_file_info info;
    struct nvmeio_request *request;
    size_t offender;

    stage_open(16);
    nvmeio_file_get_info(stage.file, &info);
    if (info.direct && info.offset_align > 1) {
        struct nvmeio_gather what = {.op = NVMEIO_OP_WRITE,
                                     .file = stage.file,
                                     .address = stage.memory.address,
                                     .size = stage.memory.size,
                                     .count = 2,
                                     .offsets = offsets,
                                     .sizes = &size,
                                     .one_size = true,
                                     .places = places};
        play(hold);
        CHECK(nvmeio_submit_gather(stage.handle, &what, &request, &offender) == 0);
        await(&in_flight, 4);
        pause_ms(20);
        CHECK(look(&pushes) == 4);
        play(perform);
        CHECK(finish(request).result == 2 * size && look(&pushes) == 8);
        for (int i = 0; i < 2; i++)
            CHECK(file_holds(stage.path, stage.memory.address + places[i], (size_t)size,
                             offsets[i]));
    }
    stage_close();
}

static void test_an_fsync_waits_for_the_writes_before_it(void)
{
    stage_open(16);
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
    stage_open(16);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = stage.file};
    struct nvmeio_transfer t = whole(NVMEIO_OP_WRITE);
    t.size = BLOCK;
    play(perform_the_second_write);
    struct nvmeio_request *first = submit(stage.handle, &t);
    t.offset = BLOCK;
    struct nvmeio_request *second = submit(stage.handle, &t);
    struct nvmeio_request *behind = submit(stage.handle, &sync);
    CHECK(finish(second).result == BLOCK);
    /* The only worker takes requests in the order of the queue.  If the second write
     * had queued the fsync, it would be in flight before this read. */
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

/* Blocks of one page succeed; the others are held. */
static bool perform_a_page(struct nvmeio_block *block)
{
    return block->op == NVMEIO_OP_READ && block->bytes == PAGE && perform(block);
}

/* Beside an fsync, or beside all blocks of a large read, several of which the worker
 * waits for at once. */
static void test_a_small_read_of_another_file_waits_for_nothing_else(enum nvmeio_op op)
{
    const char *path = path_in(test_folder());
    struct guarded memory = guarded_in_pool(PAGE);

    stage_open(4);
    nvmeio_config_default(&stage.config);
    stage.config.engine = "sync";
    if (op == NVMEIO_OP_READ)
        stage.config.block_bytes = BLOCK;
    stage_reopen();
    make_file(path, PAGE, 3);
    struct nvmeio_file *other = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    play(perform_a_page);
    struct nvmeio_request *held = start(op);
    await(&in_flight, op == NVMEIO_OP_READ ? BLOCKS : 1);
    CHECK(read_at(stage.handle, other, memory.address, PAGE, 0).result ==
          (int64_t)PAGE);
    CHECK(file_holds(path, memory.address, PAGE, 0));
    CHECK(!nvmeio_request_done(held));
    play(perform);
    CHECK(finish(held).result ==
          (op == NVMEIO_OP_READ ? (int64_t)(BLOCKS * BLOCK) : 0));
    nvmeio_file_release(other);
    check_canaries(&memory);
    nvmeio_pool_free(memory.base);
    stage_close();
}

int main(void)
{
    begin();
    stage.path = path_in(test_folder());
    test_no_more_blocks_are_in_flight_than_the_queue_holds();
    test_a_block_is_submitted_when_another_returns();
    test_a_worker_takes_new_requests_while_it_waits();
    test_a_large_bounce_serves_one_block_at_a_time();
    test_a_request_queued_just_before_a_worker_waits_is_not_missed();
    test_a_small_request_behind_a_large_one_has_its_turn_soon();
    test_some_writes_come_last(false);
    test_some_writes_come_last(true);
    test_an_awaited_request_is_done_before_those_submitted_with_it();
    test_a_large_request_leaves_room_for_others();
    test_single_submit_submits_one_block_per_call();
    test_edges_of_a_write_wait_for_its_middle();
    test_edges_of_a_scatter_wait_for_its_middles();
    test_an_fsync_waits_for_the_writes_before_it();
    test_an_fsync_waits_for_more_than_the_last_write();
    test_a_small_read_of_another_file_waits_for_nothing_else(NVMEIO_OP_FSYNC);
    test_a_small_read_of_another_file_waits_for_nothing_else(NVMEIO_OP_READ);
    return 0;
}
