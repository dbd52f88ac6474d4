/* system.c -- processors and memory, and what control groups leave of them.
 *
 * A process is in one group of version 2, or in one for each controller of version 1
 * (cgroups(7)); the groups above it limit it too.  In a container the path that the
 * kernel tells may lie above what can be seen; then the root that is seen counts. */
#include <nvmeio/system.h>

#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PATH_BYTES 4096

/* Machines of today have up to 8192 processors (Linux, NR_CPUS). */
#define CPUS_MAX 8192

static pthread_once_t once = PTHREAD_ONCE_INIT;
static unsigned quota_cpus = UINT_MAX;
static uint64_t memory_bytes = UINT64_MAX;

/* Where the limits of one controller are, and what to make of the first line there. */
struct limit {
    const char *controller; /* of version 1; NULL: version 2, which has one tree */
    const char *file;
    void (*apply)(const char *line);
};

static void limit_memory(const char *line)
{
    uint64_t bytes;

    /* "max" is no number: no limit. */
    if (sscanf(line, "%" SCNu64, &bytes) == 1 && bytes < memory_bytes)
        memory_bytes = bytes;
}

static void limit_cpus(int64_t quota_us, int64_t period_us)
{
    if (quota_us <= 0 || period_us <= 0)
        return;
    int64_t cpus = (quota_us + period_us - 1) / period_us;
    if (cpus < (int64_t)quota_cpus)
        quota_cpus = (unsigned)cpus;
}

/* cpu.max holds "quota period" or "max period". */
static void limit_cpus_v2(const char *line)
{
    int64_t quota_us, period_us;

    if (sscanf(line, "%" SCNd64 " %" SCNd64, &quota_us, &period_us) == 2)
        limit_cpus(quota_us, period_us);
}

/* cpu.cfs_quota_us holds -1 for no limit.  The period is in a file of its own; nobody
 * was seen to change it from 100 ms. */
static void limit_cpus_v1(const char *line)
{
    int64_t quota_us;

    if (sscanf(line, "%" SCNd64, &quota_us) == 1)
        limit_cpus(quota_us, 100000);
}

static const struct limit limits[] = {
    {NULL, "cpu.max", limit_cpus_v2},
    {NULL, "memory.max", limit_memory},
    {"cpu", "cpu.cfs_quota_us", limit_cpus_v1},
    {"memory", "memory.limit_in_bytes", limit_memory},
};

static void apply_file(const struct limit *limit, const char *folder)
{
    char path[PATH_BYTES + 64], line[128];

    snprintf(path, sizeof(path), "%s/%s", folder, limit->file);
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    if (fgets(line, sizeof(line), file))
        limit->apply(line);
    fclose(file);
}

/* Apply a limit of the group and of all above it, up to the root of the tree. */
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

/* A line of /proc/self/cgroup: "0::GROUP" of version 2, "N:CONTROLLERS:GROUP" of 1. */
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
    char room[CPU_ALLOC_SIZE(CPUS_MAX)];
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
