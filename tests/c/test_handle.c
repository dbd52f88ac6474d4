/* A handle under many threads, many requests, signals and early ends, on every engine.
 */
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <sys/syscall.h>

#include "handle_internal.h"
#include "transfer.h"

#define SIZE (256 * KIB)
#define THREADS 8

static const char *path;

static void pause_ms(long ms)
{
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

static struct nvmeio_request *submit_read(struct nvmeio_handle *handle,
                                          struct nvmeio_file *file, void *address,
                                          bool caller)
{
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file, address, SIZE, 0);

    t.caller = caller;
    return submit(handle, &t);
}

/* Each thread has a region of the file to itself, which it writes and reads. */
struct worker {
    pthread_t thread;
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    unsigned index;
    bool caller;
};

static void *work(void *argument)
{
    struct worker *worker = argument;
    struct nvmeio_transfer t;
    struct guarded out = guarded_new(SIZE / 8, worker->index);
    struct guarded in = guarded_new(SIZE / 8, 0);
    int64_t offset = (int64_t)(worker->index * (SIZE / 8)) + worker->index;

    for (unsigned round = 0; round < 20; round++) {
        fill(out.address, out.size, 0, worker->index * 100 + round);
        t = transfer_of(NVMEIO_OP_WRITE, worker->file, out.address, out.size, offset);
        t.caller = worker->caller;
        CHECK(carry_out(worker->handle, &t).result == (int64_t)out.size);
        t = transfer_of(NVMEIO_OP_READ, worker->file, in.address, in.size, offset);
        t.caller = worker->caller != (round & 1);
        CHECK(carry_out(worker->handle, &t).result == (int64_t)in.size);
        CHECK(memcmp(out.address, in.address, in.size) == 0);
    }
    guarded_free(&out);
    guarded_free(&in);
    return NULL;
}

static void test_threads_share_a_handle(const char *engine)
{
    for (int caller = 0; caller < 2; caller++) {
        struct worker workers[THREADS];
        struct nvmeio_config config = config_of(engine);
        config.block_bytes = 8 * KIB;
        config.queue_depth = 4;
        config.lanes = 1 + 2 * (unsigned)caller;
        config.overlap_events = caller;
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
        for (unsigned i = 0; i < THREADS; i++) {
            workers[i] = (struct worker){
                .handle = handle, .file = file, .index = i, .caller = caller};
            CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
        }
        for (unsigned i = 0; i < THREADS; i++)
            pthread_join(workers[i].thread, NULL);
        nvmeio_file_release(file);
        nvmeio_handle_close(handle);
    }
}

static void *wait_main(void *request)
{
    struct nvmeio_outcome outcome;

    wait_for(request);
    CHECK(nvmeio_request_outcome(request, &outcome) == 0);
    CHECK(outcome.result == SIZE);
    return NULL;
}

static void test_many_threads_wait_for_one_request(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(SIZE, 0);
    pthread_t threads[THREADS];

    for (int round = 0; round < 20; round++) {
        struct nvmeio_request *request =
            submit_read(handle, file, memory.address, round & 1);
        for (int i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, wait_main, request) == 0);
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
        nvmeio_request_release(request);
    }
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_more_requests_than_the_queue_holds(const char *engine)
{
    enum { COUNT = 300 };
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_request *requests[COUNT];
    static char memory[COUNT][1000];
    static char expected[COUNT * 512 + 1000];

    config.queue_depth = 2;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    CHECK(read_at(handle, file, expected, sizeof(expected), 0).result > 0);
    for (int i = 0; i < COUNT; i++) {
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_READ, file, memory[i], 1000, i * 512);
        requests[i] = submit(handle, &t);
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK(finish(requests[i]).result == 1000);
        CHECK(memcmp(memory[i], expected + i * 512, 1000) == 0);
    }
    CHECK(nvmeio_handle_pending(handle) == 0);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* More at once than the handle has rings to lend. */
static void test_many_threads_may_carry_out_their_own(const char *engine)
{
    enum { COUNT = 20 };
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct nvmeio_request *requests[COUNT];
    struct guarded memory = guarded_new(COUNT * PAGE, 0);

    for (size_t i = 0; i < COUNT; i++) {
        struct nvmeio_transfer t = transfer_of(
            NVMEIO_OP_READ, file, memory.address + i * PAGE, PAGE, (int64_t)(i * PAGE));
        t.caller = true;
        requests[i] = submit(handle, &t);
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK(nvmeio_request_wait(requests[i], INT64_MAX) == 0);
        CHECK(finish(requests[i]).result == (int64_t)PAGE);
    }
    CHECK(file_holds(path, memory.address, COUNT * PAGE, 0));
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* Whose bounces are small, for all have to do with as much as one. */
static void test_many_lanes_share_the_memory_for_bounces(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_stats stats;

    config.lanes = 64;
    config.queue_depth = 1;
    config.block_bytes = MIB;
    config.bounce = NVMEIO_BOUNCE_ALWAYS;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(SIZE, 0);
    CHECK(read_at(handle, file, memory.address, SIZE, 0).result == (int64_t)SIZE);
    CHECK(file_holds(path, memory.address, SIZE, 0));
    nvmeio_handle_stats(handle, &stats);
    CHECK(stats.bytes_bounced == 0 ||
          stats.blocks >= SIZE / (NVMEIO_LANE_BOUNCE_BYTES / 64 / 2));
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_each_user_is_popped_once(const char *engine)
{
    enum { COUNT = 50 };
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct nvmeio_request *requests[COUNT];
    unsigned char seen[COUNT] = {0};
    char memory[COUNT][16];
    void *users[7];
    unsigned found, total = 0;

    for (int i = 0; i < COUNT; i++) {
        struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file, memory[i], 16, i);
        t.user = &seen[i];
        requests[i] = submit(handle, &t);
    }
    CHECK(nvmeio_handle_drain(handle, LONG_NS) == 0);
    /* The first, the last, and some between. */
    for (int i = 0; i < COUNT; i += 7) {
        CHECK(nvmeio_request_take(requests[i]));
        CHECK(!nvmeio_request_take(requests[i]));
        seen[i]++;
        total++;
    }
    while ((found = nvmeio_handle_pop(handle, users, 7)) > 0) {
        total += found;
        for (unsigned i = 0; i < found; i++)
            CHECK((*(unsigned char *)users[i])++ == 0);
    }
    CHECK(total == COUNT);
    for (int i = 0; i < COUNT; i++) {
        CHECK(!nvmeio_request_take(requests[i]));
        CHECK(seen[i] == 1);
        nvmeio_request_release(requests[i]);
    }
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_a_request_outlives_its_handle_and_its_file(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(2 * SIZE, 5);
    struct nvmeio_request *request = submit_read(handle, file, memory.address, false);
    struct nvmeio_request *unread =
        submit_read(handle, file, memory.address + SIZE, true);

    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
    CHECK(nvmeio_request_done(request));
    CHECK(nvmeio_request_cancel(request) == 0);
    CHECK(finish(request).result == SIZE);
    CHECK(finish(unread).result == SIZE);
    CHECK(file_holds(path, memory.address, SIZE, 0));
    CHECK(file_holds(path, memory.address + SIZE, SIZE, 0));
    guarded_free(&memory);
}

static void test_closing_waits_for_all_and_leaves_the_memory_alone(const char *engine)
{
    for (int round = 0; round < 10; round++) {
        struct nvmeio_config config = config_of(engine);
        config.lanes = 2;
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
        struct guarded memory = guarded_new(8 * SIZE, 0);
        for (unsigned i = 0; i < 8; i++)
            nvmeio_request_release(
                submit_read(handle, file, memory.address + i * SIZE, i & 1));
        nvmeio_handle_close(handle);
        for (unsigned i = 0; i < 8; i++)
            CHECK(file_holds(path, memory.address + i * SIZE, SIZE, 0));
        memset(memory.address, 1, memory.size);
        pause_ms(2);
        for (size_t i = 0; i < memory.size; i++)
            CHECK(memory.address[i] == 1);
        guarded_free(&memory);
        nvmeio_file_release(file);
    }
}

/* The thread that carried the last request out may still be on its way back. */
static void test_closing_beside_a_thread_that_waits(const char *engine)
{
    for (int round = 0; round < 80; round++) {
        struct nvmeio_config config = config_of(engine);
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
        struct guarded memory = guarded_new(SIZE, 0);
        struct nvmeio_request *request =
            submit_read(handle, file, memory.address, true);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, wait_main, request) == 0);
        nvmeio_handle_close(handle);
        pthread_join(thread, NULL);
        nvmeio_request_release(request);
        nvmeio_file_release(file);
        guarded_free(&memory);
    }
}

static atomic_uint signals;

static void on_signal(int number)
{
    (void)number;
    atomic_fetch_add(&signals, 1);
}

static void test_a_storm_of_signals_loses_nothing(const char *engine)
{
    struct sigaction action = {.sa_handler = on_signal};
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    const struct timespec period = {0, 100000};
    const struct itimerspec storm = {period, period};
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(SIZE, 0);
    timer_t timer;

    atomic_store(&signals, 0);
    sigaction(SIGUSR1, &action, NULL);
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    CHECK(timer_settime(timer, 0, &storm, NULL) == 0);
    for (int round = 0; round < 100 || atomic_load(&signals) < 20; round++) {
        struct nvmeio_transfer t =
            transfer_of(round & 2 ? NVMEIO_OP_WRITE : NVMEIO_OP_READ, file,
                        memory.address, SIZE - (round & 4 ? 100 : 0), 0);
        t.caller = round & 1;
        CHECK(carry_out(handle, &t).result == (int64_t)t.size);
    }
    timer_delete(timer);
    signal(SIGUSR1, SIG_IGN);
    CHECK(file_holds(path, memory.address, SIZE, 0));
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* Begin a request that another thread is to finish. */
static void *begin_main(void *request)
{
    nvmeio_request_wait(request, 50000);
    return NULL;
}

static void test_a_request_survives_the_thread_that_began_it(const char *engine)
{
    struct nvmeio_config config = config_of(engine);

    config.block_bytes = 16 * KIB;
    struct nvmeio_handle *handle = open_handle(&config);
    for (int round = 0; round < 60; round++) {
        enum nvmeio_direct direct =
            round & 1 ? NVMEIO_DIRECT_NEVER : NVMEIO_DIRECT_AUTO;
        struct nvmeio_file *file = open_file(path, O_RDONLY, direct);
        struct guarded memory = guarded_new(SIZE, 0);
        pthread_t thread;
        posix_fadvise(nvmeio_file_fd(file), 0, 0, POSIX_FADV_DONTNEED);
        struct nvmeio_request *request =
            submit_read(handle, file, memory.address, true);
        CHECK(pthread_create(&thread, NULL, begin_main, request) == 0);
        pthread_join(thread, NULL);
        struct nvmeio_outcome outcome = finish(request);
        CHECK(outcome.result == SIZE);
        CHECK(file_holds(path, memory.address, SIZE, 0));
        guarded_free(&memory);
        nvmeio_file_release(file);
    }
    nvmeio_handle_close(handle);
}

static void test_cancelling_at_any_moment_ends_in_one_of_two_ways(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    unsigned cancelled = 0;

    config.block_bytes = 4 * KIB;
    config.queue_depth = 4;
    config.lanes = 2;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(SIZE, 0);
    for (int round = 0; round < 200; round++) {
        struct nvmeio_request *request =
            submit_read(handle, file, memory.address, round & 1);
        struct timespec pause = {0, round * 5000};
        nanosleep(&pause, NULL);
        int dropped = nvmeio_request_cancel(request);
        struct nvmeio_outcome outcome = finish(request);
        CHECK(outcome.result == (dropped ? -ECANCELED : (int64_t)SIZE));
        CHECK(outcome.got <= (int64_t)SIZE);
        CHECK(file_holds(path, memory.address, (size_t)outcome.got, 0));
        cancelled += (unsigned)dropped;
    }
    CHECK(cancelled > 0);
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_an_fsync_stands_behind_writes_of_all_threads(const char *engine)
{
    struct nvmeio_config config = config_of(engine);

    config.lanes = 2;
    config.overlap_events = true;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(SIZE, 0);
    fill(memory.address, SIZE, 0, 3);
    for (int round = 0; round < 10; round++) {
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_WRITE, file, memory.address, SIZE / 2, 0);
        struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = file};
        struct nvmeio_request *a = submit(handle, &t);
        t.address = memory.address + SIZE / 2;
        t.offset = SIZE / 2;
        t.caller = true;
        struct nvmeio_request *b = submit(handle, &t);
        CHECK(carry_out(handle, &sync).result == 0);
        CHECK(nvmeio_request_done(a) && nvmeio_request_done(b));
        CHECK(finish(a).result == SIZE / 2 && finish(b).result == SIZE / 2);
    }
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_a_handle_can_be_stopped_by_many_and_closed_after(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    char memory[16];
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file, memory, 16, 0);
    struct nvmeio_request *request;
    struct nvmeio_stats stats;

    CHECK(carry_out(handle, &t).result == 16);
    nvmeio_handle_stop(handle);
    nvmeio_handle_stop(handle);
    CHECK(nvmeio_submit(handle, &t, &request) == -EPIPE);
    nvmeio_handle_stats(handle, &stats);
    CHECK(stats.requests == 1 && stats.blocks == 1);
    nvmeio_handle_close(handle);
    nvmeio_file_release(file);
}

static void *stop_main(void *handle)
{
    nvmeio_handle_stop(handle);
    return NULL;
}

static void test_figures_neither_shrink_nor_double_while_lanes_stop(const char *engine)
{
    for (int round = 0; round < 10; round++) {
        struct nvmeio_config config = config_of(engine);
        struct nvmeio_stats stats;
        char memory[16];
        pthread_t thread;
        config.lanes = 8;
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_NEVER);
        for (int i = 0; i < 20; i++)
            CHECK(read_at(handle, file, memory, 16, 0).result == 16);
        CHECK(pthread_create(&thread, NULL, stop_main, handle) == 0);
        for (int i = 0; i < 2000; i++) {
            nvmeio_handle_stats(handle, &stats);
            CHECK(stats.blocks == 20 && stats.bytes_buffered == 20 * 16);
        }
        pthread_join(thread, NULL);
        nvmeio_file_release(file);
        nvmeio_handle_close(handle);
    }
}

/* A thread has let go of the mutex on its way into its caller lane when its request is
 * cancelled: the lane has nothing to do then, least of all the requests of others. */
static void test_a_cancelled_caller_leaves_the_queue_alone(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    config.queue_depth = 1;
    config.block_bytes = 4 * KIB;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(SIZE, 0), small = guarded_new(SIZE, 0);

    struct nvmeio_request *mine = submit_read(handle, file, small.address, true);
    struct nvmeio_lane *lane = mine->caller_lane;
    if (lane) {
        /* What nvmeio_request_wait() does, up to its first look at the queue. */
        pthread_mutex_lock(&handle->mutex);
        lane->driven = true;
        pthread_mutex_unlock(&handle->mutex);
        CHECK(nvmeio_request_cancel(mine) == 1);
        struct nvmeio_request *other = submit_read(handle, file, memory.address, false);
        while (!nvmeio_request_done(other)) {
            CHECK(!nvmeio_lane_turn(lane, 0));
            CHECK(lane->in_flight == 0);
        }
        pthread_mutex_lock(&handle->mutex);
        lane->driven = false;
        pthread_mutex_unlock(&handle->mutex);
        CHECK(finish(other).result == SIZE);
        CHECK(file_holds(path, memory.address, SIZE, 0));
        CHECK(finish(mine).result == -ECANCELED);
    } else {
        CHECK(finish(mine).result == SIZE);
    }
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
    guarded_free(&memory);
    guarded_free(&small);
}

/* The library's pread() is this one, which holds up reads of the second half. */
static atomic_bool second_half_is_slow;

ssize_t pread(int fd, void *buffer, size_t size, off_t offset)
{
    while (offset >= (off_t)SIZE && atomic_load(&second_half_is_slow))
        pause_ms(1);
    return syscall(SYS_pread64, fd, buffer, size, offset);
}

/* Slow reads take three of the four places that two lanes have. */
static void test_a_read_goes_where_there_is_a_place_free(void)
{
    struct nvmeio_config config = config_of("threads");
    config.lanes = 2;
    config.queue_depth = 2;
    config.overlap_events = true;
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_NEVER);
    struct guarded memory = guarded_new(4 * PAGE, 0);

    for (int round = 0; round < 10; round++) {
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_request *slow[3];
        atomic_store(&second_half_is_slow, true);
        for (size_t i = 0; i < 3; i++) {
            struct nvmeio_transfer t =
                transfer_of(NVMEIO_OP_READ, file, memory.address + i * PAGE, PAGE,
                            (int64_t)(SIZE + i * PAGE));
            slow[i] = submit(handle, &t);
            if (i == 0)
                pause_ms(10);
        }
        CHECK(read_at(handle, file, memory.address + 3 * PAGE, PAGE, 0).result ==
              (int64_t)PAGE);
        atomic_store(&second_half_is_slow, false);
        for (size_t i = 0; i < 3; i++)
            CHECK(finish(slow[i]).result == (int64_t)PAGE);
        nvmeio_handle_close(handle);
    }
    nvmeio_file_release(file);
    guarded_free(&memory);
}

int main(void)
{
    const char *engine;

    begin();
    path = path_in(test_folder());
    make_file(path, 2 * SIZE, 1);
    FOR_EACH_ENGINE(engine)
    {
        test_threads_share_a_handle(engine);
        test_many_threads_wait_for_one_request(engine);
        test_more_requests_than_the_queue_holds(engine);
        test_many_threads_may_carry_out_their_own(engine);
        test_many_lanes_share_the_memory_for_bounces(engine);
        test_each_user_is_popped_once(engine);
        test_a_request_outlives_its_handle_and_its_file(engine);
        test_closing_waits_for_all_and_leaves_the_memory_alone(engine);
        test_closing_beside_a_thread_that_waits(engine);
        test_a_storm_of_signals_loses_nothing(engine);
        test_a_request_survives_the_thread_that_began_it(engine);
        test_cancelling_at_any_moment_ends_in_one_of_two_ways(engine);
        test_an_fsync_stands_behind_writes_of_all_threads(engine);
        test_a_handle_can_be_stopped_by_many_and_closed_after(engine);
        test_figures_neither_shrink_nor_double_while_lanes_stop(engine);
        test_a_cancelled_caller_leaves_the_queue_alone(engine);
    }
    test_a_read_goes_where_there_is_a_place_free();
    return 0;
}
