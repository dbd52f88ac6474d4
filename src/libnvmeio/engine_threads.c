/* engine_threads.c -- carries out blocks by pread(2) and pwrite(2) in a few threads.
 *
 * For kernels that allow neither io_uring nor libaio. A push starts another thread if
 * none is idle. All threads end with the engine. */
#include "engine.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>

#include "thread.h"

/* This many threads read blocks of 1 MiB as fast as io_uring does. */
#define WORKERS_MAX 16u

/* The mutex guards everything below it. */
struct crew {
    sem_t work; /* posted once per block, and once per worker to end it */
    pthread_mutex_t mutex;
    pthread_cond_t change;             /* reap() waits here for done_count or woken */
    struct nvmeio_block *first, *last; /* pushed blocks */
    struct nvmeio_block *done;         /* finished blocks */
    unsigned done_count;
    unsigned queued; /* blocks from `first` on */
    unsigned idle;   /* workers that wait for a block */
    unsigned count;  /* all workers */
    unsigned limit;
    bool woken;
    pthread_t workers[WORKERS_MAX];
};

static void *worker_main(void *argument)
{
    struct crew *crew = argument;

    pthread_mutex_lock(&crew->mutex);
    for (;;) {
        crew->idle++;
        pthread_mutex_unlock(&crew->mutex);
        nvmeio_semaphore_wait(&crew->work);
        pthread_mutex_lock(&crew->mutex);
        crew->idle--;
        struct nvmeio_block *block = crew->first;
        if (!block)
            break;
        crew->first = block->next;
        crew->queued--;
        pthread_mutex_unlock(&crew->mutex);
        nvmeio_block_perform(block);
        pthread_mutex_lock(&crew->mutex);
        block->next = crew->done;
        crew->done = block;
        crew->done_count++;
        pthread_cond_broadcast(&crew->change);
    }
    pthread_mutex_unlock(&crew->mutex);
    return NULL;
}

/* Start one more thread. */
static int crew_hire(struct crew *crew)
{
    int error = nvmeio_thread_start(&crew->workers[crew->count], worker_main, crew);

    if (error == 0)
        crew->count++;
    return error;
}

static int threads_open(struct nvmeio_engine *engine)
{
    struct crew *crew = calloc(1, sizeof(*crew));

    if (!crew)
        return -ENOMEM;
    crew->limit = engine->depth < WORKERS_MAX ? engine->depth : WORKERS_MAX;
    sem_init(&crew->work, 0, 0);
    pthread_mutex_init(&crew->mutex, NULL);
    pthread_cond_init(&crew->change, NULL);
    int error = crew_hire(crew);
    if (error) {
        free(crew);
        return error;
    }
    engine->state = crew;
    return 0;
}

static void threads_close(struct nvmeio_engine *engine)
{
    struct crew *crew = engine->state;

    for (unsigned i = 0; i < crew->count; i++)
        sem_post(&crew->work);
    for (unsigned i = 0; i < crew->count; i++)
        pthread_join(crew->workers[i], NULL);
    sem_destroy(&crew->work);
    pthread_cond_destroy(&crew->change);
    pthread_mutex_destroy(&crew->mutex);
    free(crew);
}

static void threads_push(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    struct crew *crew = engine->state;

    engine->in_flight++;
    block->next = NULL;
    pthread_mutex_lock(&crew->mutex);
    if (crew->first)
        crew->last->next = block;
    else
        crew->first = block;
    crew->last = block;
    crew->queued++;
    /* It is no error if the thread cannot start: there is at least one. */
    if (crew->queued > crew->idle && crew->count < crew->limit)
        crew_hire(crew);
    pthread_mutex_unlock(&crew->mutex);
    sem_post(&crew->work);
}

static int threads_reap(struct nvmeio_engine *engine, unsigned wait_min)
{
    struct crew *crew = engine->state;

    pthread_mutex_lock(&crew->mutex);
    while (crew->done_count < wait_min && !crew->woken)
        pthread_cond_wait(&crew->change, &crew->mutex);
    /* A caller that does not wait leaves a wake-up for the next one that does. */
    crew->woken &= wait_min == 0;
    struct nvmeio_block *done = crew->done;
    int count = (int)crew->done_count;
    crew->done = NULL;
    crew->done_count = 0;
    pthread_mutex_unlock(&crew->mutex);
    while (done) {
        struct nvmeio_block *next = done->next;
        nvmeio_engine_finish(engine, done);
        done = next;
    }
    return count;
}

static void threads_wake(struct nvmeio_engine *engine)
{
    struct crew *crew = engine->state;

    pthread_mutex_lock(&crew->mutex);
    crew->woken = true;
    pthread_cond_broadcast(&crew->change);
    pthread_mutex_unlock(&crew->mutex);
}

const struct nvmeio_engine_ops nvmeio_engine_threads = {
    .name = "threads",
    .library = "",
    .open = threads_open,
    .close = threads_close,
    .push = threads_push,
    .reap = threads_reap,
    .wake = threads_wake,
};
