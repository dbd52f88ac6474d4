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
struct thread_pool {
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
    int signal_fd; /* an eventfd to signal after each block, or -1 */
    pthread_t workers[WORKERS_MAX];
};

static void *worker_main(void *argument)
{
    struct thread_pool *pool = argument;

    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        pool->idle++;
        pthread_mutex_unlock(&pool->mutex);
        nvmeio_semaphore_wait(&pool->work);
        pthread_mutex_lock(&pool->mutex);
        pool->idle--;
        struct nvmeio_block *block = pool->first;
        if (!block)
            break;
        pool->first = block->next;
        pool->queued--;
        pthread_mutex_unlock(&pool->mutex);
        nvmeio_block_perform(block);
        pthread_mutex_lock(&pool->mutex);
        block->next = pool->done;
        pool->done = block;
        pool->done_count++;
        pthread_cond_broadcast(&pool->change);
        if (pool->signal_fd >= 0)
            nvmeio_eventfd_signal(pool->signal_fd);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static int start_thread(struct thread_pool *pool)
{
    int error = nvmeio_thread_start(&pool->workers[pool->count], worker_main, pool);

    if (error == 0)
        pool->count++;
    return error;
}

static int threads_open(struct nvmeio_engine *engine)
{
    struct thread_pool *pool = calloc(1, sizeof(*pool));

    if (!pool)
        return -ENOMEM;
    pool->signal_fd = engine->signals ? engine->wake_fd : -1;
    pool->limit = engine->depth < WORKERS_MAX ? engine->depth : WORKERS_MAX;
    sem_init(&pool->work, 0, 0);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->change, NULL);
    int error = start_thread(pool);
    if (error) {
        free(pool);
        return error;
    }
    engine->state = pool;
    return 0;
}

static void threads_close(struct nvmeio_engine *engine)
{
    struct thread_pool *pool = engine->state;

    for (unsigned i = 0; i < pool->count; i++)
        sem_post(&pool->work);
    for (unsigned i = 0; i < pool->count; i++)
        pthread_join(pool->workers[i], NULL);
    sem_destroy(&pool->work);
    pthread_cond_destroy(&pool->change);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

static void threads_push(struct nvmeio_engine *engine, struct nvmeio_block *block)
{
    struct thread_pool *pool = engine->state;

    engine->in_flight++;
    block->next = NULL;
    pthread_mutex_lock(&pool->mutex);
    if (pool->first)
        pool->last->next = block;
    else
        pool->first = block;
    pool->last = block;
    pool->queued++;
    /* It is no error if the thread cannot start: there is at least one. */
    if (pool->queued > pool->idle && pool->count < pool->limit)
        start_thread(pool);
    pthread_mutex_unlock(&pool->mutex);
    sem_post(&pool->work);
}

static int threads_reap(struct nvmeio_engine *engine, unsigned wait_min)
{
    struct thread_pool *pool = engine->state;

    pthread_mutex_lock(&pool->mutex);
    while (pool->done_count < wait_min && !pool->woken)
        pthread_cond_wait(&pool->change, &pool->mutex);
    /* A caller that does not wait leaves a wake-up for the next one that does. */
    pool->woken &= wait_min == 0;
    struct nvmeio_block *done = pool->done;
    int count = (int)pool->done_count;
    pool->done = NULL;
    pool->done_count = 0;
    pthread_mutex_unlock(&pool->mutex);
    while (done) {
        struct nvmeio_block *next = done->next;
        nvmeio_engine_finish(engine, done);
        done = next;
    }
    return count;
}

static void threads_wake(struct nvmeio_engine *engine)
{
    struct thread_pool *pool = engine->state;

    pthread_mutex_lock(&pool->mutex);
    pool->woken = true;
    pthread_cond_broadcast(&pool->change);
    pthread_mutex_unlock(&pool->mutex);
}

const struct nvmeio_engine_ops nvmeio_engine_threads = {
    .name = "threads",
    .open = threads_open,
    .close = threads_close,
    .push = threads_push,
    .reap = threads_reap,
    .wake = threads_wake,
};
