/* Plans and sorts of many records delay neither other requests nor submissions: they
 * are held still in replaced functions. */
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "file_internal.h"
#include "records.h"
#include "transfer.h"

#define RECORDS 600
#define RECORD 16
#define SIZE (RECORDS * 2 * (size_t)RECORD)

static atomic_int held_fd = -1; /* its fstat(2) waits */
static atomic_bool sort_is_held;
static atomic_uint waiting;

static void pause_a_little(void)
{
    struct timespec pause = {0, 1000000};
    nanosleep(&pause, NULL);
}

static void await_waiting(unsigned count)
{
    while (waiting != count)
        pause_a_little();
}

int fstat(int fd, struct stat *status)
{
    bool held = fd == held_fd;

    waiting += held;
    while (fd == held_fd)
        pause_a_little();
    waiting -= held;
    return fstatat(fd, "", status, AT_EMPTY_PATH);
}

/* By insertion, as there are few. */
void qsort(void *base, size_t count, size_t size,
           int (*compare)(const void *, const void *))
{
    char *list = base, one[sizeof(struct nvmeio_record)];

    CHECK(size <= sizeof(one));
    bool held = sort_is_held;
    waiting += held;
    while (sort_is_held)
        pause_a_little();
    waiting -= held;
    for (size_t i = 1; i < count; i++) {
        size_t at = i;
        memcpy(one, list + i * size, size);
        for (; at > 0 && compare(one, list + (at - 1) * size) < 0; at--)
            memcpy(list + at * size, list + (at - 1) * size, size);
        memcpy(list + at * size, one, size);
    }
}

static char memory[SIZE] __attribute__((aligned(4096)));
static int64_t offsets[RECORDS];
static const int64_t record = RECORD;

static struct nvmeio_request *submit_records(struct nvmeio_handle *handle,
                                             enum nvmeio_op op,
                                             struct nvmeio_file *file,
                                             struct nvmeio_request *before)
{
    const struct nvmeio_gather gather = {
        .op = op,
        .file = file,
        .address = memory,
        .size = sizeof(memory),
        .count = RECORDS,
        .offsets = offsets,
        .sizes = &record,
        .one_size = true,
        .after = {.requests = &before, .count = before ? 1 : 0},
    };
    struct nvmeio_request *request;
    size_t offender;

    CHECK(nvmeio_submit_gather(handle, &gather, &request, &offender) == 0);
    return request;
}

/* Two files of SIZE bytes, and a handle. */
static struct stage {
    struct nvmeio_handle *handle;
    struct nvmeio_file *file, *other;
} stage;

static void stage_open(const char *engine)
{
    static const char *path, *other_path;
    struct nvmeio_config config = config_of(engine);

    if (!path) {
        path = path_in(test_folder());
        other_path = path_in(test_folder());
        make_file(path, SIZE, 1);
        make_file(other_path, SIZE, 2);
    }
    stage.handle = open_handle(&config);
    stage.file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    stage.other = open_file(other_path, O_RDWR, NVMEIO_DIRECT_AUTO);
    for (size_t i = 0; i < RECORDS; i++)
        offsets[i] = (int64_t)(2 * i * RECORD);
}

static void stage_close(void)
{
    nvmeio_file_release(stage.file);
    nvmeio_file_release(stage.other);
    nvmeio_handle_close(stage.handle);
}

static void hold_plan(bool hold)
{
    /* Plans open the page cache's descriptor, which is looked at from then on. */
    CHECK(nvmeio_file_fd(stage.file) >= 0);
    held_fd = hold ? nvmeio_file_any_fd(stage.file) : -1;
}

static void check_others_go_on(void)
{
    char one[RECORD];

    await_waiting(1);
    CHECK(read_at(stage.handle, stage.other, one, RECORD, 0).result == RECORD);
}

static void test_a_submission_does_not_wait_for_its_plan(const char *engine)
{
    for (int cancel = 0; cancel < 2; cancel++) {
        stage_open(engine);
        hold_plan(true);
        struct nvmeio_request *request =
            submit_records(stage.handle, NVMEIO_OP_WRITE, stage.file, NULL);
        check_others_go_on();
        CHECK(!nvmeio_request_done(request));
        CHECK(nvmeio_handle_pending(stage.handle) == 1);
        if (cancel)
            CHECK(nvmeio_request_cancel(request) == 1);
        hold_plan(false);
        int64_t result = finish(request).result;
        CHECK(result == (cancel ? -ECANCELED : RECORDS * RECORD));
        stage_close();
    }
}

static void test_a_plan_after_others_delays_no_other_request(const char *engine)
{
    char one[RECORD];

    stage_open(engine);
    hold_plan(true);
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, stage.other, one, RECORD, 0);
    struct nvmeio_request *before = submit(stage.handle, &t);
    struct nvmeio_request *request =
        submit_records(stage.handle, NVMEIO_OP_WRITE, stage.file, before);
    check_others_go_on();
    hold_plan(false);
    CHECK(finish(request).result == RECORDS * RECORD);
    CHECK(finish(before).result == RECORD);
    stage_close();
}

/* All but the first record are past the end of the file, which is noticed late. */
static void test_sorting_after_a_failure_delays_no_other_request(const char *engine)
{
    char one[RECORD];

    stage_open(engine);
    for (size_t i = 1; i < RECORDS; i++)
        offsets[i] += SIZE;
    sort_is_held = true;
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, stage.other, one, RECORD, 0);
    struct nvmeio_request *before = submit(stage.handle, &t);
    struct nvmeio_request *request =
        submit_records(stage.handle, NVMEIO_OP_READ, stage.file, before);
    check_others_go_on();
    CHECK(!nvmeio_request_done(request));
    sort_is_held = false;
    struct nvmeio_outcome outcome = finish(request);
    CHECK(outcome.result == -ENODATA && outcome.got == RECORD);
    finish(before);
    stage_close();
}

int main(void)
{
    const char *engine;

    begin();
    FOR_EACH_ENGINE(engine)
    {
        test_a_submission_does_not_wait_for_its_plan(engine);
        test_a_plan_after_others_delays_no_other_request(engine);
        test_sorting_after_a_failure_delays_no_other_request(engine);
    }
    return 0;
}
