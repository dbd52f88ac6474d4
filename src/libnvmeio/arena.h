/* arena.h -- the memory of one worker's bounces, cut into units. No locks. */
#ifndef NVMEIO_ARENA_H
#define NVMEIO_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NVMEIO_ARENA_BYTES_MAX ((size_t)16 << 20)

/* Small bounces are side by side, so that 128 of them fill one huge page: spread over
 * many, they would evict each other from the caches. */
#define NVMEIO_ARENA_UNIT_BYTES ((size_t)16 << 10)
#define NVMEIO_ARENA_UNITS_MAX (NVMEIO_ARENA_BYTES_MAX / NVMEIO_ARENA_UNIT_BYTES)

struct nvmeio_arena {
    char *memory; /* untouched until it is first used; in huge pages if there are any */
    size_t bytes, units, idle;
    bool touched;
    uint64_t used[NVMEIO_ARENA_UNITS_MAX / 64]; /* one bit a unit */
};

/* Map an arena of whole units and pages, at most NVMEIO_ARENA_BYTES_MAX. Returns 0 or
 * -ENOMEM. */
int nvmeio_arena_open(struct nvmeio_arena *arena, size_t bytes);

/* Unmap it. */
void nvmeio_arena_close(struct nvmeio_arena *arena);

/* Take memory in whole units, the lowest that is left. NULL if there is no room. */
void *nvmeio_arena_take(struct nvmeio_arena *arena, size_t bytes);

/* Give back what was taken with as many bytes. */
void nvmeio_arena_give(struct nvmeio_arena *arena, const void *address, size_t bytes);

/* Let the kernel have the memory until it is used again. Nothing may be taken. */
void nvmeio_arena_rest(struct nvmeio_arena *arena);

#endif
