/* fork.h -- what the library does before and after a fork(). */
#ifndef NVMEIO_FORK_H
#define NVMEIO_FORK_H

#include <stdbool.h>

/* Whether this process is a child of fork() that has not called exec. The library may
 * have been loaded since. A child has the state of its parent's libraries, but not
 * their threads. */
bool nvmeio_fork_without_exec(void);
/* Functions that run in the thread that forks. child() sees the new generation. A bare
 * clone(2) or vfork(2) calls none of them. */
struct nvmeio_fork_hooks {
    void (*prepare)(void); /* before the fork: takes locks */
    void (*parent)(void);  /* after it, in the parent: releases them */
    void (*child)(void);   /* after it, in the child, which has no other thread */
    struct nvmeio_fork_hooks *next;
};

/* Add hooks. They belong to the caller and must live as long as the process. Call this
 * from constructors only: the list is not locked. Hooks added last prepare first. */
void nvmeio_fork_hook(struct nvmeio_fork_hooks *hooks);

/* No fork can begin between these two calls: fork() waits. So call nothing that may
 * block.
 *
 * The kernel copies the descriptors before the memory. A child could otherwise have the
 * number of a descriptor in its memory, but not the descriptor. */
void nvmeio_fork_hold(void);
void nvmeio_fork_resume(void);

#endif
