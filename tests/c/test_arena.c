/* The memory of a worker's bounces: what is taken never overlaps, the lowest run that
 * is long enough is taken, all of it can be used, and it comes back empty after a rest.
 */
#include "arena.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

#define UNIT NVMEIO_ARENA_UNIT_BYTES
#define ROUNDS 200000
#define HELD 96

static void test_the_lowest_run_that_is_long_enough_is_taken(void)
{
    struct nvmeio_arena arena;
    char *taken[8];

    CHECK(nvmeio_arena_open(&arena, 16 * UNIT) == 0);
    for (int i = 0; i < 8; i++)
        CHECK((taken[i] = nvmeio_arena_take(&arena, UNIT + 1)) ==
              arena.memory + (size_t)i * 2 * UNIT);
    CHECK(!nvmeio_arena_take(&arena, 1));
    nvmeio_arena_give(&arena, taken[1], UNIT + 1);
    nvmeio_arena_give(&arena, taken[4], UNIT + 1);
    nvmeio_arena_give(&arena, taken[5], UNIT + 1);
    CHECK(!nvmeio_arena_take(&arena, 5 * UNIT));
    CHECK(nvmeio_arena_take(&arena, 4 * UNIT) == taken[4]);
    CHECK(nvmeio_arena_take(&arena, UNIT) == taken[1]);
    CHECK(nvmeio_arena_take(&arena, UNIT) == taken[1] + UNIT);
    CHECK(!nvmeio_arena_take(&arena, 1) && arena.idle == 0);
    nvmeio_arena_close(&arena);
}

/* Each run is filled with a number of its own, which must be there when it is given
 * back. */
static void test_runs_of_any_length_never_overlap(size_t bytes)
{
    struct nvmeio_arena arena;
    struct {
        char *memory;
        size_t bytes;
    } held[HELD] = {0};
    size_t taken = 0;

    CHECK(nvmeio_arena_open(&arena, bytes) == 0);
    CHECK((uintptr_t)arena.memory % 4096 == 0 && arena.units == bytes / UNIT);
    srand(7);
    for (int round = 0; round < ROUNDS; round++) {
        int i = rand() % HELD;
        if (!held[i].memory) {
            held[i].bytes = 1 + (size_t)rand() % (bytes / (size_t)(1 + rand() % 40));
            held[i].memory = nvmeio_arena_take(&arena, held[i].bytes);
            if (!held[i].memory)
                continue;
            CHECK(held[i].memory >= arena.memory &&
                  held[i].memory + held[i].bytes <= arena.memory + bytes);
            taken++;
            for (size_t at = 0; at < held[i].bytes; at += UNIT)
                held[i].memory[at] = (char)i;
            continue;
        }
        for (size_t at = 0; at < held[i].bytes; at += UNIT)
            CHECK(held[i].memory[at] == (char)i);
        nvmeio_arena_give(&arena, held[i].memory, held[i].bytes);
        held[i].memory = NULL;
    }
    CHECK(taken > ROUNDS / 64);
    for (int i = 0; i < HELD; i++)
        if (held[i].memory)
            nvmeio_arena_give(&arena, held[i].memory, held[i].bytes);
    CHECK(arena.idle == arena.units);
    CHECK(nvmeio_arena_take(&arena, bytes) == arena.memory);
    nvmeio_arena_close(&arena);
}

static size_t resident_pages(const struct nvmeio_arena *arena, size_t bytes)
{
    static unsigned char resident[NVMEIO_ARENA_BYTES_MAX / 4096];
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE), count = 0;

    CHECK(mincore(arena->memory, bytes, resident) == 0);
    for (size_t i = 0; i < bytes / page_bytes; i++)
        count += resident[i] & 1;
    return count;
}

static void test_after_a_rest_no_page_is_held_until_the_next_use(void)
{
    struct nvmeio_arena arena;
    size_t bytes = NVMEIO_ARENA_BYTES_MAX;

    CHECK(nvmeio_arena_open(&arena, bytes) == 0);
    CHECK(resident_pages(&arena, bytes) == 0);
    char *memory = nvmeio_arena_take(&arena, bytes);
    memset(memory, 1, bytes);
    CHECK(resident_pages(&arena, bytes) > 0);
    nvmeio_arena_give(&arena, memory, bytes);
    nvmeio_arena_rest(&arena);
    CHECK(resident_pages(&arena, bytes) == 0);
    CHECK(nvmeio_arena_take(&arena, bytes) == memory);
    memset(memory, 2, bytes);
    nvmeio_arena_close(&arena);
}

int main(void)
{
    test_the_lowest_run_that_is_long_enough_is_taken();
    test_runs_of_any_length_never_overlap(NVMEIO_ARENA_BYTES_MAX);
    test_runs_of_any_length_never_overlap(5 * UNIT);
    test_after_a_rest_no_page_is_held_until_the_next_use();
    return 0;
}
