/* Refusals of system calls, by functions that replace them at link time. */
#include <sys/resource.h>

#include "engine.h"
#include "system_calls.h"
#include "transfer.h"

/* How many more calls of io_submit() fail, and the errno. */
static atomic_uint refusals;
static atomic_int refusal;

/* Blocks are accepted and never return. A signal interrupts most calls that collect
 * them, each half a second after the one before; now and then one is refused. */
static bool disturbed;
static unsigned disturbances;

/* Offset of the clock, in half seconds. */
static int later;

int clock_gettime(clockid_t clock, struct timespec *now)
{
    long result = syscall(SYS_clock_gettime, clock, now);
    now->tv_sec += later / 2;
    now->tv_nsec += later % 2 * 500000000;
    now->tv_sec += now->tv_nsec / 1000000000;
    now->tv_nsec %= 1000000000;
    return (int)result;
}

static bool answer(long number, const long *words, long *result)
{
    if (number == SYS_io_getevents && disturbed) {
        later++;
        disturbances++;
        *result = disturbances % 40 == 0    ? 0
                  : disturbances % 40 == 20 ? -EAGAIN
                                            : -EINTR;
        return true;
    }
    if (number == SYS_io_submit && disturbed) {
        *result = words[1];
        return true;
    }
    if (number == SYS_io_submit && atomic_load(&refusals) > 0) {
        atomic_fetch_sub(&refusals, 1);
        *result = -atomic_load(&refusal);
        return true;
    }
    return false;
}

/* A security module refuses one file with EACCES or EPERM: all others must go on. */
static void test_a_refused_block_fails_only_its_request(void)
{
    static const int errors[] = {EACCES, EPERM, EINVAL};
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of("libaio");
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new(64 * KIB, 0);

    make_file(path, 64 * KIB, 1);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_NEVER);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_READ, file, memory.address, memory.size, 0);
    for (int i = 0; i < 3; i++) {
        atomic_store(&refusal, errors[i]);
        atomic_store(&refusals, 1);
        struct nvmeio_outcome outcome = carry_out(handle, &t);
        CHECK(atomic_load(&refusals) == 0);
        CHECK(outcome.result == -errors[i]);
        CHECK(outcome.got == 0 && !outcome.abandoned);
        CHECK(carry_out(handle, &t).result == (int64_t)memory.size);
    }
    nvmeio_file_release(file);
    guarded_free(&memory);
    nvmeio_handle_close(handle);
}

static void test_passing_errors_are_retried(void)
{
    static const int errors[] = {EAGAIN, EINTR, ENOMEM};
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of("libaio");
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_stats stats;
    char memory[100];

    make_file(path, 100, 1);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_NEVER);
    for (int i = 0; i < 3; i++) {
        atomic_store(&refusal, errors[i]);
        atomic_store(&refusals, 3);
        CHECK(read_at(handle, file, memory, 100, 0).result == 100);
        nvmeio_handle_stats(handle, &stats);
        CHECK(stats.retries == 3 * ((uint64_t)i + 1));
    }
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* A slow drive is not a dead one, whatever signals arrive: a debugger or cpulimit stops
 * the process ten times a second. */
static void test_interrupted_waits_never_end_an_engine(void)
{
    char memory[100];
    struct nvmeio_block block = {
        .op = NVMEIO_OP_READ, .address = memory, .bytes = sizeof(memory)};
    struct nvmeio_engine engine;
    bool known;

    CHECK(nvmeio_engine_start(&engine, nvmeio_engine_find("libaio", &known), 1) == 0);
    disturbed = true;
    engine.ops->push(&engine, &block);
    for (int i = 0; i < 3; i++) {
        engine.ops->wake(&engine);
        CHECK(engine.ops->reap(&engine, 1) == 0);
    }
    CHECK(disturbances >= 120 && engine.in_flight == 1);
    disturbed = false;
    later = 0;
    nvmeio_engine_stop(&engine);
}

/* Leave this many descriptors. */
static void leave_descriptors(unsigned count, struct rlimit limit)
{
    int fd = 0;

    for (; fcntl(fd, F_GETFD) >= 0 || count-- > 0; fd++)
        ;
    limit.rlim_cur = (rlim_t)fd;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

/* If eventfds take the last descriptors, opening the handle fails rather than choose an
 * engine without rings; it works once there are more. */
static void test_without_descriptors_auto_takes_the_best_engine_or_none(void)
{
    enum { WORKERS = 3 };
    const char *path = path_in(test_folder()), *best = engine_at(0);
    unsigned each = strcmp(best, "io_uring") == 0 ? 2 : 1, opened = 0;
    struct nvmeio_config config = config_of("auto");
    struct nvmeio_handle *handle;
    struct rlimit limit;
    char memory[100];

    make_file(path, sizeof(memory), 1);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    config.workers = WORKERS;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    for (unsigned count = 0; count <= 2 * WORKERS; count++) {
        leave_descriptors(count, limit);
        int error = nvmeio_handle_open(&config, &handle);
        CHECK(error == (count < each * WORKERS ? -EMFILE : 0));
        if (error == 0) {
            CHECK(strcmp(nvmeio_handle_engine(handle), best) == 0);
            CHECK(read_at(handle, file, memory, sizeof(memory), 0).result ==
                  (int64_t)sizeof(memory));
            nvmeio_handle_close(handle);
            opened++;
        }
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    }
    CHECK(opened > 0 && file_holds(path, memory, sizeof(memory), 0));
    nvmeio_file_release(file);
}

int main(void)
{
    struct nvmeio_config config = config_of("libaio");
    struct nvmeio_handle *handle;

    begin();
    test_without_descriptors_auto_takes_the_best_engine_or_none();
    if (nvmeio_handle_open(&config, &handle))
        SKIP("libaio does not work here");
    nvmeio_handle_close(handle);
    test_a_refused_block_fails_only_its_request();
    test_passing_errors_are_retried();
    test_interrupted_waits_never_end_an_engine();
    return 0;
}
