/* A write that extends a file lands block by block in file order, so a failed write
 * needs no truncation. */
#include <limits.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "scripted.h"

/* With four blocks of 8 KiB in flight, extending writes use blocks of 32 KiB. */
#define UNIT (2 * PAGE)
#define DEPTH 4u
#define ORDERED (DEPTH * UNIT)
#define TOTAL (4 * ORDERED)

/* ThreadSanitizer and AddressSanitizer cannot follow a child with threads. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#else
#define SANITIZED false
#endif

static void stage_open_small(void)
{
    stage_open(DEPTH);
    stage.config.block_bytes = UNIT;
    stage_reopen();
}

static int64_t size_of(const char *path)
{
    struct stat status;

    CHECK(stat(path, &status) == 0);
    return status.st_size;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The script's view of the write; guarded by the mutex. */
static struct {
    const char *path;
    int64_t size_before;
    unsigned failing; /* the block that does, from 0 on */
    bool half;        /* of it has been written first */
    int64_t missing;  /* where the first byte is that has failed */
} watched;

/* Run blocks until one fails.  A block that extends the file is alone in flight, and
 * everything before it has landed. */
static bool watch(struct nvmeio_block *block)
{
    if (block->offset + block->bytes > watched.size_before) {
        CHECK(in_flight == 1);
        CHECK(size_of(watched.path) <= larger(watched.size_before, block->offset));
    }
    unsigned call = calls++;
    if (call == watched.failing + watched.half) {
        block->result = -ENOSPC;
        watched.missing = block->offset;
        return true;
    }
    uint32_t bytes = block->bytes;
    if (call == watched.failing)
        block->bytes = bytes < 2 * PAGE ? bytes / 2 : bytes / 2 / PAGE * PAGE;
    nvmeio_block_perform(block);
    CHECK(block->result == (int64_t)block->bytes);
    block->bytes = bytes;
    return true;
}

/* A file of `size` bytes, which a write is about to extend. */
static struct nvmeio_file *watch_file(size_t size, enum nvmeio_direct direct,
                                      unsigned failing, bool half)
{
    make_file(watched.path, size, 2);
    watched.size_before = (int64_t)size;
    watched.failing = failing;
    watched.half = half;
    play(watch);
    return open_file(watched.path, O_RDWR, direct);
}

struct way {
    enum nvmeio_direct direct;
    int64_t offset;
    size_t residue; /* of the address */
    size_t size, size_before;
    unsigned blocks; /* at least */
};

static const struct way ways[] = {
    {NVMEIO_DIRECT_AUTO, 0, 0, TOTAL, 0, 4},              /* by the device */
    {NVMEIO_DIRECT_AUTO, 0, 1, TOTAL, 0, 4},              /* bounced */
    {NVMEIO_DIRECT_AUTO, 1000, 1000, TOTAL - 2000, 0, 4}, /* with ragged ends */
    {NVMEIO_DIRECT_AUTO, 1000, 0, TOTAL - 2000, 500, 4},  /* and bounced */
    {NVMEIO_DIRECT_NEVER, 0, 0, TOTAL, 0, 4},             /* by the page cache */
    {NVMEIO_DIRECT_AUTO, 0, 0, TOTAL, ORDERED + 1000, 7}, /* it begins within */
    {NVMEIO_DIRECT_AUTO, PAGE, 0, ORDERED, TOTAL, DEPTH}, /* and ends there */
};

/* As the only record of a scatter. */
static struct nvmeio_outcome scatter_at(struct nvmeio_file *file, char *bytes,
                                        const struct way *way)
{
    const int64_t size = (int64_t)way->size;
    const struct nvmeio_gather scatter = {.op = NVMEIO_OP_WRITE,
                                          .file = file,
                                          .address = bytes,
                                          .size = way->size,
                                          .count = 1,
                                          .offsets = &way->offset,
                                          .sizes = &size};
    struct nvmeio_request *request;
    size_t offender;

    CHECK(nvmeio_submit_gather(stage.handle, &scatter, &request, &offender) == 0);
    return finish(request);
}

/* False after it has succeeded. */
static bool write_until_it_fails(const struct way *way, bool as_record,
                                 unsigned failing, bool half)
{
    struct nvmeio_file *file = watch_file(way->size_before, way->direct, failing, half);
    char *bytes = stage.memory.address + way->residue;
    struct nvmeio_outcome outcome =
        as_record ? scatter_at(file, bytes, way)
                  : write_at(stage.handle, file, bytes, way->size, way->offset);

    nvmeio_file_release(file);
    CHECK(outcome.got == 0 ||
          file_holds(watched.path, bytes, (size_t)outcome.got, way->offset));
    if (outcome.result != -ENOSPC) {
        CHECK(outcome.result == (int64_t)way->size && failing >= way->blocks);
        return false;
    }
    CHECK(outcome.got < (int64_t)way->size);
    CHECK(size_of(watched.path) <= larger(watched.size_before, watched.missing));
    CHECK(watched.missing <= way->offset + outcome.got || as_record);
    return true;
}

static void test_whichever_block_fails_the_file_ends_before_the_first_missing_byte(void)
{
    stage_open_small();
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
        for (int kind = 0; kind < 4; kind++) {
            unsigned failing = 0;
            while (write_until_it_fails(&ways[i], kind & 2, failing, kind & 1))
                failing++;
        }
    stage_close();
}

/* Blocks inside the file are all in flight at once, and the rest waits for them. */
static void test_only_bytes_beyond_the_end_land_block_by_block(void)
{
    stage_open(BLOCKS);
    struct nvmeio_file *file =
        watch_file(5 * BLOCK + 1000, NVMEIO_DIRECT_AUTO, UINT_MAX, false);
    struct nvmeio_transfer t = whole(NVMEIO_OP_WRITE);
    t.file = file;
    play(hold);
    struct nvmeio_request *request = submit(stage.handle, &t);
    await(&in_flight, 5);
    /* The only worker has submitted its blocks of the write before it takes this
     * request. */
    t.op = NVMEIO_OP_READ;
    t.size = PAGE;
    struct nvmeio_request *behind = submit(stage.handle, &t);
    await(&in_flight_of[NVMEIO_OP_READ], 1);
    CHECK(look(&in_flight_of[NVMEIO_OP_WRITE]) == 5);
    play(watch);
    CHECK(finish(behind).result == (int64_t)PAGE);
    CHECK(finish(request).result == BLOCKS * BLOCK);
    CHECK(file_holds(watched.path, stage.memory.address, BLOCKS * BLOCK, 0));
    nvmeio_file_release(file);
    stage_close();
}

static bool fail(struct nvmeio_block *block)
{
    block->result = -ENOSPC;
    return true;
}

/* A child may do so with the inherited handle and file. */
static _Noreturn void write_and_sync(struct nvmeio_file *file, bool by_handle)
{
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = file};
    char bytes[] = "child";

    alarm(60);
    if (by_handle) {
        CHECK(write_at(stage.handle, file, bytes, 5, TOTAL + 100).result == 5);
        CHECK(carry_out(stage.handle, &sync).result == 0);
    } else {
        CHECK(pwrite(nvmeio_file_fd(file), bytes, 5, TOTAL + 100) == 5);
        CHECK(fsync(nvmeio_file_fd(file)) == 0);
    }
    _exit(0);
}

/* No other thread holds the script's mutex now, and the child runs its own script. */
static pid_t fork_with_script(void)
{
    fflush(NULL);
    pthread_mutex_lock(&mutex);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0) {
        pthread_mutex_unlock(&mutex);
        return pid;
    }
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    change = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    script = perform;
    return 0;
}

static void test_a_childs_synced_write_survives_a_failed_write(bool by_handle,
                                                               bool cancelled)
{
    int status;

    stage_open_small();
    struct nvmeio_file *file = watch_file(PAGE, NVMEIO_DIRECT_AUTO, UINT_MAX, false);
    CHECK(nvmeio_file_fd(file) >= 0);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_WRITE, file, stage.memory.address, TOTAL, 0);
    play(hold);
    struct nvmeio_request *request = submit(stage.handle, &t);
    await(&in_flight, 1);
    pid_t child = fork_with_script();
    if (child == 0)
        write_and_sync(file, by_handle);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(!cancelled || nvmeio_request_cancel(request) == 1);
    play(cancelled ? perform : fail);
    CHECK(finish(request).result == (cancelled ? -ECANCELED : -ENOSPC));
    CHECK(size_of(watched.path) == TOTAL + 105);
    CHECK(file_holds(watched.path, "child", 5, TOTAL + 100));
    nvmeio_file_release(file);
    stage_close();
}

int main(void)
{
    begin();
    stage.path = path_in(test_folder());
    watched.path = path_in(test_folder());
    test_whichever_block_fails_the_file_ends_before_the_first_missing_byte();
    test_only_bytes_beyond_the_end_land_block_by_block();
    for (int way = 0; way < (SANITIZED ? 2 : 4); way++)
        test_a_childs_synced_write_survives_a_failed_write(way & 2, way & 1);
    return 0;
}
