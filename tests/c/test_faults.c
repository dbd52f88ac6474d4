/* What becomes of a request when its blocks come back short, late, wrong or never.
 *
 * The engine "sync" is replaced, at link time, by one that does as the test says: a
 * script decides of every block whether it is finished, and with what result. */
#include <pthread.h>
#include <stdio.h>

#include "engine.h"
#include "file_internal.h"
#include "transfer.h"

/* Dead lanes keep for ever what the kernel may still write to. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:uring_open\nleak:fake_open\nleak:lane_equip\nleak:caller_lane_add";
}

#define BLOCK (64 * KIB)
#define BLOCKS 8

/* Guarded by the mutex. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static bool (*script)(struct nvmeio_block *block); /* true: finished, with a result */
static int death;                                  /* what reap() returns, if not 0 */
static unsigned reaps, pushes, pushed_max, in_flight, in_flight_max, calls;
static unsigned in_flight_of[3]; /* by operation */

struct fake {
    struct nvmeio_block *pushed;
    unsigned since_reap;
    bool woken;
};

static int fake_open(struct nvmeio_engine *engine)
{
    engine->state = calloc(1, sizeof(struct fake));
    return engine->state ? 0 : -ENOMEM;
}

static void fake_close(struct nvmeio_engine *engine)
{
    CHECK(engine->in_flight == 0);
    free(engine->state);
}

static void fake_push(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    struct fake *fake = engine->state;
    struct nvmeio_block **end = &fake->pushed;

    CHECK(engine->in_flight < engine->depth);
    pthread_mutex_lock(&mutex);
    while (*end)
        end = &(*end)->next;
    block->next = NULL;
    *end = block;
    engine->in_flight++;
    pushes++;
    in_flight++;
    in_flight_of[block->op]++;
    if (in_flight > in_flight_max)
        in_flight_max = in_flight;
    if (++fake->since_reap > pushed_max)
        pushed_max = fake->since_reap;
    pthread_mutex_unlock(&mutex);
}

static int fake_collect(struct nvmeio_engine *engine)
{
    struct fake *fake = engine->state;
    struct nvmeio_block **at = &fake->pushed;
    int count = 0;

    while (*at) {
        struct nvmeio_block *block = *at;
        if (!script(block)) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        in_flight--;
        in_flight_of[block->op]--;
        nvmeio_engine_finish(engine, block);
        count++;
    }
    return count;
}

static int fake_reap(struct nvmeio_engine *engine, unsigned wait_min,
                     int64_t timeout_ns)
{
    struct fake *fake = engine->state;
    int64_t end = nvmeio_now_ns() + timeout_ns;
    int count = 0;

    pthread_mutex_lock(&mutex);
    reaps++;
    fake->since_reap = 0;
    for (;;) {
        if (death) {
            count = death;
            break;
        }
        count += fake_collect(engine);
        if (count >= (int)wait_min || fake->woken ||
            (timeout_ns >= 0 && nvmeio_now_ns() >= end))
            break;
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_nsec = (soon.tv_nsec + 1000000) % 1000000000;
        soon.tv_sec += soon.tv_nsec < 1000000;
        pthread_cond_timedwait(&change, &mutex, &soon);
    }
    fake->woken = false;
    pthread_mutex_unlock(&mutex);
    return count;
}

static void fake_wake(struct nvmeio_engine *engine)
{
    pthread_mutex_lock(&mutex);
    ((struct fake *)engine->state)->woken = true;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&mutex);
}

const struct nvmeio_engine_ops nvmeio_engine_sync = {
    .name = "sync",
    .library = "",
    .punctual_direct = true,
    .punctual_buffered = true,
    .open = fake_open,
    .close = fake_close,
    .push = fake_push,
    .reap = fake_reap,
    .wake = fake_wake,
};

static bool perform(struct nvmeio_block *block)
{
    nvmeio_block_perform(block);
    return true;
}

static bool hold(struct nvmeio_block *block)
{
    (void)block;
    return false;
}

static void play(bool (*next)(struct nvmeio_block *block))
{
    pthread_mutex_lock(&mutex);
    script = next;
    calls = 0;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&mutex);
}

static unsigned look(const unsigned *figure)
{
    pthread_mutex_lock(&mutex);
    unsigned value = *figure;
    pthread_mutex_unlock(&mutex);
    return value;
}

static void pause_ms(long ms)
{
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

/* The watchdog ends this if it never comes true. */
static void await(const unsigned *figure, unsigned value)
{
    while (look(figure) != value)
        pause_ms(1);
}

/* A handle on the scripted engine, a file of BLOCKS blocks and memory for them. */
static struct stage {
    struct nvmeio_config config;
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    struct guarded memory;
    const char *path;
} stage;

static void stage_open(unsigned depth, bool overlap)
{
    play(perform);
    death = 0;
    pushes = pushed_max = in_flight = in_flight_max = 0;
    memset(in_flight_of, 0, sizeof(in_flight_of));
    stage.config = config_of("sync");
    stage.config.queue_depth = depth;
    stage.config.overlap_events = overlap;
    stage.handle = open_handle(&stage.config);
    make_file(stage.path, BLOCKS * BLOCK, 1);
    stage.file = open_file(stage.path, O_RDWR, NVMEIO_DIRECT_AUTO);
    stage.memory = guarded_in_pool(BLOCKS * BLOCK);
    fill(stage.memory.address, BLOCKS * BLOCK, 0, 9);
}

static void stage_free(void)
{
    check_canaries(&stage.memory);
    nvmeio_pool_free(stage.memory.base);
}

static void stage_close(void)
{
    nvmeio_handle_close(stage.handle);
    nvmeio_file_release(stage.file);
    stage_free();
}

static struct nvmeio_transfer whole(enum nvmeio_op op)
{
    return transfer_of(op, stage.file, stage.memory.address, stage.memory.size, 0);
}

static struct nvmeio_request *start(enum nvmeio_op op)
{
    struct nvmeio_transfer t = whole(op);
    return submit(stage.handle, &t);
}

static bool memory_holds_file(size_t size)
{
    return file_holds(stage.path, stage.memory.address, size, 0);
}

/* A thousand bytes at most, whoever asks. */
static bool perform_short(struct nvmeio_block *block)
{
    uint32_t bytes = block->bytes;

    block->bytes = bytes < 40000 ? bytes : 40000;
    nvmeio_block_perform(block);
    /* The page cache takes any length, the device whole sectors. */
    if (block->result == -EINVAL) {
        block->bytes = bytes < 40448 ? bytes : 40448;
        nvmeio_block_perform(block);
    }
    block->bytes = bytes;
    return true;
}

static void test_short_transfers_are_continued(void)
{
    for (int bounced = 0; bounced < 2; bounced++)
        for (int op = 0; op < 2; op++) {
            struct nvmeio_stats stats;
            stage_open(4, true);
            play(perform_short);
            struct nvmeio_transfer t = whole(op ? NVMEIO_OP_WRITE : NVMEIO_OP_READ);
            t.size -= bounced ? 1 : 0;
            t.address = (char *)t.address + bounced;
            CHECK(carry_out(stage.handle, &t).result == (int64_t)t.size);
            CHECK(file_holds(stage.path, t.address, t.size, 0));
            nvmeio_handle_stats(stage.handle, &stats);
            CHECK(stats.short_transfers >= BLOCKS - 1);
            CHECK(latencies_counted(stage.handle) == stats.blocks);
            stage_close();
        }
}

/* Half of the block that is asked for first, and nothing more. */
static bool perform_half_and_hold(struct nvmeio_block *block)
{
    uint32_t bytes = block->bytes;

    if (calls++ > 0)
        return false;
    block->bytes = BLOCK / 2;
    nvmeio_block_perform(block);
    block->bytes = bytes;
    return true;
}

static void test_a_latency_lasts_until_the_block_is_finished(void)
{
    stage_open(4, true);
    int64_t submitted = nvmeio_now_ns();
    play(hold);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.size = BLOCK;
    struct nvmeio_request *request = submit(stage.handle, &t);
    await(&in_flight, 1);
    int64_t held = nvmeio_now_ns();
    pause_ms(20);
    play(perform_half_and_hold);
    await(&pushes, 2);
    pause_ms(20);
    CHECK(latencies_counted(stage.handle) == 0);
    int64_t released = nvmeio_now_ns();
    play(perform);
    CHECK(finish(request).result == BLOCK);
    int64_t done = nvmeio_now_ns();
    CHECK(latencies_within(stage.handle, released - held, done - submitted) == 1);
    CHECK(latencies_counted(stage.handle) == 1);
    stage_close();
}

static bool sleep_and_perform(struct nvmeio_block *block)
{
    pause_ms(20);
    return perform(block);
}

/* Each of the two is handed over by a call that takes 20 ms, and is back behind it. */
static void test_a_latency_is_without_what_others_took_before_and_after(void)
{
    stage_open(2, true);
    nvmeio_handle_close(stage.handle);
    stage.config.single_submit = true;
    stage.handle = open_handle(&stage.config);
    play(sleep_and_perform);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.size = 2 * BLOCK;
    int64_t before = nvmeio_now_ns();
    CHECK(carry_out(stage.handle, &t).result == 2 * BLOCK);
    int64_t whole_ns = nvmeio_now_ns() - before;
    CHECK(latencies_within(stage.handle, 20000000, whole_ns - 20000000) == 2);
    stage_close();
}

static bool perform_nothing(struct nvmeio_block *block)
{
    block->result = 0;
    return true;
}

static void test_nothing_moved_is_an_error(void)
{
    stage_open(4, true);
    play(perform_nothing);
    CHECK(finish(start(NVMEIO_OP_WRITE)).result == -EIO);
    CHECK(finish(start(NVMEIO_OP_READ)).result == -ENODATA);
    stage_close();
}

/* The three that pass, twice each, then the I/O. */
static bool perform_at_the_seventh(struct nvmeio_block *block)
{
    static const int passing[] = {EINTR, EAGAIN, EBUSY};

    if (calls++ % 7 < 6)
        block->result = -passing[calls % 3];
    else
        nvmeio_block_perform(block);
    return true;
}

static void test_what_passes_goes_again(void)
{
    struct nvmeio_stats stats;

    stage_open(4, false);
    play(perform_at_the_seventh);
    CHECK(finish(start(NVMEIO_OP_WRITE)).result == BLOCKS * BLOCK);
    CHECK(memory_holds_file(BLOCKS * BLOCK));
    nvmeio_handle_stats(stage.handle, &stats);
    CHECK(stats.retries == 6 * BLOCKS && stats.blocks == BLOCKS);
    CHECK(latencies_counted(stage.handle) == BLOCKS);
    stage_close();
}

static int planned_error;

static bool fail_the_fourth(struct nvmeio_block *block)
{
    if (block->offset >= (int64_t)(3 * BLOCK) && block->offset < (int64_t)(4 * BLOCK))
        block->result = -planned_error;
    else
        nvmeio_block_perform(block);
    return true;
}

static void test_an_error_comes_with_how_far_it_came(void)
{
    static const int errors[] = {EIO, ENOSPC, EFBIG, EFAULT, ENOMEM, EREMOTEIO};

    for (int i = 0; i < 6; i++)
        for (int op = 0; op < 2; op++) {
            stage_open(i % 2 ? 2 : 16, i % 3);
            planned_error = errors[i];
            play(fail_the_fourth);
            struct nvmeio_outcome outcome =
                finish(start(op ? NVMEIO_OP_WRITE : NVMEIO_OP_READ));
            CHECK(outcome.result == -errors[i] && !outcome.abandoned);
            CHECK(outcome.got == 3 * BLOCK && memory_holds_file(3 * BLOCK));
            struct nvmeio_stats stats;
            nvmeio_handle_stats(stage.handle, &stats);
            CHECK(stats.blocks >= 4 && latencies_counted(stage.handle) == stats.blocks);
            stage_close();
        }
}

/* 20480 bytes of the fourth block, then an error. */
static bool fail_within_the_fourth(struct nvmeio_block *block)
{
    if (block->offset == (int64_t)(3 * BLOCK + 20480)) {
        block->result = -EIO;
        return true;
    }
    uint32_t bytes = block->bytes;
    if (block->offset == (int64_t)(3 * BLOCK))
        block->bytes = 20480;
    nvmeio_block_perform(block);
    block->bytes = bytes;
    return true;
}

static void test_what_came_before_an_error_is_in_the_memory(void)
{
    for (int bounced = 0; bounced < 2; bounced++) {
        stage_open(4, true);
        play(fail_within_the_fourth);
        struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
        t.address = (char *)t.address + bounced;
        t.size -= bounced;
        struct nvmeio_outcome outcome = carry_out(stage.handle, &t);
        CHECK(outcome.result == -EIO && outcome.got == 3 * BLOCK + 20480);
        CHECK(file_holds(stage.path, t.address, (size_t)outcome.got, 0));
        stage_close();
    }
}

static bool refuse_direct(struct nvmeio_block *block)
{
    if (fcntl(block->fd, F_GETFL) & O_DIRECT)
        block->result = -EINVAL;
    else
        nvmeio_block_perform(block);
    return true;
}

static void test_a_device_that_refuses_is_left_for_the_page_cache(void)
{
    struct nvmeio_file_info info;
    struct nvmeio_stats stats;

    stage_open(4, true);
    nvmeio_file_get_info(stage.file, &info);
    bool direct = info.direct;
    play(refuse_direct);
    CHECK(finish(start(NVMEIO_OP_WRITE)).result == BLOCKS * BLOCK);
    CHECK(memory_holds_file(BLOCKS * BLOCK));
    nvmeio_handle_stats(stage.handle, &stats);
    CHECK(stats.bytes_buffered == BLOCKS * BLOCK);
    nvmeio_file_get_info(stage.file, &info);
    CHECK(!info.direct);
    if (direct) {
        CHECK(stats.retries > 0);
        struct nvmeio_file *file = open_file(stage.path, O_RDWR, NVMEIO_DIRECT_ALWAYS);
        CHECK(read_at(stage.handle, file, stage.memory.address, BLOCK, 0).result ==
              -EINVAL);
        nvmeio_file_release(file);
    }
    stage_close();
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

static void test_a_cancelled_request_ends_when_its_blocks_are_back(void)
{
    struct nvmeio_outcome outcome;

    stage_open(2, true);
    play(hold);
    struct nvmeio_request *running = start(NVMEIO_OP_READ);
    struct nvmeio_request *queued = start(NVMEIO_OP_WRITE);
    await(&in_flight, 2);
    CHECK(nvmeio_request_cancel(queued) == 1);
    CHECK(nvmeio_request_done(queued) && finish(queued).result == -ECANCELED);
    CHECK(nvmeio_request_cancel(running) == 1);
    CHECK(nvmeio_request_cancel(running) == 0);
    CHECK(!nvmeio_request_done(running));
    CHECK(nvmeio_request_outcome(running, &outcome) == -EINPROGRESS);
    CHECK(nvmeio_request_wait(running, 1000000) == -ETIMEDOUT);
    play(perform);
    outcome = finish(running);
    CHECK(outcome.result == -ECANCELED && outcome.got == 2 * BLOCK);
    CHECK(look(&pushes) == 2 && memory_holds_file(2 * BLOCK));
    stage_close();
}

static bool fail(struct nvmeio_block *block)
{
    block->result = -EIO;
    return true;
}

static void test_cancelled_is_what_cancel_said_whatever_comes_after(void)
{
    stage_open(2, true);
    play(hold);
    struct nvmeio_request *request = start(NVMEIO_OP_READ);
    await(&in_flight, 2);
    CHECK(nvmeio_request_cancel(request) == 1);
    play(fail);
    CHECK(finish(request).result == -ECANCELED);
    stage_close();
}

static void test_nothing_can_be_cancelled_that_is_wholly_in_flight_or_done(void)
{
    stage_open(16, true);
    play(hold);
    struct nvmeio_request *request = start(NVMEIO_OP_READ);
    await(&in_flight, BLOCKS);
    CHECK(nvmeio_request_cancel(request) == 0);
    play(perform);
    CHECK(nvmeio_request_wait(request, LONG_NS) == 0);
    CHECK(nvmeio_request_cancel(request) == 0);
    CHECK(finish(request).result == BLOCKS * BLOCK);
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

static void *drain_main(void *argument)
{
    CHECK(nvmeio_handle_drain(argument, LONG_NS) == 0);
    return NULL;
}

static void test_drain_carries_out_what_is_submitted_meanwhile(void)
{
    pthread_t thread;

    stage_open(16, true);
    play(hold);
    struct nvmeio_request *first = start(NVMEIO_OP_READ);
    await(&in_flight, BLOCKS);
    pthread_create(&thread, NULL, drain_main, stage.handle);
    pause_ms(20);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.caller = true;
    struct nvmeio_request *second = submit(stage.handle, &t);
    play(perform);
    pthread_join(thread, NULL);
    CHECK(nvmeio_request_done(first) && nvmeio_request_done(second));
    nvmeio_request_release(first);
    nvmeio_request_release(second);
    stage_close();
}

static atomic_bool closed;

static void *close_main(void *argument)
{
    nvmeio_handle_close(argument);
    atomic_store(&closed, true);
    return NULL;
}

static void test_close_waits_for_what_is_in_flight_and_refuses_more(void)
{
    pthread_t thread;
    struct nvmeio_request *late;

    stage_open(16, true);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    play(hold);
    atomic_store(&closed, false);
    struct nvmeio_request *request = start(NVMEIO_OP_READ);
    await(&in_flight, BLOCKS);
    pthread_create(&thread, NULL, close_main, stage.handle);
    while (nvmeio_submit(stage.handle, &t, &late) == 0) {
        nvmeio_request_release(late);
        pause_ms(1);
    }
    CHECK(nvmeio_submit(stage.handle, &t, &late) == -EPIPE);
    pause_ms(20);
    CHECK(!atomic_load(&closed) && !nvmeio_request_done(request));
    play(perform);
    pthread_join(thread, NULL);
    CHECK(nvmeio_request_done(request));
    CHECK(nvmeio_submit(stage.handle, &t, &late) == -EPIPE);
    CHECK(finish(request).result == BLOCKS * BLOCK);
    nvmeio_file_release(stage.file);
    stage_free();
}

static void test_a_write_refused_by_a_closed_handle_leaves_no_bytes(void)
{
    struct nvmeio_request *late;

    stage_open(4, true);
    struct nvmeio_request *keep = start(NVMEIO_OP_READ);
    struct nvmeio_file *file =
        open_file(path_in(test_folder()), O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    nvmeio_handle_close(stage.handle);
    struct nvmeio_transfer t = whole(NVMEIO_OP_WRITE);
    t.file = file;
    CHECK(nvmeio_submit(stage.handle, &t, &late) == -EPIPE);
    CHECK(nvmeio_file_size(file) == 0);
    CHECK(finish(keep).result == BLOCKS * BLOCK);
    nvmeio_file_release(file);
    nvmeio_file_release(stage.file);
    stage_free();
}

static void kill_engines(int error)
{
    pthread_mutex_lock(&mutex);
    death = error;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&mutex);
}

static void test_a_dead_engine_fails_its_requests_and_all_that_follow(void)
{
    stage_open(2, true);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = stage.file};
    play(hold);
    struct nvmeio_request *running = start(NVMEIO_OP_WRITE);
    struct nvmeio_request *queued = start(NVMEIO_OP_READ);
    struct nvmeio_request *gated = submit(stage.handle, &sync);
    await(&in_flight, 2);
    kill_engines(-EREMOTEIO);
    struct nvmeio_outcome outcome = finish(running);
    CHECK(outcome.result == -EREMOTEIO && outcome.abandoned);
    outcome = finish(queued);
    CHECK(outcome.result == -EREMOTEIO && !outcome.abandoned && outcome.got == 0);
    CHECK(finish(gated).result == -EREMOTEIO);
    CHECK(nvmeio_handle_drain(stage.handle, LONG_NS) == 0);
    CHECK(finish(start(NVMEIO_OP_READ)).result == -EREMOTEIO);
    CHECK(carry_out(stage.handle, &sync).result == -EREMOTEIO);
    CHECK(nvmeio_handle_pending(stage.handle) == 0);
    stage_close();
}

static void test_a_dead_engine_of_a_caller_fails_its_request_alone(void)
{
    stage_open(4, true);
    play(hold);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.caller = true;
    struct nvmeio_request *request = submit(stage.handle, &t);
    CHECK(nvmeio_request_wait(request, 1000000) == -ETIMEDOUT);
    kill_engines(-EREMOTEIO);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -EREMOTEIO && outcome.abandoned);
    kill_engines(0);
    play(perform);
    CHECK(finish(start(NVMEIO_OP_READ)).result == BLOCKS * BLOCK);
    CHECK(carry_out(stage.handle, &t).result == BLOCKS * BLOCK);
    stage_close();
}

/* What is read of the first two pages together fails; of one of them, it is held. */
static bool fail_together(struct nvmeio_block *block)
{
    if (block->offset >= (int64_t)(2 * PAGE))
        return perform(block);
    calls = block->bytes == PAGE;
    block->result = -EIO;
    return block->bytes > PAGE;
}

static void test_a_gather_cancelled_in_its_second_attempt_keeps_what_has_landed(void)
{
    const int64_t offsets[] = {0, PAGE, 2 * BLOCK}, places[] = {PAGE, 0, 2 * PAGE};
    const int64_t size = PAGE;
    struct nvmeio_request *request;
    struct nvmeio_failure failures[3];
    size_t offender;

    stage_open(1, true);
    struct nvmeio_gather what = {
        .op = NVMEIO_OP_READ,
        .file = stage.file,
        .address = stage.memory.address,
        .size = stage.memory.size,
        .count = 3,
        .offsets = offsets,
        .sizes = &size,
        .one_size = true,
        .places = places,
    };
    play(fail_together);
    CHECK(nvmeio_submit_gather(stage.handle, &what, &request, &offender) == 0);
    await(&calls, 1);
    CHECK(nvmeio_request_cancel(request) == 1);
    play(perform);
    CHECK(nvmeio_request_wait(request, LONG_NS) == 0);
    CHECK(nvmeio_request_failures(request, failures, 3) == 1);
    CHECK(failures[0].index == 1 && failures[0].error == -ECANCELED);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -ECANCELED && outcome.got == (int64_t)(2 * PAGE));
    CHECK(file_holds(stage.path, stage.memory.address + PAGE, PAGE, 0));
    CHECK(file_holds(stage.path, stage.memory.address + 2 * PAGE, PAGE, 2 * BLOCK));
    stage_close();
}

/* Put something over the rings of this process that is none. */
static unsigned break_rings(void)
{
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    unsigned count = 0;

    CHECK(null >= 0);
    for (int fd = 3; fd < 1024; fd++) {
        char link[32], target[64] = "";
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        if (readlink(link, target, sizeof(target) - 1) > 0 &&
            strstr(target, "[io_uring]")) {
            CHECK(dup3(null, fd, O_CLOEXEC) == fd);
            count++;
        }
    }
    close(null);
    return count;
}

static void test_a_ring_that_can_no_longer_be_entered_is_dead_soon(void)
{
    struct nvmeio_config config = config_of("io_uring");
    const char *best = engine_at(0);

    if (!best || strcmp(best, "io_uring") != 0)
        return;
    stage_open(4, true);
    struct nvmeio_handle *handle = open_handle(&config);
    CHECK(break_rings() == 1);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    int64_t before = nvmeio_now_ns();
    struct nvmeio_outcome outcome = carry_out(handle, &t);
    CHECK(outcome.result == -EOPNOTSUPP && outcome.abandoned);
    CHECK(nvmeio_now_ns() - before < 5 * SECOND_NS);
    before = nvmeio_now_ns();
    outcome = carry_out(handle, &t);
    CHECK(outcome.result == -EOPNOTSUPP && !outcome.abandoned);
    CHECK(nvmeio_now_ns() - before < SECOND_NS / 2);
    nvmeio_handle_close(handle);
    stage_close();
}

static void test_patience_ends_with_failures_in_a_row_not_with_age(void)
{
    struct nvmeio_patience patience = {0};

    CHECK(nvmeio_patience_try(&patience, -EINTR) == 0);
    /* The call that follows sleeps for a minute, and then a signal comes. */
    patience.since_ns -= 60 * SECOND_NS;
    patience.last_ns -= 60 * SECOND_NS;
    CHECK(nvmeio_patience_try(&patience, -EINTR) == 0);
    /* It has been failing for a minute, without a rest. */
    patience.since_ns -= 60 * SECOND_NS;
    CHECK(nvmeio_patience_try(&patience, -EINTR) == -EINTR);
    patience = (struct nvmeio_patience){0};
    CHECK(nvmeio_patience_try(&patience, -EIO) == 0);
    patience.since_ns -= 2 * SECOND_NS;
    CHECK(nvmeio_patience_try(&patience, -EIO) == -EIO);
}

int main(void)
{
    begin();
    stage.path = path_in(test_folder());
    test_short_transfers_are_continued();
    test_a_latency_lasts_until_the_block_is_finished();
    test_a_latency_is_without_what_others_took_before_and_after();
    test_nothing_moved_is_an_error();
    test_what_passes_goes_again();
    test_an_error_comes_with_how_far_it_came();
    test_what_came_before_an_error_is_in_the_memory();
    test_a_device_that_refuses_is_left_for_the_page_cache();
    test_no_more_blocks_are_in_flight_than_the_queue_holds();
    test_overlapped_lanes_refill_at_once_and_others_when_all_is_back();
    test_overlapped_lanes_take_new_requests_while_they_wait();
    test_single_submit_hands_over_one_block_a_call();
    test_edges_of_a_write_wait_for_its_middle();
    test_a_cancelled_request_ends_when_its_blocks_are_back();
    test_cancelled_is_what_cancel_said_whatever_comes_after();
    test_nothing_can_be_cancelled_that_is_wholly_in_flight_or_done();
    test_an_fsync_waits_for_the_writes_before_it();
    test_an_fsync_carries_out_a_write_that_nobody_waits_for();
    test_a_deserted_request_is_finished_by_those_who_ask();
    test_a_caller_that_only_looks_brings_its_request_forward();
    test_drain_carries_out_what_is_submitted_meanwhile();
    test_close_waits_for_what_is_in_flight_and_refuses_more();
    test_a_write_refused_by_a_closed_handle_leaves_no_bytes();
    test_a_dead_engine_fails_its_requests_and_all_that_follow();
    test_a_dead_engine_of_a_caller_fails_its_request_alone();
    test_a_gather_cancelled_in_its_second_attempt_keeps_what_has_landed();
    test_a_ring_that_can_no_longer_be_entered_is_dead_soon();
    test_patience_ends_with_failures_in_a_row_not_with_age();
    return 0;
}
