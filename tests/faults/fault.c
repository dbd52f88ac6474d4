/* fault.c -- decide which faults strike: read NVMEIO_FAULTS, count occasions, draw
 * random numbers.
 *
 * Only in the test build.  fault_engine.c and fault_calls.c implement the faults. */
#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXACT_MAX 8
#define RATE_MAX 1000
#define RATE_FINE 1000 /* rates are stored in this fraction of a 1000th */

/* With all= pauses are this many times rarer than other kinds, because each lock is two
 * occasions, and tests would mostly sleep. */
#define PAUSE_RARER 500
#define PAUSE_RANDOM_MS 20
#define PAUSE_MAX_MS 60000

/* The log has one for each kind, shared with forked children; tests read it as 16 bytes
 * of name and three numbers. */
struct tally {
    char name[16];
    uint64_t rate; /* of RATE_MAX */
    _Atomic uint64_t occasions, fired;
};

static struct {
    const char *name;
    bool harmless; /* part of all= */
    unsigned rate; /* of RATE_MAX * RATE_FINE */
    uint64_t exact[EXACT_MAX];
    unsigned exact_count;
    _Atomic uint64_t occasions; /* occasions of this process, on which random numbers
    depend */
} kinds[NVMEIO_FAULT_COUNT] = {
    [NVMEIO_FAULT_SHORT] = {.name = "short", .harmless = true},
    [NVMEIO_FAULT_AGAIN] = {.name = "again", .harmless = true},
    [NVMEIO_FAULT_EARLY] = {.name = "early", .harmless = true},
    [NVMEIO_FAULT_LATE] = {.name = "late", .harmless = true},
    [NVMEIO_FAULT_REORDER] = {.name = "reorder", .harmless = true},
    [NVMEIO_FAULT_SPURIOUS] = {.name = "spurious", .harmless = true},
    [NVMEIO_FAULT_WAKE] = {.name = "wake", .harmless = true},
    [NVMEIO_FAULT_EIO] = {.name = "eio"},
    [NVMEIO_FAULT_ENOSPC] = {.name = "enospc"},
    [NVMEIO_FAULT_DIRECT] = {.name = "direct"},
    [NVMEIO_FAULT_NOSYNC] = {.name = "nosync"},
    [NVMEIO_FAULT_DEAD] = {.name = "dead"},
    [NVMEIO_FAULT_EINTR] = {.name = "eintr", .harmless = true},
    [NVMEIO_FAULT_EAGAIN] = {.name = "eagain", .harmless = true},
    [NVMEIO_FAULT_EBUSY] = {.name = "ebusy", .harmless = true},
    [NVMEIO_FAULT_ENOMEM] = {.name = "enomem", .harmless = true},
    [NVMEIO_FAULT_PARTLY] = {.name = "partly", .harmless = true},
    [NVMEIO_FAULT_BEHIND] = {.name = "behind", .harmless = true},
    [NVMEIO_FAULT_PAUSE] = {.name = "pause", .harmless = true},
    [NVMEIO_FAULT_SETUP] = {.name = "setup"},
    [NVMEIO_FAULT_MEMORY] = {.name = "memory"},
    [NVMEIO_FAULT_THREADS] = {.name = "threads"},
    [NVMEIO_FAULT_DESCRIPTORS] = {.name = "descriptors"},
    [NVMEIO_FAULT_SIGNAL] = {.name = "signal"},
    [NVMEIO_FAULT_TRUNCATE] = {.name = "truncate"},
    [NVMEIO_FAULT_STAT] = {.name = "stat"},
    [NVMEIO_FAULT_SIGINT] = {.name = "sigint"},
};

static uint64_t seed;
static char pause_at[32]; /* "": at every call */
static uint64_t pause_ms; /* 0: at random */
static _Atomic(const char *) paused_at, interrupted_at;
static atomic_bool paused_after;
static struct tally own_tallies[NVMEIO_FAULT_COUNT];
static struct tally *tallies = own_tallies;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A test build must not run without the faults that were requested. */
static void refuse(const char *word, const char *why)
{
    fprintf(stderr, "NVMEIO_FAULTS: %s: %s\n", word, why);
    abort();
}

static uint64_t number_of(const char *word, const char *digits, uint64_t limit)
{
    char *end;

    errno = 0;
    unsigned long long value = strtoull(digits, &end, 10);
    if (*digits < '0' || *digits > '9' || *end || errno || value > limit)
        refuse(word, "not a number in its range");
    return value;
}

static void open_log(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);

    if (fd < 0 || ftruncate(fd, sizeof(own_tallies)))
        refuse(path, strerror(errno));
    void *shared =
        mmap(NULL, sizeof(own_tallies), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED)
        refuse(path, strerror(errno));
    close(fd);
    tallies = shared;
}

static enum nvmeio_fault kind_of(const char *word, size_t length)
{
    for (unsigned i = 0; i < NVMEIO_FAULT_COUNT; i++) {
        if (strncmp(kinds[i].name, word, length) == 0 && kinds[i].name[length] == 0)
            return (enum nvmeio_fault)i;
    }
    refuse(word, "no such word");
    return NVMEIO_FAULT_COUNT;
}

static unsigned rate_of(const char *word, const char *value)
{
    return (unsigned)number_of(word, value, RATE_MAX) * RATE_FINE;
}

static void read_word(const char *word)
{
    size_t length = strcspn(word, "=@");
    const char *value = word + length + 1;

    if (word[length] == 0)
        refuse(word, "wants = or @ and a value");
    if (strncmp(word, "seed=", 5) == 0) {
        seed = number_of(word, value, UINT64_MAX);
    } else if (strncmp(word, "log=", 4) == 0) {
        open_log(value);
    } else if (strncmp(word, "all=", 4) == 0) {
        for (unsigned i = 0; i < NVMEIO_FAULT_COUNT; i++)
            if (kinds[i].harmless)
                kinds[i].rate =
                    rate_of(word, value) / (i == NVMEIO_FAULT_PAUSE ? PAUSE_RARER : 1);
    } else if (strncmp(word, "pause_ms=", 9) == 0) {
        pause_ms = number_of(word, value, PAUSE_MAX_MS);
    } else if (strncmp(word, "pause_at=", 9) == 0) {
        snprintf(pause_at, sizeof(pause_at), "%s", value);
    } else if (word[length] == '=') {
        kinds[kind_of(word, length)].rate = rate_of(word, value);
    } else {
        enum nvmeio_fault kind = kind_of(word, length);
        if (kinds[kind].exact_count == EXACT_MAX)
            refuse(word, "too many of this kind");
        uint64_t occasion = number_of(word, value, UINT64_MAX);
        if (occasion == 0)
            refuse(word, "the first occasion is 1");
        kinds[kind].exact[kinds[kind].exact_count++] = occasion;
    }
}

static void configure(const char *text)
{
    char *words = strdup(text), *left = words, *word;

    if (!words)
        refuse(text, "out of memory");
    seed = pause_ms = 0;
    pause_at[0] = 0;
    atomic_store(&paused_at, NULL);
    atomic_store(&interrupted_at, NULL);
    tallies = own_tallies;
    for (unsigned i = 0; i < NVMEIO_FAULT_COUNT; i++) {
        kinds[i].rate = kinds[i].exact_count = 0;
        atomic_store(&kinds[i].occasions, 0);
        atomic_store(&tallies[i].occasions, 0);
        atomic_store(&tallies[i].fired, 0);
    }
    while ((word = strsep(&left, ",")))
        if (*word)
            read_word(word);
    for (unsigned i = 0; i < NVMEIO_FAULT_COUNT; i++) {
        snprintf(tallies[i].name, sizeof(tallies[i].name), "%s", kinds[i].name);
        tallies[i].rate = kinds[i].rate / RATE_FINE;
    }
    free(words);
}

static void read_environment(void)
{
    const char *text = getenv("NVMEIO_FAULTS");

    configure(text ? text : "");
}

void nvmeio_fault_configure(const char *text)
{
    /* Otherwise the first fault would read the environment. */
    pthread_once(&once, read_environment);
    configure(text);
}

/* splitmix64 by Sebastiano Vigna, in the public domain. */
static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

bool nvmeio_fault_strikes(enum nvmeio_fault kind, uint64_t *number)
{
    pthread_once(&once, read_environment);
    uint64_t occasion =
        atomic_fetch_add_explicit(&kinds[kind].occasions, 1, memory_order_relaxed) + 1;
    atomic_fetch_add_explicit(&tallies[kind].occasions, 1, memory_order_relaxed);
    uint64_t drawn = mix(mix(seed ^ ((uint64_t)kind << 56)) ^ occasion);
    bool strikes = drawn % (RATE_MAX * RATE_FINE) < kinds[kind].rate;

    for (unsigned i = 0; i < kinds[kind].exact_count; i++)
        strikes |= kinds[kind].exact[i] == occasion;
    if (!strikes)
        return false;
    atomic_fetch_add_explicit(&tallies[kind].fired, 1, memory_order_relaxed);
    if (number)
        *number = mix(drawn);
    return true;
}

void nvmeio_fault_pause(const char *call, bool after)
{
    int error = errno, cancelling;
    uint64_t number;

    pthread_once(&once, read_environment);
    if ((!*pause_at || strcmp(pause_at, call) == 0) &&
        nvmeio_fault_strikes(NVMEIO_FAULT_PAUSE, &number)) {
        uint64_t ms = pause_ms ? pause_ms : 1 + number % PAUSE_RANDOM_MS;
        struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
        atomic_store(&paused_after, after);
        atomic_store(&paused_at, call);
        /* Signals do not shorten it. It is no cancellation point, as a lock is none. */
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
        while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR)
            ;
        pthread_setcancelstate(cancelling, NULL);
    }
    errno = error;
}

bool nvmeio_fault_interrupt(const char *call)
{
    if (!nvmeio_fault_strikes(NVMEIO_FAULT_SIGINT, NULL))
        return false;
    atomic_store(&interrupted_at, call);
    syscall(SYS_tgkill, getpid(), getpid(), SIGINT);
    return syscall(SYS_gettid) == getpid();
}

const char *nvmeio_fault_interrupted(void)
{
    return atomic_load(&interrupted_at);
}

const char *nvmeio_fault_paused(bool *after)
{
    *after = atomic_load(&paused_after);
    return atomic_load(&paused_at);
}

uint64_t nvmeio_fault_occasions(enum nvmeio_fault kind)
{
    return atomic_load_explicit(&tallies[kind].occasions, memory_order_relaxed);
}

uint64_t nvmeio_fault_fired(enum nvmeio_fault kind)
{
    return atomic_load_explicit(&tallies[kind].fired, memory_order_relaxed);
}

const char *nvmeio_fault_name(enum nvmeio_fault kind)
{
    return kinds[kind].name;
}
