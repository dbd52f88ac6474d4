/* transfer.h -- shared by tests of transfers: files in the folder under test, memory
 * between canaries, a transfer from submission to outcome.
 *
 * Files are in $NVMEIO_TEST_DIR, by default the working directory, and are removed at
 * the end.  A watchdog turns every hang into a failure. */
#ifndef NVMEIO_TESTS_TRANSFER_H
#define NVMEIO_TESTS_TRANSFER_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <nvmeio/nvmeio.h>

#include "check.h"
#include "stuck.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define PAGE ((size_t)4096)
#define SECOND_NS INT64_C(1000000000)
#define LONG_NS (60 * SECOND_NS)
#define WATCHDOG_S 240

#define TEST_FILES_MAX 64
static char test_paths[TEST_FILES_MAX][256];
static unsigned test_path_count;
static pid_t test_pid;

static void remove_files(void)
{
    for (unsigned i = 0; i < test_path_count && getpid() == test_pid; i++)
        unlink(test_paths[i]);
}

/* Call this first in every main(). */
static inline void begin(void)
{
    test_pid = getpid();
    atexit(remove_files);
    alarm(WATCHDOG_S);
}

static inline const char *test_folder(void)
{
    const char *folder = getenv("NVMEIO_TEST_DIR");
    return folder ? folder : ".";
}

static inline unsigned descriptors_open(void)
{
    DIR *folder = opendir("/proc/self/fd");
    unsigned count = 0;

    CHECK(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

/* A path in `folder` for a file of this test, which does not exist yet. */
static inline const char *path_in(const char *folder)
{
    CHECK(test_path_count < TEST_FILES_MAX);
    char *path = test_paths[test_path_count];
    snprintf(path, sizeof(test_paths[0]), "%s/nvmeio-test-%d-%u", folder, (int)getpid(),
             test_path_count);
    test_path_count++;
    unlink(path);
    return path;
}

/* The engines that work here, best first; NULL past the last. */
static inline const char *engine_at(unsigned index)
{
    struct nvmeio_engine_info info;

    for (unsigned i = 0; i < nvmeio_engine_count(); i++) {
        CHECK(nvmeio_engine_probe(i, &info) == 0);
        if (info.built && info.error == 0 && index-- == 0)
            return info.name;
    }
    return NULL;
}

#define FOR_EACH_ENGINE(name)                                                          \
    for (unsigned name##_index = 0; (name = engine_at(name##_index)); name##_index++)

static inline bool engine_works(const char *wanted)
{
    const char *engine;

    FOR_EACH_ENGINE(engine)
    {
        if (strcmp(engine, wanted) == 0)
            return true;
    }
    return false;
}

static inline struct nvmeio_config config_of(const char *engine)
{
    struct nvmeio_config config;

    nvmeio_config_default(&config);
    config.engine = engine;
    config.block_bytes = 64 * KIB;
    config.queue_depth = 16;
    return config;
}

static inline struct nvmeio_handle *open_handle(const struct nvmeio_config *config)
{
    struct nvmeio_handle *handle;

    CHECK(nvmeio_handle_open(config, &handle) == 0);
    CHECK(strcmp(nvmeio_handle_engine(handle), config->engine) == 0);
    return handle;
}

static inline struct nvmeio_file *open_file(const char *path, int flags,
                                            enum nvmeio_direct direct)
{
    struct nvmeio_file *file;
    int error = nvmeio_file_open(path, flags, direct, &file);

    if (error)
        fprintf(stderr, "%s: %s\n", path, strerror(-error));
    CHECK(error == 0);
    return file;
}

/* Bytes that depend on their offset and on the number of the write. */
static inline void fill(char *bytes, size_t size, uint64_t position, unsigned seed)
{
    for (size_t i = 0; i < size; i++) {
        uint64_t x = (position + i + 1) * UINT64_C(0x9e3779b97f4a7c15);
        bytes[i] = (char)((x >> 32) + seed * 31);
    }
}

/* Memory `residue` bytes after a page boundary, with canaries on both sides. */
struct guarded {
    char *base;
    char *address;
    size_t size;
    size_t total;
};

#define CANARY 0x5a

static inline struct guarded guarded_new(size_t size, size_t residue)
{
    struct guarded memory = {.size = size};

    memory.total = (size + residue + 3 * PAGE) / PAGE * PAGE;
    CHECK(posix_memalign((void **)&memory.base, PAGE, memory.total) == 0);
    memset(memory.base, CANARY, memory.total);
    memory.address = memory.base + PAGE + residue;
    return memory;
}

/* The same in the pool, whose memory is never bounced for its pages.  Free it by
 * nvmeio_pool_free(base). */
static inline struct guarded guarded_in_pool(size_t size)
{
    struct guarded memory = {.size = size, .total = size + 3 * PAGE};

    CHECK(nvmeio_pool_alloc(memory.total, false, (void **)&memory.base, NULL) == 0);
    memset(memory.base, CANARY, memory.total);
    memory.address = memory.base + PAGE;
    return memory;
}

static inline void check_canaries(const struct guarded *memory)
{
    const char *end = memory->address + memory->size;

    for (const char *p = memory->base; p < memory->address; p++)
        CHECK(*p == CANARY);
    for (const char *p = end; p < memory->base + memory->total; p++)
        CHECK(*p == CANARY);
}

static inline void guarded_free(struct guarded *memory)
{
    check_canaries(memory);
    free(memory->base);
}

static inline struct nvmeio_request *submit(struct nvmeio_handle *handle,
                                            const struct nvmeio_transfer *transfer)
{
    struct nvmeio_request *request;

    CHECK(nvmeio_submit(handle, transfer, &request) == 0);
    return request;
}

/* Whether its completion was reported to this thread. */
static inline bool wait_for(struct nvmeio_request *request)
{
    int result = nvmeio_request_wait(request, LONG_NS);

    if (result < 0)
        tell_stuck(request);
    CHECK(result == 0 || (result == 1 && request->user));
    return result;
}

/* Whether a thread sleeps until a request is done, or until a handle has none. */
static inline bool is_awaited(struct nvmeio_request *request)
{
    struct nvmeio_queue *queue = &request->handle->queue;

    pthread_mutex_lock(&queue->mutex);
    bool found = request->waiters;
    pthread_mutex_unlock(&queue->mutex);
    return found;
}

static inline bool is_drained(struct nvmeio_handle *handle)
{
    pthread_mutex_lock(&handle->queue.mutex);
    bool found = handle->queue.drainers;
    pthread_mutex_unlock(&handle->queue.mutex);
    return found;
}

/* Wait, take the outcome and release. */
static inline struct nvmeio_outcome finish(struct nvmeio_request *request)
{
    struct nvmeio_outcome outcome;

    wait_for(request);
    CHECK(nvmeio_request_done(request));
    CHECK(nvmeio_request_outcome(request, &outcome) == 0);
    nvmeio_request_release(request);
    return outcome;
}

static inline struct nvmeio_outcome carry_out(struct nvmeio_handle *handle,
                                              const struct nvmeio_transfer *transfer)
{
    return finish(submit(handle, transfer));
}

/* In this thread if possible. */
static inline struct nvmeio_outcome
perform_or_submit(struct nvmeio_handle *handle, const struct nvmeio_transfer *transfer)
{
    struct nvmeio_outcome outcome;
    int done = nvmeio_perform(handle, transfer, &outcome);

    CHECK(done >= 0);
    return done ? outcome : carry_out(handle, transfer);
}

/* One way or the other. */
static inline struct nvmeio_outcome carry_out_by(bool perform,
                                                 struct nvmeio_handle *handle,
                                                 const struct nvmeio_transfer *transfer)
{
    return perform ? perform_or_submit(handle, transfer) : carry_out(handle, transfer);
}

static inline struct nvmeio_transfer transfer_of(enum nvmeio_op op,
                                                 struct nvmeio_file *file,
                                                 void *address, size_t size,
                                                 int64_t offset)
{
    return (struct nvmeio_transfer){
        .op = op, .file = file, .address = address, .size = size, .offset = offset};
}

static inline struct nvmeio_outcome read_at(struct nvmeio_handle *handle,
                                            struct nvmeio_file *file, void *address,
                                            size_t size, int64_t offset)
{
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file, address, size, offset);
    return carry_out(handle, &t);
}

static inline struct nvmeio_outcome write_at(struct nvmeio_handle *handle,
                                             struct nvmeio_file *file, void *address,
                                             size_t size, int64_t offset)
{
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_WRITE, file, address, size, offset);
    return carry_out(handle, &t);
}

/* How many latencies of a handle may have been from `shortest` to `longest`
 * nanoseconds; 0 to INT64_MAX for all. */
static inline uint64_t latencies_within(struct nvmeio_handle *handle, int64_t shortest,
                                        int64_t longest)
{
    uint64_t counts[NVMEIO_LATENCY_BUCKETS], found = 0;

    nvmeio_handle_latencies(handle, counts);
    for (unsigned i = 0; i < NVMEIO_LATENCY_BUCKETS; i++) {
        int64_t begin = i > 0 ? nvmeio_latency_ns(i - 1) + 1 : 0;
        if (nvmeio_latency_ns(i) >= shortest && begin <= longest)
            found += counts[i];
    }
    return found;
}

static inline uint64_t latencies_counted(struct nvmeio_handle *handle)
{
    return latencies_within(handle, 0, INT64_MAX);
}

/* Make a file of `size` bytes of fill(), and drop it from the page cache. */
static inline void make_file(const char *path, size_t size, unsigned seed)
{
    char chunk[64 * KIB];
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

    CHECK(fd >= 0);
    for (size_t done = 0; done < size;) {
        size_t part = size - done < sizeof(chunk) ? size - done : sizeof(chunk);
        fill(chunk, part, done, seed);
        CHECK(write(fd, chunk, part) == (ssize_t)part);
        done += part;
    }
    CHECK(fsync(fd) == 0);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    close(fd);
}

/* Drop the pages of a file from the page cache, so that reads go to the device. */
static inline void cool(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    CHECK(fd >= 0 && fsync(fd) == 0);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    close(fd);
}

/* Whether an ordinary read finds `bytes` at `offset`. */
static inline bool file_holds(const char *path, const char *bytes, size_t size,
                              int64_t offset)
{
    char chunk[64 * KIB];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool equal = true;

    CHECK(fd >= 0);
    for (size_t done = 0; done < size && equal;) {
        size_t part = size - done < sizeof(chunk) ? size - done : sizeof(chunk);
        ssize_t got = pread(fd, chunk, part, offset + (int64_t)done);
        equal = got > 0 && memcmp(chunk, bytes + done, (size_t)got) == 0;
        done += equal ? (size_t)got : 0;
    }
    close(fd);
    return equal;
}

#endif
