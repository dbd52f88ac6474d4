/* system.c -- processors and memory, and how control groups limit them.
 *
 * A process is in one group of version 2, or in one per controller of version 1
 * (cgroups(7)); the groups above it limit it too. In a container, the path that the
 * kernel reports may not be visible. Then the limits of the visible root apply. */
#include <nvmeio/system.h>

#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PATH_BYTES 4096

/* Machines have up to 8192 processors today (Linux, NR_CPUS). */
#define CPUS_MAX 8192

static pthread_once_t once = PTHREAD_ONCE_INIT;
static unsigned quota_cpus = UINT_MAX;
static uint64_t memory_bytes = UINT64_MAX;

/* Where the limits of one controller are, and how to parse the first line there. */
struct limit {
    const char *controller; /* of version 1; NULL: version 2, which has one tree */
    const char *file;
    const char *file_too; /* its first line is appended to that of `file`; or NULL */
    void (*apply)(const char *line);
};

static void limit_memory(const char *line)
{
    uint64_t bytes;

    /* "max" is not a number, and means no limit. */
    if (sscanf(line, "%" SCNu64, &bytes) == 1 && bytes < memory_bytes)
        memory_bytes = bytes;
}

/* The line is "QUOTA PERIOD" in us, as in cpu.max of version 2. apply_file() makes the
 * same of the two files of version 1. A quota of "max" or -1 means no limit. */
static void limit_cpus(const char *line)
{
    int64_t quota_us, period_us;

    if (sscanf(line, "%" SCNd64 " %" SCNd64, &quota_us, &period_us) != 2 ||
        quota_us <= 0 || period_us <= 0)
        return;
    int64_t cpus = (quota_us - 1) / period_us + 1;
    if (cpus < (int64_t)quota_cpus)
        quota_cpus = (unsigned)cpus;
}

static const struct limit limits[] = {
    {NULL, "cpu.max", NULL, limit_cpus},
    {NULL, "memory.max", NULL, limit_memory},
    {"cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us", limit_cpus},
    {"memory", "memory.limit_in_bytes", NULL, limit_memory},
};

/* Read the first line of a file into `line`. False if there is none. */
static bool first_line(const char *folder, const char *name, char *line, int size)
{
    char path[PATH_BYTES + 64];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "re");
    bool found = file && fgets(line, size, file);
    if (file)
        fclose(file);
    return found;
}

static void apply_file(const struct limit *limit, const char *folder)
{
    char line[256];

    if (!first_line(folder, limit->file, line, sizeof(line) / 2))
        return;
    size_t length = strlen(line);
    if (limit->file_too &&
        !first_line(folder, limit->file_too, line + length, sizeof(line) / 2))
        return;
    limit->apply(line);
}

/* Apply the limits of a group and of all above it, up to the root of the tree. */
static void apply_upward(const struct limit *limit, const char *group)
{
    char folder[PATH_BYTES];
    int root = snprintf(folder, sizeof(folder), "/sys/fs/cgroup%s%s",
                        limit->controller ? "/" : "",
                        limit->controller ? limit->controller : "");
    snprintf(folder + root, sizeof(folder) - (size_t)root, "%s", group);
    for (char *end = folder + strlen(folder); end >= folder + root;) {
        apply_file(limit, folder);
        while (end >= folder + root && *end != '/')
            end--;
        if (end >= folder + root)
            *end = '\0';
    }
}

static bool is_listed(const char *controllers, const char *name)
{
    size_t length = strlen(name);

    for (const char *at = controllers; (at = strstr(at, name)); at += length) {
        bool begins = at == controllers || at[-1] == ',';
        if (begins && (at[length] == ',' || at[length] == '\0'))
            return true;
    }
    return false;
}

/* A line of /proc/self/cgroup: "0::GROUP" (version 2) or "N:CONTROLLERS:GROUP" (1). */
static void apply_line(char *line)
{
    char *controllers = strchr(line, ':');
    char *group = controllers ? strchr(controllers + 1, ':') : NULL;

    if (!group)
        return;
    *controllers++ = '\0';
    *group++ = '\0';
    group[strcspn(group, "\n")] = '\0';
    for (unsigned i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        const char *name = limits[i].controller;
        if (name ? is_listed(controllers, name) : *controllers == '\0')
            apply_upward(&limits[i], group);
    }
}

static void look_up(void)
{
    char line[PATH_BYTES];
    FILE *file = fopen("/proc/self/cgroup", "re");

    memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    while (file && fgets(line, sizeof(line), file))
        apply_line(line);
    if (file)
        fclose(file);
}

unsigned nvmeio_cpu_count(void)
{
    static const size_t bytes = CPU_ALLOC_SIZE(CPUS_MAX);
    _Alignas(cpu_set_t) char room[CPU_ALLOC_SIZE(CPUS_MAX)];
    cpu_set_t *cpus = (cpu_set_t *)(void *)room;

    pthread_once(&once, look_up);
    if (sched_getaffinity(0, bytes, cpus))
        return 1;
    unsigned count = (unsigned)CPU_COUNT_S(bytes, cpus);
    if (count > quota_cpus)
        count = quota_cpus;
    return count > 0 ? count : 1;
}

uint64_t nvmeio_memory_bytes(void)
{
    pthread_once(&once, look_up);
    return memory_bytes;
}
