/* thread.c -- threads that take no signals, on small stacks.
 *
 * glibc keeps up to 40 MiB of stacks of ended threads and unmaps the rest. If unmapping
 * fails, it ends the process. Small stacks are kept. */
#include "thread.h"

#include <errno.h>
#include <link.h>
#include <signal.h>

/* glibc takes a program's thread-local variables from each thread's stack, so their
 * size is added. */
static size_t stack_bytes = 256u << 10;

static int add_thread_locals(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size;
    (void)unused;
    for (unsigned i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_TLS)
            stack_bytes += info->dlpi_phdr[i].p_memsz;
    return 0;
}

/* Once, at load: this takes the loader's lock, which a child of fork() may find locked
 * for ever. Libraries loaded later use other memory. */
__attribute__((constructor)) static void find_stack_bytes(void)
{
    dl_iterate_phdr(add_thread_locals, NULL);
}

int nvmeio_thread_start(pthread_t *thread, void *(*main)(void *), void *argument)
{
    pthread_attr_t small;
    sigset_t all, before;

    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, stack_bytes);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, &small, main, argument);
    /* The user may have reserved more with the tunable
     * glibc.rtld.optional_static_tls. */
    if (error == EINVAL)
        error = pthread_create(thread, NULL, main, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small);
    return -error;
}
