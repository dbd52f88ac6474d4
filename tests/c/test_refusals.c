/* What system calls refuse, shown by functions that stand in for them at link time. */
#include <sys/resource.h>
#include <sys/syscall.h>

#include "engine.h"
#include "transfer.h"

/* How often io_submit() is still to be refused, and with what. */
static atomic_uint refusals;
static atomic_int refusal;

/* Blocks are taken and never come back, and every other look for them is disturbed by a
 * signal. */
static bool disturbed;
static unsigned disturbances;

struct iocb;
struct io_event;
int io_submit(unsigned long context, long count, struct iocb **blocks);
int io_getevents(unsigned long context, long count_min, long count_max,
                 struct io_event *events, struct timespec *limit);

int io_getevents(unsigned long context, long count_min, long count_max,
                 struct io_event *events, struct timespec *limit)
{
    if (disturbed)
        return disturbances++ % 2 ? 0 : -EINTR;
    long result =
        syscall(SYS_io_getevents, context, count_min, count_max, events, limit);
    return result < 0 ? -errno : (int)result;
}

/* How much later it is than the system says, in half seconds. */
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

int io_submit(unsigned long context, long count, struct iocb **blocks)
{
    if (disturbed)
        return (int)count;
    if (atomic_load(&refusals) > 0) {
        atomic_fetch_sub(&refusals, 1);
        return -atomic_load(&refusal);
    }
    long result = syscall(SYS_io_submit, context, count, blocks);
    return result < 0 ? -errno : (int)result;
}

/* A security module says EACCES or EPERM of one file: all others must go on. */
static void test_a_refused_block_fails_its_request_alone(void)
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

static void test_what_passes_is_asked_again(void)
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

/* A drive that takes its time is not one that answers no more, whatever signals come
 * meanwhile: the kernel is asked, and says that nothing has finished. */
static void test_patience_begins_anew_with_each_call_that_works(void)
{
    char memory[100];
    struct nvmeio_block block = {
        .op = NVMEIO_OP_READ, .address = memory, .bytes = sizeof(memory)};
    struct nvmeio_engine engine;
    bool known;

    CHECK(nvmeio_engine_start(&engine, nvmeio_engine_find("libaio", &known), 1) == 0);
    disturbed = true;
    engine.ops->push(&engine, &block);
    for (; later < 60; later++) {
        engine.ops->wake(&engine);
        CHECK(engine.ops->reap(&engine, 1) == 0);
    }
    CHECK(disturbances >= 60 && engine.in_flight == 1);
    disturbed = false;
    later = 0;
    nvmeio_engine_stop(&engine);
}

/* Leave so many descriptors of what there is. */
static void leave_descriptors(unsigned count, struct rlimit limit)
{
    int fd = 0;

    for (; fcntl(fd, F_GETFD) >= 0 || count-- > 0; fd++)
        ;
    limit.rlim_cur = (rlim_t)fd;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

/* A handle whose eventfds take the last descriptors does not go on without rings: it is
 * told, and has them when there are more. */
static void test_auto_takes_the_best_engine_or_none_for_want_of_descriptors(void)
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
    test_auto_takes_the_best_engine_or_none_for_want_of_descriptors();
    if (nvmeio_handle_open(&config, &handle))
        SKIP("libaio does not work here");
    nvmeio_handle_close(handle);
    test_a_refused_block_fails_its_request_alone();
    test_what_passes_is_asked_again();
    test_patience_begins_anew_with_each_call_that_works();
    return 0;
}
