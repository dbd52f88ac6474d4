/* copy_steps.h -- one kernel: 8 vectors a step, then 4, then 1, then the bytes left.
 *
 * Included once for each kernel, with these defined, and undefined at the end:
 *   KERNEL  the name of the function      TARGET  its attribute
 *   VECTOR  the type of a register        LOAD(from), STORE(to, vector)
 *   FENCE() what makes its stores visible like ordinary ones
 * The target is brought to a cache line first, which stores past the caches need and
 * others like: a store over two lines costs two. */
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
