/* fixed_workload.c -- FOLDER ENGINE: open a handle, write, read, gather, scatter, sync
 * and close, after a pause in which strace attaches.
 *
 * It prints "ready" as JSON, and at the end the result of each step, 0 or -errno, and
 * how many descriptors stayed open.  A step that reports success must be right.  After
 * the pause it makes only system calls that the library never makes, readv, writev,
 * preadv and flock, so that faults strike only the library. */
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include "../c/transfer.h"

#define FILE_BYTES (20 * 16 * KIB + 777)
#define SKEW 3
#define RECORDS 12
#define RECORD_BYTES ((int64_t)1000)
#define DESCRIPTORS 64

enum step {
    OPEN_HANDLE,
    OPEN_SOURCE,
    OPEN_TARGET,
    WRITE,
    READ,
    UNALIGNED,
    SMALL,
    GATHER,
    SCATTER,
    FSYNC,
    AGAIN,
    DRAIN,
    STEPS
};

static const char *const step_names[STEPS] = {
    "open_handle", "open_source", "open_target", "write", "read",  "unaligned",
    "small",       "gather",      "scatter",     "fsync", "again", "drain",
};

static int64_t results[STEPS];
static const char *source_path, *target_path;
static int target_fd;
static struct guarded written, whole, skewed, small, gathered, scattered;
static int64_t offsets[RECORDS];
static char seen[FILE_BYTES];

static void say(const char *text)
{
    struct iovec part = {(void *)text, strlen(text)};
    CHECK(writev(STDOUT_FILENO, &part, 1) == (ssize_t)part.iov_len);
}

/* Return how many descriptors are open, by trying to unlock each. */
static int open_count(void)
{
    int count = 0;

    for (int fd = 0; fd < DESCRIPTORS; fd++)
        count += flock(fd, LOCK_UN) == 0 || errno != EBADF;
    return count;
}

static void report(int left_open)
{
    char text[1024], *end = text;

    for (enum step i = 0; i < STEPS; i++)
        end += snprintf(end, sizeof(text) - (size_t)(end - text), "%s\"%s\": %d",
                        i ? ", " : "{", step_names[i], (int)results[i]);
    snprintf(end, sizeof(text) - (size_t)(end - text), ", \"left_open\": %d}\n",
             left_open);
    say(text);
}

static void prepare(void)
{
    source_path = path_in(test_folder());
    target_path = path_in(test_folder());
    make_file(source_path, FILE_BYTES, 1);
    make_file(target_path, PAGE, 2);
    target_fd = open(target_path, O_RDONLY | O_CLOEXEC);
    CHECK(target_fd >= 0);
    written = guarded_new(FILE_BYTES, 0);
    fill(written.address, FILE_BYTES, 0, 3);
    whole = guarded_new(FILE_BYTES, 0);
    skewed = guarded_new(FILE_BYTES - 16, SKEW);
    small = guarded_new(PAGE, 0);
    gathered = guarded_new(RECORDS * RECORD_BYTES, 0);
    scattered = guarded_new(RECORDS * RECORD_BYTES, 0);
    fill(scattered.address, scattered.size, 0, 4);
    /* Neighbours, a gap that is read and discarded, and distant records, unsorted. */
    for (int i = 0; i < RECORDS; i++)
        offsets[i] = (i * 5 % RECORDS) * (RECORD_BYTES + (i % 2) * 24 * (int64_t)KIB);
}

/* Whether the bytes are those of make_file(). */
static bool right(const struct guarded *memory, int64_t offset, unsigned seed)
{
    static char expected[FILE_BYTES];

    fill(expected, memory->size, (uint64_t)offset, seed);
    return memcmp(memory->address, expected, memory->size) == 0;
}

/* Whether the target holds these bytes, by an ordinary read. */
static bool landed(const char *bytes, size_t size, int64_t offset)
{
    struct iovec part = {seen, size};
    return preadv(target_fd, &part, 1, offset) == (ssize_t)size &&
           memcmp(seen, bytes, size) == 0;
}

/* The outcome of a request, if it could be submitted. */
static int64_t ended(int error, struct nvmeio_request *request)
{
    struct nvmeio_outcome outcome;

    if (error)
        return error;
    error = nvmeio_request_wait(request, LONG_NS);
    CHECK(error == 0);
    CHECK(nvmeio_request_outcome(request, &outcome) == 0);
    nvmeio_request_release(request);
    return outcome.result;
}

static int64_t transfer(struct nvmeio_handle *handle, struct nvmeio_transfer transfer)
{
    struct nvmeio_request *request = NULL;
    int error = nvmeio_submit(handle, &transfer, &request);

    return ended(error, request);
}

static int64_t gather(struct nvmeio_handle *handle, struct nvmeio_file *file,
                      enum nvmeio_op op, struct guarded *memory)
{
    int64_t size = RECORD_BYTES;
    struct nvmeio_request *request = NULL;
    size_t offender;
    struct nvmeio_gather gather = {.op = op,
                                   .file = file,
                                   .address = memory->address,
                                   .size = memory->size,
                                   .count = RECORDS,
                                   .offsets = offsets,
                                   .sizes = &size,
                                   .one_size = true,
                                   .gap_max = PAGE};
    int error = nvmeio_submit_gather(handle, &gather, &request, &offender);

    return ended(error, request);
}

/* A failed step leaves its errno; a successful one has moved all bytes, which must be
 * right. */
#define STEP(step, outcome, size, holds)                                               \
    do {                                                                               \
        int64_t result = (outcome);                                                    \
        if (result >= 0) {                                                             \
            CHECK(result == (int64_t)(size));                                          \
            CHECK(holds);                                                              \
            result = 0;                                                                \
        }                                                                              \
        results[step] = result;                                                        \
    } while (0)

static bool records_right(void)
{
    struct guarded record = {.size = RECORD_BYTES};

    for (int i = 0; i < RECORDS; i++) {
        record.address = gathered.address + i * RECORD_BYTES;
        if (!right(&record, offsets[i], 1))
            return false;
    }
    return true;
}

static bool records_landed(void)
{
    for (int i = 0; i < RECORDS; i++)
        if (!landed(scattered.address + i * RECORD_BYTES, RECORD_BYTES, offsets[i]))
            return false;
    return true;
}

/* In this thread if possible. */
static int64_t at_once(struct nvmeio_handle *handle, struct nvmeio_file *file)
{
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_READ, file, small.address, small.size, PAGE);
    struct nvmeio_outcome outcome;
    int done = nvmeio_perform(handle, &t, &outcome);

    if (done < 0)
        return done;
    return done ? outcome.result : transfer(handle, t);
}

static void read_all(struct nvmeio_handle *handle, struct nvmeio_file *source)
{
    STEP(READ,
         transfer(handle,
                  transfer_of(NVMEIO_OP_READ, source, whole.address, whole.size, 0)),
         whole.size, right(&whole, 0, 1));
    STEP(UNALIGNED,
         transfer(handle,
                  transfer_of(NVMEIO_OP_READ, source, skewed.address, skewed.size, 7)),
         skewed.size, right(&skewed, 7, 1));
    STEP(SMALL, at_once(handle, source), small.size, right(&small, PAGE, 1));
    STEP(GATHER, gather(handle, source, NVMEIO_OP_READ, &gathered), gathered.size,
         records_right());
    memset(whole.address, 0, whole.size);
    STEP(AGAIN,
         transfer(handle,
                  transfer_of(NVMEIO_OP_READ, source, whole.address, whole.size, 0)),
         whole.size, right(&whole, 0, 1));
}

static void write_all(struct nvmeio_handle *handle, struct nvmeio_file *target)
{
    STEP(WRITE,
         transfer(handle, transfer_of(NVMEIO_OP_WRITE, target, written.address,
                                      written.size, 0)),
         written.size, landed(written.address, written.size, 0));
    STEP(SCATTER, gather(handle, target, NVMEIO_OP_WRITE, &scattered), scattered.size,
         records_landed());
    STEP(FSYNC, transfer(handle, transfer_of(NVMEIO_OP_FSYNC, target, NULL, 0, 0)), 0,
         true);
}

static void run(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = NULL;
    struct nvmeio_file *source = NULL, *target = NULL;

    config.block_bytes = 16 * KIB;
    config.queue_depth = 8;
    results[OPEN_HANDLE] = nvmeio_handle_open(&config, &handle);
    results[OPEN_SOURCE] =
        nvmeio_file_open(source_path, O_RDONLY, NVMEIO_DIRECT_AUTO, &source);
    results[OPEN_TARGET] =
        nvmeio_file_open(target_path, O_RDWR | O_TRUNC, NVMEIO_DIRECT_AUTO, &target);
    if (handle && target)
        write_all(handle, target);
    if (handle && source)
        read_all(handle, source);
    if (handle) {
        results[DRAIN] = nvmeio_handle_drain(handle, LONG_NS);
        CHECK(nvmeio_handle_pending(handle) == 0);
        nvmeio_handle_close(handle);
    }
    if (source)
        nvmeio_file_release(source);
    if (target)
        nvmeio_file_release(target);
}

int main(int argc, char **argv)
{
    char answer[8];
    struct iovec part = {answer, sizeof(answer)};

    begin();
    CHECK(argc == 2);
    /* Allow any process to trace this one; by default Yama allows only ancestors. */
    (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    prepare();
    int open_before = open_count();
    say("\"ready\"\n");
    CHECK(readv(STDIN_FILENO, &part, 1) > 0);
    run(argv[1]);
    struct guarded *all[] = {&written, &whole, &skewed, &small, &gathered, &scattered};
    for (unsigned i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        check_canaries(all[i]);
    report(open_count() - open_before);
    return 0;
}
