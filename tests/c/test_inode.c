/* Direct and buffered writes of one file take turns, whichever handle, file or thread
 * they belong to; an fsync that reports lost data fails all that cover the same writes.
 */
#include <pthread.h>
#include <sys/wait.h>

#include "inode.h"
#include "scripted.h"

#define FOLIO (2 * MIB)

static struct nvmeio_file *direct, *buffered;
static struct nvmeio_handle *other; /* beside stage.handle */

static bool is_direct(const struct nvmeio_block *block)
{
    return block->fd == block->request->file->direct_fd;
}

static bool hold_direct(struct nvmeio_block *block)
{
    return block->op != NVMEIO_OP_FSYNC && is_direct(block) ? false : perform(block);
}

static bool hold_buffered(struct nvmeio_block *block)
{
    return block->op != NVMEIO_OP_FSYNC && !is_direct(block) ? false : perform(block);
}

/* One file, opened twice, and two handles. */
static bool open_all(unsigned depth)
{
    stage_open(depth);
    other = open_handle(&stage.config);
    make_file(stage.path, 3 * FOLIO, 1);
    direct = open_file(stage.path, O_RDWR, NVMEIO_DIRECT_AUTO);
    buffered = open_file(stage.path, O_RDWR, NVMEIO_DIRECT_NEVER);
    struct nvmeio_file_info info;
    nvmeio_file_get_info(direct, &info);
    return info.direct;
}

static void close_all(void)
{
    nvmeio_file_release(direct);
    nvmeio_file_release(buffered);
    nvmeio_handle_close(other);
    stage_close();
}

static struct nvmeio_transfer block_at(struct nvmeio_file *file, int64_t offset)
{
    return transfer_of(NVMEIO_OP_WRITE, file, stage.memory.address, BLOCK, offset);
}

static struct nvmeio_request *start_at(struct nvmeio_handle *handle,
                                       struct nvmeio_file *file, int64_t offset)
{
    struct nvmeio_transfer t = block_at(file, offset);
    return submit(handle, &t);
}

static bool is_done_soon(struct nvmeio_request *request)
{
    return nvmeio_request_wait(request, 20000000) != -ETIMEDOUT;
}

static void test_writes_of_one_folio_take_turns(bool direct_first, bool one_handle)
{
    struct nvmeio_file *first = direct_first ? direct : buffered;
    struct nvmeio_file *second = direct_first ? buffered : direct;
    struct nvmeio_handle *handle = one_handle ? stage.handle : other;

    play(direct_first ? hold_direct : hold_buffered);
    struct nvmeio_request *held = start_at(stage.handle, first, 0);
    await(&in_flight, 1);
    struct nvmeio_request *waits = start_at(handle, second, FOLIO - BLOCK);
    CHECK(!is_done_soon(waits));
    /* It comes after one that waits, though it could run beside the one that runs. */
    struct nvmeio_request *alike = start_at(handle, first, BLOCK);
    struct nvmeio_request *elsewhere = start_at(handle, second, FOLIO);
    CHECK(finish(elsewhere).result == BLOCK);
    CHECK(look(&in_flight) == 1 && !is_done_soon(alike));
    play(perform);
    CHECK(finish(held).result == BLOCK);
    CHECK(finish(waits).result == BLOCK);
    CHECK(finish(alike).result == BLOCK);
    CHECK(look(&in_flight) == 0);
}

/* Blocks of one worker are noted, as long as there are slots, and listed after that. */
static void test_each_of_many_direct_writes_is_waited_for(void)
{
    struct nvmeio_request *held[200];

    stage.config.queue_depth = 200;
    stage_reopen();
    play(hold_direct);
    for (int i = 0; i < 200; i++)
        held[i] = start_at(stage.handle, direct, i == 199 ? FOLIO : 0);
    await(&in_flight, 200);
    struct nvmeio_request *waits = start_at(other, buffered, FOLIO + BLOCK);
    struct nvmeio_request *waits_too = start_at(other, buffered, 0);
    CHECK(!is_done_soon(waits) && !is_done_soon(waits_too));
    struct nvmeio_request *elsewhere = start_at(other, buffered, 2 * FOLIO);
    CHECK(finish(elsewhere).result == BLOCK);
    play(perform);
    for (int i = 0; i < 200; i++)
        CHECK(finish(held[i]).result == BLOCK);
    CHECK(finish(waits).result == BLOCK && finish(waits_too).result == BLOCK);
}

static void test_reads_wait_for_nothing(void)
{
    play(hold_direct);
    struct nvmeio_request *held = start_at(stage.handle, direct, 0);
    await(&in_flight, 1);
    struct nvmeio_transfer t = block_at(buffered, BLOCK);
    t.op = NVMEIO_OP_READ;
    CHECK(carry_out(other, &t).result == BLOCK);
    play(perform);
    CHECK(finish(held).result == BLOCK);
}

static void test_a_call_in_its_own_thread_leaves_a_wait_to_the_workers(void)
{
    struct nvmeio_outcome outcome;

    play(hold_direct);
    struct nvmeio_request *held = start_at(stage.handle, direct, 0);
    await(&in_flight, 1);
    struct nvmeio_transfer t = block_at(buffered, BLOCK);
    CHECK(nvmeio_perform(other, &t, &outcome) == 0);
    CHECK(nvmeio_handle_pending(other) == 0);
    play(perform);
    CHECK(finish(held).result == BLOCK);
    CHECK(nvmeio_perform(other, &t, &outcome) == 1 && outcome.result == BLOCK);
    t.file = direct;
    CHECK(nvmeio_perform(other, &t, &outcome) == 1 && outcome.result == BLOCK);
}

static void test_a_write_that_waits_can_be_cancelled(bool one_handle)
{
    struct nvmeio_handle *handle = one_handle ? stage.handle : other;
    struct nvmeio_transfer t = block_at(buffered, BLOCK);

    play(hold_direct);
    struct nvmeio_request *held = start_at(stage.handle, direct, 0);
    await(&in_flight, 1);
    struct nvmeio_request *cancelled = submit(handle, &t);
    struct nvmeio_request *waits = start_at(handle, direct, 2 * BLOCK);
    CHECK(!is_done_soon(cancelled) && look(&in_flight) == 1);
    nvmeio_request_cancel(cancelled);
    CHECK(finish(cancelled).result == -ECANCELED);
    /* Nothing is in its way any more. */
    await(&in_flight, 2);
    play(perform);
    CHECK(finish(held).result == BLOCK && finish(waits).result == BLOCK);
}

/* Of a request of two blocks, the second fails while the first waits. */
static bool hold_direct_and_fail(struct nvmeio_block *block)
{
    if (block->offset < (int64_t)FOLIO)
        return hold_direct(block);
    block->result = -EREMOTEIO;
    return true;
}

static void test_a_request_that_fails_gives_up_blocks_that_wait(void)
{
    play(hold_direct_and_fail);
    struct nvmeio_request *held = start_at(stage.handle, direct, 0);
    await(&in_flight, 1);
    struct nvmeio_transfer t = block_at(buffered, FOLIO - BLOCK);
    t.size = 2 * BLOCK;
    struct nvmeio_outcome outcome = carry_out(other, &t);
    CHECK(outcome.result == -EREMOTEIO && outcome.got == 0);
    play(perform);
    CHECK(finish(held).result == BLOCK);
}

/* The device refuses a direct write, which then goes through the page cache. */
static bool refuse_direct(struct nvmeio_block *block)
{
    if (!is_direct(block))
        return perform(block);
    if (block->offset == 0)
        return false;
    block->result = -EINVAL;
    return true;
}

static void test_a_write_whose_direct_way_is_refused_waits_as_a_buffered_one(void)
{
    play(refuse_direct);
    struct nvmeio_request *held = start_at(stage.handle, direct, 0);
    await(&in_flight, 1);
    struct nvmeio_request *refused = start_at(stage.handle, direct, BLOCK);
    CHECK(!is_done_soon(refused));
    play(perform);
    CHECK(finish(held).result == BLOCK && finish(refused).result == BLOCK);
    nvmeio_file_release(direct);
    direct = open_file(stage.path, O_RDWR, NVMEIO_DIRECT_AUTO);
}

/* A direct write moves a part that is no whole sector; the rest goes through the page
 * cache and waits for its turn. Then that rest is written, not all of it again. */
static int64_t rest_offset;

static bool move_a_part(struct nvmeio_block *block)
{
    if (is_direct(block) && block->offset == 0)
        return false;
    if (!is_direct(block)) {
        rest_offset = block->offset;
        return perform(block);
    }
    CHECK(pwrite(nvmeio_file_fd(buffered), block->address, 1000, block->offset) ==
          1000);
    block->result = 1000;
    return true;
}

static bool release_and_note(struct nvmeio_block *block)
{
    if (!is_direct(block))
        rest_offset = block->offset;
    return perform(block);
}

static void test_the_rest_of_a_short_write_waits_and_is_only_the_rest(void)
{
    play(move_a_part);
    struct nvmeio_request *held = start_at(stage.handle, direct, 0);
    await(&in_flight, 1);
    struct nvmeio_request *part = start_at(stage.handle, direct, BLOCK);
    CHECK(!is_done_soon(part) && rest_offset == 0);
    play(release_and_note);
    CHECK(finish(held).result == BLOCK && finish(part).result == BLOCK);
    CHECK(rest_offset == BLOCK + 1000);
    CHECK(file_holds(stage.path, stage.memory.address, BLOCK, BLOCK));
}

/* The last test, because the handles are of no use afterwards. */
static void test_a_dead_engine_holds_up_no_other_handle(void)
{
    play(hold_direct);
    struct nvmeio_request *lost = start_at(stage.handle, direct, 0);
    await(&in_flight, 1);
    struct nvmeio_request *parked = start_at(stage.handle, buffered, BLOCK);
    struct nvmeio_request *waits = start_at(other, buffered, 2 * BLOCK);
    CHECK(!is_done_soon(parked) && !is_done_soon(waits));
    pthread_mutex_lock(&mutex);
    death = -EIO;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&mutex);
    CHECK(finish(lost).result == -EIO && finish(parked).result == -EIO);
    /* Its own engine ends too, if it comes to it before the line below. */
    finish(waits);
    death = 0;
}

__attribute__((unused)) static void use_file(void)
{
    struct nvmeio_transfer t = block_at(buffered, BLOCK);

    CHECK(carry_out(other, &t).result == BLOCK);
    t.file = direct;
    CHECK(carry_out(other, &t).result == BLOCK);
}

/* The sanitizers of gcc 12 cannot follow forks (test_fork.c says why). */
static void test_a_forked_child_waits_for_none_of_its_parents(void)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    int status;

    play(hold_direct);
    struct nvmeio_request *held = start_at(stage.handle, direct, 0);
    await(&in_flight, 1);
    struct nvmeio_request *waits = start_at(other, buffered, BLOCK);
    CHECK(!is_done_soon(waits));
    fflush(NULL);
    pthread_mutex_lock(&mutex);
    pid_t pid = fork();
    pthread_mutex_unlock(&mutex);
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(60);
        play(perform);
        use_file();
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    play(perform);
    CHECK(finish(held).result == BLOCK && finish(waits).result == BLOCK);
#endif
}

static int sync_error;

/* The kernel tells a descriptor of an error once. */
static bool fail_one_sync(struct nvmeio_block *block)
{
    if (block->op != NVMEIO_OP_FSYNC)
        return perform(block);
    block->result = calls++ == 0 ? -sync_error : 0;
    return true;
}

static int64_t sync_by(struct nvmeio_handle *handle, struct nvmeio_file *file)
{
    struct nvmeio_transfer t = {.op = NVMEIO_OP_FSYNC, .file = file};
    return carry_out(handle, &t).result;
}

static struct nvmeio_request *start_sync(struct nvmeio_handle *handle,
                                         struct nvmeio_file *file)
{
    struct nvmeio_transfer t = {.op = NVMEIO_OP_FSYNC, .file = file};
    return submit(handle, &t);
}

static void test_lost_data_fail_every_fsync_that_covers_them(void)
{
    static const int errors[] = {EIO, ENOSPC, EDQUOT};

    for (int i = 0; i < 3; i++) {
        sync_error = errors[i];
        play(hold);
        struct nvmeio_request *first = start_sync(stage.handle, direct);
        struct nvmeio_request *second = start_sync(stage.handle, direct);
        struct nvmeio_request *third = start_sync(other, buffered);
        await(&in_flight, 1);
        CHECK(!is_done_soon(first) && look(&in_flight) == 1);
        play(fail_one_sync);
        CHECK(finish(first).result == -sync_error);
        CHECK(finish(second).result == -sync_error);
        CHECK(finish(third).result == -sync_error);
        /* Whatever is synced next cannot bring the data back. */
        CHECK(sync_by(other, direct) == -sync_error);
        CHECK(sync_by(stage.handle, buffered) == -sync_error);
        /* The kernel knows nothing more to tell one who opens the file now. */
        struct nvmeio_file *late = open_file(stage.path, O_RDWR, NVMEIO_DIRECT_AUTO);
        CHECK(sync_by(other, late) == 0);
        nvmeio_file_release(late);
        nvmeio_file_release(direct);
        nvmeio_file_release(buffered);
        direct = open_file(stage.path, O_RDWR, NVMEIO_DIRECT_AUTO);
        buffered = open_file(stage.path, O_RDWR, NVMEIO_DIRECT_NEVER);
    }
}

static void test_an_fsync_that_was_not_carried_out_loses_nothing(void)
{
    static const int errors[] = {EINVAL, ENOMEM};

    for (int i = 0; i < 2; i++) {
        sync_error = errors[i];
        play(fail_one_sync);
        CHECK(sync_by(stage.handle, direct) == -sync_error);
        CHECK(sync_by(stage.handle, direct) == 0);
    }
}

int main(void)
{
    begin();
    stage.path = path_in(test_folder());
    if (!open_all(4)) {
        printf("skipped: this file system has no O_DIRECT\n");
        return 77;
    }
    for (int i = 0; i < 4; i++)
        test_writes_of_one_folio_take_turns(i & 1, i & 2);
    test_reads_wait_for_nothing();
    test_a_call_in_its_own_thread_leaves_a_wait_to_the_workers();
    test_a_write_that_waits_can_be_cancelled(true);
    test_a_write_that_waits_can_be_cancelled(false);
    test_a_request_that_fails_gives_up_blocks_that_wait();
    test_each_of_many_direct_writes_is_waited_for();
    test_a_forked_child_waits_for_none_of_its_parents();
    test_lost_data_fail_every_fsync_that_covers_them();
    test_an_fsync_that_was_not_carried_out_loses_nothing();
    test_a_write_whose_direct_way_is_refused_waits_as_a_buffered_one();
    test_the_rest_of_a_short_write_waits_and_is_only_the_rest();
    test_a_dead_engine_holds_up_no_other_handle();
    close_all();
    return 0;
}
