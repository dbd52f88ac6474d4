/* A handle under many threads, many requests, signals and early ends, on every engine.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "handle_internal.h"
#include "file_internal.h"
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
                                          struct nvmeio_file *file, void *address)
{
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file, address, SIZE, 0);

    return submit(handle, &t);
}

/* Each thread writes and reads its own region of the file. */
struct user {
    pthread_t thread;
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    unsigned index;
    bool perform;
};

static void *work(void *argument)
{
    struct user *user = argument;
    struct nvmeio_transfer t;
    struct guarded out = guarded_new(SIZE / 8, user->index);
    struct guarded in = guarded_new(SIZE / 8, 0);
    int64_t offset = (int64_t)(user->index * (SIZE / 8)) + user->index;

    for (unsigned round = 0; round < 20; round++) {
        fill(out.address, out.size, 0, user->index * 100 + round);
        t = transfer_of(NVMEIO_OP_WRITE, user->file, out.address, out.size, offset);
        CHECK(carry_out_by(user->perform, user->handle, &t).result ==
              (int64_t)out.size);
        t = transfer_of(NVMEIO_OP_READ, user->file, in.address, in.size, offset);
        CHECK(carry_out_by(user->perform != (round & 1), user->handle, &t).result ==
              (int64_t)in.size);
        CHECK(memcmp(out.address, in.address, in.size) == 0);
    }
    guarded_free(&out);
    guarded_free(&in);
    return NULL;
}

static void test_threads_share_a_handle(const char *engine)
{
    for (int perform = 0; perform < 2; perform++) {
        struct user users[THREADS];
        struct nvmeio_config config = config_of(engine);
        config.block_bytes = 8 * KIB;
        config.queue_depth = 4;
        config.workers = 1 + 2 * (unsigned)perform;
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
        for (unsigned i = 0; i < THREADS; i++) {
            users[i] = (struct user){
                .handle = handle, .file = file, .index = i, .perform = perform};
            CHECK(pthread_create(&users[i].thread, NULL, work, &users[i]) == 0);
        }
        for (unsigned i = 0; i < THREADS; i++)
            pthread_join(users[i].thread, NULL);
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
        struct nvmeio_request *request = submit_read(handle, file, memory.address);
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

static void test_more_requests_than_the_queue_holds_are_completed(const char *engine)
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

/* Their bounces are small, because all share the memory that one would have. */
static void test_many_workers_share_the_memory_for_bounces(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_stats stats;

    config.workers = 64;
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
          stats.blocks >= SIZE / (NVMEIO_ARENA_BYTES_MAX / 64 / 2));
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_each_completion_is_reported_once(const char *engine)
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
        CHECK(nvmeio_request_wait(requests[i], 0) == 1);
        CHECK(nvmeio_request_wait(requests[i], 0) == 0);
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
        CHECK(nvmeio_request_wait(requests[i], 0) == 0);
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
    struct nvmeio_request *request = submit_read(handle, file, memory.address);
    struct nvmeio_request *unread = submit_read(handle, file, memory.address + SIZE);

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

static void test_close_waits_and_then_leaves_the_memory_alone(const char *engine)
{
    for (int round = 0; round < 10; round++) {
        struct nvmeio_config config = config_of(engine);
        config.workers = 2;
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
        struct guarded memory = guarded_new(8 * SIZE, 0);
        for (unsigned i = 0; i < 8; i++)
            nvmeio_request_release(
                submit_read(handle, file, memory.address + i * SIZE));
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

/* That thread may still be returning from its wait when the handle is freed. */
static void test_close_while_a_thread_waits(const char *engine)
{
    for (int round = 0; round < 80; round++) {
        struct nvmeio_config config = config_of(engine);
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
        struct guarded memory = guarded_new(SIZE, 0);
        struct nvmeio_request *request = submit_read(handle, file, memory.address);
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
        if (round & 8)
            t.size = PAGE;
        CHECK(carry_out_by(round & 1, handle, &t).result == (int64_t)t.size);
    }
    timer_delete(timer);
    signal(SIGUSR1, SIG_IGN);
    CHECK(file_holds(path, memory.address, SIZE, 0));
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* Otherwise workers would run the program's handlers, or take signals from sigwait(3).
 * */
static void test_workers_take_no_signals_of_the_program(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct sigaction action = {.sa_handler = on_signal};
    char memory[16];
    sigset_t ours, pending;
    int number;

    atomic_store(&signals, 0);
    sigemptyset(&ours);
    sigaddset(&ours, SIGUSR1);
    sigaction(SIGUSR1, &action, NULL);
    pthread_sigmask(SIG_BLOCK, &ours, NULL);
    CHECK(kill(getpid(), SIGUSR1) == 0);
    CHECK(read_at(handle, file, memory, 16, 0).result == 16);
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1) == 1);
    CHECK(sigwait(&ours, &number) == 0 && number == SIGUSR1);
    CHECK(atomic_load(&signals) == 0);
    pthread_sigmask(SIG_UNBLOCK, &ours, NULL);
    signal(SIGUSR1, SIG_IGN);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

static void test_a_cancel_at_any_moment_has_one_of_two_outcomes(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    unsigned cancelled = 0;

    config.block_bytes = 4 * KIB;
    config.queue_depth = 4;
    config.workers = 2;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(SIZE, 0);
    for (int round = 0; round < 200; round++) {
        struct nvmeio_request *request = submit_read(handle, file, memory.address);
        struct timespec pause = {0, round * 5000};
        if (round & 3)
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

static void test_an_fsync_waits_for_writes_of_all_threads(const char *engine)
{
    struct nvmeio_config config = config_of(engine);

    config.workers = 2;
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
        struct nvmeio_request *b = submit(handle, &t);
        CHECK(carry_out(handle, &sync).result == 0);
        CHECK(nvmeio_request_done(a) && nvmeio_request_done(b));
        CHECK(finish(a).result == SIZE / 2 && finish(b).result == SIZE / 2);
    }
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* Replace fsync() and fdatasync() in the library. */
static atomic_uint fsyncs, fdatasyncs;

int fsync(int fd)
{
    atomic_fetch_add(&fsyncs, 1);
    return (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
    atomic_fetch_add(&fdatasyncs, 1);
    return (int)syscall(SYS_fdatasync, fd);
}

static void test_an_fsync_of_the_data_alone_is_fdatasync(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    bool by_kernel = strcmp(engine, "libaio") == 0;
    bool by_function = strcmp(engine, "io_uring") != 0 && !by_kernel;

    for (int data_only = 0; data_only < 2; data_only++) {
        struct nvmeio_transfer sync = {
            .op = NVMEIO_OP_FSYNC, .file = file, .data_only = data_only};
        unsigned fsyncs_before = atomic_load(&fsyncs);
        unsigned fdatasyncs_before = atomic_load(&fdatasyncs);
        CHECK(carry_out(handle, &sync).result == 0);
        bool full = atomic_load(&fsyncs) > fsyncs_before;
        bool data = atomic_load(&fdatasyncs) > fdatasyncs_before;
        /* An io_uring worker calls one only if the kernel has cancelled its entry. */
        CHECK(data_only ? !full : !data);
        CHECK(!by_function || full != data);
        /* With libaio the worker is not delayed either. */
        CHECK(!by_kernel || !(full || data));
    }
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* A thread that sits in vfork(2) until its child has read from a pipe. */
struct sitter {
    pthread_t thread;
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    struct guarded memory;
    int sits[2], go_on[2];
};

/* A thread with a pending cancellation submits a request that fails at once, so that it
 * signals an eventfd. */
static void *submit_cancelled(void *argument)
{
    struct sitter *sitter = argument;
    struct nvmeio_transfer past_the_end = transfer_of(
        NVMEIO_OP_READ, sitter->file, sitter->memory.address, SIZE, INT64_C(1) << 40);

    pthread_cancel(pthread_self());
    nvmeio_request_release(submit(sitter->handle, &past_the_end));
    sitter->sits[0] = 1;
    pthread_testcancel();
    return NULL;
}

static void test_a_cancelled_thread_leaves_nothing_locked(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct sitter sitter = {.handle = open_handle(&config)};
    int fd = eventfd(0, EFD_NONBLOCK);
    uint64_t signals;
    void *end;

    sitter.file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    sitter.memory = guarded_new(SIZE, 0);
    CHECK(nvmeio_handle_watch(sitter.handle, fd) == 0);
    pthread_create(&sitter.thread, NULL, submit_cancelled, &sitter);
    pthread_join(sitter.thread, &end);
    CHECK(sitter.sits[0] == 1 && end == PTHREAD_CANCELED);
    CHECK(read(fd, &signals, sizeof(signals)) == sizeof(signals));
    CHECK(nvmeio_handle_drain(sitter.handle, LONG_NS) == 0);
    guarded_free(&sitter.memory);
    nvmeio_file_release(sitter.file);
    nvmeio_handle_close(sitter.handle);
    close(fd);
}

static void *stop_cancelled(void *handle)
{
    pthread_cancel(pthread_self());
    nvmeio_handle_stop(handle);
    pthread_testcancel();
    return NULL;
}

/* It joins workers, which is a cancellation point. */
static void test_a_cancelled_thread_stops_a_handle(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    pthread_t thread;
    void *end;

    CHECK(pthread_create(&thread, NULL, stop_cancelled, handle) == 0);
    pthread_join(thread, &end);
    CHECK(end == PTHREAD_CANCELED);
    nvmeio_handle_close(handle);
}

static void *submit_and_sit(void *argument)
{
    struct sitter *sitter = argument;
    char byte = 0;
    int status;

    for (unsigned i = 0; i < 8; i++)
        nvmeio_request_release(submit_read(sitter->handle, sitter->file,
                                           sitter->memory.address + i * SIZE));
    pid_t child = vfork();
    if (child == 0) {
        /* Otherwise it would wait for itself if the test failed. */
        close(sitter->go_on[1]);
        syscall(SYS_exit_group, write(sitter->sits[1], &byte, 1) != 1 ||
                                    read(sitter->go_on[0], &byte, 1) != 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    return NULL;
}

static void test_drain_needs_no_help_of_the_submitting_thread(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct sitter sitter = {
        .handle = open_handle(&config),
        .file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO),
        .memory = guarded_new(8 * SIZE, 0),
    };
    char byte = 0;

    CHECK(pipe2(sitter.sits, O_CLOEXEC) == 0 && pipe2(sitter.go_on, O_CLOEXEC) == 0);
    CHECK(pthread_create(&sitter.thread, NULL, submit_and_sit, &sitter) == 0);
    CHECK(read(sitter.sits[0], &byte, 1) == 1);
    CHECK(nvmeio_handle_drain(sitter.handle, LONG_NS) == 0);
    for (unsigned i = 0; i < 8; i++)
        CHECK(file_holds(path, sitter.memory.address + i * SIZE, SIZE, 0));
    CHECK(write(sitter.go_on[1], &byte, 1) == 1);
    pthread_join(sitter.thread, NULL);
    for (int i = 0; i < 2; i++) {
        close(sitter.sits[i]);
        close(sitter.go_on[i]);
    }
    guarded_free(&sitter.memory);
    nvmeio_file_release(sitter.file);
    nvmeio_handle_close(sitter.handle);
}

static void test_many_threads_may_stop_a_handle_and_then_close_it(const char *engine)
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

static void test_statistics_stay_right_while_workers_stop(const char *engine)
{
    for (int round = 0; round < 10; round++) {
        struct nvmeio_config config = config_of(engine);
        struct nvmeio_stats stats;
        char memory[16];
        pthread_t thread;
        config.workers = 8;
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

/* Replaces pread() in the library; delays reads of the second half. */
static atomic_bool second_half_is_slow;

ssize_t pread(int fd, void *buffer, size_t size, off_t offset)
{
    while (offset >= (off_t)SIZE && atomic_load(&second_half_is_slow))
        pause_ms(1);
    return syscall(SYS_pread64, fd, buffer, size, offset);
}

/* Slow reads take three of the four slots of two workers. */
static void test_a_read_goes_to_a_worker_with_a_free_slot(void)
{
    struct nvmeio_config config = config_of("threads");
    config.workers = 2;
    config.queue_depth = 2;
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

static void on_fault(int number)
{
    _exit(number == SIGBUS ? 7 : 1);
}

/* A worker copies into a mapping of a file that has become shorter: the program's own
 * handler decides what happens. */
static void test_a_fault_in_a_worker_calls_the_handler(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    int status;
    cool(path);
    pid_t child = fork();
    if (child == 0) {
        FILE *mapped = tmpfile();
        char *memory =
            mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(mapped), 0);
        signal(SIGBUS, on_fault);
        config.bounce = NVMEIO_BOUNCE_ALWAYS;
        struct nvmeio_handle *handle = open_handle(&config);
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
        read_at(handle, file, memory, 4 * PAGE, 0);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

/* Its workers share memory that they cannot divide into whole pages. */
static void test_a_closed_handle_leaves_no_memory_mapped(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    size_t pages[2];

    config.workers = 3;
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 20; j++)
            nvmeio_handle_close(open_handle(&config));
        FILE *file = fopen("/proc/self/statm", "re");
        CHECK(file && fscanf(file, "%zu", &pages[i]) == 1);
        fclose(file);
    }
    CHECK(pages[1] <= pages[0] + 16 * MIB / PAGE);
}

/* A block is a multiple of the edge, which may be larger than what its bounce was asked
 * for: on a file system with blocks of 64 KiB, here. */
static void test_growing_writes_stay_within_their_bounces(const char *engine)
{
    const char *grown = path_in(test_folder()), *other = path_in(test_folder());
    struct nvmeio_config config = config_of(engine);
    enum { OTHERS = 8 };
    struct nvmeio_request *requests[OTHERS];
    struct guarded memory = guarded_new(2 * MIB, 1), beside = guarded_new(MIB, 1);
    const size_t part = 64 * KIB;

    config.block_bytes = 68 * KIB;
    config.queue_depth = 3;
    config.bounce = NVMEIO_BOUNCE_ALWAYS;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *files[2];
    memset(memory.address, 'A', 2 * MIB);
    memset(beside.address, 'B', MIB);
    make_file(other, MIB, 1);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 2; i++) {
            files[i] =
                open_file(i ? other : grown, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
            files[i]->block_bytes = 64 * KIB;
        }
        CHECK(nvmeio_file_truncate(files[0], 0) == 0);
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_WRITE, files[0], memory.address, 2 * MIB, 0);
        struct nvmeio_request *growing = submit(handle, &t);
        for (size_t i = 0; i < OTHERS; i++) {
            t = transfer_of(NVMEIO_OP_WRITE, files[1], beside.address + i * part, part,
                            (int64_t)(i * part));
            requests[i] = submit(handle, &t);
        }
        CHECK(finish(growing).result == 2 * (int64_t)MIB);
        for (size_t i = 0; i < OTHERS; i++)
            CHECK(finish(requests[i]).result == (int64_t)part);
        CHECK(file_holds(grown, memory.address, 2 * MIB, 0));
        CHECK(file_holds(other, beside.address, OTHERS * part, 0));
        nvmeio_file_release(files[0]);
        nvmeio_file_release(files[1]);
    }
    guarded_free(&memory);
    guarded_free(&beside);
    nvmeio_handle_close(handle);
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
        test_more_requests_than_the_queue_holds_are_completed(engine);
        test_many_workers_share_the_memory_for_bounces(engine);
        test_growing_writes_stay_within_their_bounces(engine);
        test_a_closed_handle_leaves_no_memory_mapped(engine);
        test_each_completion_is_reported_once(engine);
        test_a_request_outlives_its_handle_and_its_file(engine);
        test_close_waits_and_then_leaves_the_memory_alone(engine);
        test_close_while_a_thread_waits(engine);
        test_a_storm_of_signals_loses_nothing(engine);
        test_workers_take_no_signals_of_the_program(engine);
        test_a_fault_in_a_worker_calls_the_handler(engine);
        test_a_cancel_at_any_moment_has_one_of_two_outcomes(engine);
        test_an_fsync_waits_for_writes_of_all_threads(engine);
        test_an_fsync_of_the_data_alone_is_fdatasync(engine);
        test_a_cancelled_thread_leaves_nothing_locked(engine);
        test_a_cancelled_thread_stops_a_handle(engine);
        test_drain_needs_no_help_of_the_submitting_thread(engine);
        test_many_threads_may_stop_a_handle_and_then_close_it(engine);
        test_statistics_stay_right_while_workers_stop(engine);
    }
    test_a_read_goes_to_a_worker_with_a_free_slot();
    return 0;
}
