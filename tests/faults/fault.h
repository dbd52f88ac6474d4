/* fault.h -- injected faults: which ones strike, and when.
 *
 * Only in the test build.  The environment variable NVMEIO_FAULTS sets the faults
 * (docs/reliability.md), as words with commas between them:
 *
 *   seed=7         the seed of the random numbers
 *   KIND=50        this kind strikes 50 of 1000 occasions, at random
 *   KIND@3         it strikes on its third occasion
 *   all=50         every kind that leaves results right strikes at this rate; pauses
 *                  500 times less often, because every lock is an occasion
 *   pause_ms=50    the length of a pause; by default random, 1 to 20 ms
 *   pause_at=CALL  pause only before and after this call, such as munmap
 *   log=PATH       a file that counts how often each kind could strike, and did
 *
 * The random number of each occasion depends only on seed, kind and its count, so the
 * same occasions are struck in every run.  Which call or block an occasion belongs to
 * depends on the timing of threads. */
#ifndef NVMEIO_FAULT_H
#define NVMEIO_FAULT_H

#include <stdbool.h>
#include <stdint.h>

#include "nvmeio/base.h"

enum nvmeio_fault {
    /* Faults of blocks, on every engine; in fault_engine.c. */
    NVMEIO_FAULT_SHORT,    /* a transfer moves a part */
    NVMEIO_FAULT_AGAIN,    /* it is refused: EAGAIN, EINTR or EBUSY */
    NVMEIO_FAULT_EARLY,    /* it is complete before its submission returns */
    NVMEIO_FAULT_LATE,     /* its completion is reported some calls later */
    NVMEIO_FAULT_REORDER,  /* completions come in another order */
    NVMEIO_FAULT_SPURIOUS, /* a wait ends spuriously */
    NVMEIO_FAULT_WAKE,     /* a wake-up is lost */
    NVMEIO_FAULT_EIO,      /* it fails */
    NVMEIO_FAULT_ENOSPC,   /* a write finds no space */
    NVMEIO_FAULT_DIRECT,   /* the device refuses O_DIRECT after all */
    NVMEIO_FAULT_NOSYNC,   /* an fsync is reported as done, and is not */
    NVMEIO_FAULT_DEAD,     /* the engine stops responding */

    /* Faults of the library's system calls; in fault_calls.c. */
    NVMEIO_FAULT_EINTR,   /* calls that transfer or wait */
    NVMEIO_FAULT_EAGAIN,  /* pread, pwrite, io_uring_enter, io_submit */
    NVMEIO_FAULT_EBUSY,   /* io_uring_enter */
    NVMEIO_FAULT_ENOMEM,  /* io_uring_enter */
    NVMEIO_FAULT_PARTLY,  /* less is accepted than was given: pread, pwrite, io_submit
                           */
    NVMEIO_FAULT_BEHIND,  /* io_uring returns a block that it has not begun */
    NVMEIO_FAULT_PAUSE,   /* a thread sleeps, before or after any call or lock */
    NVMEIO_FAULT_SETUP,   /* a ring or context is refused */
    NVMEIO_FAULT_MEMORY,  /* out of memory: malloc and its relatives, mmap, mlock, mbind
                           */
    NVMEIO_FAULT_THREADS, /* no thread starts */
    NVMEIO_FAULT_DESCRIPTORS, /* none is left */
    NVMEIO_FAULT_SIGNAL,      /* one arrives while a file is opened */
    NVMEIO_FAULT_TRUNCATE,    /* a file cannot be truncated */
    NVMEIO_FAULT_STAT,   /* the state of a file, memory or this process is unknown */
    NVMEIO_FAULT_SIGINT, /* SIGINT reaches the main thread at a system call of any */

    NVMEIO_FAULT_COUNT
};

struct nvmeio_engine_ops;

/* If a fault strikes, *number is another random number of 64 bits, for its details. */
bool nvmeio_fault_strikes(enum nvmeio_fault kind, uint64_t *number);

/* Sleep if a pause strikes, before or after the call of this name.  Keeps errno. */
void nvmeio_fault_pause(const char *call, bool after);

/* Send SIGINT to the main thread if that strikes at the system call of this name;
 * return whether the main thread is the one that makes it, so that it is interrupted.
 */
NVMEIO_API bool nvmeio_fault_interrupt(const char *call);

/* The call at which SIGINT was sent; NULL if it was not. */
NVMEIO_API const char *nvmeio_fault_interrupted(void);

/* The call at which a thread has last paused; NULL if none has. */
const char *nvmeio_fault_paused(bool *after);

/* Set the faults as NVMEIO_FAULTS would, and count from the beginning; "": none.  For
 * tests, those in Python by ctypes; other threads of the library may only wait. */
NVMEIO_API void nvmeio_fault_configure(const char *text);

/* How often a kind could strike since then, and did. */
uint64_t nvmeio_fault_occasions(enum nvmeio_fault kind);
uint64_t nvmeio_fault_fired(enum nvmeio_fault kind);

/* The kind's name in NVMEIO_FAULTS. */
const char *nvmeio_fault_name(enum nvmeio_fault kind);

/* The engine with faults round it. */
const struct nvmeio_engine_ops *
nvmeio_fault_engine(const struct nvmeio_engine_ops *real);

#endif
