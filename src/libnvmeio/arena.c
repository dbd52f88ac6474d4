/* arena.c -- cuts bounces from a worker's memory: the first run of idle units that is
 * long enough. */
#include "arena.h"

#include <errno.h>
#include <sys/mman.h>

#include "pages.h"

int nvmeio_arena_open(struct nvmeio_arena *arena, size_t bytes)
{
    char *memory = nvmeio_pages_map(bytes);

    if (!memory)
        return -ENOMEM;
    *arena = (struct nvmeio_arena){
        .memory = memory,
        .bytes = bytes,
        .units = bytes / NVMEIO_ARENA_UNIT_BYTES,
        .idle = bytes / NVMEIO_ARENA_UNIT_BYTES,
    };
    madvise(memory, bytes, MADV_HUGEPAGE);
    return 0;
}

void nvmeio_arena_close(struct nvmeio_arena *arena)
{
    if (arena->memory)
        munmap(arena->memory, arena->bytes);
}

/* The first unit from `unit` on that is used, or that is not; arena->units if there is
 * none. */
static size_t find(const struct nvmeio_arena *arena, size_t unit, bool used)
{
    while (unit < arena->units) {
        uint64_t word = arena->used[unit / 64];
        uint64_t wanted = (used ? word : ~word) >> unit % 64;
        if (wanted) {
            unit += (size_t)__builtin_ctzll(wanted);
            return unit < arena->units ? unit : arena->units;
        }
        unit = (unit / 64 + 1) * 64;
    }
    return arena->units;
}

static void flip(struct nvmeio_arena *arena, size_t unit, size_t count)
{
    for (; count > 0; unit++, count--)
        arena->used[unit / 64] ^= UINT64_C(1) << unit % 64;
}

static size_t units_of(size_t bytes)
{
    return (bytes + NVMEIO_ARENA_UNIT_BYTES - 1) / NVMEIO_ARENA_UNIT_BYTES;
}

void *nvmeio_arena_take(struct nvmeio_arena *arena, size_t bytes)
{
    size_t count = units_of(bytes), end;

    for (size_t unit = find(arena, 0, false); unit < arena->units;
         unit = find(arena, end, false)) {
        end = find(arena, unit, true);
        if (end - unit < count)
            continue;
        flip(arena, unit, count);
        arena->idle -= count;
        arena->touched = true;
        return arena->memory + unit * NVMEIO_ARENA_UNIT_BYTES;
    }
    return NULL;
}

void nvmeio_arena_give(struct nvmeio_arena *arena, const void *address, size_t bytes)
{
    size_t offset = (size_t)((const char *)address - arena->memory);

    flip(arena, offset / NVMEIO_ARENA_UNIT_BYTES, units_of(bytes));
    arena->idle += units_of(bytes);
}

void nvmeio_arena_rest(struct nvmeio_arena *arena)
{
    if (arena->touched)
        madvise(arena->memory, arena->bytes, MADV_DONTNEED);
    arena->touched = false;
}
