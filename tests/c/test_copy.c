/* Copies of every size and alignment move the right bytes, and no others: each kernel
 * that this processor can run, through the caches and past them, with memcpy and
 * memmove as the reference. */
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include "check.h"
#include "copy_internal.h"
#include "copy_kernels.h"

#define LINE NVMEIO_LINE_BYTES
#define GUARD_BYTES 128
#define LENGTH_MAX 1025
#define LARGE_BYTES (nvmeio_copy_stream_bytes() + 1024)
#define AREA_BYTES (LARGE_BYTES + 2 * GUARD_BYTES + 2 * LINE)
#define CANARY 0xa5

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED true
#else
#define SANITIZED false
#endif

static unsigned char *source_area, *target_area, *expected_area;
static unsigned char canaries[GUARD_BYTES];

/* No two neighbouring cache lines are equal, so a shifted copy shows. */
static void fill(unsigned char *area, uint32_t state)
{
    for (size_t i = 0; i < AREA_BYTES; i++) {
        state = state * 1664525u + 1013904223u;
        area[i] = (unsigned char)(state >> 24);
    }
}

static bool untouched(const unsigned char *guard)
{
    return memcmp(guard, canaries, GUARD_BYTES) == 0;
}

/* Copy between these residues modulo the cache line, as a part of `total` bytes. */
static void check_part(size_t target_residue, size_t source_residue, size_t size,
                       size_t total)
{
    unsigned char *target = target_area + GUARD_BYTES + target_residue;
    const unsigned char *source = source_area + GUARD_BYTES + source_residue;

    memset(target - GUARD_BYTES, CANARY, size + 2 * GUARD_BYTES);
    nvmeio_copy_part(target, source, size, total);
    CHECK(memcmp(target, source, size) == 0);
    CHECK(untouched(target - GUARD_BYTES) && untouched(target + size));
}

static void test_every_length_at_every_alignment(size_t total)
{
    for (size_t size = 0; size <= LENGTH_MAX; size++)
        for (size_t target = 0; target < LINE; target++)
            /* The kernels align their stores, not their loads: some sources do. */
            for (size_t i = 0; i < (SANITIZED ? 1 : 4); i++)
                check_part(target, (target * 7 + size + i) % LINE, size, total);
}

/* Sizes at which another kernel takes over, with each function that copies. */
static void test_the_edges_of_the_thresholds(void)
{
    const size_t thresholds[] = {nvmeio_copy_stream_bytes(),
                                 NVMEIO_COPY_COLD_STREAM_BYTES};
    static const int changes[] = {-257, -65, -64, -1, 0, 1, 63, 64, 257};

    for (unsigned i = 0; i < 2; i++)
        for (unsigned j = 0; j < sizeof(changes) / sizeof(*changes); j++)
            for (unsigned way = 0; way < 2; way++) {
                size_t size = thresholds[i] + (size_t)changes[j];
                unsigned char *target = target_area + GUARD_BYTES + j * 5 % LINE;
                const unsigned char *source = source_area + j * 11 % LINE;
                memset(target - GUARD_BYTES, CANARY, size + 2 * GUARD_BYTES);
                (way ? nvmeio_copy : nvmeio_copy_cold)(target, source, size);
                CHECK(memcmp(target, source, size) == 0);
                CHECK(untouched(target - GUARD_BYTES) && untouched(target + size));
            }
}

/* Other loops copy these, because the processor takes their loads for the stores. */
static void test_targets_a_little_above_their_sources(void)
{
    static const size_t sizes[] = {2047, 2048, 4 * NVMEIO_COPY_PAGE_BYTES + 100,
                                   9 * NVMEIO_COPY_PAGE_BYTES, 300000};
    static const size_t distances[] = {1, 16, 63, 64, 300, 511, 512, 4095};
    const size_t page = NVMEIO_COPY_PAGE_BYTES;

    for (unsigned i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
        for (unsigned j = 0; j < sizeof(distances) / sizeof(*distances); j++)
            for (unsigned way = 0; way < 2; way++) {
                size_t above =
                    ((uintptr_t)source_area + distances[j] - (uintptr_t)target_area) %
                    page;
                unsigned char *target = target_area + page + above;
                memset(target - GUARD_BYTES, CANARY, sizes[i] + 2 * GUARD_BYTES);
                (way ? nvmeio_copy : nvmeio_copy_cold)(target, source_area, sizes[i]);
                CHECK(memcmp(target, source_area, sizes[i]) == 0);
                CHECK(untouched(target - GUARD_BYTES) && untouched(target + sizes[i]));
            }
}

static void test_overlapping_ranges_are_copied_as_by_memmove(void)
{
    const size_t sizes[] = {1, 63, 64, 1000, 70000, nvmeio_copy_stream_bytes()};
    static const size_t distances[] = {0, 1, 31, 64, 999, 4096};

    for (unsigned i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
        for (unsigned j = 0; j < sizeof(distances) / sizeof(*distances); j++)
            for (unsigned back = 0; back < 2; back++) {
                size_t size = sizes[i], distance = distances[j];
                size_t from = back ? distance : 0, to = back ? 0 : distance;
                if (size + distance > AREA_BYTES)
                    continue;
                memcpy(target_area, source_area, size + distance);
                memcpy(expected_area, source_area, size + distance);
                memmove(expected_area + to, expected_area + from, size);
                nvmeio_copy(target_area + to, target_area + from, size);
                CHECK(memcmp(target_area, expected_area, size + distance) == 0);
                CHECK(nvmeio_copy_overlaps(target_area + to, target_area + from,
                                           size) == (distance < size));
            }
}

static void test_kernel(const char *name)
{
    const char *small, *large;

    CHECK(nvmeio_copy_select(name) == 0);
    nvmeio_copy_selected(&small, &large);
    CHECK(strcmp(name, "auto") == 0 ||
          (strcmp(small, name) == 0 && strcmp(large, name) == 0));
    test_every_length_at_every_alignment(0);
    test_every_length_at_every_alignment(SIZE_MAX);
    test_the_edges_of_the_thresholds();
    test_targets_a_little_above_their_sources();
    test_overlapping_ranges_are_copied_as_by_memmove();
}

static void test_an_unusable_kernel_is_refused_and_changes_nothing(void)
{
    const char *name, *small, *large, *small_before, *large_before;
    int works;

    nvmeio_copy_selected(&small_before, &large_before);
    CHECK(nvmeio_copy_select("avx9") == -EINVAL);
    for (unsigned i = 0; (name = nvmeio_copy_kernel_at(i, &works)); i++) {
        if (!works)
            CHECK(nvmeio_copy_select(name) == -ENOTSUP);
    }
    nvmeio_copy_selected(&small, &large);
    CHECK(strcmp(small, small_before) == 0 && strcmp(large, large_before) == 0);
}

int main(void)
{
    const char *name;
    int works;

    source_area = aligned_alloc(4096, (AREA_BYTES + 4095) / 4096 * 4096);
    target_area = aligned_alloc(4096, (AREA_BYTES + 4095) / 4096 * 4096);
    expected_area = aligned_alloc(4096, (AREA_BYTES + 4095) / 4096 * 4096);
    CHECK(source_area && target_area && expected_area);
    fill(source_area, 1);
    memset(canaries, CANARY, GUARD_BYTES);
    test_an_unusable_kernel_is_refused_and_changes_nothing();
    for (unsigned i = 0; (name = nvmeio_copy_kernel_at(i, &works)); i++) {
        if (works)
            test_kernel(name);
    }
    test_kernel("auto");
    free(source_area);
    free(target_area);
    free(expected_area);
    return 0;
}
