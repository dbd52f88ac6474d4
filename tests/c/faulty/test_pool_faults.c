/* The pool cannot get memory, or the memory to record it: nothing stays mapped. */
#include <sys/wait.h>

#include "fault.h"
#include "transfer.h"

/* More than the heap can grow meanwhile. */
#define SIZE (64 * MIB)

static size_t bytes_mapped(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");

    CHECK(file && fscanf(file, "%zu", &pages) == 1);
    fclose(file);
    return pages * PAGE;
}

/* Exit statuses of a child; CHECK() exits with 1. */
enum { REFUSED = 2, SERVED, SPARED, ENDS };

/* Runs in a child, whose pool is empty, and returns the pool's answer to a fault at
 * this place. */
static int take(unsigned place)
{
    char fault[32];
    void *memory;
    int locked;
    size_t before = bytes_mapped();

    snprintf(fault, sizeof(fault), "memory@%u", place);
    nvmeio_fault_configure(fault);
    int result = nvmeio_pool_alloc(SIZE, false, &memory, &locked);
    if (nvmeio_fault_fired(NVMEIO_FAULT_MEMORY) == 0)
        return SPARED;
    if (result == 0)
        return SERVED;
    CHECK(result == -ENOMEM);
    CHECK(bytes_mapped() < before + SIZE);
    return REFUSED;
}

int main(void)
{
    unsigned found[ENDS] = {0};

    begin();
    for (unsigned place = 1; found[SPARED] == 0; place++) {
        int status;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            _exit(take(place));
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
        CHECK(WEXITSTATUS(status) >= REFUSED);
        found[WEXITSTATUS(status)]++;
    }
    /* The place of the mapping, and that of its record. */
    CHECK(found[REFUSED] >= 2);
    return 0;
}
