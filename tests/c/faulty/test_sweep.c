/* One fault at each place where it could strike: each kind in turn, on its first
 * occasion, its second, and so on to the last, while a fixed workload runs on every
 * engine.  What is reported to be done is done; what is not, fails with the fault's own
 * errno; and nothing is broken afterwards: the same workload goes well, with as many
 * descriptors and threads as before.  Then storms: all kinds at once, by lot.
 *
 * test_sweep [STRIDE [SEED]]: one of so many occasions, but one of each kind; and
 * which. */
#include <dirent.h>
#include <signal.h>

#include "fault.h"
#include "transfer.h"

#define CASE_S 10
#define MEMORY (256 * KIB)
#define BLOCK (16 * KIB)
#define RECORDS 24

/* Leaks of a dead engine are not leaks: the kernel may still write to its memory. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:lane_equip\nleak:faulty_open\nleak:caller_lane_add\nleak:guarded_new"
           "\nleak:nvmeio_handle_open\nleak:lanes_start\nleak:uring_open";
}

static char spec[256];
static const char *engine;
static const char *path;
static int allowed[12]; /* -errno that the fault may end in */
static unsigned failures;
static bool abandoned;

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

/* True where all went well; an error must be the fault's. */
static bool fine(int64_t result)
{
    if (result >= 0)
        return true;
    for (unsigned i = 0; i < sizeof(allowed) / sizeof(allowed[0]); i++) {
        if (allowed[i] && result == allowed[i]) {
            failures++;
            return false;
        }
    }
    fprintf(stderr, "%s %s: %s\n", engine, spec, strerror((int)-result));
    exit(1);
}

static bool done(struct nvmeio_request *request, struct nvmeio_outcome *outcome)
{
    CHECK(nvmeio_request_wait(request, LONG_NS) == 0);
    CHECK(nvmeio_request_outcome(request, outcome) == 0);
    abandoned |= outcome->abandoned;
    nvmeio_request_release(request);
    return fine(outcome->result);
}

static bool transfer(struct nvmeio_handle *handle, const struct nvmeio_transfer *t)
{
    struct nvmeio_outcome outcome;
    struct nvmeio_request *request;

    if (!fine(nvmeio_submit(handle, t, &request)) || !done(request, &outcome))
        return false;
    CHECK(outcome.result == (int64_t)t->size);
    return true;
}

/* Memory that a dead engine may still write to stays. */
static void give_back(struct guarded *memory)
{
    if (abandoned)
        check_canaries(memory);
    else
        guarded_free(memory);
}

/* A write, seen by an ordinary read, and read back: aligned, ragged and bounced. */
static void write_and_read(struct nvmeio_handle *handle, struct nvmeio_file *file,
                           size_t residue, int64_t offset, bool caller)
{
    struct guarded out = guarded_new(MEMORY, residue);
    struct guarded in = guarded_new(MEMORY, residue);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_WRITE, file, out.address, out.size, offset);

    t.caller = caller;
    fill(out.address, out.size, (uint64_t)offset, (unsigned)residue);
    bool written = transfer(handle, &t);
    if (written)
        CHECK(file_holds(path, out.address, out.size, offset));
    t.op = NVMEIO_OP_READ;
    t.address = in.address;
    if (written && transfer(handle, &t))
        CHECK(memcmp(in.address, out.address, in.size) == 0);
    give_back(&in);
    give_back(&out);
}

static void plan_records(struct nvmeio_gather *gather, int64_t *offsets, int64_t *sizes)
{
    for (int i = 0; i < RECORDS; i++) {
        int j = (i * 7) % RECORDS;
        offsets[i] = j * (int64_t)(j % 3 ? 5000 : 8192);
        sizes[i] = 100 + 171 * (j % 3) * 7;
    }
    gather->count = RECORDS;
    gather->offsets = offsets;
    gather->sizes = sizes;
    gather->gap_max = 4096;
}

/* Records that are scattered and gathered again. */
static void scatter_and_gather(struct nvmeio_handle *handle, struct nvmeio_file *file,
                               bool caller)
{
    int64_t offsets[RECORDS], sizes[RECORDS];
    struct guarded out = guarded_new(MEMORY, 3);
    struct guarded in = guarded_new(MEMORY, 0);
    struct nvmeio_request *request;
    struct nvmeio_outcome outcome;
    size_t offender, total = 0;
    struct nvmeio_gather gather = {
        .op = NVMEIO_OP_WRITE, .file = file, .address = out.address, .size = out.size};

    gather.caller = caller;
    plan_records(&gather, offsets, sizes);
    fill(out.address, out.size, 0, 77);
    bool written = fine(nvmeio_submit_gather(handle, &gather, &request, &offender)) &&
                   done(request, &outcome);
    for (int i = 0; i < RECORDS && written; total += (size_t)sizes[i++])
        CHECK(file_holds(path, out.address + total, (size_t)sizes[i], offsets[i]));
    gather.op = NVMEIO_OP_READ;
    gather.address = in.address;
    if (written && fine(nvmeio_submit_gather(handle, &gather, &request, &offender)) &&
        done(request, &outcome))
        CHECK(memcmp(in.address, out.address, total) == 0);
    give_back(&in);
    give_back(&out);
}

/* Requests of which some are cancelled, an fsync behind them, and a close on top. */
static void leave_in_flight(struct nvmeio_handle *handle, struct nvmeio_file *file,
                            struct guarded *memory)
{
    struct nvmeio_transfer sync = {.op = NVMEIO_OP_FSYNC, .file = file};
    struct nvmeio_request *requests[5] = {0};
    size_t part = MEMORY / 4;

    for (int i = 0; i < 4; i++) {
        struct nvmeio_transfer t =
            transfer_of(i & 1 ? NVMEIO_OP_WRITE : NVMEIO_OP_READ, file,
                        memory->address + (size_t)i * part, part, i * (int64_t)part);
        if (!fine(nvmeio_submit(handle, &t, &requests[i])))
            requests[i] = NULL;
    }
    if (!fine(nvmeio_submit(handle, &sync, &requests[4])))
        requests[4] = NULL;
    if (requests[2])
        nvmeio_request_cancel(requests[2]);
    nvmeio_handle_close(handle);
    for (int i = 0; i < 5; i++) {
        struct nvmeio_outcome outcome;
        if (!requests[i])
            continue;
        CHECK(nvmeio_request_outcome(requests[i], &outcome) == 0);
        abandoned |= outcome.abandoned;
        if (outcome.result != -ECANCELED || i != 2)
            fine(outcome.result);
        nvmeio_request_release(requests[i]);
    }
}

static void use_pool(void)
{
    void *memory;
    int locked;

    if (!fine(nvmeio_pool_alloc(3 * MIB, true, &memory, &locked)))
        return;
    memset(memory, 1, 3 * MIB);
    nvmeio_pool_free(memory);
}

static void work(void)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle;
    struct nvmeio_file *file;
    struct guarded memory = guarded_new(MEMORY, 0);

    config.block_bytes = BLOCK;
    config.queue_depth = 8;
    config.overlap_events = true;
    unlink(path);
    abandoned = false;
    use_pool();
    nvmeio_team_size(3);
    if (fine(nvmeio_file_open(path, O_RDWR | O_CREAT, NVMEIO_DIRECT_AUTO, &file))) {
        if (fine(nvmeio_handle_open(&config, &handle))) {
            write_and_read(handle, file, 0, 0, false);
            write_and_read(handle, file, 1000, 1000, true);
            write_and_read(handle, file, 1, 0, false);
            scatter_and_gather(handle, file, true);
            scatter_and_gather(handle, file, false);
            leave_in_flight(handle, file, &memory);
        }
        nvmeio_file_release(file);
    }
    give_back(&memory);
    /* The next one maps its memory anew. */
    nvmeio_pool_set_limit(1);
    nvmeio_pool_set_limit(0);
}

static unsigned entries_in(const char *folder)
{
    unsigned count = 0;
    DIR *listing = opendir(folder);

    CHECK(listing);
    while (readdir(listing))
        count++;
    closedir(listing);
    return count;
}

/* A thread that has been joined may be listed for a moment. */
static void check_threads(unsigned before)
{
    for (int i = 0; entries_in("/proc/self/task") > before; i++) {
        CHECK(i < 5000);
        usleep(1000);
    }
}

static void set_allowed(enum nvmeio_fault kind)
{
    static const int of_kind[NVMEIO_FAULT_COUNT][12] = {
        [NVMEIO_FAULT_EIO] = {-EIO},
        [NVMEIO_FAULT_ENOSPC] = {-ENOSPC},
        [NVMEIO_FAULT_DEAD] = {-EIO},
        [NVMEIO_FAULT_SETUP] = {-ENOMEM, -ENOSYS, -EPERM, -EMFILE},
        [NVMEIO_FAULT_MEMORY] = {-ENOMEM},
        [NVMEIO_FAULT_THREADS] = {-EAGAIN, -ENODATA},
        [NVMEIO_FAULT_DESCRIPTORS] = {-EMFILE, -ENFILE},
        [NVMEIO_FAULT_SIGNAL] = {-EINTR},
        [NVMEIO_FAULT_FALLOCATE] = {-ENOSPC, -EDQUOT},
        [NVMEIO_FAULT_STAT] = {-EIO},
    };
    memcpy(allowed, of_kind[kind], sizeof(allowed));
}

/* Carry the workload out with the faults of `spec`, then without. */
static void try_faults(void (*look)(void *), void *argument)
{
    unsigned files = entries_in("/proc/self/fd");
    unsigned threads = entries_in("/proc/self/task");

    alarm(CASE_S);
    nvmeio_fault_configure(spec);
    work();
    look(argument);
    nvmeio_fault_configure("");
    memset(allowed, 0, sizeof(allowed));
    if (abandoned)
        return; /* what a dead engine keeps is kept for ever */
    work();
    check_threads(threads);
    CHECK(entries_in("/proc/self/fd") == files);
}

struct place {
    enum nvmeio_fault kind;
    uint64_t occasion;
    bool fired;
};

static void look_at_place(void *argument)
{
    struct place *place = argument;

    place->fired = nvmeio_fault_fired(place->kind) == 1;
    CHECK(place->fired == (nvmeio_fault_occasions(place->kind) >= place->occasion));
    CHECK(!abandoned || place->kind == NVMEIO_FAULT_DEAD);
}

/* Returns false when the workload has no such occasion. */
static bool sweep_case(enum nvmeio_fault kind, uint64_t occasion)
{
    struct place place = {.kind = kind, .occasion = occasion};

    snprintf(spec, sizeof(spec), "%s@%llu", nvmeio_fault_name(kind),
             (unsigned long long)occasion);
    set_allowed(kind);
    try_faults(look_at_place, &place);
    return place.fired;
}

/* How many faults of a kind have struck. */
static unsigned sweep(enum nvmeio_fault kind, uint64_t stride, uint64_t seed)
{
    unsigned fired = 0, before = failures;

    nvmeio_fault_configure("");
    work();
    uint64_t count = nvmeio_fault_occasions(kind);
    if (count == 0)
        return 0;
    /* Blocks are much alike; what is set up is met at a place of its own each time. */
    bool everywhere = kind >= NVMEIO_FAULT_SETUP;
    uint64_t step = everywhere ? 1 : stride < count ? stride : count;
    for (uint64_t i = 1 + seed % step; sweep_case(kind, i); i += step)
        fired++;
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

/* All kinds at once but for a dead engine; returns how many have struck.  ENODATA:
 * where the writes have failed, there is nothing to read. */
static unsigned storm(uint64_t seed)
{
    static const int all_allowed[12] = {-EIO,   -ENOSPC, -EDQUOT, -ENOMEM, -ENOSYS,
                                        -EPERM, -EMFILE, -ENFILE, -EAGAIN, -ENODATA};
    unsigned fired = 0;

    snprintf(spec, sizeof(spec),
             "seed=%llu,all=%u,eio=5,enospc=5,nosync=500,setup=50,memory=%u,threads=50,"
             "descriptors=50,fallocate=200,truncate=500,stat=5",
             (unsigned long long)seed, (unsigned)(seed % 100), (unsigned)(seed % 20));
    memcpy(allowed, all_allowed, sizeof(allowed));
    try_faults(look_at_storm, &fired);
    return fired;
}

int main(int count, char **arguments)
{
    uint64_t stride = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    uint64_t storms = count > 3 ? strtoull(arguments[3], NULL, 10) : 20;
    unsigned fired = 0;

    begin();
    signal(SIGALRM, expire);
    path = path_in(test_folder());
    FOR_EACH_ENGINE(engine)
    {
        unsigned stormed = 0;
        for (int kind = 0; kind < NVMEIO_FAULT_COUNT; kind++)
            fired += sweep((enum nvmeio_fault)kind, stride, seed);
        for (uint64_t i = 0; i < storms; i++)
            stormed += storm(seed + i);
        printf("%s: %llu storms, %u faults\n", engine, (unsigned long long)storms,
               stormed);
        CHECK(stormed >= storms);
    }
    printf("%u faults\n", fired);
    return 0;
}
