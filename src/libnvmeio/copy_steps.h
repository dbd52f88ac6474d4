/* copy_steps.h -- one kernel: 8 vectors a step, then 4, then 1, then the bytes left.
 *
 * Include it once for each kernel, after defining these. It undefines them at its end.
 *   KERNEL  the name of the function      TARGET  its attribute
 *   VECTOR  the type of a register        LOAD(from), STORE(to, vector)
 *   FENCE() orders its stores like ordinary ones
 *   PAGES   how many pages the 8 vectors of a step come from, while that many are left
 *
 * Copying several pages at once keeps more of the memory busy: with four, stores that
 * bypass the caches were 10 to 25 % faster between 16 and 512 MiB (Xeon with AVX-512,
 * 2026-11-21). But not if the target is a little above the source, modulo a page: then
 * each load waits for a store of another page whose address looks the same. 1 MiB at 2
 * GB/s instead of 22, below a distance of 300 bytes (EPYC with AVX2, 2026-11-27). The
 * first few bytes are copied alone, so that the target begins at a cache line. Stores
 * that bypass the caches need that; others cost twice as much across two lines. */
TARGET static void KERNEL(void *target, const void *source, size_t size)
{
    const size_t step = sizeof(VECTOR);
    char *to = target;
    const char *from = source;
    size_t head = -(uintptr_t)to % NVMEIO_LINE_BYTES;

    if (head > size)
        head = size;
    memcpy(to, from, head);
    to += head;
    from += head;
    size -= head;
    const size_t group = PAGES * NVMEIO_COPY_PAGE_BYTES;
    bool together = PAGES > 1 && !nvmeio_copy_is_above(to, from, 512);
    for (; together && size >= group; size -= group, to += group, from += group)
        for (size_t at = 0; at < NVMEIO_COPY_PAGE_BYTES; at += 8 / PAGES * step) {
            VECTOR v[8];
#pragma GCC unroll 8
            for (size_t i = 0; i < 8; i++)
                v[i] = LOAD(from + at + i / (8 / PAGES) * NVMEIO_COPY_PAGE_BYTES +
                            i % (8 / PAGES) * step);
#pragma GCC unroll 8
            for (size_t i = 0; i < 8; i++)
                STORE(to + at + i / (8 / PAGES) * NVMEIO_COPY_PAGE_BYTES +
                          i % (8 / PAGES) * step,
                      v[i]);
        }
    for (; size >= 8 * step; size -= 8 * step, to += 8 * step, from += 8 * step) {
        VECTOR v0 = LOAD(from), v1 = LOAD(from + step);
        VECTOR v2 = LOAD(from + 2 * step), v3 = LOAD(from + 3 * step);
        VECTOR v4 = LOAD(from + 4 * step), v5 = LOAD(from + 5 * step);
        VECTOR v6 = LOAD(from + 6 * step), v7 = LOAD(from + 7 * step);
        STORE(to, v0);
        STORE(to + step, v1);
        STORE(to + 2 * step, v2);
        STORE(to + 3 * step, v3);
        STORE(to + 4 * step, v4);
        STORE(to + 5 * step, v5);
        STORE(to + 6 * step, v6);
        STORE(to + 7 * step, v7);
    }
    for (; size >= 4 * step; size -= 4 * step, to += 4 * step, from += 4 * step) {
        VECTOR v0 = LOAD(from), v1 = LOAD(from + step);
        VECTOR v2 = LOAD(from + 2 * step), v3 = LOAD(from + 3 * step);
        STORE(to, v0);
        STORE(to + step, v1);
        STORE(to + 2 * step, v2);
        STORE(to + 3 * step, v3);
    }
    for (; size >= step; size -= step, to += step, from += step)
        STORE(to, LOAD(from));
    FENCE();
    memcpy(to, from, size);
}

#undef KERNEL
#undef TARGET
#undef VECTOR
#undef LOAD
#undef STORE
#undef FENCE
#undef PAGES
