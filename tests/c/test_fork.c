/* Children of a process with handles: they work with their own workers, and parent and
 * child do not disturb each other, on every engine. */
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "file_internal.h"
#include "transfer.h"

#define SIZE (512 * KIB)

/* The sanitizers of gcc 12 cannot follow this: AddressSanitizer does not hold its
 * allocator's locks over a fork, so a child may wait for them for ever, and
 * ThreadSanitizer does not know which threads a child lacks. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#else
#define SANITIZED false
#endif

static const char *path;

/* Fork, run `child` in the child with a watchdog of its own, and expect it to succeed.
 */
static pid_t start_child(void (*child)(void *argument), void *argument)
{
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(60);
        child(argument);
        _exit(0);
    }
    return pid;
}

static void await_child(pid_t pid)
{
    int status;

    CHECK(waitpid(pid, &status, 0) == pid);
    if (status)
        fprintf(stderr, "the child ended with status %#x\n", status);
    CHECK(status == 0);
}

struct scene {
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    struct guarded memory;
    struct nvmeio_request *running[8];
};

static struct scene scene_open(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct scene scene = {.memory = guarded_new(8 * SIZE, 0)};

    config.workers = 2;
    config.queue_depth = 4;
    scene.handle = open_handle(&config);
    scene.file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    return scene;
}

static void scene_close(struct scene *scene)
{
    nvmeio_handle_close(scene->handle);
    nvmeio_file_release(scene->file);
    guarded_free(&scene->memory);
}

static void start_reads(struct scene *scene)
{
    for (unsigned i = 0; i < 8; i++) {
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_READ, scene->file, scene->memory.address + i * SIZE,
                        SIZE, (int64_t)i);
        scene->running[i] = submit(scene->handle, &t);
    }
}

static void finish_reads(struct scene *scene)
{
    for (unsigned i = 0; i < 8; i++) {
        CHECK(finish(scene->running[i]).result == SIZE);
        CHECK(file_holds(path, scene->memory.address + i * SIZE, SIZE, i));
    }
}

static void use_handle(struct scene *scene)
{
    struct guarded memory = guarded_new(SIZE, 7);

    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_READ, scene->file, memory.address, SIZE, 3);
    CHECK(carry_out(scene->handle, &t).result == SIZE);
    CHECK(file_holds(path, memory.address, SIZE, 3));
    t = transfer_of(NVMEIO_OP_READ, scene->file, memory.address, PAGE, PAGE);
    CHECK(perform_or_submit(scene->handle, &t).result == (int64_t)PAGE);
    CHECK(file_holds(path, memory.address, PAGE, PAGE));
    guarded_free(&memory);
}

/* Requests in flight belong to the parent; everything else works. */
static void child_uses(void *argument)
{
    struct scene *scene = argument;
    struct nvmeio_outcome outcome;

    for (unsigned i = 0; i < 8; i++) {
        struct nvmeio_request *old = scene->running[i];
        if (nvmeio_request_done(old))
            continue;
        CHECK(nvmeio_request_wait(old, -1) == -EOWNERDEAD);
        CHECK(nvmeio_request_outcome(old, &outcome) == -EOWNERDEAD);
        CHECK(nvmeio_request_cancel(old) == -EOWNERDEAD);
    }
    CHECK(nvmeio_handle_pending(scene->handle) == 0);
    use_handle(scene);
    for (unsigned i = 0; i < 8; i++)
        nvmeio_request_release(scene->running[i]);
    nvmeio_handle_close(scene->handle);
    nvmeio_file_release(scene->file);
}

static void test_a_child_uses_the_handle_while_its_parent_goes_on(const char *engine)
{
    for (int round = 0; round < 5; round++) {
        struct scene scene = scene_open(engine);
        start_reads(&scene);
        pid_t child = start_child(child_uses, &scene);
        finish_reads(&scene);
        await_child(child);
        use_handle(&scene);
        scene_close(&scene);
    }
}

static void child_closes(void *argument)
{
    struct scene *scene = argument;

    nvmeio_handle_close(scene->handle);
    for (unsigned i = 0; i < 8; i++)
        nvmeio_request_release(scene->running[i]);
}

static void child_stops_asks_and_closes(void *argument)
{
    struct scene *scene = argument;
    struct nvmeio_request *request;
    struct nvmeio_stats stats;
    void *user;
    char byte;
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, scene->file, &byte, 1, 0);

    nvmeio_handle_stop(scene->handle);
    CHECK(nvmeio_handle_pop(scene->handle, &user, 1) == 0);
    nvmeio_handle_stats(scene->handle, &stats);
    CHECK(nvmeio_submit(scene->handle, &t, &request) == -EPIPE);
    nvmeio_handle_stop(scene->handle);
    nvmeio_handle_close(scene->handle);
}

static void test_a_child_may_close_a_handle_that_it_never_used(const char *engine)
{
    struct scene scene = scene_open(engine);

    start_reads(&scene);
    pid_t first = start_child(child_closes, &scene);
    pid_t second = start_child(child_stops_asks_and_closes, &scene);
    finish_reads(&scene);
    await_child(first);
    await_child(second);
    use_handle(&scene);
    scene_close(&scene);
}

static void child_of_child(void *argument)
{
    use_handle(argument);
}

static void child_with_child(void *argument)
{
    struct scene *scene = argument;

    use_handle(scene);
    await_child(start_child(child_of_child, scene));
    use_handle(scene);
}

static void test_grandchildren_have_their_own_workers(const char *engine)
{
    struct scene scene = scene_open(engine);

    use_handle(&scene);
    await_child(start_child(child_with_child, &scene));
    use_handle(&scene);
    scene_close(&scene);
}

/* Other threads submit, wait and cancel all the time, so locks may be in any state. */
struct storm {
    struct scene scene;
    pthread_t threads[3];
    atomic_bool over;
};

static void *storm_main(void *argument)
{
    struct storm *storm = argument;
    struct guarded memory = guarded_new(SIZE, 0);

    for (unsigned round = 0; !atomic_load(&storm->over); round++) {
        struct nvmeio_transfer t =
            transfer_of(NVMEIO_OP_READ, storm->scene.file, memory.address, 64 * KIB, 0);
        if (round & 1)
            CHECK(perform_or_submit(storm->scene.handle, &t).result == (int64_t)t.size);
        struct nvmeio_request *request = submit(storm->scene.handle, &t);
        if (round % 3 == 0)
            nvmeio_request_cancel(request);
        struct nvmeio_outcome outcome = finish(request);
        CHECK(outcome.result == (int64_t)(64 * KIB) || outcome.result == -ECANCELED);
    }
    guarded_free(&memory);
    return NULL;
}

static void child_in_storm(void *argument)
{
    struct storm *storm = argument;

    use_handle(&storm->scene);
    nvmeio_handle_close(storm->scene.handle);
}

static void test_forks_while_threads_submit(const char *engine)
{
    struct storm storm = {.scene = scene_open(engine)};

    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&storm.threads[i], NULL, storm_main, &storm) == 0);
    for (int round = 0; round < 25; round++)
        await_child(start_child(child_in_storm, &storm));
    atomic_store(&storm.over, true);
    for (int i = 0; i < 3; i++)
        pthread_join(storm.threads[i], NULL);
    use_handle(&storm.scene);
    scene_close(&storm.scene);
}

static void *first_use(void *argument)
{
    use_handle(argument);
    return NULL;
}

/* Fork while another thread of the child starts the workers. */
static void child_forks_while_it_starts(void *argument)
{
    pthread_t thread;

    CHECK(pthread_create(&thread, NULL, first_use, argument) == 0);
    for (int i = 0; i < 3; i++)
        await_child(start_child(child_of_child, argument));
    pthread_join(thread, NULL);
}

static void test_a_fork_during_the_first_use_in_a_child(const char *engine)
{
    struct scene scene = scene_open(engine);

    for (int round = 0; round < 10; round++)
        await_child(start_child(child_forks_while_it_starts, &scene));
    scene_close(&scene);
}

static void limit_descriptors(rlim_t count)
{
    struct rlimit limit;

    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = count ? count : limit.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static void *use_until_it_works(void *argument)
{
    struct scene *scene = argument;
    char bytes[10];
    struct nvmeio_outcome outcome;

    do {
        outcome = read_at(scene->handle, scene->file, bytes, sizeof(bytes), 3);
        CHECK(outcome.result == -EMFILE || outcome.result == sizeof(bytes));
    } while (outcome.result < 0);
    CHECK(file_holds(path, bytes, sizeof(bytes), 3));
    return NULL;
}

/* No thread can start its workers until there are descriptors. */
static void child_wants_descriptors(void *argument)
{
    struct scene *scene = argument;
    struct nvmeio_stats stats;
    pthread_t threads[3];
    char byte;

    limit_descriptors(3);
    for (int i = 0; i < 2; i++)
        CHECK(read_at(scene->handle, scene->file, &byte, 1, 0).result == -EMFILE);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, use_until_it_works, scene) == 0);
    nvmeio_handle_stats(scene->handle, &stats);
    CHECK(nvmeio_handle_pending(scene->handle) <= 3);
    limit_descriptors(0);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    use_handle(scene);
    nvmeio_handle_close(scene->handle);
}

static void child_closes_in_want(void *argument)
{
    struct scene *scene = argument;
    char byte;

    limit_descriptors(3);
    CHECK(read_at(scene->handle, scene->file, &byte, 1, 0).result == -EMFILE);
    nvmeio_handle_close(scene->handle);
}

static void test_a_child_without_descriptors_works_once_it_has_some(const char *engine)
{
    struct scene scene = scene_open(engine);

    await_child(start_child(child_wants_descriptors, &scene));
    await_child(start_child(child_closes_in_want, &scene));
    use_handle(&scene);
    scene_close(&scene);
}

static void child_counts_descriptors(void *argument)
{
    struct scene *scene = argument;
    char link[32], target[256];

    /* The parent's file stays the same, whatever the child's workers open. */
    use_handle(scene);
    snprintf(link, sizeof(link), "/proc/self/fd/%d", nvmeio_file_fd(scene->file));
    ssize_t length = readlink(link, target, sizeof(target) - 1);
    CHECK(length > 0);
    target[length] = '\0';
    CHECK(strstr(target, "nvmeio-test-"));
    for (int fd = 3; fd < 200; fd++) {
        int flags = fcntl(fd, F_GETFD);
        CHECK(flags < 0 || (flags & FD_CLOEXEC));
    }
}

static void *ask_for_pending(void *handle)
{
    nvmeio_handle_pending(handle);
    return NULL;
}

struct watched {
    struct scene scene;
    int fd;
};

/* The child inherits the eventfd, but its workers must not signal it until requested.
 * */
static void child_watches(void *argument)
{
    struct watched *watched = argument;
    eventfd_t count;

    nvmeio_handle_unwatch(watched->scene.handle, watched->fd);
    use_handle(&watched->scene);
    CHECK(eventfd_read(watched->fd, &count) < 0 && errno == EAGAIN);
    int own = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    CHECK(nvmeio_handle_watch(watched->scene.handle, own) == 0);
    use_handle(&watched->scene);
    CHECK(eventfd_read(own, &count) == 0 && count == 1);
    nvmeio_handle_close(watched->scene.handle);
}

static void test_a_child_signals_no_eventfd_of_its_parent(const char *engine)
{
    struct watched watched = {scene_open(engine),
                              eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    eventfd_t count;

    CHECK(nvmeio_handle_watch(watched.scene.handle, watched.fd) == 0);
    await_child(start_child(child_watches, &watched));
    use_handle(&watched.scene);
    CHECK(eventfd_read(watched.fd, &count) == 0 && count == 1);
    scene_close(&watched.scene);
    close(watched.fd);
}

/* One thread of the child stops the handle while another starts its workers. */
static void child_stops_amid_first_use(void *argument)
{
    const struct scene *scene = argument;
    pthread_t thread;

    CHECK(pthread_create(&thread, NULL, ask_for_pending, scene->handle) == 0);
    nvmeio_handle_stop(scene->handle);
    pthread_join(thread, NULL);
    nvmeio_handle_stop(scene->handle);
}

static void test_a_child_may_stop_during_the_first_use(const char *engine)
{
    struct scene scene = scene_open(engine);

    for (int i = 0; i < 20; i++)
        await_child(start_child(child_stops_amid_first_use, &scene));
    scene_close(&scene);
}

static void test_descriptors_stay_what_they_are_and_close_at_exec(const char *engine)
{
    struct scene scene = scene_open(engine);

    start_reads(&scene);
    pid_t child = start_child(child_counts_descriptors, &scene);
    finish_reads(&scene);
    await_child(child);
    scene_close(&scene);
}

/* While the process forks, a thread opens the second descriptor of a file. */
static struct {
    struct nvmeio_file *file; /* NULL: forks are ordinary ones */
    pthread_t thread;
    atomic_int thread_id;
    int fd; /* the number that the second descriptor gets */
} window;

static void *open_second(void *argument)
{
    (void)argument;
    atomic_store(&window.thread_id, (int)syscall(SYS_gettid));
    CHECK(nvmeio_file_fd(window.file) == window.fd);
    return NULL;
}

static bool second_is_stored(void)
{
    return atomic_load(&window.file->fd) >= 0;
}

/* Once it has the descriptor, it can only sleep because it may not store the number. */
static bool thread_sleeps(void)
{
    char path[64], state = 0;

    if (fcntl(window.fd, F_GETFD) < 0)
        return false;
    snprintf(path, sizeof(path), "/proc/self/task/%d/stat",
             atomic_load(&window.thread_id));
    FILE *status = fopen(path, "re");
    CHECK(status && fscanf(status, "%*d %*s %c", &state) == 1);
    fclose(status);
    return state == 'S';
}

static void open_amid_fork(void)
{
    if (!window.file)
        return;
    CHECK(pthread_create(&window.thread, NULL, open_second, NULL) == 0);
    while (!second_is_stored() && !thread_sleeps())
        sched_yield();
}

/* Before the library's own handlers, so that this one runs after them. */
__attribute__((constructor(101))) static void watch_forks(void)
{
    pthread_atfork(open_amid_fork, NULL, NULL);
}

static void child_opens_second(void *argument)
{
    char bytes[100];

    /* It is here because fork() begins after the handlers.  Without it, the child is
     * one whose descriptors were copied before the thread opened it. */
    CHECK(close(window.fd) == 0);
    int other = open(argument, O_RDWR);
    CHECK(other == window.fd);
    int fd = nvmeio_file_fd(window.file);
    CHECK(pread(fd, bytes, sizeof(bytes), 0) == sizeof(bytes));
    CHECK(file_holds(path, bytes, sizeof(bytes), 0));
    nvmeio_file_release(window.file);
    CHECK(fcntl(other, F_GETFD) >= 0);
}

static void test_a_child_takes_no_other_file_for_a_second_descriptor(void)
{
    const char *other = path_in(test_folder());

    make_file(other, KIB, 2);
    window.file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    if (!window.file->info.direct)
        SKIP("the file system has no O_DIRECT");
    window.fd = dup(window.file->direct_fd);
    close(window.fd);
    pid_t child = start_child(child_opens_second, (void *)other);
    pthread_join(window.thread, NULL);
    await_child(child);
    nvmeio_file_release(window.file);
    window.file = NULL;
}

int main(void)
{
    const char *engine;

    begin();
    if (SANITIZED)
        SKIP("sanitizers cannot follow forks of a process with threads");
    /* Ignore descriptors that this test has inherited. */
    for (int fd = 3; fd < 200; fd++)
        fcntl(fd, F_SETFD, FD_CLOEXEC);
    path = path_in(test_folder());
    make_file(path, SIZE + 16, 1);
    FOR_EACH_ENGINE(engine)
    {
        test_a_child_uses_the_handle_while_its_parent_goes_on(engine);
        test_a_child_may_close_a_handle_that_it_never_used(engine);
        test_grandchildren_have_their_own_workers(engine);
        test_descriptors_stay_what_they_are_and_close_at_exec(engine);
        test_forks_while_threads_submit(engine);
        test_a_fork_during_the_first_use_in_a_child(engine);
        test_a_child_may_stop_during_the_first_use(engine);
        test_a_child_signals_no_eventfd_of_its_parent(engine);
        test_a_child_without_descriptors_works_once_it_has_some(engine);
    }
    /* The last, because it is skipped where there is no second descriptor. */
    test_a_child_takes_no_other_file_for_a_second_descriptor();
    return 0;
}
