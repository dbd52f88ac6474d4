/* The processors and memory of a process: control groups of both versions, and the
 * state after a fork, with replaced system functions.
 *
 * The limits are read once, so each case runs in a child. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nvmeio/system.h>

#include "check.h"
#include "fork.h"

#define FILES_MAX 6
#define CPUS 64

struct text {
    const char *path, *content;
};

struct machine {
    struct text files[FILES_MAX];
    unsigned cpus_expected;
    uint64_t memory_expected; /* 0: as much as the machine has */
    int cpus; /* usable by the thread; -1: the kernel does not report it */
};

static const struct machine *machine;

FILE *fopen(const char *path, const char *mode)
{
    for (unsigned i = 0; machine && i < FILES_MAX && machine->files[i].path; i++) {
        const char *content = machine->files[i].content;
        if (strcmp(machine->files[i].path, path) == 0)
            return fmemopen((void *)(uintptr_t)content, strlen(content), "r");
    }
    if (machine) {
        errno = ENOENT;
        return NULL;
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? NULL : fdopen(fd, mode);
}

int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *cpus)
{
    (void)pid;
    if (machine->cpus < 0) {
        errno = EINVAL;
        return -1;
    }
    CPU_ZERO_S(size, cpus);
    for (int i = 0; i < machine->cpus; i++)
        CPU_SET_S(i, size, cpus);
    return 0;
}

#define GROUPS "/sys/fs/cgroup"

static const struct machine machines[] = {
    /* No control groups at all. */
    {.cpus_expected = CPUS, .cpus = CPUS},
    {.cpus_expected = 1, .cpus = -1},
    {.cpus_expected = 1, .cpus = 0},
    /* Version 2: the minimum over the group and its ancestors. */
    {{{"/proc/self/cgroup", "0::/a/b\n"},
      {GROUPS "/a/b/cpu.max", "350000 100000\n"},
      {GROUPS "/a/b/memory.max", "max\n"},
      {GROUPS "/a/cpu.max", "max 100000\n"},
      {GROUPS "/a/memory.max", "1048576\n"},
      {GROUPS "/memory.max", "2097152\n"}},
     4,
     1048576,
     CPUS},
    {{{"/proc/self/cgroup", "0::/\n"}, {GROUPS "/cpu.max", "100000 50000\n"}},
     2,
     0,
     CPUS},
    /* In a container the visible root is the container's own group. */
    {{{"/proc/self/cgroup", "0::/docker/0123\n"},
      {GROUPS "/cpu.max", "200000 100000\n"},
      {GROUPS "/memory.max", "3145728\n"}},
     2,
     3145728,
     CPUS},
    /* No more than the thread may run on. */
    {{{"/proc/self/cgroup", "0::/\n"}, {GROUPS "/cpu.max", "900000 100000\n"}},
     3,
     0,
     3},
    /* An invalid quota limits nothing. */
    {{{"/proc/self/cgroup", "0::/a\n"},
      {GROUPS "/a/cpu.max", "0 100000\n"},
      {GROUPS "/cpu.max", "100000 0\n"},
      {GROUPS "/a/memory.max", ""}},
     CPUS,
     0,
     CPUS},
    /* More than the machine has. */
    {{{"/proc/self/cgroup", "0::/a\n"},
      {GROUPS "/a/cpu.max", "99999900000 1\n"},
      {GROUPS "/a/memory.max", "18446744073709551615\n"}},
     CPUS,
     0,
     CPUS},
    /* Version 1: a tree for each controller, several of which may share one. */
    {{{"/proc/self/cgroup", "3:cpuacct,cpu:/c\n2:memory:/m\n1:name=systemd:/x\n0::/\n"},
      {GROUPS "/cpu/c/cpu.cfs_quota_us", "150000\n"},
      {GROUPS "/cpu/c/cpu.cfs_period_us", "100000\n"},
      {GROUPS "/memory/m/memory.limit_in_bytes", "4194304\n"}},
     2,
     4194304,
     CPUS},
    {{{"/proc/self/cgroup", "3:cpu,cpuacct:/c\n2:cpuset,mymemory:/m\n"},
      {GROUPS "/cpu/c/cpu.cfs_quota_us", "-1\n"},
      {GROUPS "/cpu/c/cpu.cfs_period_us", "100000\n"},
      {GROUPS "/memory/m/memory.limit_in_bytes", "4096\n"}},
     CPUS,
     0,
     CPUS},
    /* A quota without its period, and invalid lines. */
    {{{"/proc/self/cgroup", "nothing\n4:nothing\n3:cpu:/c\n"},
      {GROUPS "/cpu/c/cpu.cfs_quota_us", "100000\n"}},
     CPUS,
     0,
     CPUS},
};

/* Run a case in a child, because values are read once. */
static void in_child(void (*function)(void))
{
    pid_t child = fork();
    int status;

    CHECK(child >= 0);
    if (child == 0) {
        function();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void check_machine(void)
{
    uint64_t all = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);

    CHECK(nvmeio_cpu_count() == machine->cpus_expected);
    CHECK(nvmeio_memory_bytes() ==
          (machine->memory_expected ? machine->memory_expected : all));
}

static void test_control_groups_limit_processors_and_memory(void)
{
    for (size_t i = 0; i < sizeof(machines) / sizeof(machines[0]); i++) {
        machine = &machines[i];
        in_child(check_machine);
    }
    machine = NULL;
}

static void check_team_of_a_child(void)
{
    CHECK(nvmeio_fork_without_exec());
    CHECK(nvmeio_team_size(4) == 1);
}

static void test_a_child_of_a_fork_leads_no_team(void)
{
    CHECK(!nvmeio_fork_without_exec());
    in_child(check_team_of_a_child);
}

static void test_a_team_has_the_requested_size(void)
{
    CHECK(nvmeio_team_size(0) == 1 && nvmeio_team_size(1) == 1);
    CHECK(nvmeio_team_size(4) == 4);
    /* This size has worked before, so it is allowed again. */
    CHECK(nvmeio_team_size(3) == 3 && nvmeio_team_size(4) == 4);
}

int main(void)
{
    alarm(60);
    test_control_groups_limit_processors_and_memory();
    test_a_child_of_a_fork_leads_no_team();
    test_a_team_has_the_requested_size();
    return 0;
}
