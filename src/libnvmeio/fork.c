/* fork.c -- counts forks, holds them back, and calls the hooks of other files.
 *
 * One pthread_atfork() serves the whole library, so the order in which locks are taken
 * before a fork is decided in one place. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <nvmeio/base.h>

#include "fork.h"

/* Only a new child writes it, while it has one thread, so relaxed order is enough. */
static _Atomic uint32_t generation;

/* When the library was loaded, this was a forked child that had not called exec. */
static bool forked_before;

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

/* Read PF_FORKNOEXEC in the ninth field of /proc/self/stat (proc(5)). The name in
 * brackets before it may contain any character, so search for the last bracket. */
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

/* pthread_atfork(3) can fail only for lack of memory. Its result is ignored: while the
 * library is being loaded, there is no caller to report it to. */
__attribute__((constructor)) static void register_hooks(void)
{
    forked_before = was_forked();
    pthread_atfork(prepare, continue_parent, continue_child);
}
