/* One fault at each place where it can strike: each kind in turn, on its first
 * occasion, its second, and so on, while a fixed workload runs on every engine.  An
 * operation that is reported as done is done, and a failed one has the fault's errno.
 * Afterwards the same workload succeeds, with as many descriptors and threads as
 * before. Then storms: all kinds at once, at random.  All resources are released,
 * except those that a dead engine keeps, so engines die last.
 *
 * test_sweep [STRIDE [SEED [STORMS [ENGINE]]]]: strike one of STRIDE occasions of
 * blocks, more of other kinds, and at least one of each kind.  SEED chooses them, and
 * the details of a fault. */
#include <dirent.h>
#include <signal.h>

#include "fault.h"
#include "workload.h"

#define CASE_S 10

/* Set-up has fewer and more varied places than blocks, so this many times as many are
 * tried. */
#define SETUP_SHARE 20

/* Attempts at a place that depends on the timing of threads. */
#define TRIES_MAX 30

/* The pool's limit: so low that one step of the workload must unmap memory of another.
 * */
#define POOL_BYTES (8 * MIB)

/* Of clang and gcc under ASan: if memory is lost, prints that and returns nonzero. */
int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

static void expire(int signal)
{
    static const char text[] = ": hangs\n";

    (void)signal;
    (void)!write(STDERR_FILENO, engine, strlen(engine));
    (void)!write(STDERR_FILENO, " ", 1);
    (void)!write(STDERR_FILENO, spec, strlen(spec));
    (void)!write(STDERR_FILENO, text, sizeof(text) - 1);
    _exit(1);
}

static void come(int signal)
{
    (void)signal;
}

/* Kernel threads live on for a while, those of a dead ring as long as the ring. */
static unsigned threads_of_ours(void)
{
    unsigned count = 0;
    DIR *listing = opendir("/proc/self/task");

    CHECK(listing);
    for (struct dirent *entry; (entry = readdir(listing));) {
        char name[300], text[32] = "";
        snprintf(name, sizeof(name), "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(name, "re");
        if (file && fgets(text, sizeof(text), file))
            count += strncmp(text, "iou-", 4) != 0;
        if (file)
            fclose(file);
    }
    closedir(listing);
    return count;
}

/* A joined thread may still be listed for a moment. */
static void check_threads(unsigned before)
{
    for (int i = 0; threads_of_ours() > before; i++) {
        CHECK(i < 5000);
        usleep(1000);
    }
}

/* The errnos that a single fault of a kind may cause.  For a ring or context ENOMEM,
 * EAGAIN and EINVAL lead to a smaller or simpler one. */
static void set_allowed(enum nvmeio_fault kind)
{
    static const int of_kind[NVMEIO_FAULT_COUNT][ALLOWED_MAX] = {
        [NVMEIO_FAULT_EIO] = {-EIO},
        [NVMEIO_FAULT_ENOSPC] = {-ENOSPC},
        [NVMEIO_FAULT_DEAD] = {-EIO, -ENODATA}, /* from bytes that were not written */
        [NVMEIO_FAULT_SETUP] = {-ENOSYS, -EPERM, -EMFILE},
        [NVMEIO_FAULT_MEMORY] = {-ENOMEM},
        [NVMEIO_FAULT_THREADS] = {-EAGAIN},
        [NVMEIO_FAULT_DESCRIPTORS] = {-EMFILE, -ENFILE},
        [NVMEIO_FAULT_SIGNAL] = {-EINTR},
        [NVMEIO_FAULT_TRUNCATE] = {-EIO},
        [NVMEIO_FAULT_STAT] = {-EIO},
        [NVMEIO_FAULT_SIGINT] = {-EINTR}, /* from an open */
    };
    memcpy(allowed, of_kind[kind], sizeof(allowed));
}

/* Whether the workload has occasions of a kind. */
static bool occurs(enum nvmeio_fault kind)
{
    bool uring = strcmp(engine, "io_uring") == 0;
    bool of_library = uring || strcmp(engine, "libaio") == 0;

    switch (kind) {
    case NVMEIO_FAULT_DIRECT:
        return direct;
    case NVMEIO_FAULT_DEAD:
    case NVMEIO_FAULT_SETUP:
        return of_library;
    case NVMEIO_FAULT_EBUSY:
    case NVMEIO_FAULT_ENOMEM:
    case NVMEIO_FAULT_BEHIND:
        return uring;
    case NVMEIO_FAULT_PARTLY:
        return !uring || performs;
    default:
        return true;
    }
}

/* Run the workload with the faults of `spec`, then without.  A dead engine keeps its
 * resources for ever, and nothing else stays. */
static void try_faults(void (*look)(void *), void *argument)
{
    unsigned files = descriptors_open();
    unsigned threads = threads_of_ours();

    alarm(CASE_S);
    nvmeio_fault_configure(spec);
    work();
    look(argument);
    nvmeio_fault_configure("");
    memset(allowed, 0, sizeof(allowed));
    check_threads(threads);
    if (abandoned)
        files = descriptors_open();
    work();
    CHECK(!abandoned);
    check_threads(threads);
    CHECK(descriptors_open() == files);
}

struct place {
    enum nvmeio_fault kind;
    uint64_t occasion;
    uint64_t occasions;
    bool fired;
};

static void look_at_place(void *argument)
{
    struct place *place = argument;

    place->fired = nvmeio_fault_fired(place->kind) == 1;
    place->occasions = nvmeio_fault_occasions(place->kind);
    CHECK(place->fired == (place->occasions >= place->occasion));
    CHECK(!abandoned || place->kind == NVMEIO_FAULT_DEAD);
}

/* Strike one occasion, and return whether it came.  If the workload has fewer this
 * time, because of the timing of threads, strike another.  A wake-up needs a worker
 * that waits for the device, which in memory may never happen. */
static bool strike(enum nvmeio_fault kind, uint64_t occasion, uint64_t seed)
{
    struct place place = {.kind = kind, .occasion = occasion};

    for (int tries = 0; !place.fired; tries++) {
        if (tries == TRIES_MAX) {
            CHECK(kind == NVMEIO_FAULT_WAKE);
            return false;
        }
        snprintf(spec, sizeof(spec), "seed=%llu,%s@%llu", (unsigned long long)seed,
                 nvmeio_fault_name(kind), (unsigned long long)place.occasion);
        set_allowed(kind);
        try_faults(look_at_place, &place);
        if (!place.fired && place.occasions > 0)
            place.occasion = 1 + (place.occasion - 1) % place.occasions;
    }
    return true;
}

/* How many occasions of a kind the workload has. */
static uint64_t places_of(enum nvmeio_fault kind)
{
    alarm(CASE_S);
    set_allowed(kind);
    nvmeio_fault_configure("");
    work();
    uint64_t count = nvmeio_fault_occasions(kind);
    /* The submitting thread must meet a busy worker. */
    if (kind == NVMEIO_FAULT_WAKE && count == 0)
        count = 1;
    if (occurs(kind) != (count > 0)) {
        fprintf(stderr, "%s %s: %llu places\n", engine, nvmeio_fault_name(kind),
                (unsigned long long)count);
        exit(1);
    }
    return count;
}

/* How many faults of a kind have struck. */
static unsigned sweep(enum nvmeio_fault kind, uint64_t stride, uint64_t seed)
{
    unsigned fired = 0, before = failures;
    uint64_t count = places_of(kind);
    bool sets_up = kind >= NVMEIO_FAULT_SETUP && kind != NVMEIO_FAULT_SIGINT;
    uint64_t step = sets_up ? stride / SETUP_SHARE : stride;

    if (count == 0)
        return 0;
    if (step > count)
        step = count;
    if (step == 0)
        step = 1;
    for (uint64_t i = 1 + seed % step; i <= count; i += step)
        fired += strike(kind, i, seed);
    printf("%s %s: %u of %llu places, %u errors\n", engine, nvmeio_fault_name(kind),
           fired, (unsigned long long)count, failures - before);
    fflush(stdout);
    return fired;
}

static void look_at_storm(void *argument)
{
    unsigned *fired = argument;

    for (int kind = 0; kind < NVMEIO_FAULT_COUNT; kind++)
        *fired += (unsigned)nvmeio_fault_fired((enum nvmeio_fault)kind);
    CHECK(!abandoned);
}

/* All kinds at once except a dead engine; return how many have struck.  ENODATA: after
 * failed writes there may be nothing to read. */
static unsigned storm(uint64_t seed)
{
    static const int all_allowed[ALLOWED_MAX] = {-EIO,    -ENOSPC, -EDQUOT, -ENOMEM,
                                                 -ENOSYS, -EPERM,  -EMFILE, -ENFILE,
                                                 -EAGAIN, -EINTR,  -ENODATA};
    unsigned fired = 0;

    snprintf(spec, sizeof(spec),
             "seed=%llu,all=%u,eio=5,enospc=5,direct=2,nosync=500,setup=50,memory=%u,"
             "threads=50,descriptors=50,signal=20,truncate=500,stat=5",
             (unsigned long long)seed, (unsigned)(seed % 100), (unsigned)(seed % 20));
    memcpy(allowed, all_allowed, sizeof(allowed));
    try_faults(look_at_storm, &fired);
    return fired;
}

static void try_nodes(void)
{
    void *memory;

    many_nodes = nvmeio_pool_alloc_on(0, MIB, false, &memory, NULL) == 0;
    if (many_nodes)
        nvmeio_pool_free(memory);
}

/* Every kind except a dead engine, and pauses, which test_pauses.c sweeps; return how
 * many faults have struck. */
static unsigned sweep_engine(uint64_t stride, uint64_t seed, uint64_t storms)
{
    unsigned fired = 0, stormed = 0;

    for (int kind = 0; kind < NVMEIO_FAULT_COUNT; kind++)
        if (kind != NVMEIO_FAULT_DEAD && kind != NVMEIO_FAULT_PAUSE)
            fired += sweep((enum nvmeio_fault)kind, stride, seed);
    for (uint64_t i = 0; i < storms; i++)
        stormed += storm(seed + i);
    printf("%s: %llu storms, %u faults\n", engine, (unsigned long long)storms, stormed);
    CHECK(stormed >= storms);
    return fired;
}

int main(int count, char **arguments)
{
    uint64_t stride = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    uint64_t storms = count > 3 ? strtoull(arguments[3], NULL, 10) : 20;
    const char *chosen = count > 4 ? arguments[4] : NULL;
    unsigned fired = 0;

    begin();
    signal(SIGALRM, expire);
    sigaction(SIGINT, &(struct sigaction){.sa_handler = come}, NULL);
    path = path_in(test_folder());
    try_nodes();
    nvmeio_pool_set_limit(POOL_BYTES);
    FOR_EACH_ENGINE(engine)
    {
        if (!chosen || strcmp(engine, chosen) == 0)
            fired += sweep_engine(stride, seed, storms);
    }
    if (fired == 0) {
        snprintf(spec, sizeof(spec), "%s does not work here", chosen);
        SKIP(spec);
    }
    CHECK(!__lsan_do_recoverable_leak_check || !__lsan_do_recoverable_leak_check());
    nvmeio_pool_set_limit(0);
    FOR_EACH_ENGINE(engine)
    {
        if (!chosen || strcmp(engine, chosen) == 0)
            fired += sweep(NVMEIO_FAULT_DEAD, stride, seed);
    }
    printf("%u faults\n", fired);
    fflush(stdout);
    remove_files();
    _exit(0); /* without a leak check: the kernel might still write to that memory */
}
