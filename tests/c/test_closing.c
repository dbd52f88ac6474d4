/* What close(2) says of a file that was written, from a replaced function: who learns
 * it, and who waits for it. */
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "file_internal.h"
#include "transfer.h"

/* The sanitizers of gcc 12 cannot follow forks of a process with threads. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#else
#define SANITIZED false
#endif

#define DESCRIPTORS 1024
#define SIZE (16 * PAGE)

/* By descriptor: the errno that its next close(2) reports, and whether that waits. */
static atomic_int errors[DESCRIPTORS];
static atomic_bool held[DESCRIPTORS];
static atomic_uint waiting, closed;

static void pause_a_little(void)
{
    struct timespec pause = {0, 1000000};
    nanosleep(&pause, NULL);
}

int close(int fd)
{
    bool known = fd >= 0 && fd < DESCRIPTORS;

    if (known && held[fd]) {
        waiting++;
        while (held[fd])
            pause_a_little();
        waiting--;
    }
    int error = known ? atomic_exchange(&errors[fd], 0) : 0;
    int result = (int)syscall(SYS_close, fd);
    closed += error != 0;
    if (!error)
        return result;
    errno = error;
    return -1;
}

static void close_fails(const struct nvmeio_file *file, int error)
{
    if (file->direct_fd >= 0)
        errors[file->direct_fd] = error;
    if (file->fd >= 0)
        errors[file->fd] = error;
}

static void hold_close(const struct nvmeio_file *file, bool hold)
{
    held[nvmeio_file_any_fd(file)] = hold;
}

static void await_waiting(unsigned count)
{
    while (waiting != count)
        pause_a_little();
}

/* A file without a name. */
static struct nvmeio_file *new_file(void)
{
    static const char *path;

    if (!path)
        path = path_in(test_folder());
    struct nvmeio_file *file = open_file(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO);
    CHECK(unlink(path) == 0);
    return file;
}

/* As if it were on FUSE or NFS. */
static struct nvmeio_file *new_distant_file(void)
{
    struct nvmeio_file *file = new_file();

    file->local = false;
    return file;
}

static char memory[SIZE] __attribute__((aligned(4096)));

/* A write that takes over the caller's reference. */
static struct nvmeio_transfer last_write(struct nvmeio_file *file)
{
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_WRITE, file, memory, sizeof(memory), 0);
    t.pass_file = true;
    return t;
}

static void check_close_failed(const struct nvmeio_outcome *outcome, int error)
{
    CHECK(outcome->result == -error && outcome->closing);
    CHECK(outcome->got == SIZE && !outcome->abandoned);
}

static void test_the_last_release_returns_the_error(void)
{
    struct nvmeio_file *file = new_file();

    nvmeio_file_retain(file);
    close_fails(file, EDQUOT);
    CHECK(nvmeio_file_release(file) == 0);
    CHECK(nvmeio_file_release(file) == -EDQUOT);
    CHECK(nvmeio_file_release(NULL) == 0);

    file = new_file();
    close_fails(file, EINTR);
    CHECK(nvmeio_file_release(file) == 0);
    /* In outcomes it is the end of the file. */
    file = new_file();
    close_fails(file, ENODATA);
    CHECK(nvmeio_file_release(file) == -EIO);
    file = new_file();
    CHECK(nvmeio_file_release(file) == 0);
}

static void test_both_descriptors_are_closed_and_the_first_error_returned(void)
{
    for (int i = 0; i < 3; i++) {
        struct nvmeio_file *file = new_file();
        int second = nvmeio_file_fd(file);
        if (file->direct_fd < 0) {
            nvmeio_file_release(file);
            continue;
        }
        unsigned before = closed, open = descriptors_open();
        if (i != 1)
            errors[file->direct_fd] = EIO;
        if (i != 0)
            errors[second] = ENOSPC;
        CHECK(nvmeio_file_release(file) == (i == 1 ? -ENOSPC : -EIO));
        CHECK(closed - before == (i == 2 ? 2 : 1));
        CHECK(descriptors_open() == open - 2);
    }
}

static void test_a_file_that_was_only_read_is_closed_silently(void)
{
    const char *path = path_in(test_folder());

    make_file(path, PAGE, 1);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    close_fails(file, EIO);
    CHECK(nvmeio_file_release(file) == 0);
}

static void test_a_file_can_be_remembered_after_its_close(void)
{
    struct nvmeio_file *file = new_file();

    nvmeio_file_remember(file);
    CHECK(nvmeio_file_is_open(file) && nvmeio_file_try_retain(file));
    CHECK(nvmeio_file_release(file) == 0);
    CHECK(nvmeio_file_release(file) == 0);
    CHECK(!nvmeio_file_is_open(file) && !nvmeio_file_try_retain(file));
    nvmeio_file_forget(file);
    nvmeio_file_forget(NULL);
}

/* Submitted, and in this thread if possible. */
static void test_a_write_that_closes_the_file_has_its_error(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    unsigned before = descriptors_open();

    for (int i = 0; i < 4; i++) {
        struct nvmeio_file *file = i < 2 ? new_file() : new_distant_file();
        struct nvmeio_transfer t = last_write(file);
        close_fails(file, ENOSPC);
        struct nvmeio_outcome outcome = carry_out_by(i % 2, handle, &t);
        check_close_failed(&outcome, ENOSPC);
        CHECK(descriptors_open() == before);

        file = i < 2 ? new_file() : new_distant_file();
        t = last_write(file);
        outcome = carry_out_by(i % 2, handle, &t);
        CHECK(outcome.result == SIZE && !outcome.closing);
        CHECK(descriptors_open() == before);
    }
    nvmeio_handle_close(handle);
}

/* Of several requests and the caller, the last holder learns it. */
static void test_only_the_last_learns_it(const char *engine)
{
    enum { COUNT = 20 };
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);

    for (int i = 0; i < 10; i++) {
        struct nvmeio_file *file = i % 2 ? new_file() : new_distant_file();
        struct nvmeio_request *requests[COUNT];
        struct nvmeio_transfer t = last_write(file);
        int told = 0;
        t.pass_file = false;
        errors[nvmeio_file_any_fd(file)] = EIO;
        for (int j = 0; j < COUNT; j++)
            requests[j] = submit(handle, &t);
        int error = nvmeio_file_release(file);
        CHECK(error == 0 || error == -EIO);
        told += error != 0;
        for (int j = 0; j < COUNT; j++) {
            struct nvmeio_outcome outcome = finish(requests[j]);
            if (outcome.result == SIZE)
                continue;
            check_close_failed(&outcome, EIO);
            told++;
        }
        CHECK(told == 1);
    }
    nvmeio_handle_close(handle);
}

static void test_an_error_of_its_own_stays(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);

    for (int i = 0; i < 2; i++) {
        struct nvmeio_file *file = i ? new_file() : new_distant_file();
        struct nvmeio_transfer t = last_write(file);
        t.op = NVMEIO_OP_READ; /* past the end */
        unsigned before = closed;
        close_fails(file, EIO);
        struct nvmeio_outcome outcome = carry_out(handle, &t);
        CHECK(outcome.result == -ENODATA && !outcome.closing && closed > before);
        CHECK(outcome.close_error == -EIO);
    }
    nvmeio_handle_close(handle);
}

static void test_a_refused_request_leaves_the_file_to_the_caller(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = new_file();
    struct nvmeio_transfer t = last_write(file);
    struct nvmeio_request *request;

    t.offset = -1;
    CHECK(nvmeio_submit(handle, &t, &request) == -EINVAL);
    nvmeio_handle_stop(handle);
    t.offset = 0;
    CHECK(nvmeio_submit(handle, &t, &request) == -EPIPE);
    nvmeio_handle_close(handle);
    close_fails(file, EIO);
    CHECK(nvmeio_file_release(file) == -EIO);
}

static void test_the_item_that_closes_its_file_fails(const char *engine)
{
    enum { COUNT = 6 };
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_transfer transfers[COUNT];
    const struct nvmeio_many many = {.transfers = transfers, .count = COUNT};
    struct nvmeio_failure failures[COUNT];
    struct nvmeio_request *request;
    size_t offender;

    for (int i = 0; i < COUNT; i++) {
        transfers[i] = last_write(i % 2 ? new_file() : new_distant_file());
        if (i == 2 || i == 3)
            close_fails(transfers[i].file, i == 2 ? EDQUOT : EIO);
    }
    CHECK(nvmeio_submit_many(handle, &many, &request, &offender) == 0);
    wait_for(request);
    CHECK(nvmeio_request_failures(request, failures, COUNT) == 2);
    CHECK(failures[0].index == 2 && failures[0].error == -EDQUOT);
    CHECK(failures[1].index == 3 && failures[1].error == -EIO);
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -EDQUOT && outcome.got == 4 * SIZE);
    nvmeio_handle_close(handle);
}

static void test_a_scatter_that_closes_the_file_fails(const char *engine)
{
    static const int64_t offsets[] = {3 * PAGE, 100}, size = PAGE;
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);

    for (int i = 0; i < 2; i++) {
        struct nvmeio_request *request;
        size_t offender;
        const struct nvmeio_gather scatter = {
            .op = NVMEIO_OP_WRITE,
            .file = i ? new_file() : new_distant_file(),
            .pass_file = true,
            .address = memory,
            .size = sizeof(memory),
            .count = 2,
            .offsets = offsets,
            .sizes = &size,
            .one_size = true,
        };
        close_fails(scatter.file, ENOSPC);
        CHECK(nvmeio_submit_gather(handle, &scatter, &request, &offender) == 0);
        wait_for(request);
        CHECK(nvmeio_request_failures(request, NULL, 0) == 0);
        struct nvmeio_outcome outcome = finish(request);
        CHECK(outcome.result == -ENOSPC && outcome.closing);
    }
    nvmeio_handle_close(handle);
}

static void test_what_comes_after_a_failed_close_fails(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = new_distant_file(), *other = new_file();
    struct nvmeio_transfer t = last_write(file);

    close_fails(file, EIO);
    hold_close(file, true);
    struct nvmeio_request *first = submit(handle, &t);
    t = last_write(other);
    t.after = (struct nvmeio_after){&first, 1};
    struct nvmeio_request *second = submit(handle, &t);
    await_waiting(1);
    CHECK(!nvmeio_request_done(first) && !nvmeio_request_done(second));
    hold_close(file, false);
    struct nvmeio_outcome outcome = finish(second);
    CHECK(outcome.result == -EIO && !outcome.closing && outcome.blocker == 0);
    outcome = finish(first);
    check_close_failed(&outcome, EIO);
    nvmeio_handle_close(handle);
}

/* More of them than there are threads for closing. */
static void test_slow_closes_hold_up_nobody_else(const char *engine)
{
    enum { COUNT = 9 };
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_request *requests[COUNT];
    struct nvmeio_file *files[COUNT], *other = new_distant_file();

    for (int i = 0; i < COUNT; i++) {
        files[i] = new_distant_file();
        nvmeio_file_remember(files[i]);
        hold_close(files[i], true);
        close_fails(files[i], EIO);
        struct nvmeio_transfer t = last_write(files[i]);
        requests[i] = submit(handle, &t);
    }
    await_waiting(4);
    CHECK(write_at(handle, other, memory, SIZE, 0).result == SIZE);
    CHECK(read_at(handle, other, memory, SIZE, 0).result == SIZE);
    CHECK(nvmeio_handle_drain(handle, 1000000) == -ETIMEDOUT);
    for (int i = 0; i < COUNT; i++)
        CHECK(!nvmeio_request_done(requests[i]));
    for (int i = 0; i < COUNT; i++)
        hold_close(files[i], false);
    for (int i = 0; i < COUNT; i++) {
        struct nvmeio_outcome outcome = finish(requests[i]);
        check_close_failed(&outcome, EIO);
        nvmeio_file_forget(files[i]);
    }
    CHECK(nvmeio_file_release(other) == 0);
    nvmeio_handle_close(handle);
}

/* The kernel frees the blocks of a file without a name when it is closed. */
static void test_freeing_a_large_file_holds_up_nobody_else(const char *engine)
{
    static char zeros[MIB];
    const char *path = path_in(test_folder());
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *other = new_file();
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

    for (off_t at = 0; at < 65 * (off_t)MIB; at += (off_t)MIB)
        CHECK(pwrite(fd, zeros, MIB, at) == MIB);
    close(fd);
    struct nvmeio_file *large = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    CHECK(unlink(path) == 0);
    struct nvmeio_transfer t = last_write(large);
    nvmeio_file_remember(large);
    hold_close(large, true);
    struct nvmeio_request *request = submit(handle, &t);
    await_waiting(1);
    CHECK(write_at(handle, other, memory, SIZE, 0).result == SIZE);
    CHECK(!nvmeio_request_done(request));
    hold_close(large, false);
    CHECK(finish(request).result == SIZE);
    nvmeio_file_forget(large);
    CHECK(nvmeio_file_release(other) == 0);
    nvmeio_handle_close(handle);
}

static void *release_slowly(void *file)
{
    pause_a_little();
    hold_close(file, false);
    return NULL;
}

static void test_a_cancelled_request_tells_of_the_close(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = new_distant_file(), *other = new_file();
    struct nvmeio_transfer t = last_write(file);

    hold_close(file, true);
    struct nvmeio_request *first = submit(handle, &t);
    t = last_write(other);
    t.after = (struct nvmeio_after){&first, 1};
    close_fails(other, EDQUOT);
    struct nvmeio_request *second = submit(handle, &t);
    await_waiting(1);
    CHECK(nvmeio_request_cancel(second) == 1);
    hold_close(file, false);
    struct nvmeio_outcome outcome = finish(second);
    CHECK(outcome.result == -ECANCELED && !outcome.closing);
    CHECK(outcome.close_error == -EDQUOT);
    outcome = finish(first);
    CHECK(outcome.result == SIZE && outcome.close_error == 0);
    nvmeio_handle_close(handle);
}

static void test_closing_the_handle_waits_for_closes(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = new_distant_file();
    struct nvmeio_transfer t = last_write(file);
    unsigned before = closed;
    pthread_t thread;

    nvmeio_file_remember(file);
    hold_close(file, true);
    close_fails(file, EIO);
    nvmeio_request_release(submit(handle, &t));
    await_waiting(1);
    CHECK(pthread_create(&thread, NULL, release_slowly, file) == 0);
    nvmeio_handle_close(handle);
    CHECK(closed > before && !nvmeio_file_is_open(file));
    pthread_join(thread, NULL);
    nvmeio_file_forget(file);
}

/* The parent's threads for closing do not exist in the child, which starts its own. */
static void test_a_forked_child_closes_by_itself(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = new_distant_file();
    struct nvmeio_transfer t = last_write(file);
    struct nvmeio_outcome outcome;
    int status;

    nvmeio_file_remember(file);
    hold_close(file, true);
    struct nvmeio_request *request = submit(handle, &t);
    await_waiting(1);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(WATCHDOG_S);
        struct nvmeio_file *own = new_distant_file();
        CHECK(nvmeio_request_outcome(request, &outcome) == -EOWNERDEAD);
        t = last_write(own);
        close_fails(own, ENOSPC);
        outcome = carry_out(handle, &t);
        check_close_failed(&outcome, ENOSPC);
        nvmeio_handle_close(handle);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    hold_close(file, false);
    CHECK(finish(request).result == SIZE);
    nvmeio_file_forget(file);
    nvmeio_handle_close(handle);
}

int main(void)
{
    const char *engine;

    begin();
    test_the_last_release_returns_the_error();
    test_both_descriptors_are_closed_and_the_first_error_returned();
    test_a_file_that_was_only_read_is_closed_silently();
    test_a_file_can_be_remembered_after_its_close();
    FOR_EACH_ENGINE(engine)
    {
        test_a_write_that_closes_the_file_has_its_error(engine);
        test_only_the_last_learns_it(engine);
        test_an_error_of_its_own_stays(engine);
        test_a_refused_request_leaves_the_file_to_the_caller(engine);
        test_the_item_that_closes_its_file_fails(engine);
        test_a_scatter_that_closes_the_file_fails(engine);
        test_what_comes_after_a_failed_close_fails(engine);
        test_slow_closes_hold_up_nobody_else(engine);
        test_freeing_a_large_file_holds_up_nobody_else(engine);
        test_a_cancelled_request_tells_of_the_close(engine);
        test_closing_the_handle_waits_for_closes(engine);
        if (!SANITIZED)
            test_a_forked_child_closes_by_itself(engine);
    }
    return 0;
}
