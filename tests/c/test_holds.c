/* What no thread does to the others: hold a handle's mutex in proportion to the number
 * of parts or records, or leave a worker asleep that it was about to wake. */
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <time.h>

#include "system_calls.h"
#include "transfer.h"

#define COUNT 5000
#define STEPS 1024

static struct nvmeio_handle *handle;
static atomic_uint pauses;

/* Replace nanosleep() in the library. */
int nanosleep(const struct timespec *pause, struct timespec *left)
{
    if (handle && pause->tv_sec == 0 && pause->tv_nsec == 1000 &&
        pthread_mutex_trylock(&handle->queue.mutex) == 0) {
        /* Another thread looks for work: it takes requests that have none off the
         * queue. */
        nvmeio_queue_next(&handle->queue);
        pthread_mutex_unlock(&handle->queue.mutex);
        atomic_fetch_add(&pauses, 1);
    }
    return (int)syscall(SYS_nanosleep, pause, left);
}

static _Thread_local bool held_here;
static sem_t entered, released;

/* One thread stays where it wakes another. */
static bool answer(long number, const long *words, long *result)
{
    (void)result;
    if (number == SYS_futex && words[1] == FUTEX_WAKE_PRIVATE && held_here) {
        held_here = false;
        sem_post(&entered);
        while (sem_wait(&released))
            ;
    }
    return false;
}

static struct nvmeio_file *file_read;
static char byte_read;

static void *read_and_stay(void *unused)
{
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file_read, &byte_read, 1, 0);

    held_here = true;
    CHECK(carry_out(handle, &t).result == 1);
    return unused;
}

static void test_a_thread_that_does_not_run_holds_up_no_other(struct nvmeio_file *file,
                                                              char *memory)
{
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file, memory, 1, 0);
    struct nvmeio_consumer *worker = handle->queue.consumers;
    pthread_t thread;
    bool idle;

    /* The worker sleeps soon after its last request; for a second it would wake up by
     * itself. */
    do {
        nvmeio_queue_lock(&handle->queue);
        idle = worker->state == NVMEIO_CONSUMER_IDLE;
        nvmeio_queue_unlock(&handle->queue);
    } while (!idle);
    usleep(1200000);
    file_read = file;
    CHECK(pthread_create(&thread, NULL, read_and_stay, NULL) == 0);
    while (sem_wait(&entered))
        ;
    for (int i = 0; i < 3; i++)
        CHECK(carry_out(handle, &t).result == 1);
    sem_post(&released);
    CHECK(pthread_join(thread, NULL) == 0);
}

static void test_many_parts(struct nvmeio_file *file, char *memory, bool after)
{
    static struct nvmeio_transfer parts[COUNT];
    struct nvmeio_request *request, *first;
    size_t offender;

    for (int i = 0; i < COUNT; i++)
        parts[i] = transfer_of(NVMEIO_OP_WRITE, file, memory, 1, i);
    struct nvmeio_transfer t = transfer_of(NVMEIO_OP_READ, file, memory, 1, 0);
    first = submit(handle, &t);
    struct nvmeio_many many = {.transfers = parts,
                               .count = COUNT,
                               .after = {.requests = &first, .count = after}};
    atomic_store(&pauses, 0);
    CHECK(nvmeio_submit_many(handle, &many, &request, &offender) == 0);
    CHECK(finish(request).result == COUNT);
    /* While they are added, and while they begin. */
    CHECK(atomic_load(&pauses) > COUNT / STEPS);
    finish(first);
}

/* The first round has one block, and must look at all others to find no second. */
static void test_a_scatter_of_many_ragged_records(struct nvmeio_file *file,
                                                  char *memory)
{
    static int64_t offsets[COUNT], sizes[COUNT], places[COUNT];
    struct nvmeio_request *request;
    size_t offender;

    for (int i = 0; i < COUNT; i++) {
        offsets[i] = i == 0 ? 0 : (int64_t)PAGE + 3 * i;
        sizes[i] = i == 0 ? (int64_t)PAGE : 1;
        places[i] = i == 0 ? 0 : (int64_t)PAGE + i;
    }
    struct nvmeio_gather what = {.op = NVMEIO_OP_WRITE,
                                 .file = file,
                                 .address = memory,
                                 .size = PAGE + COUNT,
                                 .count = COUNT,
                                 .offsets = offsets,
                                 .sizes = sizes,
                                 .places = places};
    atomic_store(&pauses, 0);
    CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) == 0);
    CHECK(finish(request).result == PAGE + COUNT - 1);
    CHECK(atomic_load(&pauses) >= COUNT / STEPS);
    nvmeio_queue_lock(&handle->queue);
    CHECK(!nvmeio_queue_next(&handle->queue) && handle->queue.blocks_left == 0);
    nvmeio_queue_unlock(&handle->queue);
}

int main(void)
{
    struct nvmeio_file_info info;
    const char *path;

    begin();
    path = path_in(test_folder());
    make_file(path, MIB, 1);
    struct nvmeio_config config = config_of(engine_at(0));
    handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDWR, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_in_pool(PAGE + COUNT);
    sem_init(&entered, 0, 0);
    sem_init(&released, 0, 0);
    test_a_thread_that_does_not_run_holds_up_no_other(file, memory.address);
    test_many_parts(file, memory.address, false);
    test_many_parts(file, memory.address, true);
    nvmeio_file_get_info(file, &info);
    if (info.direct)
        test_a_scatter_of_many_ragged_records(file, memory.address);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
    handle = NULL;
    nvmeio_pool_free(memory.base);
    return 0;
}
