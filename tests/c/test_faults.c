/* Requests whose blocks return short, late, failed or never. */
#include <sys/syscall.h>

#include "scripted.h"

/* Every transfer moves at most a thousand bytes. */
static bool perform_short(struct nvmeio_block *block)
{
    uint32_t bytes = block->bytes;

    block->bytes = bytes < 40000 ? bytes : 40000;
    nvmeio_block_perform(block);
    /* The page cache accepts any length, the device only whole sectors. */
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
            stage_open(4);
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

/* Half of the first block, and nothing more. */
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
    stage_open(4);
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

/* Each of the two is submitted by a call that takes 20 ms, and returns after it. */
static void test_a_latency_excludes_the_time_of_other_blocks(void)
{
    stage_open(2);
    stage.config.single_submit = true;
    stage_reopen();
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
    stage_open(4);
    play(perform_nothing);
    CHECK(finish(start(NVMEIO_OP_WRITE)).result == -EIO);
    CHECK(finish(start(NVMEIO_OP_READ)).result == -ENODATA);
    stage_close();
}

/* The three passing errors, twice each, then success. */
static bool perform_at_the_seventh(struct nvmeio_block *block)
{
    static const int passing[] = {EINTR, EAGAIN, EBUSY};

    if (calls++ % 7 < 6)
        block->result = -passing[calls % 3];
    else
        nvmeio_block_perform(block);
    return true;
}

static void test_passing_errors_are_retried(void)
{
    struct nvmeio_stats stats;

    stage_open(4);
    play(perform_at_the_seventh);
    CHECK(finish(start(NVMEIO_OP_WRITE)).result == BLOCKS * BLOCK);
    CHECK(memory_holds_file(BLOCKS * BLOCK));
    nvmeio_handle_stats(stage.handle, &stats);
    CHECK(stats.retries == 6 * BLOCKS && stats.blocks == BLOCKS);
    CHECK(latencies_counted(stage.handle) == BLOCKS);
    stage_close();
}

static int planned_error;

static bool fail(struct nvmeio_block *block)
{
    block->result = -planned_error;
    return true;
}

static bool fail_the_fourth(struct nvmeio_block *block)
{
    if (block->offset >= (int64_t)(3 * BLOCK) && block->offset < (int64_t)(4 * BLOCK))
        block->result = -planned_error;
    else
        nvmeio_block_perform(block);
    return true;
}

static bool fail_the_fifth(struct nvmeio_block *block)
{
    return block->offset == (int64_t)(4 * BLOCK) ? fail(block) : perform(block);
}

static bool fail_the_third_time(struct nvmeio_block *block)
{
    return ++calls == 3 ? fail(block) : perform(block);
}

static void test_an_error_reports_how_far_the_transfer_came(void)
{
    static const int errors[] = {EIO, ENOSPC, EFBIG, EFAULT, ENOMEM, EREMOTEIO};

    for (int i = 0; i < 6; i++)
        for (int op = 0; op < 2; op++) {
            stage_open(i % 2 ? 2 : 16);
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

/* Its head would be written last, and so is never written. */
static void test_a_write_that_fails_in_its_middle_has_written_no_head(void)
{
    struct nvmeio_file_info info;

    stage_open(1);
    nvmeio_file_get_info(stage.file, &info);
    if (info.direct && info.offset_align > 1) {
        struct nvmeio_transfer t = transfer_of(
            NVMEIO_OP_WRITE, stage.file, stage.memory.address + 1000, 4 * BLOCK, 1000);
        planned_error = EIO;
        play(fail_the_third_time);
        struct nvmeio_outcome outcome = carry_out(stage.handle, &t);
        CHECK(outcome.result == -EIO && outcome.got == 0);
        CHECK(!file_holds(stage.path, t.address, PAGE - 1000, 1000));
    }
    stage_close();
}

/* The kernel's errnos for a bad medium, and for I/O that the kernel cancelled. */
static void test_an_error_of_the_disk_is_neither_an_end_of_file_nor_a_cancel(void)
{
    static const int errors[] = {ENODATA, ECANCELED};

    for (int i = 0; i < 2; i++)
        for (int op = 0; op < 2; op++) {
            stage_open(4);
            planned_error = errors[i];
            play(fail_the_fourth);
            struct nvmeio_outcome outcome =
                finish(start(op ? NVMEIO_OP_WRITE : NVMEIO_OP_READ));
            CHECK(outcome.result == -EIO && outcome.got == 3 * BLOCK);
            stage_close();
        }
}

/* The fifth fails at once, the second only after that. */
static bool fail_two(struct nvmeio_block *block)
{
    if (block->offset == (int64_t)(4 * BLOCK))
        block->result = -EIO;
    else if (block->offset != (int64_t)BLOCK)
        nvmeio_block_perform(block);
    else if (calls++ == 0)
        return false;
    else
        block->result = -EREMOTEIO;
    return true;
}

static void test_of_two_errors_the_lower_blocks_is_reported(void)
{
    stage_open(BLOCKS);
    play(fail_two);
    struct nvmeio_outcome outcome = finish(start(NVMEIO_OP_READ));
    CHECK(outcome.result == -EREMOTEIO && outcome.got == BLOCK);
    stage_close();
}

static void test_a_failed_write_leaves_the_bytes_that_others_wrote_after_it(void)
{
    const char *path = path_in(test_folder());

    stage_open(4);
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file *other = open_file(path, O_RDWR, NVMEIO_DIRECT_NEVER);
    struct nvmeio_transfer t = whole(NVMEIO_OP_WRITE);
    t.file = file;
    planned_error = ENOSPC;
    play(hold);
    struct nvmeio_request *request = submit(stage.handle, &t);
    await(&in_flight, 1);
    CHECK(pwrite(nvmeio_file_fd(other), "other", 5, BLOCKS * BLOCK) == 5);
    play(fail);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -ENOSPC && outcome.got == 0);
    CHECK(nvmeio_file_size(other) == BLOCKS * BLOCK + 5);
    CHECK(file_holds(path, "other", 5, BLOCKS * BLOCK));
    nvmeio_file_release(other);
    nvmeio_file_release(file);
    stage_close();
}

static void test_an_fsync_that_fails_says_so(void)
{
    static const int errors[] = {EIO, ENOSPC, EDQUOT, EINVAL};

    stage_open(4);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = stage.file};
    for (int i = 0; i < 4; i++) {
        planned_error = errors[i];
        play(fail);
        CHECK(carry_out(stage.handle, &sync).result == -errors[i]);
    }
    stage_close();
}

/* Every other block is a record; the third in the file fails, which is second in the
 * list. */
static void test_a_record_that_fails_is_named(enum nvmeio_op op)
{
    const int64_t offsets[] = {0, 4 * BLOCK, 2 * BLOCK, 6 * BLOCK}, size = BLOCK;
    struct nvmeio_failure failures[4];
    struct nvmeio_request *request;
    size_t offender;

    stage_open(4);
    struct nvmeio_gather what = {.op = op,
                                 .file = stage.file,
                                 .address = stage.memory.address,
                                 .size = stage.memory.size,
                                 .count = 4,
                                 .offsets = offsets,
                                 .sizes = &size,
                                 .one_size = true};
    planned_error = EIO;
    play(fail_the_fifth);
    CHECK(nvmeio_submit_gather(stage.handle, &what, &request, &offender) == 0);
    wait_for(request);
    CHECK(nvmeio_request_failures(request, failures, 4) == 1);
    CHECK(failures[0].index == 1 && failures[0].error == -EIO);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -EIO && outcome.got == 3 * BLOCK);
    for (size_t i = 0; i < 4; i++)
        CHECK(i == 1 || file_holds(stage.path, (char *)what.address + i * BLOCK, BLOCK,
                                   offsets[i]));
    stage_close();
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

static void test_bytes_before_an_error_are_in_memory(void)
{
    for (int bounced = 0; bounced < 2; bounced++) {
        stage_open(4);
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

static void test_a_device_that_refuses_direct_io_is_used_through_the_page_cache(void)
{
    struct nvmeio_file_info info;
    struct nvmeio_stats stats;

    stage_open(4);
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

static void kill_engines(int error)
{
    pthread_mutex_lock(&mutex);
    death = error;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&mutex);
}

static void test_a_dead_engine_fails_its_requests_and_all_that_follow(void)
{
    stage_open(2);
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

/* A dead worker must not take wake-ups from the others. */
static void test_other_workers_go_on_if_one_dies(void)
{
    stage_open(4);
    stage.config.workers = 2;
    stage_reopen();
    play(hold);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.size = PAGE; /* so little that only one worker is woken */
    struct nvmeio_request *request = submit(stage.handle, &t);
    await(&in_flight, 1);
    kill_engines(-EREMOTEIO);
    CHECK(finish(request).result == -EREMOTEIO);
    kill_engines(0);
    play(perform);
    for (int i = 0; i < 4; i++) {
        pause_ms(5); /* until the worker sleeps, and would have to be woken */
        CHECK(carry_out(stage.handle, &t).result == (int64_t)PAGE);
    }
    stage_close();
}

/* Replaces pread() in the library; a thread can delay it. */
static _Thread_local bool held_here;
static atomic_bool reads_held, reads;

ssize_t pread(int fd, void *address, size_t size, off_t offset)
{
    atomic_store(&reads, true);
    while (held_here && atomic_load(&reads_held))
        pause_ms(1);
    return syscall(SYS_pread64, fd, address, size, offset);
}

static void *perform_main(void *t)
{
    struct nvmeio_outcome outcome;

    held_here = true;
    CHECK(nvmeio_perform(stage.handle, t, &outcome) == 1);
    CHECK(outcome.result == BLOCK && !outcome.abandoned);
    return NULL;
}

static void test_a_transfer_in_the_callers_thread_outlives_the_last_worker(void)
{
    pthread_t thread;

    stage_open(4);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.size = BLOCK;
    if (!stage.file->local)
        return stage_close();
    play(hold);
    struct nvmeio_request *running = start(NVMEIO_OP_READ);
    await(&in_flight, 4);
    atomic_store(&reads_held, true);
    atomic_store(&reads, false);
    CHECK(pthread_create(&thread, NULL, perform_main, &t) == 0);
    while (!atomic_load(&reads))
        pause_ms(1);
    kill_engines(-EREMOTEIO);
    CHECK(finish(running).result == -EREMOTEIO);
    /* After this, because then the worker has been marked dead. */
    CHECK(finish(start(NVMEIO_OP_READ)).result == -EREMOTEIO);
    CHECK(nvmeio_handle_pending(stage.handle) == 1);
    atomic_store(&reads_held, false);
    pthread_join(thread, NULL);
    CHECK(file_holds(stage.path, t.address, BLOCK, 0));
    stage_close();
}

/* Replace the rings of this process by another file. */
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

static void test_a_ring_that_can_no_longer_be_entered_soon_counts_as_dead(void)
{
    struct nvmeio_config config = config_of("io_uring");
    const char *best = engine_at(0);

    if (!best || strcmp(best, "io_uring") != 0)
        return;
    stage_open(4);
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

static void test_patience_ends_when_the_kernel_refuses_for_long(void)
{
    static const int passing[] = {-EAGAIN, -EBUSY, -ENOMEM};
    struct nvmeio_patience patience = {0};

    for (int i = 0; i < 3; i++) {
        patience = (struct nvmeio_patience){0};
        CHECK(nvmeio_patience_try(&patience, passing[i]) == 0);
        patience.since_ns -= 8 * SECOND_NS;
        CHECK(nvmeio_patience_try(&patience, passing[i]) == 0);
        patience.since_ns -= 3 * SECOND_NS;
        /* A signal neither ends the series nor begins another. */
        CHECK(nvmeio_patience_try(&patience, -EINTR) == 0);
        CHECK(nvmeio_patience_try(&patience, passing[i]) == passing[i]);
    }
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
    test_a_latency_excludes_the_time_of_other_blocks();
    test_nothing_moved_is_an_error();
    test_passing_errors_are_retried();
    test_an_error_reports_how_far_the_transfer_came();
    test_a_write_that_fails_in_its_middle_has_written_no_head();
    test_an_error_of_the_disk_is_neither_an_end_of_file_nor_a_cancel();
    test_of_two_errors_the_lower_blocks_is_reported();
    test_a_failed_write_leaves_the_bytes_that_others_wrote_after_it();
    test_an_fsync_that_fails_says_so();
    test_a_record_that_fails_is_named(NVMEIO_OP_READ);
    test_a_record_that_fails_is_named(NVMEIO_OP_WRITE);
    test_bytes_before_an_error_are_in_memory();
    test_a_device_that_refuses_direct_io_is_used_through_the_page_cache();
    test_a_dead_engine_fails_its_requests_and_all_that_follow();
    test_other_workers_go_on_if_one_dies();
    test_a_transfer_in_the_callers_thread_outlives_the_last_worker();
    test_a_ring_that_can_no_longer_be_entered_soon_counts_as_dead();
    test_patience_ends_when_the_kernel_refuses_for_long();
    return 0;
}
