/* fork.c -- counts forks, makes them wait, and calls the hooks of other files.
 *
 * One pthread_atfork() serves the whole library, so the order in which locks are taken
 * before a fork is decided in one place. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <nvmeio/base.h>

#include "fork.h"

/* Only a new child writes it, while it has one thread. Relaxed order is enough. */
static _Atomic uint32_t generation;

static bool
    forked_before; /* set when the library was loaded: a child that never called exec */

static struct nvmeio_fork_hooks *hooks_first;

/* Held during a fork, and by nvmeio_fork_hold(). */
static pthread_mutex_t forking = PTHREAD_MUTEX_INITIALIZER;

void nvmeio_fork_hook(struct nvmeio_fork_hooks *hooks)
{
    hooks->next = hooks_first;
    hooks_first = hooks;
}

void nvmeio_fork_hold(void)
{
    pthread_mutex_lock(&forking);
}

void nvmeio_fork_resume(void)
{
    pthread_mutex_unlock(&forking);
}

uint32_t nvmeio_fork_generation(void)
{
    return atomic_load_explicit(&generation, memory_order_relaxed);
}

static void prepare(void)
{
    for (struct nvmeio_fork_hooks *hooks = hooks_first; hooks; hooks = hooks->next)
        hooks->prepare();
    pthread_mutex_lock(&forking);
}

static void continue_parent(void)
{
    pthread_mutex_unlock(&forking);
    for (struct nvmeio_fork_hooks *hooks = hooks_first; hooks; hooks = hooks->next)
        hooks->parent();
}

static void continue_child(void)
{
    pthread_mutex_unlock(&forking);
    atomic_fetch_add_explicit(&generation, 1, memory_order_relaxed);
    for (struct nvmeio_fork_hooks *hooks = hooks_first; hooks; hooks = hooks->next)
        hooks->child();
}

bool nvmeio_fork_without_exec(void)
{
    return forked_before || nvmeio_fork_generation() > 0;
}

/* Linux, PF_FORKNOEXEC: the ninth field of /proc/self/stat, behind a name in brackets
 * that may hold anything. */
static bool was_forked(void)
{
    char text[1024];
    unsigned long flags = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    size_t length = file ? fread(text, 1, sizeof(text) - 1, file) : 0;

    if (file)
        fclose(file);
    text[length] = '\0';
    const char *behind = strrchr(text, ')');
    return behind && sscanf(behind, ") %*c %*d %*d %*d %*d %*d %lu", &flags) == 1 &&
           (flags & 0x40);
}

/* This can fail for want of memory alone, while the library is being loaded and nobody
 * could be told. */
__attribute__((constructor)) static void register_hooks(void)
{
    forked_before = was_forked();
    pthread_atfork(prepare, continue_parent, continue_child);
}
