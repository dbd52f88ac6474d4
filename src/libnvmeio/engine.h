/* engine.h -- what every engine provides, and the blocks that it carries out.
 *
 * Functions return 0 or -errno unless said otherwise. */
#ifndef NVMEIO_ENGINE_H
#define NVMEIO_ENGINE_H

#include <nvmeio/base.h>
#include <semaphore.h>

#include "align.h"
#include "inode.h"
#include "records.h"
#include "waiter.h"

struct nvmeio_request;

/* One I/O, as the kernel sees it. The first part is for the engine. The second belongs
 * to request.c, and engines do not use it. */
struct nvmeio_block {
    enum nvmeio_op op;
    int fd;
    uint32_t bytes;
    uint32_t index; /* in the worker's array, so below engine->depth */
    bool data_only; /* an fsync: fdatasync(2) */
    void *address;
    int64_t offset;
    /* The file is on FUSE or the like, where io_uring and libaio wait for each answer
     * of the server before they send the next request. So threads carry out the block.
     * If FUSE answers short, io_uring itself (Linux 6.18, 2026-11-21) even continues at
     * the wrong place in memory and reports the full length: wrong bytes without an
     * error. */
    bool aside;
    int64_t result; /* set by the engine: bytes or -errno */
    struct nvmeio_block *next;

    struct nvmeio_request *request;
    struct nvmeio_piece piece;
    char *memory; /* the caller's, of this piece; NULL: in several places */
    struct nvmeio_extent extent; /* of a gather or scatter: the extent it belongs to */
    void *bounce;                /* the worker's memory, or NULL */
    size_t bounce_bytes;
    struct nvmeio_claim claim; /* of a write or an fsync */
    bool parked;               /* it waits for its claim */
    bool prepared;             /* its descriptor and address are chosen */
    size_t moved;              /* of piece.io_bytes */
    int64_t stalled_ns; /* when the kernel began to return EAGAIN; 0: it does not */
    int64_t pushed_ns;  /* when the engine first got it; 0: never */
    int64_t seen_ns;    /* when the worker saw it among the finished; 0: not yet */
};

struct nvmeio_engine_ops;

struct nvmeio_engine {
    const struct nvmeio_engine_ops *ops;
    unsigned depth;     /* requested; open() lowers it to what is available */
    unsigned in_flight; /* pushed and not yet in `finished` */
    struct nvmeio_block *finished; /* reap() puts blocks here, the worker takes them */
    uint64_t retries;              /* system calls that had to be repeated */
    int wake_fd;                   /* eventfd of wake() */
    bool signals; /* the threads engine: signal wake_fd after each block */
    struct nvmeio_engine *aside; /* threads for blocks that the kernel would carry out
                                    one by one; NULL before the first */
    void *state;                 /* the engine's own */
    void *faults;                /* faults that the test build injects (tests/faults) */
};

struct nvmeio_engine_ops {
    const char *name;

    /* Set up for at most engine->depth blocks, in the thread that will use the
     * engine. */
    int (*open)(struct nvmeio_engine *engine);

    /* Free everything.  No block is in flight. */
    void (*close)(struct nvmeio_engine *engine);

    /* Take one block, which must stay in place until it is finished. The kernel may get
     * it only at the next reap(). Cannot fail: the caller keeps in_flight below
     * depth. */
    void (*push)(struct nvmeio_engine *engine, struct nvmeio_block *block);

    /* Submit what was pushed and collect what has finished. Waits until at least
     * wait_min blocks have finished (0: does not wait) or wake() is called. Returns how
     * many blocks it added to `finished`, or -errno if the engine is dead: the kernel
     * no longer answers, and may still write to the memory of blocks in flight. */
    int (*reap)(struct nvmeio_engine *engine, unsigned wait_min);

    /* End a reap() that waits, or the next one that would. Any thread may call it. */
    void (*wake)(struct nvmeio_engine *engine);
};

extern const struct nvmeio_engine_ops nvmeio_engine_uring;
extern const struct nvmeio_engine_ops nvmeio_engine_libaio;
extern const struct nvmeio_engine_ops nvmeio_engine_threads;
extern const struct nvmeio_engine_ops nvmeio_engine_sync;

/* The built-in engines, in order of preference. NULL past the last one. */
const struct nvmeio_engine_ops *nvmeio_engine_at(unsigned index);

/* Find an engine by name. NULL if it is unknown (*known is false) or not built in. */
const struct nvmeio_engine_ops *nvmeio_engine_find(const char *name, bool *known);

/* Explain in words why open() returned `error`, and what would help. */
void nvmeio_engine_explain(const char *name, int error, char *reason, size_t size);

/* Start and stop an engine: its wake-up eventfd, which all engines have, and its own
 * open() or close(). If the start fails, nothing is left to stop. */
int nvmeio_engine_start(struct nvmeio_engine *engine,
                        const struct nvmeio_engine_ops *ops, unsigned depth);
void nvmeio_engine_stop(struct nvmeio_engine *engine);

/* Carry out a block by pread(2), pwrite(2) or fsync(2), and set its result. */
void nvmeio_block_perform(struct nvmeio_block *block);

/* For engines that ask the kernel: hand a block over to threads, which are started when
 * they are first needed. Their completions end a reap() that waits. */
void nvmeio_engine_push_aside(struct nvmeio_engine *engine, struct nvmeio_block *block);

/* Move what they have carried out to `finished`, and return how many blocks. */
int nvmeio_engine_collect_aside(struct nvmeio_engine *engine);

/* Put a block that has its result first in `finished`. Only engines call this. */
static inline void nvmeio_engine_finish(struct nvmeio_engine *engine,
                                        struct nvmeio_block *block)
{
    block->next = engine->finished;
    engine->finished = block;
    engine->in_flight--;
}

/* Back-off for a system call that keeps failing. */
struct nvmeio_patience {
    int64_t since_ns; /* 0: all is well */
    int64_t pause_ns;
};

/* A call failed with `error` (negative). Sleep a little and return 0 to try again.
 * Return the error if it has lasted too long: 10 s for transient errors (EAGAIN, EBUSY,
 * ENOMEM), 1 s for others. EINTR does not count, because the kernel refused nothing. */
int nvmeio_patience_try(struct nvmeio_patience *patience, int error);

/* Wait for sem_post(3), even if signals arrive. Use a semaphore to wake one of several
 * threads, and a condition variable only to wake all of them: in glibc 2.25 to 2.40,
 * pthread_cond_signal(3) may wake none (bug 25847). */
void nvmeio_semaphore_wait(sem_t *semaphore);

/* Reset a non-blocking eventfd to 0, or add a signal to it. */
void nvmeio_eventfd_clear(int fd);
void nvmeio_eventfd_signal(int fd);

#endif
