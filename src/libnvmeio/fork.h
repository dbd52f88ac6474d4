/* fork.h -- what the library does before and after a fork(). */
#ifndef NVMEIO_FORK_H
#define NVMEIO_FORK_H

#include <stdbool.h>

/* Whether this process is a forked child that has not called exec, even if it loaded
 * this library only after the fork. Such a child has the state of its parent's
 * libraries, but none of their threads. */
bool nvmeio_fork_without_exec(void);

/* Functions that fork() calls in the thread that forks. In child(),
 * nvmeio_fork_generation() is already the new one. A bare clone(2) or vfork(2) calls
 * none of them. */
struct nvmeio_fork_hooks {
    void (*prepare)(void); /* before the fork: takes locks */
    void (*parent)(void);  /* after it, in the parent: releases them */
    void (*child)(void);   /* after it, in the child, which has no other thread */
    struct nvmeio_fork_hooks *next;
};

/* Add hooks. The caller owns them, and they must live as long as the process. Call this
 * only from constructors, because the list has no lock. prepare() of the hooks added
 * last is called first. */
void nvmeio_fork_hook(struct nvmeio_fork_hooks *hooks);

/* Hold back forks: between these two calls, fork() waits. So call nothing in between
 * that may block.
 *
 * Use it to store the number of a new descriptor. The kernel copies the descriptors
 * before the memory, so a child could otherwise have the number in its memory without
 * having the descriptor. */
void nvmeio_fork_hold(void);
void nvmeio_fork_resume(void);

#endif
