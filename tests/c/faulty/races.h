/* races.h -- threads, forks and mappings while one thread of the library pauses.
 *
 * A race does the same I/O each time, in its own child process, so that all start
 * alike: with an empty pool and no open handle.  Wherever a thread pauses, every
 * transfer must have the same result as without the pause, and the right bytes. */
#ifndef NVMEIO_TESTS_RACES_H
#define NVMEIO_TESTS_RACES_H

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "fault.h"
#include "transfer.h"

#define RACE_S 20
#define SPEC_MAX 128

struct race {
    const char *name;
    const char *words; /* of NVMEIO_FAULTS */
    void (*run)(void);
};

/* The outcome, which is shared with the child. */
struct raced {
    uint64_t first;     /* occasions of a pause before the race */
    uint64_t occasions; /* and after it */
    bool met;           /* the other side ran during the pause, or at all */
    bool struck;
    bool after;
    const char *call; /* parent and child have the library at the same address */
};

static struct raced *raced;
static const char *race_engine;
static const char *race_path;
static pid_t race_pid;

static inline void begin_races(void)
{
    begin();
    race_path = path_in(test_folder());
    raced = mmap(NULL, sizeof(*raced), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(raced != MAP_FAILED);
}

static inline bool has_paused(void)
{
    return nvmeio_fault_fired(NVMEIO_FAULT_PAUSE) > 0;
}

/* Runs at exit, because a CHECK() may end the race.  A child that the race has forked
 * counts its own pauses. */
static void note_pause(void)
{
    if (getpid() != race_pid)
        return;
    raced->call = nvmeio_fault_paused(&raced->after);
    raced->struck = has_paused();
    raced->occasions = nvmeio_fault_occasions(NVMEIO_FAULT_PAUSE);
}

static inline void begin_race(void)
{
    raced->first = nvmeio_fault_occasions(NVMEIO_FAULT_PAUSE);
}

static void expire_race(int signal)
{
    (void)signal;
    note_pause();
    kill(getpid(), SIGKILL);
}

static inline void sleep_a_little(void)
{
    static const struct timespec moment = {0, 100000};
    nanosleep(&moment, NULL);
}

/* Run a race with faults; return whether nothing went wrong, and report what did. */
static inline bool holds(const struct race *race, const char *faults)
{
    char spec[SPEC_MAX];
    int status;

    snprintf(spec, sizeof(spec), "%s,%s", race->words, faults);
    *raced = (struct raced){0};
    fflush(NULL);
    alarm(WATCHDOG_S);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        race_pid = getpid();
        atexit(note_pause);
        signal(SIGALRM, expire_race);
        alarm(RACE_S);
        nvmeio_fault_configure(spec);
        race->run();
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    if (status)
        fprintf(stderr, "%s %s: %s, a pause %s %s(): %s\n", race_engine, race->name,
                spec, raced->after ? "after" : "before",
                raced->call ? raced->call : "nothing",
                WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "wrong");
    return status == 0;
}

/* Several threads do I/O on one handle and one file, with memory of the pool.  None
 * ends before all have done their rounds, so that the others go on while one pauses. */
#define RACERS 3
#define ROUNDS 2
#define PART (96 * KIB)

static struct nvmeio_handle *raced_handle;
static struct nvmeio_file *raced_file;
static atomic_uint racers_busy;

static inline void go_round(unsigned racer, unsigned round)
{
    /* Not whole blocks, and for one of them not whole pages. */
    size_t size = PART - (racer == 1 ? 1000 : 0) - round * PAGE;
    int64_t offset = (int64_t)(racer * 2 * PART);
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = raced_file};
    char *out, *in;

    CHECK(nvmeio_pool_alloc(PART, racer == 0, (void **)&out, NULL) == 0);
    CHECK(nvmeio_pool_alloc(PART, false, (void **)&in, NULL) == 0);
    fill(out, size, (uint64_t)offset, round);
    memset(in, 0, size);
    CHECK(write_at(raced_handle, raced_file, out, size, offset).result ==
          (int64_t)size);
    CHECK(read_at(raced_handle, raced_file, in, size, offset).result == (int64_t)size);
    CHECK(memcmp(in, out, size) == 0);
    CHECK(racer != 2 || carry_out(raced_handle, &sync).result == 0);
    CHECK(file_holds(race_path, out, size, offset));
    nvmeio_pool_free(in);
    nvmeio_pool_free(out);
}

static inline void *race_rounds(void *argument)
{
    unsigned racer = (unsigned)(uintptr_t)argument;
    bool busy = true;

    for (unsigned round = 0; atomic_load(&racers_busy) > 0; round++) {
        go_round(racer, round % 8);
        if (busy && round + 1 >= ROUNDS) {
            busy = false;
            atomic_fetch_sub(&racers_busy, 1);
        }
    }
    return NULL;
}

static inline void race_threads(void)
{
    struct nvmeio_config config = config_of(race_engine);
    pthread_t threads[RACERS];

    config.block_bytes = 16 * KIB;
    config.workers = 2;
    raced_handle = open_handle(&config);
    raced_file = open_file(race_path, O_RDWR | O_CREAT | O_TRUNC, NVMEIO_DIRECT_AUTO);
    atomic_store(&racers_busy, RACERS);
    for (uintptr_t i = 0; i < RACERS; i++)
        CHECK(pthread_create(&threads[i], NULL, race_rounds, (void *)i) == 0);
    for (unsigned i = 0; i < RACERS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    nvmeio_handle_close(raced_handle);
    nvmeio_file_release(raced_file);
    raced->met = true;
}

/* A child writes and fsyncs through the handle and the file that it has inherited.  Its
 * parent writes to the same place, but fails before a byte has moved, so the bytes of
 * the child must stay. */
#define FAILED MIB
#define CHILDS (8 * KIB)

static atomic_bool writer_done;

static inline void *fail_and_write(void *argument)
{
    int64_t behind = (int64_t)(2 * FAILED);
    char *out, *in;

    (void)argument;
    CHECK(nvmeio_pool_alloc(FAILED, false, (void **)&out, NULL) == 0);
    CHECK(nvmeio_pool_alloc(PART, false, (void **)&in, NULL) == 0);
    fill(out, FAILED, 0, 1);
    CHECK(write_at(raced_handle, raced_file, out, FAILED, 0).result == -ENOSPC);
    CHECK(write_at(raced_handle, raced_file, out, PART, behind).result ==
          (int64_t)PART);
    CHECK(read_at(raced_handle, raced_file, in, PART, behind).result == (int64_t)PART);
    CHECK(memcmp(in, out, PART) == 0);
    nvmeio_pool_free(in);
    nvmeio_pool_free(out);
    atomic_store(&writer_done, true);
    return NULL;
}

static inline void write_in_child(void)
{
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = raced_file};
    char *bytes;

    alarm(RACE_S);
    nvmeio_fault_configure("");
    CHECK(nvmeio_pool_alloc(CHILDS, false, (void **)&bytes, NULL) == 0);
    fill(bytes, CHILDS, 0, 2);
    CHECK(write_at(raced_handle, raced_file, bytes, CHILDS, 0).result ==
          (int64_t)CHILDS);
    CHECK(carry_out(raced_handle, &sync).result == 0);
    nvmeio_handle_close(raced_handle);
    _exit(0);
}

/* Fork while the writer pauses; at the end if it never does. */
static inline void race_forks(void)
{
    struct nvmeio_config config = config_of(race_engine);
    char expected[CHILDS];
    pthread_t writer;
    int status;

    config.block_bytes = FAILED;
    raced_handle = open_handle(&config);
    raced_file = open_file(race_path, O_RDWR | O_CREAT | O_TRUNC, NVMEIO_DIRECT_AUTO);
    begin_race();
    CHECK(pthread_create(&writer, NULL, fail_and_write, NULL) == 0);
    while (!has_paused() && !atomic_load(&writer_done))
        sleep_a_little();
    raced->met = has_paused();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        write_in_child();
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(pthread_join(writer, NULL) == 0);
    nvmeio_handle_close(raced_handle);
    nvmeio_file_release(raced_file);
    fill(expected, CHILDS, 0, 2);
    CHECK(file_holds(race_path, expected, CHILDS, 0));
}

/* The pool unmaps memory to make room for more, and another thread at once maps its own
 * memory at that address.  I/O there must reach the new memory.  Before, the old memory
 * was used by so many small blocks that an engine may have registered it. */
#define GIVEN_UP (2 * MIB)
#define WANTED (4 * MIB)
#define USED (16 * KIB) /* for larger sizes, the library first asks about the pages */

static inline void *take_more(void *argument)
{
    void *memory;

    (void)argument;
    CHECK(nvmeio_pool_alloc(WANTED, false, &memory, NULL) == 0);
    memset(memory, 3, WANTED);
    nvmeio_pool_free(memory);
    atomic_store(&writer_done, true);
    return NULL;
}

/* Occupy both neighbours, or the pool might map the larger memory over the address. */
static inline void fence_in(char *address)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;

    for (int side = -1; side <= 1; side += 2)
        (void)mmap(address + side * (ptrdiff_t)GIVEN_UP, GIVEN_UP, PROT_NONE, flags, -1,
                   0);
}

/* Map memory at the address as soon as it is free.  NULL if something else took it. */
static inline char *map_at(char *address)
{
    for (bool last = false; !last; sleep_a_little()) {
        last = atomic_load(&writer_done);
        char *memory = mmap(address, GIVEN_UP, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (memory == address)
            return memory;
        CHECK(memory == MAP_FAILED && errno == EEXIST);
    }
    return NULL;
}

static inline void use_mapping(char *memory)
{
    char *expected = memory + MIB;

    fill(expected, USED, 0, 1);
    CHECK(read_at(raced_handle, raced_file, memory, USED, 0).result == (int64_t)USED);
    CHECK(memcmp(memory, expected, USED) == 0);
    fill(memory, USED, 0, 2);
    CHECK(write_at(raced_handle, raced_file, memory, USED, 0).result == (int64_t)USED);
    CHECK(file_holds(race_path, memory, USED, 0));
}

static inline void race_mappings(void)
{
    struct nvmeio_config config = config_of(race_engine);
    pthread_t taker;
    char *old;

    config.block_bytes = PAGE;
    config.queue_depth = 32;
    nvmeio_pool_set_limit(WANTED);
    CHECK(nvmeio_pool_alloc(GIVEN_UP, false, (void **)&old, NULL) == 0);
    fence_in(old);
    make_file(race_path, MIB, 1);
    raced_handle = open_handle(&config);
    raced_file = open_file(race_path, O_RDWR, NVMEIO_DIRECT_AUTO);
    CHECK(read_at(raced_handle, raced_file, old, MIB, 0).result == (int64_t)MIB);
    nvmeio_pool_free(old);
    begin_race();
    CHECK(pthread_create(&taker, NULL, take_more, NULL) == 0);
    char *memory = map_at(old);
    raced->met = memory != NULL;
    if (memory)
        use_mapping(memory);
    CHECK(pthread_join(taker, NULL) == 0);
    nvmeio_handle_close(raced_handle);
    nvmeio_file_release(raced_file);
}

/* A pause must outlast a mapping and a transfer, or a fork and a write. */
static const struct race race_of_threads = {"threads", "", race_threads};
static const struct race race_of_forks = {"forks", "enospc@1,pause_ms=40", race_forks};
static const struct race race_of_mappings = {"mappings", "pause_ms=20", race_mappings};

#endif
