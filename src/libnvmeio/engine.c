/* engine.c -- the table of engines, the reasons why one cannot be used, and helpers
 * that engines share.
 *
 * An engine is one file and one entry in the table below. The build leaves out an
 * engine whose library it did not find; the entry then has no functions. */
#include "engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* The test build defines this to inject faults (tests/faults). */
#ifndef NVMEIO_ENGINE_HANDED_OUT
#define NVMEIO_ENGINE_HANDED_OUT(ops) (ops)
#endif

struct entry {
    const char *name;
    const char *library;
    const struct nvmeio_engine_ops *ops;
};

#ifdef NVMEIO_HAVE_LIBURING
#define OPS_URING &nvmeio_engine_uring
#else
#define OPS_URING NULL
#endif

static const struct entry entries[] = {
    {"io_uring", "liburing", OPS_URING},
    {"libaio", "", &nvmeio_engine_libaio},
    {"threads", "", &nvmeio_engine_threads},
    {"sync", "", &nvmeio_engine_sync},
};
#define ENTRY_COUNT (sizeof(entries) / sizeof(entries[0]))

/* How long a call is repeated after transient errors, and after others. */
#define PATIENCE_TRANSIENT_NS 10000000000
#define PATIENCE_OTHER_NS 1000000000
#define PAUSE_MIN_NS 1000
#define PAUSE_MAX_NS 10000000

const char *nvmeio_version(void)
{
    return NVMEIO_VERSION;
}

unsigned nvmeio_engine_count(void)
{
    return ENTRY_COUNT;
}

const struct nvmeio_engine_ops *nvmeio_engine_at(unsigned index)
{
    for (unsigned i = 0; i < ENTRY_COUNT; i++) {
        if (entries[i].ops && index-- == 0)
            return NVMEIO_ENGINE_HANDED_OUT(entries[i].ops);
    }
    return NULL;
}

const struct nvmeio_engine_ops *nvmeio_engine_find(const char *name, bool *known)
{
    for (unsigned i = 0; i < ENTRY_COUNT; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            *known = true;
            return NVMEIO_ENGINE_HANDED_OUT(entries[i].ops);
        }
    }
    *known = false;
    return NULL;
}

/* The value of the sysctl kernel.io_uring_disabled, or -1 if the kernel has no such
 * sysctl. */
static int uring_disabled(void)
{
    int value = -1;
    FILE *file = fopen("/proc/sys/kernel/io_uring_disabled", "re");
    if (!file)
        return -1;
    if (fscanf(file, "%d", &value) != 1)
        value = -1;
    fclose(file);
    return value;
}

static const char *explain_uring(int error, char *scratch, size_t size)
{
    int disabled = uring_disabled();
    struct rlimit limit = {0};

    switch (-error) {
    case EPERM:
        if (disabled > 0) {
            /* At 1, root and the members of kernel.io_uring_group may still use it. */
            snprintf(scratch, size,
                     "sysctl kernel.io_uring_disabled is %d; set it to 0%s", disabled,
                     disabled > 1 ? "" : " (for root, the cause is a seccomp profile)");
            return scratch;
        }
        return "refused, probably by the seccomp profile of a container; allow "
               "io_uring_setup, io_uring_enter and io_uring_register";
    case ENOSYS:
        return "the kernel is older than 5.1, or a seccomp profile hides "
               "io_uring_setup";
    case ENOMEM:
        getrlimit(RLIMIT_MEMLOCK, &limit);
        if (limit.rlim_cur == RLIM_INFINITY)
            return "memory for the rings ran out";
        snprintf(scratch, size,
                 "the rings exceed the limit on locked memory, or memory ran out; "
                 "raise ulimit -l, which is %llu KiB",
                 (unsigned long long)limit.rlim_cur / 1024);
        return scratch;
    default:
        return "io_uring_setup failed";
    }
}

static const char *explain_libaio(int error)
{
    switch (-error) {
    case EAGAIN:
        return "too many events in use; raise sysctl fs.aio-max-nr";
    case ENOSYS:
        return "the kernel has no AIO, or a seccomp profile hides io_setup";
    case EPERM:
        return "refused by a seccomp profile; allow io_setup, io_submit, io_getevents";
    default:
        return "io_setup failed";
    }
}

void nvmeio_engine_explain(const char *name, int error, char *reason, size_t size)
{
    char scratch[128];
    struct rlimit limit = {0};
    const char *advice = "could not be started";

    if (error == -EMFILE) {
        getrlimit(RLIMIT_NOFILE, &limit);
        snprintf(scratch, sizeof(scratch),
                 "all descriptors are in use; raise ulimit -n, which is %llu",
                 (unsigned long long)limit.rlim_cur);
        advice = scratch;
    } else if (strcmp(name, "io_uring") == 0)
        advice = explain_uring(error, scratch, sizeof(scratch));
    else if (strcmp(name, "libaio") == 0)
        advice = explain_libaio(error);
    else if (error == -EAGAIN)
        advice = "no thread can be started; raise ulimit -u";
    snprintf(reason, size, "%s (errno %d): %s", strerror(-error), -error, advice);
}

int nvmeio_engine_probe(unsigned index, struct nvmeio_engine_info *info)
{
    struct nvmeio_engine engine;

    if (index >= ENTRY_COUNT)
        return -EINVAL;
    const struct entry *entry = &entries[index];
    *info = (struct nvmeio_engine_info){
        .name = entry->name, .library = entry->library, .built = entry->ops != NULL};
    if (!entry->ops) {
        info->error = -ENOSYS;
        snprintf(info->reason, sizeof(info->reason),
                 "not built: %s was missing or left out when nvmeio was compiled",
                 entry->library);
        return 0;
    }
    info->error = nvmeio_engine_start(&engine, NVMEIO_ENGINE_HANDED_OUT(entry->ops), 1);
    if (info->error == 0)
        nvmeio_engine_stop(&engine);
    else
        nvmeio_engine_explain(entry->name, info->error, info->reason,
                              sizeof(info->reason));
    return 0;
}

int nvmeio_engine_start(struct nvmeio_engine *engine,
                        const struct nvmeio_engine_ops *ops, unsigned depth)
{
    *engine = (struct nvmeio_engine){.ops = ops, .depth = depth};
    engine->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->wake_fd < 0)
        return -errno;
    int error = ops->open(engine);
    if (error)
        close(engine->wake_fd);
    return error;
}

void nvmeio_engine_stop(struct nvmeio_engine *engine)
{
    if (engine->aside) {
        engine->aside->ops->close(engine->aside);
        free(engine->aside);
    }
    engine->ops->close(engine);
    close(engine->wake_fd);
}

static void start_aside(struct nvmeio_engine *engine)
{
    struct nvmeio_engine *aside = malloc(sizeof(*aside));

    if (!aside)
        return;
    *aside = (struct nvmeio_engine){
        .ops = &nvmeio_engine_threads,
        .depth = engine->depth,
        .wake_fd = engine->wake_fd,
        .signals = true,
    };
    if (aside->ops->open(aside) == 0)
        engine->aside = aside;
    else
        free(aside);
}

void nvmeio_engine_push_aside(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    engine->in_flight++;
    if (!engine->aside)
        start_aside(engine);
    if (engine->aside) {
        engine->aside->ops->push(engine->aside, block);
        return;
    }
    nvmeio_block_perform(block);
    nvmeio_engine_finish(engine, block);
}

int nvmeio_engine_collect_aside(struct nvmeio_engine *engine)
{
    struct nvmeio_engine *aside = engine->aside;
    int count = aside ? aside->ops->reap(aside, 0) : 0;

    while (aside && aside->finished) {
        struct nvmeio_block *block = aside->finished;
        aside->finished = block->next;
        nvmeio_engine_finish(engine, block);
    }
    return count;
}

void nvmeio_block_perform(struct nvmeio_block *block)
{
    ssize_t result;

    switch (block->op) {
    case NVMEIO_OP_READ:
        result = pread(block->fd, block->address, block->bytes, block->offset);
        break;
    case NVMEIO_OP_WRITE:
        result = pwrite(block->fd, block->address, block->bytes, block->offset);
        break;
    default:
        result = block->data_only ? fdatasync(block->fd) : fsync(block->fd);
    }
    block->result = result < 0 ? -errno : result;
}

int nvmeio_patience_try(struct nvmeio_patience *patience, int error)
{
    bool transient = error == -EAGAIN || error == -EBUSY || error == -ENOMEM;
    int64_t limit_ns = transient ? PATIENCE_TRANSIENT_NS : PATIENCE_OTHER_NS;

    /* The kernel refused nothing: a signal came, or a stopped process went on. */
    if (error == -EINTR)
        return 0;
    int64_t now = nvmeio_now_ns();
    if (patience->since_ns == 0) {
        patience->since_ns = now;
        patience->pause_ns = PAUSE_MIN_NS;
        return 0;
    }
    if (now - patience->since_ns > limit_ns)
        return error;
    struct timespec pause = {0, patience->pause_ns};
    nanosleep(&pause, NULL);
    if (patience->pause_ns < PAUSE_MAX_NS)
        patience->pause_ns *= 2;
    return 0;
}

void nvmeio_semaphore_wait(sem_t *semaphore)
{
    while (sem_wait(semaphore))
        continue;
}

void nvmeio_eventfd_clear(int fd)
{
    uint64_t value;
    /* The descriptor does not block. -EAGAIN means that it is empty, which is what we
     * want. */
    while (read(fd, &value, sizeof(value)) < 0 && errno == EINTR)
        ;
}

void nvmeio_eventfd_signal(int fd)
{
    uint64_t one = 1;
    /* -EAGAIN means that 2^64-2 wake-ups are waiting, so the reader will wake
     * anyway. */
    while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
}
