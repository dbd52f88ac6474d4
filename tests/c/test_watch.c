/* Eventfds signal completed requests on every engine: once for each watch, and never
 * too rarely. */
#include <poll.h>
#include <pthread.h>

#include <sys/eventfd.h>

#include "transfer.h"

#define SIZE (64 * KIB)
#define THREADS 4
#define ROUNDS 100

static const char *path;

struct scene {
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    struct guarded memory;
    int fd;
};

static struct scene scene_open(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct scene scene = {.memory = guarded_new(SIZE, 0)};

    config.workers = 2;
    config.block_bytes = 16 * KIB;
    scene.handle = open_handle(&config);
    scene.file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    scene.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(scene.fd >= 0);
    return scene;
}

static void scene_close(struct scene *scene)
{
    nvmeio_handle_close(scene->handle);
    nvmeio_file_release(scene->file);
    guarded_free(&scene->memory);
    close(scene->fd);
}

/* Read `size` bytes, and wait until all effects of the completion have happened. */
static struct nvmeio_outcome read_some(struct scene *scene, size_t size, int64_t offset)
{
    struct nvmeio_outcome outcome =
        read_at(scene->handle, scene->file, scene->memory.address, size, offset);

    CHECK(nvmeio_handle_drain(scene->handle, LONG_NS) == 0);
    return outcome;
}

/* How often an eventfd was signalled since the last call. */
static eventfd_t signals_of(int fd)
{
    eventfd_t count;

    if (eventfd_read(fd, &count) == 0)
        return count;
    CHECK(errno == EAGAIN);
    return 0;
}

static void test_each_watch_is_signalled_once(const char *engine)
{
    struct scene scene = scene_open(engine);

    CHECK(read_some(&scene, SIZE, 0).result == SIZE);
    CHECK(nvmeio_handle_watch(scene.handle, scene.fd) == 0);
    CHECK(signals_of(scene.fd) == 0);
    for (int i = 0; i < 5; i++)
        CHECK(read_some(&scene, SIZE, 0).result == SIZE);
    CHECK(signals_of(scene.fd) == 1);
    CHECK(read_some(&scene, SIZE, 0).result == SIZE);
    CHECK(signals_of(scene.fd) == 0);
    CHECK(nvmeio_handle_watch(scene.handle, scene.fd) == 0);
    CHECK(nvmeio_handle_watch(scene.handle, scene.fd) == 0);
    CHECK(read_some(&scene, SIZE, 0).result == SIZE);
    CHECK(signals_of(scene.fd) == 1);
    scene_close(&scene);
}

static void test_failures_signal_too(const char *engine)
{
    struct scene scene = scene_open(engine);

    CHECK(nvmeio_handle_watch(scene.handle, scene.fd) == 0);
    CHECK(read_some(&scene, SIZE, SIZE).result == -ENODATA);
    CHECK(signals_of(scene.fd) == 1);
    CHECK(nvmeio_handle_watch(scene.handle, scene.fd) == 0);
    CHECK(read_some(&scene, 0, 0).result == 0);
    CHECK(signals_of(scene.fd) == 1);
    scene_close(&scene);
}

/* An unwatched eventfd may be closed, and its number reused. */
static void test_an_unwatched_eventfd_is_not_signalled(const char *engine)
{
    struct scene scene = scene_open(engine);
    int other = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    CHECK(nvmeio_handle_watch(scene.handle, scene.fd) == 0);
    CHECK(nvmeio_handle_watch(scene.handle, other) == 0);
    nvmeio_handle_unwatch(scene.handle, scene.fd);
    nvmeio_handle_unwatch(scene.handle, scene.fd);
    CHECK(read_some(&scene, SIZE, 0).result == SIZE);
    CHECK(signals_of(scene.fd) == 0);
    CHECK(signals_of(other) == 1);
    /* Both unwatched after a signal, and left to the handle. */
    nvmeio_handle_unwatch(scene.handle, other);
    CHECK(nvmeio_handle_watch(scene.handle, other) == 0);
    scene_close(&scene);
    CHECK(signals_of(other) == 0);
    close(other);
}

static void test_one_eventfd_serves_several_handles(const char *engine)
{
    struct scene scenes[2] = {scene_open(engine), scene_open(engine)};

    for (int i = 0; i < 2; i++)
        CHECK(nvmeio_handle_watch(scenes[i].handle, scenes[0].fd) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(read_some(&scenes[i], SIZE, 0).result == SIZE);
        CHECK(signals_of(scenes[0].fd) == 1);
    }
    scene_close(&scenes[1]);
    scene_close(&scenes[0]);
}

/* Threads submit reads one after the other; another thread finds each by its number. */
struct submitter {
    pthread_t thread;
    struct scene *scene;
    char memory[ROUNDS];
};

/* Completions that were reported to a waiting thread, and so to no other. */
static atomic_uint reported_to_waiters;

static void *submit_reads(void *argument)
{
    struct submitter *submitter = argument;

    for (int i = 0; i < ROUNDS; i++) {
        struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, submitter->scene->file,
                                               &submitter->memory[i], 1, i);
        t.user = &submitter->memory[i];
        struct nvmeio_request *request = submit(submitter->scene->handle, &t);
        if (i & 1 && wait_for(request)) {
            atomic_fetch_add(&reported_to_waiters, 1);
            CHECK(eventfd_write(submitter->scene->fd, 1) == 0);
        }
        nvmeio_request_release(request);
    }
    return NULL;
}

/* As event loops do: sleep without a timeout, clear, watch again, poll. */
static void await_all(struct scene *scene, unsigned count)
{
    struct pollfd readable = {.fd = scene->fd, .events = POLLIN};
    unsigned popped = 0;
    void *users[7];

    for (;;) {
        signals_of(scene->fd);
        CHECK(nvmeio_handle_watch(scene->handle, scene->fd) == 0);
        unsigned found = nvmeio_handle_pop(scene->handle, users, 7);
        popped += found;
        if (popped + atomic_load(&reported_to_waiters) == count)
            return;
        if (found == 0)
            CHECK(poll(&readable, 1, -1) == 1);
    }
}

static void test_threads_lose_no_completion(const char *engine)
{
    static struct submitter submitters[THREADS];
    struct scene scene = scene_open(engine);
    void *user;

    atomic_store(&reported_to_waiters, 0);
    for (int i = 0; i < THREADS; i++) {
        submitters[i].scene = &scene;
        memset(submitters[i].memory, 0, ROUNDS);
        CHECK(pthread_create(&submitters[i].thread, NULL, submit_reads,
                             &submitters[i]) == 0);
    }
    await_all(&scene, THREADS * ROUNDS);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(submitters[i].thread, NULL);
        CHECK(file_holds(path, submitters[i].memory, ROUNDS, 0));
    }
    CHECK(nvmeio_handle_pop(scene.handle, &user, 1) == 0);
    scene_close(&scene);
}

/* Eventfds come and go while requests become done. */
static void *come_and_go(void *argument)
{
    struct scene *scene = argument;

    for (int i = 0; i < 10 * ROUNDS; i++) {
        int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        CHECK(fd >= 0);
        CHECK(nvmeio_handle_watch(scene->handle, fd) == 0);
        nvmeio_handle_unwatch(scene->handle, fd);
        CHECK(signals_of(fd) <= 1);
        close(fd);
    }
    return NULL;
}

static void test_eventfds_come_and_go_during_completions(const char *engine)
{
    struct scene scene = scene_open(engine);
    pthread_t threads[THREADS];

    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, come_and_go, &scene) == 0);
    CHECK(nvmeio_handle_watch(scene.handle, scene.fd) == 0);
    for (int i = 0; i < ROUNDS; i++)
        CHECK(read_some(&scene, SIZE, 0).result == SIZE);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(signals_of(scene.fd) == 1);
    scene_close(&scene);
}

int main(void)
{
    const char *engine;

    begin();
    path = path_in(test_folder());
    make_file(path, SIZE, 1);
    FOR_EACH_ENGINE(engine)
    {
        test_each_watch_is_signalled_once(engine);
        test_failures_signal_too(engine);
        test_an_unwatched_eventfd_is_not_signalled(engine);
        test_one_eventfd_serves_several_handles(engine);
        test_threads_lose_no_completion(engine);
        test_eventfds_come_and_go_during_completions(engine);
    }
    return 0;
}
