/* Run each race of races.h once for each place where a thread can pause: before and
 * after each system call and lock, from the first occasion to the last that a run
 * without pauses has.
 *
 * test_pauses [STRIDE [SEED [ENGINE [RACE]]]]: pause at one of STRIDE places.  SEED
 * chooses them, and how long the pauses last. */
#include "races.h"

/* The fewest places of a race that are tried. */
#define PLACES_MIN 8

/* Return how many places were struck; add those with errors to *wrong. */
static unsigned sweep(const struct race *race, uint64_t stride, uint64_t seed,
                      unsigned *wrong)
{
    unsigned struck = 0, met = 0, wrong_before = *wrong;
    char faults[64];

    *wrong += !holds(race, "");
    uint64_t first = raced->first, count = raced->occasions - first;
    /* A busy machine makes other calls in each run, so a single place may be missed. */
    if (stride > count / PLACES_MIN)
        stride = count / PLACES_MIN + 1;
    for (uint64_t i = seed % stride; i < count; i += stride) {
        snprintf(faults, sizeof(faults), "seed=%llu,pause@%llu",
                 (unsigned long long)seed, (unsigned long long)(first + 1 + i));
        *wrong += !holds(race, faults);
        struck += raced->struck;
        met += raced->met;
    }
    printf("%s %s: %u of %llu places, %u wrong\n", race_engine, race->name, struck,
           (unsigned long long)count, *wrong - wrong_before);
    fflush(stdout);
    CHECK(struck > 0 && met > 0);
    return struck;
}

/* ThreadSanitizer allows no thread in the child of a process that has several. */
static const struct race *const races[] = {
    &race_of_threads,
    &race_of_mappings,
#ifndef __SANITIZE_THREAD__
    &race_of_forks,
#endif
};

int main(int count, char **arguments)
{
    uint64_t stride = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    uint64_t seed = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    const char *chosen = count > 3 ? arguments[3] : NULL;
    const char *chosen_race = count > 4 ? arguments[4] : NULL;
    unsigned struck = 0, wrong = 0;

    begin_races();
    FOR_EACH_ENGINE(race_engine)
    {
        for (unsigned i = 0; i < sizeof(races) / sizeof(races[0]); i++)
            if ((!chosen || strcmp(race_engine, chosen) == 0) &&
                (!chosen_race || strcmp(races[i]->name, chosen_race) == 0))
                struck += sweep(races[i], stride, seed, &wrong);
    }
    if (struck == 0) {
        char reason[64];
        snprintf(reason, sizeof(reason), "%s does not work here", chosen);
        SKIP(reason);
    }
    CHECK(wrong == 0);
    return 0;
}
