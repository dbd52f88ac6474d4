/* Which occasions are struck depends only on seed, kind and count; the rate is the
 * requested one, and the log agrees. */
#include <string.h>

#include "fault.h"
#include "transfer.h"

#define OCCASIONS 20000u

/* For each occasion 0, or the random number of a strike. */
static uint64_t first[OCCASIONS], second[OCCASIONS];

static unsigned draw(const char *spec, enum nvmeio_fault kind, uint64_t *numbers)
{
    unsigned struck = 0;

    nvmeio_fault_configure(spec);
    for (unsigned i = 0; i < OCCASIONS; i++) {
        uint64_t number = 0;
        numbers[i] = nvmeio_fault_strikes(kind, &number) ? number | 1 : 0;
        struck += numbers[i] != 0;
    }
    CHECK(nvmeio_fault_occasions(kind) == OCCASIONS);
    CHECK(nvmeio_fault_fired(kind) == struck);
    return struck;
}

/* The chance that another seed or kind draws the same is below 1 in 10^100. */
static void test_random_numbers_depend_only_on_seed_kind_and_count(void)
{
    unsigned struck = draw("seed=7,eio=50,short=50", NVMEIO_FAULT_EIO, first);

    /* 20000 occasions at 50 of 1000; the standard deviation is 31. */
    CHECK(struck > 850 && struck < 1150);
    CHECK(draw("eio=50,seed=7,late=900", NVMEIO_FAULT_EIO, second) == struck);
    CHECK(memcmp(first, second, sizeof(first)) == 0);
    (void)draw("seed=8,eio=50", NVMEIO_FAULT_EIO, second);
    CHECK(memcmp(first, second, sizeof(first)) != 0);
    (void)draw("seed=7,enospc=50", NVMEIO_FAULT_ENOSPC, second);
    CHECK(memcmp(first, second, sizeof(first)) != 0);
    CHECK(draw("eio=1000", NVMEIO_FAULT_EIO, first) == OCCASIONS);
}

static void test_a_named_occasion_is_struck(void)
{
    CHECK(draw("eio@3,eio@20000", NVMEIO_FAULT_EIO, first) == 2);
    CHECK(first[2] && first[OCCASIONS - 1]);
}

static void test_a_later_word_changes_an_earlier_one(void)
{
    CHECK(draw("all=50,short=0", NVMEIO_FAULT_SHORT, first) == 0);
    CHECK(draw("short=1000,all=0", NVMEIO_FAULT_SHORT, first) == 0);
    CHECK(draw("short=0,all=50", NVMEIO_FAULT_SHORT, first) > 0);
    CHECK(draw("all=1000", NVMEIO_FAULT_EIO, first) == 0);
    /* Pauses by all= are 500 times rarer: 40, with a standard deviation of 6. */
    unsigned pauses = draw("all=1000", NVMEIO_FAULT_PAUSE, first);
    CHECK(pauses > 0 && pauses < 100);
}

/* The format of docs/reliability.md: 16 bytes of name and three numbers for each kind.
 * */
static void test_a_log_adds_up(void)
{
    struct {
        char name[16];
        uint64_t rate, occasions, fired;
    } tallies[NVMEIO_FAULT_COUNT];
    const char *path = path_in(test_folder());
    char spec[4096];

    for (unsigned run = 1; run <= 2; run++) {
        snprintf(spec, sizeof(spec), "log=%s,eio=1,eio@3", path);
        nvmeio_fault_configure(spec);
        for (unsigned i = 0; i < 3; i++)
            CHECK(nvmeio_fault_strikes(NVMEIO_FAULT_EIO, NULL) == (i == 2));
        nvmeio_fault_configure("");
        FILE *log = fopen(path, "re");
        CHECK(log && fread(tallies, sizeof(tallies), 1, log) == 1);
        CHECK(fgetc(log) == EOF);
        fclose(log);
        for (int i = 0; i < NVMEIO_FAULT_COUNT; i++) {
            enum nvmeio_fault kind = (enum nvmeio_fault)i;
            bool asked = kind == NVMEIO_FAULT_EIO;
            CHECK(strcmp(tallies[i].name, nvmeio_fault_name(kind)) == 0);
            CHECK(tallies[i].rate == (asked ? 1 : 0));
            CHECK(tallies[i].occasions == (asked ? 3 * run : 0));
            CHECK(tallies[i].fired == (asked ? run : 0));
        }
    }
}

int main(void)
{
    begin();
    test_random_numbers_depend_only_on_seed_kind_and_count();
    test_a_named_occasion_is_struck();
    test_a_later_word_changes_an_earlier_one();
    test_a_log_adds_up();
    return 0;
}
