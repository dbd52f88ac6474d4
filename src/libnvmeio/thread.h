/* thread.h -- threads of the library's own. */
#ifndef NVMEIO_THREAD_H
#define NVMEIO_THREAD_H

#include <pthread.h>

/* Start a thread that takes no signals, which belong to the program's own threads: 0 or
 * -errno. */
int nvmeio_thread_start(pthread_t *thread, void *(*main)(void *), void *argument);

#endif
