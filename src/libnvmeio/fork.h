/* fork.h -- what has to happen round a fork(). */
#ifndef NVMEIO_FORK_H
#define NVMEIO_FORK_H

#include <stdbool.h>

/* Whether this process is a child that goes on where its parent was, though the library
 * may have been loaded since: what the parent's libraries had is here, their threads
 * are not. */
bool nvmeio_fork_without_exec(void);
/* Functions that run in the thread that forks; child() finds the new generation.  The
 * kernel's clone() and vfork() call none of them. */
struct nvmeio_fork_hooks {
    void (*prepare)(void); /* before the fork: take locks */
    void (*parent)(void);  /* after it: give them back */
    void (*child)(void);   /* the same, in the child, which has no other thread */
    struct nvmeio_fork_hooks *next;
};

/* Add hooks, which stay the caller's and must live as long as the process.  For
 * constructors: nothing guards the list once there are threads.  The hooks that were
 * added last prepare first. */
void nvmeio_fork_hook(struct nvmeio_fork_hooks *hooks);

/* Between these two no fork is under way: fork() waits, so call nothing that may block.
 *
 * The kernel copies the descriptors before the memory.  A descriptor that is opened and
 * stored during a fork can be missing in the child, whose memory has its number. */
void nvmeio_fork_hold(void);
void nvmeio_fork_resume(void);

#endif
