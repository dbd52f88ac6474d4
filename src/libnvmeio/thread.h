/* thread.h -- the library's own threads. */
#ifndef NVMEIO_THREAD_H
#define NVMEIO_THREAD_H

#include <pthread.h>

/* Start a thread that takes no signals; those belong to the program's own threads.
 * Returns 0 or -errno. */
int nvmeio_thread_start(pthread_t *thread, void *(*main)(void *), void *argument);

#endif
