/* fault.h -- faults on purpose: which strike, and when.
 *
 * For the test build alone; the ordinary library has none of this.  The environment
 * variable NVMEIO_FAULTS says which faults there are (docs/reliability.md): words with
 * commas between them,
 *
 *   seed=7         of the random numbers
 *   KIND=50        this kind strikes 50 of 1000 occasions, at random
 *   KIND@3         it strikes on its third occasion
 *   all=50         every kind that leaves results right strikes so often; pauses 500
 *                  times less often, because every lock is an occasion
 *   pause_ms=50    a pause lasts so long; 1 to 20 ms, at random, if it is not said
 *   pause_at=CALL  only before and after this call (munmap) are occasions of a pause
 *   log=PATH       a file that says how often each kind could strike, and did
 *
 * The occasions of a kind are counted, and the random number of each depends on seed,
 * kind and count alone: which occasions are struck, and how, is the same in every run.
 * Which call or block an occasion is of depends on who comes first, where threads meet.
 */
#ifndef NVMEIO_FAULT_H
#define NVMEIO_FAULT_H

#include <stdbool.h>
#include <stdint.h>

enum nvmeio_fault {
    /* Of blocks, on every engine; by fault_engine.c. */
    NVMEIO_FAULT_SHORT,    /* a transfer moves a part */
    NVMEIO_FAULT_AGAIN,    /* it is refused: EAGAIN, EINTR or EBUSY */
    NVMEIO_FAULT_EARLY,    /* it is complete before it was handed over */
    NVMEIO_FAULT_LATE,     /* its completion is seen some calls later */
    NVMEIO_FAULT_REORDER,  /* completions come in another order */
    NVMEIO_FAULT_SPURIOUS, /* a wait ends for nothing */
    NVMEIO_FAULT_WAKE,     /* a wake-up is lost */
    NVMEIO_FAULT_EIO,      /* it fails */
    NVMEIO_FAULT_ENOSPC,   /* a write finds no room */
    NVMEIO_FAULT_DIRECT,   /* the device takes no O_DIRECT after all */
    NVMEIO_FAULT_NOSYNC,   /* an fsync is said to be done, and is not */
    NVMEIO_FAULT_DEAD,     /* the engine answers no more */

    /* Of the library's calls into the system; by fault_calls.c. */
    NVMEIO_FAULT_EINTR,   /* what carries out or waits */
    NVMEIO_FAULT_EAGAIN,  /* pread, pwrite, io_uring_enter, io_submit */
    NVMEIO_FAULT_EBUSY,   /* io_uring_enter */
    NVMEIO_FAULT_ENOMEM,  /* io_uring_enter */
    NVMEIO_FAULT_PARTLY,  /* less is taken than was given: pread, pwrite, io_submit */
    NVMEIO_FAULT_BEHIND,  /* io_uring gives a block back that it has not begun */
    NVMEIO_FAULT_PAUSE,   /* a thread sleeps, before or after any call or lock */
    NVMEIO_FAULT_SETUP,   /* a ring or context is refused */
    NVMEIO_FAULT_MEMORY,  /* there is none: malloc and its kin, mmap, mlock, mbind */
    NVMEIO_FAULT_THREADS, /* no thread starts */
    NVMEIO_FAULT_DESCRIPTORS, /* none is left */
    NVMEIO_FAULT_SIGNAL,      /* one comes while a file is opened */
    NVMEIO_FAULT_TRUNCATE,    /* a file cannot be truncated */
    NVMEIO_FAULT_STAT, /* what a file, memory or this process is cannot be told */

    NVMEIO_FAULT_COUNT
};

struct nvmeio_engine_ops;

/* Another random number, of 64 bits, in *number where a fault strikes: for what it
 * leaves open. */
bool nvmeio_fault_strikes(enum nvmeio_fault kind, uint64_t *number);

/* Sleep if a pause strikes, before or after the call of this name.  Keeps errno. */
void nvmeio_fault_pause(const char *call, bool after);

/* The call at which a thread has last paused; NULL if none has. */
const char *nvmeio_fault_paused(bool *after);

/* Set the faults anew, as NVMEIO_FAULTS would, and count from the beginning; "": none.
 * For C tests; no other thread may be in the library. */
void nvmeio_fault_configure(const char *text);

/* How often a kind could strike since then, and did. */
uint64_t nvmeio_fault_occasions(enum nvmeio_fault kind);
uint64_t nvmeio_fault_fired(enum nvmeio_fault kind);

/* The kind's name in NVMEIO_FAULTS. */
const char *nvmeio_fault_name(enum nvmeio_fault kind);

/* The engine with faults round it. */
const struct nvmeio_engine_ops *
nvmeio_fault_engine(const struct nvmeio_engine_ops *real);

#endif
