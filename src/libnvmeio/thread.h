/* thread.h -- the library's own threads. */
#ifndef NVMEIO_THREAD_H
#define NVMEIO_THREAD_H

#include <pthread.h>

/* Start a thread with all signals blocked, so that the program's own threads get them.
 * Returns 0 or -errno. */
int nvmeio_thread_start(pthread_t *thread, void *(*main)(void *), void *argument);

#endif
