/* The table of engines: the reason why one does not work, and the choice of another.
 * Replaced system functions make the refusals. */
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include "engine.h"
#include "system_calls.h"
#include "transfer.h"

struct io_uring;
struct io_uring_params;
int io_uring_queue_init_params(unsigned entries, struct io_uring *ring,
                               struct io_uring_params *params);

/* The results of setting up each engine. */
static int refusal;
static unsigned refused;
/* Eventfds that the system has left. */
static int events_left;

int io_uring_queue_init_params(unsigned entries, struct io_uring *ring,
                               struct io_uring_params *params)
{
    (void)entries, (void)ring, (void)params;
    refused++;
    return -refusal;
}

static bool answer(long number, const long *words, long *result)
{
    if (number != SYS_io_setup || (!refusal && words[0] <= events_left))
        return false;
    refused++;
    *result = refusal ? -refusal : -EAGAIN;
    return true;
}

/* The next eventfd exceeds the limit. */
static bool no_descriptor;

int eventfd(unsigned count, int flags)
{
    if (!no_descriptor)
        return (int)syscall(SYS_eventfd2, count, flags);
    no_descriptor = false;
    errno = EMFILE;
    return -1;
}

/* Read instead of the kernel's sysctl; NULL: the kernel has none. */
static const char *disabled;

FILE *fopen(const char *path, const char *mode)
{
    if (strcmp(path, "/proc/sys/kernel/io_uring_disabled") == 0)
        return disabled ? fmemopen((void *)(uintptr_t)disabled, strlen(disabled), "r")
                        : NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? NULL : fdopen(fd, mode);
}

static void check_reason(const char *name, int error, const char *words)
{
    char reason[256];

    nvmeio_engine_explain(name, -error, reason, sizeof(reason));
    if (!strstr(reason, words))
        fprintf(stderr, "%s\n", reason);
    /* The words of the errno come first, and only once. */
    CHECK(strstr(reason, words) && strstr(reason, strerror(error)) == reason);
    CHECK(!strcasestr(reason + strlen(strerror(error)), strerror(error)));
}

/* False if this process may not do that. */
static bool limit_locked(rlim_t bytes)
{
    struct rlimit limit;

    CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    limit.rlim_cur = bytes;
    limit.rlim_max = bytes > limit.rlim_max ? bytes : limit.rlim_max;
    return setrlimit(RLIMIT_MEMLOCK, &limit) == 0;
}

static void test_a_reason_says_what_would_help(void)
{
    disabled = "2\n";
    check_reason("io_uring", EPERM, "kernel.io_uring_disabled is 2; set it to 0");
    disabled = "1\n";
    check_reason("io_uring", EPERM,
                 "set it to 0 (for root, the cause is a seccomp profile)");
    static const char *const others[] = {"0\n", "none\n", NULL};
    for (int i = 0; i < 3; i++) {
        disabled = others[i];
        check_reason("io_uring", EPERM, "allow io_uring_setup, io_uring_enter and");
    }
    check_reason("io_uring", ENOSYS, "older than 5.1");
    if (limit_locked(64 * KIB))
        check_reason("io_uring", ENOMEM, "raise ulimit -l, which is 64 KiB");
    if (limit_locked(RLIM_INFINITY))
        check_reason("io_uring", ENOMEM, "memory for the rings ran out");
    check_reason("io_uring", EMFILE, "raise ulimit -n");
    check_reason("io_uring", EIO, "io_uring_setup failed");
    check_reason("libaio", EAGAIN, "raise sysctl fs.aio-max-nr");
    check_reason("libaio", ENOSYS, "the kernel has no AIO");
    check_reason("libaio", EPERM, "allow io_setup, io_submit, io_getevents");
    check_reason("libaio", EIO, "io_setup failed");
    check_reason("libaio", EMFILE, "raise ulimit -n");
    check_reason("threads", EAGAIN, "raise ulimit -u");
    check_reason("threads", EIO, "could not be started");
}

static void test_engines_are_found_by_number_and_by_name(void)
{
    const struct nvmeio_engine_ops *ops;
    struct nvmeio_engine_info info;
    unsigned count = 0;
    bool known;

    CHECK(strcmp(nvmeio_version(), NVMEIO_VERSION) == 0);
    while ((ops = nvmeio_engine_at(count))) {
        CHECK(nvmeio_engine_find(ops->name, &known) == ops && known);
        count++;
    }
    CHECK(count >= 2 && count <= nvmeio_engine_count());
    CHECK(nvmeio_engine_find("steam", &known) == NULL && !known);
    CHECK(nvmeio_engine_probe(nvmeio_engine_count(), &info) == -EINVAL);
}

/* A refused engine is skipped with its reason, and the next one is used.  Everything
 * that the first opened is closed. */
static void test_auto_chooses_the_first_engine_that_works(void)
{
    struct nvmeio_config config = config_of("auto");
    struct nvmeio_engine_info info;
    struct nvmeio_handle *handle;
    unsigned before = descriptors_open();
    bool known;

    refusal = EPERM;
    disabled = "2\n";
    refused = 0;
    CHECK(nvmeio_handle_open(&config, &handle) == 0);
    CHECK(strcmp(nvmeio_handle_engine(handle), "threads") == 0);
    const char *fallback = nvmeio_handle_fallback(handle);
    bool uring = nvmeio_engine_find("io_uring", &known);
    CHECK(refused >= (unsigned)uring + 1);
    if (uring)
        CHECK(strstr(fallback, "io_uring: Operation not permitted"));
    CHECK(strstr(fallback, "libaio: Operation not permitted"));
    if (uring)
        CHECK(strstr(fallback, "; libaio: "));
    nvmeio_handle_close(handle);
    for (unsigned i = 0; i < nvmeio_engine_count(); i++) {
        CHECK(nvmeio_engine_probe(i, &info) == 0);
        CHECK(info.built ||
              (info.error == -ENOSYS && strstr(info.reason, "not built")));
        bool works =
            strcmp(info.name, "threads") == 0 || strcmp(info.name, "sync") == 0;
        CHECK((info.error == 0) == works && (info.reason[0] == '\0') == works);
    }
    CHECK(descriptors_open() == before);
    refusal = 0;
}

static void test_auto_skips_no_engine_for_a_lack_that_all_would_have(void)
{
    struct nvmeio_config config = config_of("auto");
    struct nvmeio_handle *handle;

    refused = 0;
    no_descriptor = true;
    CHECK(nvmeio_handle_open(&config, &handle) == -EMFILE);
    CHECK(refused == 0 && !no_descriptor);
}

/* A named engine has no fallback. */
static void test_a_named_engine_that_is_refused_is_an_error(void)
{
    static const char *const names[] = {"io_uring", "libaio"};
    static const int errors[] = {EPERM, ENOMEM, EAGAIN, ENOSYS};
    struct nvmeio_handle *handle;
    bool known;

    for (int i = 0; i < 2 * 4; i++) {
        struct nvmeio_config config = config_of(names[i / 4]);
        bool built = nvmeio_engine_find(config.engine, &known);
        refusal = errors[i % 4];
        CHECK(nvmeio_handle_open(&config, &handle) == (built ? -refusal : -ENOSYS));
    }
    refusal = 0;
    struct nvmeio_config config = config_of("steam");
    CHECK(nvmeio_handle_open(&config, &handle) == -EINVAL);
    config.engine = NULL;
    CHECK(nvmeio_handle_open(&config, &handle) == -EINVAL);
}

static void test_few_events_are_enough(void)
{
    struct nvmeio_config config = config_of("libaio");
    struct nvmeio_handle *handle;

    config.queue_depth = 64;
    events_left = 4;
    refused = 0;
    int error = nvmeio_handle_open(&config, &handle);
    if (error == -ENOSYS || error == -EPERM)
        return;
    CHECK(error == 0 && refused == 4);
    const char *path = path_in(test_folder());
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(MIB, 0);
    fill(memory.address, MIB, 0, 1);
    CHECK(write_at(handle, file, memory.address, MIB, 0).result == (int64_t)MIB);
    CHECK(file_holds(path, memory.address, MIB, 0));
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
    events_left = 0;
    CHECK(nvmeio_handle_open(&config, &handle) == -EAGAIN);
}

int main(void)
{
    begin();
    test_a_reason_says_what_would_help();
    test_engines_are_found_by_number_and_by_name();
    test_auto_chooses_the_first_engine_that_works();
    test_auto_skips_no_engine_for_a_lack_that_all_would_have();
    test_a_named_engine_that_is_refused_is_an_error();
    test_few_events_are_enough();
    return 0;
}
