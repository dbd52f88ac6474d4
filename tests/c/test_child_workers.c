/* A forked child that cannot start workers at its first use of a handle, and then stops
 * the handle.  A replacement of the C library's function at link time refuses and
 * delays threads. */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>

#include "transfer.h"

/* The sanitizers of gcc 12 cannot follow this; see test_fork.c. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#else
#define SANITIZED false
#endif

typedef int create_function(pthread_t *thread, const pthread_attr_t *attributes,
                            void *(*function)(void *), void *argument);

static atomic_bool refused, held_up;
static atomic_uint asked_for;

static create_function *real_create(void)
{
    create_function *create = dlsym(RTLD_NEXT, "pthread_create");
    CHECK(create);
    return create;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                   void *(*function)(void *), void *argument)
{
    atomic_fetch_add(&asked_for, 1);
    if (atomic_load(&refused))
        return EAGAIN;
    while (atomic_load(&held_up))
        sched_yield();
    return real_create()(thread, attributes, function, argument);
}

static struct nvmeio_handle *handle;
static struct nvmeio_file *file;
static atomic_bool stopped;

/* One byte is read, or the handle was stopped before. */
static void *read_main(void *unused)
{
    char byte;
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file, &byte, 1, 0);
    struct nvmeio_request *request;
    int error = nvmeio_submit(handle, &t, &request);

    CHECK(error == 0 || error == -EPIPE);
    if (error == 0)
        CHECK(finish(request).result == 1);
    return unused;
}

static void *stop_main(void *unused)
{
    nvmeio_handle_stop(handle);
    atomic_store(&stopped, true);
    return unused;
}

/* Both attempts fail, in the first call and in the submission. */
static void use_in_want(void)
{
    char byte;

    atomic_store(&refused, true);
    CHECK(read_at(handle, file, &byte, 1, 0).result == -EAGAIN);
    CHECK(atomic_load(&asked_for) == 2);
    atomic_store(&refused, false);
    atomic_store(&asked_for, 0);
}

/* Workers that start now would outlive the handle. */
static void what_is_stopped_starts_no_workers(void)
{
    char byte;
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file, &byte, 1, 0);
    struct nvmeio_request *request;

    use_in_want();
    nvmeio_handle_stop(handle);
    CHECK(nvmeio_submit(handle, &t, &request) == -EPIPE);
    CHECK(atomic_load(&asked_for) == 0);
    nvmeio_handle_close(handle);
}

/* So would workers that are starting. */
static void stopping_waits_for_workers_that_start(void)
{
    static const struct timespec pause = {0, 20000000};
    pthread_t reader, stopper;

    use_in_want();
    atomic_store(&held_up, true);
    CHECK(real_create()(&reader, NULL, read_main, NULL) == 0);
    while (atomic_load(&asked_for) == 0)
        sched_yield();
    CHECK(real_create()(&stopper, NULL, stop_main, NULL) == 0);
    nanosleep(&pause, NULL);
    CHECK(!atomic_load(&stopped));
    atomic_store(&held_up, false);
    pthread_join(reader, NULL);
    pthread_join(stopper, NULL);
    nvmeio_handle_close(handle);
}

static void try_in_child(void (*child)(void))
{
    int status;

    atomic_store(&asked_for, 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(60);
        child();
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

int main(void)
{
    struct nvmeio_config config = config_of("sync");

    begin();
    if (SANITIZED)
        SKIP("sanitizers cannot follow forks of a process with threads");
    const char *path = path_in(test_folder());
    make_file(path, 1, 1);
    config.workers = 2;
    handle = open_handle(&config);
    file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    try_in_child(what_is_stopped_starts_no_workers);
    try_in_child(stopping_waits_for_workers_that_start);
    nvmeio_handle_close(handle);
    nvmeio_file_release(file);
    return 0;
}
