/* Requests that are cancelled, or in flight when the handle is closed. */
#include <sys/syscall.h>

#include "scripted.h"

static void test_a_cancelled_request_ends_when_its_blocks_are_back(void)
{
    struct nvmeio_outcome outcome;

    stage_open(2);
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

static void test_the_return_value_of_cancel_stays_true(void)
{
    stage_open(2);
    play(hold);
    struct nvmeio_request *request = start(NVMEIO_OP_READ);
    await(&in_flight, 2);
    CHECK(nvmeio_request_cancel(request) == 1);
    play(fail);
    CHECK(finish(request).result == -ECANCELED);
    stage_close();
}

static void test_requests_wholly_in_flight_or_done_cannot_be_cancelled(void)
{
    stage_open(16);
    play(hold);
    struct nvmeio_request *request = start(NVMEIO_OP_READ);
    await(&in_flight, BLOCKS);
    CHECK(nvmeio_request_cancel(request) == 0);
    play(perform);
    wait_for(request);
    CHECK(nvmeio_request_cancel(request) == 0);
    CHECK(finish(request).result == BLOCKS * BLOCK);
    stage_close();
}

static void *drain_main(void *argument)
{
    CHECK(nvmeio_handle_drain(argument, LONG_NS) == 0);
    return NULL;
}

static void test_drain_waits_for_requests_submitted_meanwhile(void)
{
    pthread_t thread;

    stage_open(16);
    play(hold);
    struct nvmeio_request *first = start(NVMEIO_OP_READ);
    await(&in_flight, BLOCKS);
    pthread_create(&thread, NULL, drain_main, stage.handle);
    pause_ms(20);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
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

static void test_close_waits_for_requests_in_flight_and_refuses_more(void)
{
    pthread_t thread;
    struct nvmeio_request *late;

    stage_open(16);
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

    stage_open(4);
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

/* Reads of the first two pages together fail; reads of one of them are held. */
static bool fail_together(struct nvmeio_block *block)
{
    if (block->offset >= (int64_t)(2 * PAGE))
        return perform(block);
    calls = block->bytes == PAGE;
    block->result = -EIO;
    return block->bytes > PAGE;
}

/* Replaces close() in the library; takes as long as a test wants. */
static atomic_bool closes_slowly, closes;

int close(int fd)
{
    atomic_store(&closes, true);
    while (atomic_load(&closes_slowly))
        pause_ms(1);
    return (int)syscall(SYS_close, fd);
}

static void *cancel_main(void *request)
{
    CHECK(nvmeio_request_cancel(request) == 1);
    return NULL;
}

static void *wait_main(void *request)
{
    wait_for(request);
    return NULL;
}

/* Threads that wait for a request, or for all, which another thread ends. */
static bool sleeps(struct nvmeio_request *request, bool drains)
{
    return drains ? is_drained(stage.handle) : is_awaited(request);
}

/* The cancelling thread drops the last reference to the request's file, and so closes
 * it.  Meanwhile it delays only threads that wait for this request. */
static void test_a_slow_end_of_a_request_delays_only_its_waiters(bool drains)
{
    pthread_t ends, waits;

    stage_open(2);
    play(hold);
    struct nvmeio_request *running = start(NVMEIO_OP_READ);
    await(&in_flight, 2);
    struct nvmeio_file *file = open_file(stage.path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct nvmeio_transfer t = whole(NVMEIO_OP_READ);
    t.file = file;
    struct nvmeio_request *request = submit(stage.handle, &t);
    nvmeio_file_release(file);
    atomic_store(&closes_slowly, true);
    atomic_store(&closes, false);
    CHECK(pthread_create(&ends, NULL, cancel_main, request) == 0);
    while (!atomic_load(&closes))
        pause_ms(1);
    CHECK(pthread_create(&waits, NULL, drains ? drain_main : wait_main,
                         drains ? (void *)stage.handle : request) == 0);
    while (!sleeps(request, drains))
        pause_ms(1);
    play(perform);
    CHECK(finish(running).result == BLOCKS * BLOCK);
    CHECK(!nvmeio_request_done(request) && sleeps(request, drains));
    CHECK(nvmeio_handle_pending(stage.handle) == 1);
    atomic_store(&closes_slowly, false);
    pthread_join(ends, NULL);
    pthread_join(waits, NULL);
    CHECK(finish(request).result == -ECANCELED);
    stage_close();
}

static void test_a_gather_cancelled_in_its_second_attempt_keeps_landed_records(void)
{
    const int64_t offsets[] = {0, PAGE, 2 * BLOCK}, places[] = {PAGE, 0, 2 * PAGE};
    const int64_t size = PAGE;
    struct nvmeio_request *request;
    struct nvmeio_failure failures[3];
    size_t offender;

    stage_open(1);
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
    CHECK(nvmeio_request_failures(request, failures, 3) == 0);
    CHECK(nvmeio_request_cancel(request) == 1);
    play(perform);
    wait_for(request);
    CHECK(nvmeio_request_failures(request, failures, 3) == 1);
    CHECK(failures[0].index == 1 && failures[0].error == -ECANCELED);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -ECANCELED && outcome.got == (int64_t)(2 * PAGE));
    CHECK(file_holds(stage.path, stage.memory.address + PAGE, PAGE, 0));
    CHECK(file_holds(stage.path, stage.memory.address + 2 * PAGE, PAGE, 2 * BLOCK));
    stage_close();
}

int main(void)
{
    begin();
    stage.path = path_in(test_folder());
    test_a_cancelled_request_ends_when_its_blocks_are_back();
    test_the_return_value_of_cancel_stays_true();
    test_requests_wholly_in_flight_or_done_cannot_be_cancelled();
    test_drain_waits_for_requests_submitted_meanwhile();
    test_close_waits_for_requests_in_flight_and_refuses_more();
    test_a_write_refused_by_a_closed_handle_leaves_no_bytes();
    test_a_slow_end_of_a_request_delays_only_its_waiters(false);
    test_a_slow_end_of_a_request_delays_only_its_waiters(true);
    test_a_gather_cancelled_in_its_second_attempt_keeps_landed_records();
    return 0;
}
