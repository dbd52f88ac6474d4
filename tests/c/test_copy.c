/* Copies of every size and alignment move the right bytes, and no others: nvmeio_copy()
 * and each kernel that this processor can run, with memcpy as the reference. */
#include <stdint.h>
#include <string.h>

#include <nvmeio/copy.h>

#include "../../src/libnvmeio/copy_kernels.h"
#include "check.h"

#define LINE_BYTES 64
#define GUARD_BYTES 256
#define SIZE_MAX_TESTED ((1u << 20) + 1)
#define AREA_BYTES (GUARD_BYTES + LINE_BYTES + SIZE_MAX_TESTED + GUARD_BYTES)

static unsigned char *source_area;
static unsigned char *target_area;
static unsigned char *expected_area;

static unsigned char *aligned_area(void)
{
    unsigned char *area = aligned_alloc(4096, (AREA_BYTES + 4095) / 4096 * 4096);
    CHECK(area);
    return area;
}

/* Bytes of which no two neighbouring lines are alike: a shifted copy shows. */
static void fill_source(void)
{
    uint32_t state = 1;
    for (size_t i = 0; i < AREA_BYTES; i++) {
        state = state * 1664525u + 1013904223u;
        source_area[i] = state >> 24;
    }
}

/* Copy between these residues modulo the cache line, and look at the whole area. */
static void check_copy(nvmeio_copy_kernel *copy, size_t target_offset,
                       size_t source_offset, size_t size)
{
    unsigned char *target = target_area + GUARD_BYTES + target_offset;
    const unsigned char *source = source_area + GUARD_BYTES + source_offset;
    size_t used_bytes = 2 * GUARD_BYTES + target_offset + size;

    memset(target_area, 0xa5, used_bytes);
    memset(expected_area, 0xa5, used_bytes);
    memcpy(expected_area + GUARD_BYTES + target_offset, source, size);
    copy(target, source, size);
    CHECK(memcmp(target_area, expected_area, used_bytes) == 0);
}

static void test_small_copies_of_every_size(nvmeio_copy_kernel *copy)
{
    for (size_t size = 0; size <= 1024; size++)
        check_copy(copy, size % LINE_BYTES, size * 7 % LINE_BYTES, size);
}

/* The threshold is 256 KiB: on both sides of it, at every residue of the target with
 * source residues that are equal to it, next to it and far from it. */
static void test_every_alignment_round_the_threshold(nvmeio_copy_kernel *copy)
{
    static const int changes[] = {-1, 0, 1, 63, 64, 65, 127, 255, 256, 257};
    static const size_t shifts[] = {0, 1, 16, 33};

    for (size_t offset = 0; offset < LINE_BYTES; offset++)
        for (size_t i = 0; i < sizeof(changes) / sizeof(*changes); i++)
            for (size_t j = 0; j < sizeof(shifts) / sizeof(*shifts); j++)
                check_copy(copy, offset, (offset + shifts[j]) % LINE_BYTES,
                           (256u << 10) + changes[i]);
}

static void test_large_copies_of_every_remainder(nvmeio_copy_kernel *copy)
{
    for (size_t i = 0; i <= 256; i++)
        check_copy(copy, i * 5 % LINE_BYTES, i * 11 % LINE_BYTES, SIZE_MAX_TESTED - i);
}

static void test_copy(nvmeio_copy_kernel *copy)
{
    test_small_copies_of_every_size(copy);
    test_every_alignment_round_the_threshold(copy);
    test_large_copies_of_every_remainder(copy);
}

int main(void)
{
    nvmeio_copy_kernel *kernel;

    source_area = aligned_area();
    target_area = aligned_area();
    expected_area = aligned_area();
    fill_source();
    test_copy(nvmeio_copy);
    for (unsigned i = 0; (kernel = nvmeio_copy_stream_kernel(i)); i++)
        test_copy(kernel);
    free(source_area);
    free(target_area);
    free(expected_area);
    return 0;
}
