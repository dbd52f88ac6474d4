/* team.c -- how large a team of threads may be.
 *
 * OpenMP ends the process if it cannot start a thread. So we first try to start as many
 * ourselves. Once for each thread that leads a team is enough, because OpenMP keeps the
 * threads of a team. */
#include <pthread.h>
#include <stdlib.h>

#include <nvmeio/system.h>

#include "fork.h"

static _Thread_local unsigned tried = 1;

static void *pass_gate(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* Start `wanted` threads that live at the same time. Returns how many could start. */
static unsigned try_threads(unsigned wanted)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t *threads = calloc(wanted, sizeof(*threads));
    unsigned count = 0;

    if (!threads)
        return 0;
    pthread_mutex_lock(&gate);
    while (count < wanted &&
           pthread_create(&threads[count], NULL, pass_gate, &gate) == 0)
        count++;
    pthread_mutex_unlock(&gate);
    for (unsigned i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    free(threads);
    return count;
}

unsigned nvmeio_team_size(unsigned wanted)
{
    if (wanted <= 1 || nvmeio_fork_without_exec())
        return 1;
    if (wanted > tried)
        tried = 1 + try_threads(wanted - 1);
    return wanted < tried ? wanted : tried;
}
