/* Two races that once lost bytes, each held open by a pause at the calls around it; and
 * pauses themselves last long enough, at the requested call. */
#include <sys/time.h>

#include "races.h"

static unsigned wrong;

/* Pause on each occasion of a call in turn; return how many there were. */
static unsigned pause_at_each(const struct race *race, const char *call)
{
    char faults[64];

    for (unsigned i = 1;; i++) {
        snprintf(faults, sizeof(faults), "pause_ms=60,pause_at=%s,pause@%u", call, i);
        wrong += !holds(race, faults);
        if (!raced->struck)
            return i - 1;
    }
}

static void test_memory_that_the_pool_unmaps_is_mapped_again_at_once(void)
{
    CHECK(pause_at_each(&race_of_mappings, "munmap") > 0);
}

static void test_a_childs_synced_write_survives_a_failed_write_of_its_parent(void)
{
    static const char *const calls[] = {"fstat", "ftruncate"};

    for (unsigned i = 0; i < 2; i++)
        (void)pause_at_each(&race_of_forks, calls[i]);
}

static void ignore(int signal)
{
    (void)signal;
}

/* A pause changes neither the handling of signals nor errno. */
static void test_no_signal_makes_a_pause_shorter(void)
{
    static const struct itimerval often = {{0, 1000}, {0, 1000}}, never;
    struct sigaction action = {.sa_handler = ignore}, before;
    struct timespec begin, end;

    CHECK(sigaction(SIGALRM, &action, &before) == 0);
    nvmeio_fault_configure("pause@1,pause_ms=50");
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    errno = ENOTTY;
    nvmeio_fault_pause("close", true);
    CHECK(errno == ENOTTY);
    clock_gettime(CLOCK_MONOTONIC, &end);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    CHECK((end.tv_sec - begin.tv_sec) * SECOND_NS + end.tv_nsec - begin.tv_nsec >=
          SECOND_NS / 20);
    CHECK(sigaction(SIGALRM, &before, NULL) == 0);
}

static void test_a_pause_is_at_the_named_call(void)
{
    bool after;

    nvmeio_fault_configure("pause=1000,pause_ms=1,pause_at=munmap");
    nvmeio_fault_pause("mmap", true);
    CHECK(nvmeio_fault_occasions(NVMEIO_FAULT_PAUSE) == 0);
    CHECK(!nvmeio_fault_paused(&after));
    nvmeio_fault_pause("munmap", false);
    nvmeio_fault_pause("munmap", true);
    CHECK(nvmeio_fault_fired(NVMEIO_FAULT_PAUSE) == 2);
    CHECK(strcmp(nvmeio_fault_paused(&after), "munmap") == 0 && after);
    nvmeio_fault_configure("");
}

int main(void)
{
    test_a_pause_is_at_the_named_call();
    test_no_signal_makes_a_pause_shorter();
    begin_races();
    race_engine = engine_at(0);
    test_memory_that_the_pool_unmaps_is_mapped_again_at_once();
    test_a_childs_synced_write_survives_a_failed_write_of_its_parent();
    CHECK(wrong == 0);
    return 0;
}
