/* A completion wakes, and is reported to, exactly the threads that wait for it. */
#include <linux/futex.h>
#include <poll.h>
#include <semaphore.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include "scripted.h"
#include "system_calls.h"

static struct nvmeio_transfer small(enum nvmeio_op op, int64_t page)
{
    struct nvmeio_transfer t = whole(op);

    t.size = PAGE;
    t.address = (char *)t.address + page * (int64_t)PAGE;
    t.offset = page * (int64_t)PAGE;
    return t;
}

/* The library's threads sleep and wake each other by syscall(2).  It can hold a thread
 * after its timeout, and another before it wakes the second of two. */
static _Thread_local bool gives_up;
static _Thread_local unsigned waits;
static atomic_bool late, wake_is_held, waking;
static sem_t go_on, wake_on;

static void await_post(sem_t *semaphore)
{
    while (sem_wait(semaphore))
        ;
}

static bool answer(long number, const long *words, long *result)
{
    bool sleeps = number == SYS_futex && (int)words[1] != FUTEX_WAKE_PRIVATE;
    bool wakes = number == SYS_futex && !sleeps;
    if (wakes && atomic_exchange(&wake_is_held, false)) {
        atomic_store(&waking, true);
        await_post(&wake_on);
    }
    if (!sleeps || !gives_up)
        return false;
    if (waits++ == 1)
        sem_post(&wake_on);
    *result = call_kernel(number, words) < 0 ? -errno : 0;
    if (*result == -ETIMEDOUT) {
        atomic_store(&late, true);
        await_post(&go_on);
    }
    return true;
}

#define READERS 64

struct reader {
    pthread_t thread;
    int64_t page;
    struct nvmeio_request *_Atomic request;
    long sleeps; /* while it waited */
};

static void *read_main(void *argument)
{
    struct reader *reader = argument;
    struct nvmeio_transfer t = small(NVMEIO_OP_READ, reader->page);
    struct nvmeio_request *request = submit(stage.handle, &t);
    struct rusage before, after;

    atomic_store(&reader->request, request);
    getrusage(RUSAGE_THREAD, &before);
    wait_for(request);
    getrusage(RUSAGE_THREAD, &after);
    reader->sleeps = after.ru_nvcsw - before.ru_nvcsw;
    return NULL;
}

static int64_t turn; /* guarded by the mutex of the script */

static bool perform_whose_turn_it_is(struct nvmeio_block *block)
{
    return block->offset == turn * (int64_t)PAGE && perform(block);
}

static void play_turn(int64_t page)
{
    pthread_mutex_lock(&mutex);
    turn = page;
    pthread_mutex_unlock(&mutex);
    play(perform_whose_turn_it_is);
}

static void test_a_thread_is_woken_only_by_its_own_request(void)
{
    static struct reader readers[READERS];
    long sleeps = 0;

    stage_open(READERS);
    play(hold);
    for (int i = 0; i < READERS; i++) {
        struct reader *reader = &readers[i];
        reader->page = i;
        CHECK(pthread_create(&reader->thread, NULL, read_main, reader) == 0);
        while (!atomic_load(&reader->request) || !is_awaited(reader->request))
            pause_ms(1);
    }
    await(&in_flight, READERS);
    for (int i = 0; i < READERS; i++) {
        /* In neither ascending nor descending order. */
        int own = i * 37 % READERS, next = (i + 1) * 37 % READERS;
        play_turn(own);
        pthread_join(readers[own].thread, NULL);
        CHECK(i == READERS - 1 || !nvmeio_request_done(readers[next].request));
        sleeps += readers[own].sleeps;
    }
    /* Once each, plus spurious ones; if every completion woke all, it would be 32 each.
     * */
    CHECK(sleeps < 2 * READERS);
    for (int i = 0; i < READERS; i++)
        CHECK(finish(readers[i].request).result == (int64_t)PAGE);
    CHECK(memory_holds_file(READERS * PAGE));
    stage_close();
}

/* As event loops do: sleep without a timeout, clear, watch again, poll. */
static void *sleep_until_completion(void *user)
{
    struct pollfd readable = {.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
                              .events = POLLIN};
    eventfd_t count;
    void *found;

    CHECK(readable.fd >= 0);
    for (;;) {
        CHECK(nvmeio_handle_watch(stage.handle, readable.fd) == 0);
        if (nvmeio_handle_pop(stage.handle, &found, 1) == 1)
            break;
        CHECK(poll(&readable, 1, -1) == 1);
        CHECK(eventfd_read(readable.fd, &count) == 0);
    }
    CHECK(found == user);
    nvmeio_handle_unwatch(stage.handle, readable.fd);
    close(readable.fd);
    return NULL;
}

static bool is_watched(void)
{
    struct nvmeio_queue *queue = &stage.handle->queue;

    pthread_mutex_lock(&queue->mutex);
    bool found = queue->eventfds.armed;
    pthread_mutex_unlock(&queue->mutex);
    return found;
}

static void test_an_fsync_after_a_write_without_waiters_wakes_its_waiter(void)
{
    pthread_t sleeper;
    char user;

    stage_open(BLOCKS);
    struct nvmeio_transfer sync = {
        .op = NVMEIO_OP_FSYNC, .file = stage.file, .user = &user};
    play(hold);
    struct nvmeio_request *write = start(NVMEIO_OP_WRITE);
    await(&in_flight, BLOCKS);
    CHECK(nvmeio_request_wait(write, 1000000) == -ETIMEDOUT);
    struct nvmeio_request *behind = submit(stage.handle, &sync);
    CHECK(pthread_create(&sleeper, NULL, sleep_until_completion, &user) == 0);
    while (!is_watched())
        pause_ms(1);
    play(perform);
    pthread_join(sleeper, NULL);
    CHECK(nvmeio_request_done(write) && finish(write).result == BLOCKS * BLOCK);
    CHECK(finish(behind).result == 0);
    stage_close();
}

#define WAITERS 4

/* Threads that wait for a request or pop completions, with a timeout. */
static struct {
    struct nvmeio_request *request;
    int64_t timeout_ns;
    atomic_bool over, begun;
    atomic_uint reports;
} race;

static void *race_to_wait(void *argument)
{
    (void)argument;
    while (!atomic_load(&race.begun))
        sched_yield();
    int result = nvmeio_request_wait(race.request, race.timeout_ns);
    CHECK(result == 0 || result == 1);
    atomic_fetch_add(&race.reports, (unsigned)result);
    return NULL;
}

static void *race_to_pop(void *argument)
{
    void *users[2];

    (void)argument;
    while (!atomic_load(&race.begun))
        sched_yield();
    do
        atomic_fetch_add(&race.reports, nvmeio_handle_pop(stage.handle, users, 2));
    while (!atomic_load(&race.over));
    return NULL;
}

static struct nvmeio_request *submit_raced(void)
{
    struct nvmeio_transfer t = small(NVMEIO_OP_READ, 0);

    t.user = &race;
    play(hold);
    return submit(stage.handle, &t);
}

static void race_on(int64_t timeout_ns, void (*during)(void))
{
    pthread_t waiting[WAITERS], popping[2];

    race.timeout_ns = timeout_ns;
    atomic_store(&race.reports, 0);
    atomic_store(&race.over, false);
    atomic_store(&race.begun, false);
    for (int i = 0; i < WAITERS; i++)
        CHECK(pthread_create(&waiting[i], NULL, race_to_wait, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&popping[i], NULL, race_to_pop, NULL) == 0);
    atomic_store(&race.begun, true);
    during();
    for (int i = 0; i < WAITERS; i++)
        pthread_join(waiting[i], NULL);
    atomic_store(&race.over, true);
    for (int i = 0; i < 2; i++)
        pthread_join(popping[i], NULL);
    CHECK(atomic_load(&race.reports) == 1);
    CHECK(nvmeio_request_wait(race.request, 0) == 0);
    CHECK(finish(race.request).result == (int64_t)PAGE);
}

static bool all_wait(void)
{
    struct nvmeio_queue *queue = &stage.handle->queue;
    unsigned count = 0;

    pthread_mutex_lock(&queue->mutex);
    for (struct nvmeio_waiter *w = race.request->waiters; w; w = w->next)
        count++;
    pthread_mutex_unlock(&queue->mutex);
    return count == WAITERS;
}

static void complete_when_all_wait(void)
{
    while (!all_wait())
        pause_ms(1);
    play(perform);
}

static void complete_at_once(void)
{
    play(perform);
}

static void do_nothing(void)
{
}

static void test_exactly_one_of_racing_threads_gets_a_completion(void)
{
    stage_open(4);
    for (int round = 0; round < 50; round++) {
        race.request = submit_raced();
        race_on(LONG_NS, complete_when_all_wait);
        race.request = submit_raced();
        race_on(LONG_NS, complete_at_once);
        race.request = submit_raced();
        play(perform);
        CHECK(nvmeio_handle_drain(stage.handle, LONG_NS) == 0);
        race_on(0, do_nothing);
    }
    stage_close();
}

static void *wait_long(void *request)
{
    return (void *)(intptr_t)nvmeio_request_wait(request, LONG_NS);
}

static void *wait_and_give_up(void *request)
{
    gives_up = true;
    intptr_t result = nvmeio_request_wait(request, 1000000);
    sem_post(&wake_on);
    return (void *)result;
}

/* Two threads wait.  The second one times out, but before it reacts both are taken off
 * the list, and it has not been woken yet when it checks. */
static void test_a_thread_woken_at_its_timeout_may_get_the_completion(void)
{
    pthread_t first, second;
    void *a, *b, *user;

    stage_open(4);
    struct nvmeio_request *request = submit_raced();
    CHECK(sem_init(&go_on, 0, 0) == 0 && sem_init(&wake_on, 0, 0) == 0);
    CHECK(pthread_create(&first, NULL, wait_long, request) == 0);
    while (!is_awaited(request))
        pause_ms(1);
    CHECK(pthread_create(&second, NULL, wait_and_give_up, request) == 0);
    while (!atomic_load(&late))
        pause_ms(1);
    atomic_store(&wake_is_held, true);
    play(perform);
    while (!atomic_load(&waking))
        pause_ms(1);
    sem_post(&go_on);
    pthread_join(second, &b);
    pthread_join(first, &a);
    CHECK(nvmeio_handle_pop(stage.handle, &user, 1) == 0);
    CHECK(nvmeio_request_wait(request, 0) == 0);
    CHECK(((intptr_t)a == 1) + ((intptr_t)b == 1) == 1);
    CHECK(finish(request).result == (int64_t)PAGE);
    stage_close();
}

static void test_a_wait_that_times_out_leaves_the_completion_to_pop(void)
{
    void *user;

    stage_open(4);
    struct nvmeio_request *request = submit_raced();
    CHECK(nvmeio_request_wait(request, 1000000) == -ETIMEDOUT);
    play(perform);
    CHECK(nvmeio_handle_drain(stage.handle, LONG_NS) == 0);
    CHECK(nvmeio_handle_pop(stage.handle, &user, 1) == 1 && user == &race);
    CHECK(nvmeio_handle_pop(stage.handle, &user, 1) == 0);
    CHECK(nvmeio_request_wait(request, 0) == 0);
    CHECK(finish(request).result == (int64_t)PAGE);
    stage_close();
}

int main(void)
{
    begin();
    stage.path = path_in(test_folder());
    test_a_thread_is_woken_only_by_its_own_request();
    test_an_fsync_after_a_write_without_waiters_wakes_its_waiter();
    test_exactly_one_of_racing_threads_gets_a_completion();
    test_a_thread_woken_at_its_timeout_may_get_the_completion();
    test_a_wait_that_times_out_leaves_the_completion_to_pop();
    return 0;
}
