/* gomp.h -- runs a function on the threads of the libgomp that this process has.
 *
 * Wheels use it instead of prange: they run beside torch, which has an OpenMP runtime
 * of its own, and a second one would have threads of its own. */
#ifndef NVMEIO_GOMP_H
#define NVMEIO_GOMP_H

#include <stdbool.h>

#ifdef NVMEIO_FINDS_GOMP

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

typedef void gomp_run_function(void (*work)(void *), void *job, unsigned threads,
                               unsigned flags);
static int (*_Atomic gomp_thread_number)(void);
static gomp_run_function *_Atomic gomp_parallel;

/* Note the path of a libgomp, which may have another name in a wheel that brought it.
 */
static int gomp_note(struct dl_phdr_info *info, size_t size, void *path)
{
    const char *slash = strrchr(info->dlpi_name, '/');

    (void)size;
    if (!slash || strncmp(slash, "/libgomp", 8) || strlen(info->dlpi_name) >= PATH_MAX)
        return 0;
    strcpy(path, info->dlpi_name);
    return 1;
}

/* The libgomp that is loaded, or else the system's; NULL if there is none. */
static void *gomp_open(void)
{
    static atomic_bool sought;
    char path[PATH_MAX];
    void *library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);

    if (!library && dl_iterate_phdr(gomp_note, path))
        library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    /* A search that fails is slow, so do it once. torch may still bring one. */
    if (!library && !atomic_exchange(&sought, true))
        library = dlopen("libgomp.so.1", RTLD_LAZY);
    return library;
}

/* Whether this process can share work among threads. */
static inline bool gomp_is_found(void)
{
    if (atomic_load_explicit(&gomp_parallel, memory_order_acquire))
        return true;
    void *library = gomp_open();
    void *number = library ? dlsym(library, "omp_get_thread_num") : NULL;
    void *run = library ? dlsym(library, "GOMP_parallel") : NULL;
    if (!number || !run)
        return false;
    atomic_store_explicit(&gomp_thread_number, (int (*)(void))number,
                          memory_order_relaxed);
    /* Release: a thread that sees this function sees the other too. */
    atomic_store_explicit(&gomp_parallel, (gomp_run_function *)run,
                          memory_order_release);
    return true;
}

/* Run `work` in this thread and up to `threads` - 1 others; false: it was not run. */
static inline bool gomp_run(void (*work)(void *), void *job, int threads)
{
    if (!gomp_is_found())
        return false;
    gomp_parallel(work, job, (unsigned)threads, 0);
    return true;
}

/* The number of this thread among those that run the function; that of the caller of
 * gomp_run() is 0. */
static inline int gomp_number(void)
{
    return gomp_thread_number();
}

#else

/* prange does it, if the compiler knows OpenMP. */
static inline bool gomp_is_found(void)
{
#ifdef _OPENMP
    return true;
#else
    return false;
#endif
}

static inline bool gomp_run(void (*work)(void *), void *job, int threads)
{
    (void)work, (void)job, (void)threads;
    return false;
}

static inline int gomp_number(void)
{
    return 0;
}

#endif
#endif
