/* copy_x86.c -- copies with the non-temporal stores of x86-64.
 *
 * Such a store writes whole cache lines without reading them first and leaves the
 * caches to others.  Kernels are compiled for their instructions by attribute, so the
 * rest of the library runs on any x86-64; nvmeio_copy_stream_kernel() picks one that
 * this processor can run. */
#include "copy_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define LINE_BYTES 64

/* Copy up to the first cache line of the target, and return how much that was. */
static size_t copy_head(char *target, const char *source, size_t size)
{
    size_t head_bytes = -(uintptr_t)target % LINE_BYTES;
    if (head_bytes > size)
        head_bytes = size;
    memcpy(target, source, head_bytes);
    return head_bytes;
}

__attribute__((target("avx512f"))) static void
copy_avx512(void *target, const void *source, size_t size)
{
    char *to = target;
    const char *from = source;
    size_t position = copy_head(to, from, size);
    for (; size - position >= 4 * LINE_BYTES; position += 4 * LINE_BYTES) {
        __m512i line0 = _mm512_loadu_si512(from + position);
        __m512i line1 = _mm512_loadu_si512(from + position + LINE_BYTES);
        __m512i line2 = _mm512_loadu_si512(from + position + 2 * LINE_BYTES);
        __m512i line3 = _mm512_loadu_si512(from + position + 3 * LINE_BYTES);
        _mm512_stream_si512((__m512i *)(to + position), line0);
        _mm512_stream_si512((__m512i *)(to + position + LINE_BYTES), line1);
        _mm512_stream_si512((__m512i *)(to + position + 2 * LINE_BYTES), line2);
        _mm512_stream_si512((__m512i *)(to + position + 3 * LINE_BYTES), line3);
    }
    _mm_sfence();
    memcpy(to + position, from + position, size - position);
}

__attribute__((target("avx2"))) static void copy_avx2(void *target, const void *source,
                                                      size_t size)
{
    char *to = target;
    const char *from = source;
    size_t position = copy_head(to, from, size);
    for (; size - position >= 2 * LINE_BYTES; position += 2 * LINE_BYTES) {
        const __m256i *halves = (const __m256i *)(from + position);
        __m256i half0 = _mm256_loadu_si256(halves);
        __m256i half1 = _mm256_loadu_si256(halves + 1);
        __m256i half2 = _mm256_loadu_si256(halves + 2);
        __m256i half3 = _mm256_loadu_si256(halves + 3);
        _mm256_stream_si256((__m256i *)(to + position), half0);
        _mm256_stream_si256((__m256i *)(to + position) + 1, half1);
        _mm256_stream_si256((__m256i *)(to + position) + 2, half2);
        _mm256_stream_si256((__m256i *)(to + position) + 3, half3);
    }
    _mm_sfence();
    memcpy(to + position, from + position, size - position);
}

nvmeio_copy_kernel *nvmeio_copy_stream_kernel(unsigned index)
{
    if (__builtin_cpu_supports("avx512f") && index-- == 0)
        return copy_avx512;
    if (__builtin_cpu_supports("avx2") && index-- == 0)
        return copy_avx2;
    return NULL;
}

#endif
