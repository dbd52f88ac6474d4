#ifndef LIBURING_CALLS_H
#define LIBURING_CALLS_H

/* The real functions of liburing, for tests that replace them.  A test that replaces
 * one at link time must replace all that the library calls: io_uring_queue_init_params,
 * io_uring_queue_exit, io_uring_submit and io_uring_submit_and_wait.  Then the linker
 * leaves liburing out. */

#include <dlfcn.h>
#include <liburing.h>

#include "check.h"

static inline void *real(const char *name)
{
    static void *library;

    if (!library)
        library = dlopen("liburing.so.2", RTLD_NOW | RTLD_LOCAL);
    CHECK(library);
    void *function = dlsym(library, name);
    CHECK(function);
    return function;
}

#endif
