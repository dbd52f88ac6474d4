/* thread.c -- threads that take no signals but their own faults, on small stacks.
 *
 * glibc caches up to 40 MiB of stacks of ended threads, and unmaps the others. If
 * munmap(2) fails, it ends the process. Small stacks stay in the cache. */
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

/* Runs once, when the library is loaded, because it takes the dynamic linker's lock,
 * which a forked child may find locked for ever. Libraries loaded later do not use the
 * stack for their thread-local variables. */
__attribute__((constructor)) static void find_stack_bytes(void)
{
    dl_iterate_phdr(add_thread_locals, NULL);
}

/* Signals that an instruction of the thread itself causes, such as SIGBUS by a copy
 * into a mapping of a file that has become shorter. While they are blocked the kernel
 * ends the process, without calling the program's handler. */
static const int faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGSYS};

int nvmeio_thread_start(pthread_t *thread, void *(*main)(void *), void *argument)
{
    pthread_attr_t small;
    sigset_t all, before;

    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, stack_bytes);
    sigfillset(&all);
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, &small, main, argument);
    /* The stack is too small if the user reserved more for such variables, with the
     * tunable glibc.rtld.optional_static_tls. Use the default size then. */
    if (error == EINVAL)
        error = pthread_create(thread, NULL, main, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small);
    return -error;
}
