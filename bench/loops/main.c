/* main.c -- a child process that carries out commands and answers with their figures.
 *
 * A command is a line of words, separated by tabs. The answer is a line: `ok`, bytes,
 * seconds, CPU seconds, context switches and bytes from the device; or `error` and the
 * reason. The process ends at the end of its standard input. */
#include "loops.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

enum { WORDS_MAX = 12, THREADS_MAX = 1024, HUGE = 2 << 20 };

static double now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static int64_t switches(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw + usage.ru_nivcsw;
}

static int64_t device_bytes(void)
{
    char line[128];
    long long found = 0;
    FILE *file = fopen("/proc/self/io", "r");
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "read_bytes: %lld", &found) == 1)
            break;
    if (file)
        fclose(file);
    return found;
}

void begin(struct turn *turn)
{
    turn->device_bytes = -device_bytes();
    turn->switches = -switches();
    turn->cpu_seconds = -now(CLOCK_PROCESS_CPUTIME_ID);
    turn->seconds = -now(CLOCK_MONOTONIC);
}

void end(struct turn *turn, int64_t bytes)
{
    turn->seconds += now(CLOCK_MONOTONIC);
    turn->cpu_seconds += now(CLOCK_PROCESS_CPUTIME_ID);
    turn->switches += switches();
    turn->device_bytes += device_bytes();
    turn->bytes = bytes;
}

int64_t number(const char *word)
{
    return strtoll(word, NULL, 10);
}

unsigned char *touched(const char *kind, size_t size)
{
    static struct {
        unsigned char *address, *start;
        size_t size;
    } kept[2];
    bool huge = strcmp(kind, "huge") == 0;

    if (kept[huge].size >= size)
        return kept[huge].start;
    if (kept[huge].address)
        munmap(kept[huge].address, kept[huge].size + HUGE);
    kept[huge].size = 0;
    kept[huge].address = mmap(NULL, size + HUGE, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (kept[huge].address == MAP_FAILED) {
        kept[huge].address = NULL;
        return NULL;
    }
    kept[huge].start =
        kept[huge].address + (-(uintptr_t)kept[huge].address & (HUGE - 1));
    kept[huge].size = size;
    madvise(kept[huge].address, size + HUGE, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(kept[huge].start, 1, size);
    return kept[huge].start;
}

uint64_t draw(uint64_t *state, uint64_t limit)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state % limit;
}

struct member {
    pthread_t thread;
    int (*body)(void *, unsigned);
    void *context;
    unsigned index;
    int error;
};

static void *run_member(void *argument)
{
    struct member *member = argument;
    member->error = member->body(member->context, member->index);
    return NULL;
}

int in_threads(unsigned count, int (*body)(void *, unsigned), void *context)
{
    static struct member members[THREADS_MAX];
    unsigned started = 0;
    int error = count > THREADS_MAX ? -EINVAL : 0;

    while (!error && started < count) {
        struct member *member = &members[started];
        *member = (struct member){.body = body, .context = context, .index = started};
        error = -pthread_create(&member->thread, NULL, run_member, member);
        started += !error;
    }
    for (unsigned i = 0; i < started; i++) {
        pthread_join(members[i].thread, NULL);
        error = error ? error : members[i].error;
    }
    return error;
}

static const struct {
    const char *name;
    int words;
    command *run;
} commands[] = {
    {"plain blocks", 6, plain_blocks},         {"plain files", 6, plain_files},
    {"plain open files", 6, plain_open_files}, {"plain fresh", 6, plain_fresh},
    {"plain gather", 5, plain_gather},         {"plain both", 5, plain_both},
    {"plain opens", 2, plain_opens},           {"plain threads", 3, plain_threads},
    {"engine blocks", 5, engine_blocks},       {"engine opens", 2, engine_opens},
    {"engine threads", 4, engine_threads},     {"model load", 4, model_load},
    {"model cached", 3, model_cached},         {"model save", 4, model_save},
};

static int carry_out(char *line, struct turn *turn)
{
    char *words[WORDS_MAX];
    int count = 0;

    for (char *word = strtok(line, "\t\n"); word && count < WORDS_MAX;
         word = strtok(NULL, "\t\n"))
        words[count++] = word;
    for (size_t i = 0; i < sizeof(commands) / sizeof(*commands); i++)
        if (count == commands[i].words + 1 && strcmp(words[0], commands[i].name) == 0)
            return commands[i].run(words + 1, turn);
    return -EINVAL;
}

int main(void)
{
    char line[8192];

    while (fgets(line, sizeof(line), stdin)) {
        struct turn turn = {0};
        int error = carry_out(line, &turn);
        if (error)
            printf("error %s\n", strerror(-error));
        else
            printf("ok %lld %.9f %.9f %lld %lld\n", (long long)turn.bytes, turn.seconds,
                   turn.cpu_seconds, (long long)turn.switches,
                   (long long)turn.device_bytes);
        fflush(stdout);
    }
    return 0;
}
