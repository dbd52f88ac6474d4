/* fault_engine.c -- a wrapper of an engine that injects faults of blocks.
 *
 * The worker sees the worst of a kernel and a device: transfers that are short, refused
 * or failed, completions that are early, late or reordered, spurious ends of waits,
 * lost wake-ups.  Only in the test build. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "fault.h"

#define ENGINES_MAX 8
#define SECTORS_BYTES 4096u

/* The most calls of reap() by which a completion is delayed. */
#define LATE_MAX 4

struct entry {
    struct nvmeio_engine_ops ops; /* those with faults */
    const struct nvmeio_engine_ops *real;
};

/* engine->faults */
struct faults {
    struct nvmeio_block *held; /* complete, but not reported yet */
    unsigned held_count;
    bool dead;
    /* Of each block, by its index. */
    struct {
        unsigned late;         /* remaining calls of reap() until it is reported */
        uint64_t short_number; /* 0: not short */
    } blocks[];
};

static struct entry entries[ENGINES_MAX];
static _Atomic unsigned entry_count; /* grows under the mutex */
static pthread_mutex_t entries_mutex = PTHREAD_MUTEX_INITIALIZER;

static const struct nvmeio_engine_ops *real_of(const struct nvmeio_engine *engine)
{
    return ((const struct entry *)engine->ops)->real;
}

static int faulty_open(struct nvmeio_engine *engine)
{
    int error = real_of(engine)->open(engine);

    if (error)
        return error;
    struct faults *faults =
        calloc(1, sizeof(*faults) + engine->depth * sizeof(faults->blocks[0]));
    if (!faults) {
        real_of(engine)->close(engine);
        return -ENOMEM;
    }
    engine->faults = faults;
    return 0;
}

static void faulty_close(struct nvmeio_engine *engine)
{
    real_of(engine)->close(engine);
    free(engine->faults);
}

/* Whether it bypasses the page cache. */
static bool is_direct(const struct nvmeio_block *block)
{
    return block->op != NVMEIO_OP_FSYNC && fcntl(block->fd, F_GETFL) & O_DIRECT;
}

/* The errno with which a block is refused, or 0. */
static int refusal(const struct nvmeio_block *block)
{
    static const int passing[] = {-EAGAIN, -EINTR, -EBUSY};
    static const int undirect[] = {-EINVAL, -EOPNOTSUPP};
    uint64_t number;

    if (nvmeio_fault_strikes(NVMEIO_FAULT_AGAIN, &number))
        return passing[number % 3];
    if (is_direct(block) && nvmeio_fault_strikes(NVMEIO_FAULT_DIRECT, &number))
        return undirect[number % 2];
    if (nvmeio_fault_strikes(NVMEIO_FAULT_EIO, NULL))
        return -EIO;
    if (block->op == NVMEIO_OP_WRITE && nvmeio_fault_strikes(NVMEIO_FAULT_ENOSPC, NULL))
        return -ENOSPC;
    return 0;
}

/* Half of the short transfers end between sectors: less is requested.  The others end
 * anywhere, as on some file systems but no device: less is reported. */
static void shorten(struct faults *faults, struct nvmeio_block *block)
{
    uint64_t number;

    faults->blocks[block->index].short_number = 0;
    if (block->op == NVMEIO_OP_FSYNC || block->bytes < 2 ||
        !nvmeio_fault_strikes(NVMEIO_FAULT_SHORT, &number))
        return;
    uint32_t sectors = (block->bytes - 1) / SECTORS_BYTES;
    if (number & 1 && sectors > 0)
        block->bytes = (uint32_t)(1 + (number >> 1) % sectors) * SECTORS_BYTES;
    else
        faults->blocks[block->index].short_number = number | 1;
}

static void faulty_push(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    struct faults *faults = engine->faults;
    int error = refusal(block);
    bool done = error || (block->op == NVMEIO_OP_FSYNC &&
                          nvmeio_fault_strikes(NVMEIO_FAULT_NOSYNC, NULL));
    uint64_t number;

    faults->blocks[block->index].late = 0;
    if (!error)
        shorten(faults, block);
    if (done) {
        block->result = error;
    } else if (nvmeio_fault_strikes(NVMEIO_FAULT_EARLY, NULL)) {
        nvmeio_block_perform(block);
        done = true;
    }
    if (done) {
        engine->in_flight++;
        nvmeio_engine_finish(engine, block);
        return;
    }
    if (nvmeio_fault_strikes(NVMEIO_FAULT_LATE, &number))
        faults->blocks[block->index].late = (unsigned)(1 + number % LATE_MAX);
    real_of(engine)->push(engine, block);
}

/* Report less than was moved. */
static void report_less(struct faults *faults, struct nvmeio_block *block)
{
    uint64_t number = faults->blocks[block->index].short_number;

    if (number && block->result > 1)
        block->result = (int64_t)(1 + number % (uint64_t)(block->result - 1));
    faults->blocks[block->index].short_number = 0;
}

/* Split the returned blocks into those to report now and those to delay. */
static unsigned deal(struct faults *faults, struct nvmeio_block *list,
                     struct nvmeio_block **reported)
{
    struct nvmeio_block *held = NULL;
    unsigned count = 0;

    faults->held_count = 0;
    while (list) {
        struct nvmeio_block *block = list;
        list = block->next;
        unsigned *late = &faults->blocks[block->index].late;
        if (*late > 0) {
            --*late;
            block->next = held;
            held = block;
            faults->held_count++;
        } else {
            report_less(faults, block);
            block->next = *reported;
            *reported = block;
            count++;
        }
    }
    faults->held = held;
    return count;
}

/* Move every second block of a list to its end, in reverse order. */
static struct nvmeio_block *reordered(struct nvmeio_block *list)
{
    struct nvmeio_block *first = NULL, *second = NULL, **end = &first;
    bool odd = false;

    for (; list; odd = !odd) {
        struct nvmeio_block *block = list;
        list = block->next;
        if (odd) {
            block->next = second;
            second = block;
        } else {
            *end = block;
            end = &block->next;
        }
    }
    *end = second;
    return first;
}

/* Move the blocks before `old` from `finished` to the delayed ones. */
static struct nvmeio_block *take_new(struct nvmeio_engine *engine,
                                     const struct nvmeio_block *old)
{
    struct faults *faults = engine->faults;
    struct nvmeio_block *list = faults->held;

    while (engine->finished != old) {
        struct nvmeio_block *block = engine->finished;
        engine->finished = block->next;
        engine->in_flight++;
        block->next = list;
        list = block;
    }
    return list;
}

/* Engines of our own threads always return blocks. */
static bool by_kernel(const struct nvmeio_engine *engine)
{
    const char *name = real_of(engine)->name;
    return strcmp(name, "io_uring") == 0 || strcmp(name, "libaio") == 0;
}

static int faulty_reap(struct nvmeio_engine *engine, unsigned wait_min)
{
    struct faults *faults = engine->faults;
    struct nvmeio_block *old = engine->finished, *reported = NULL;

    if (by_kernel(engine))
        faults->dead |= nvmeio_fault_strikes(NVMEIO_FAULT_DEAD, NULL);
    if (faults->dead)
        return -EIO;
    /* With delayed completions, a wait would wait for too many. */
    if (faults->held ||
        (wait_min > 0 && nvmeio_fault_strikes(NVMEIO_FAULT_SPURIOUS, NULL)))
        wait_min = 0;
    engine->in_flight -= faults->held_count;
    int result = real_of(engine)->reap(engine, wait_min);
    engine->in_flight += faults->held_count;
    if (result < 0)
        return result;
    unsigned count = deal(faults, take_new(engine, old), &reported);
    if (count > 1 && nvmeio_fault_strikes(NVMEIO_FAULT_REORDER, NULL))
        reported = reordered(reported);
    while (reported) {
        struct nvmeio_block *next = reported->next;
        nvmeio_engine_finish(engine, reported);
        reported = next;
    }
    return (int)count;
}

static void faulty_wake(struct nvmeio_engine *engine)
{
    if (!nvmeio_fault_strikes(NVMEIO_FAULT_WAKE, NULL))
        real_of(engine)->wake(engine);
}

/* The entry of an engine, or NULL. */
static struct entry *entry_of(const struct nvmeio_engine_ops *real)
{
    /* Acquire: pairs with the release below. */
    unsigned count = atomic_load_explicit(&entry_count, memory_order_acquire);

    for (unsigned i = 0; i < count; i++)
        if (entries[i].real == real)
            return &entries[i];
    return NULL;
}

const struct nvmeio_engine_ops *
nvmeio_fault_engine(const struct nvmeio_engine_ops *real)
{
    if (!real)
        return NULL;
    struct entry *entry = entry_of(real);
    if (entry)
        return &entry->ops;
    pthread_mutex_lock(&entries_mutex);
    entry = entry_of(real);
    if (!entry) {
        unsigned count = atomic_load_explicit(&entry_count, memory_order_relaxed);
        assert(count < ENGINES_MAX);
        entry = &entries[count];
        entry->ops = *real;
        entry->ops.open = faulty_open;
        entry->ops.close = faulty_close;
        entry->ops.push = faulty_push;
        entry->ops.reap = faulty_reap;
        entry->ops.wake = faulty_wake;
        entry->real = real;
        atomic_store_explicit(&entry_count, count + 1, memory_order_release);
    }
    pthread_mutex_unlock(&entries_mutex);
    return &entry->ops;
}
