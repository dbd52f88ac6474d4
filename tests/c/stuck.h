/* stuck.h -- report the state of a request that does not end, of its handle and
 * workers, and where each thread of the process is in the kernel.
 *
 * A hang once in a thousand runs cannot be reproduced at will, so the first report must
 * say everything. */
#ifndef NVMEIO_TESTS_STUCK_H
#define NVMEIO_TESTS_STUCK_H

#include <dirent.h>
#include <stdio.h>

#include "handle_internal.h"
#include "request_internal.h"

static inline void tell_worker(const struct nvmeio_consumer *worker)
{
    fprintf(stderr,
            "worker: %u blocks in the engine, %s finished, state %d, woken %u\n",
            worker->engine->in_flight, worker->engine->finished ? "some" : "none",
            (int)worker->state, atomic_load(&worker->waiter.woken));
}

/* Without the mutex, which may never be free; nothing moves anyway. */
static inline void tell_request(const struct nvmeio_request *request)
{
    const struct nvmeio_handle *handle = request->handle;

    fprintf(
        stderr,
        "request: operation %d, state %d, error %d, cancelled %d, queued %d, behind a "
        "write %d, barrier %d, ordered from %lld, span %u of %u, position %zu of %zu, "
        "%u "
        "blocks in flight\n",
        (int)request->op, atomic_load(&request->state), request->error,
        request->cancelled, request->queued, request->in_line, request->barrier,
        (long long)request->ordered_from, request->span, request->plan.count,
        request->position, request->size, request->in_flight);
    fprintf(stderr, "handle: engine %s, %u requests, queue %s, %u workers, %u alive\n",
            handle->workers.ops->name, handle->queue.active_count,
            handle->queue.turns[0].first ? "filled" : "empty", handle->workers.started,
            handle->workers.alive);
    for (const struct nvmeio_consumer *c = handle->queue.consumers; c; c = c->next)
        tell_worker(c);
}

static inline void tell_file(const char *path)
{
    FILE *file = fopen(path, "r");
    int c;

    while (file && (c = fgetc(file)) != EOF)
        fputc(c, stderr);
    if (file)
        fclose(file);
    fputc('\n', stderr);
}

static inline void tell_threads(void)
{
    DIR *threads = opendir("/proc/self/task");
    const struct dirent *entry;
    char path[320];

    while (threads && (entry = readdir(threads))) {
        if (entry->d_name[0] == '.')
            continue;
        fprintf(stderr, "thread %s: ", entry->d_name);
        snprintf(path, sizeof(path), "/proc/self/task/%s/wchan", entry->d_name);
        tell_file(path);
        /* Only root can read it. */
        snprintf(path, sizeof(path), "/proc/self/task/%s/stack", entry->d_name);
        tell_file(path);
    }
    if (threads)
        closedir(threads);
}

static inline void tell_stuck(const struct nvmeio_request *request)
{
    tell_request(request);
    tell_threads();
}

#endif
