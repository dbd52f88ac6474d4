/* copy_x86.c -- copies with the vectors of x86-64.
 *
 * A non-temporal store writes whole cache lines without reading them first, and leaves
 * the caches to others. Each kernel is compiled for its instructions by an attribute,
 * so the rest of the library runs on any x86-64. */
#include "copy_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define NOTHING() ((void)0)

#define TARGET __attribute__((target("avx512f")))
#define KERNEL copy_avx512
#define VECTOR __m512i
#define LOAD(from) _mm512_loadu_si512(from)
#define STORE(to, vector) _mm512_store_si512(to, vector)
#define FENCE NOTHING
#define PAGES 1
#include "copy_steps.h"

#define TARGET __attribute__((target("avx512f")))
#define KERNEL stream_avx512
#define VECTOR __m512i
#define LOAD(from) _mm512_loadu_si512(from)
#define STORE(to, vector) _mm512_stream_si512((__m512i *)(to), vector)
#define FENCE _mm_sfence
#define PAGES 4
#include "copy_steps.h"

#define TARGET __attribute__((target("avx2")))
#define KERNEL copy_avx2
#define VECTOR __m256i
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define STORE(to, vector) _mm256_store_si256((__m256i *)(to), vector)
#define FENCE NOTHING
#define PAGES 1
#include "copy_steps.h"

#define TARGET __attribute__((target("avx2")))
#define KERNEL stream_avx2
#define VECTOR __m256i
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define STORE(to, vector) _mm256_stream_si256((__m256i *)(to), vector)
#define FENCE _mm_sfence
#define PAGES 4
#include "copy_steps.h"

bool nvmeio_copy_has_near_cache(void)
{
    return __builtin_cpu_is("amd");
}

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f");
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2");
}

const struct nvmeio_copy_kernel nvmeio_copy_avx512 = {
    .name = "avx512",
    .works = has_avx512,
    .cached = copy_avx512,
    .stream = stream_avx512,
};

const struct nvmeio_copy_kernel nvmeio_copy_avx2 = {
    .name = "avx2",
    .works = has_avx2,
    .cached = copy_avx2,
    .stream = stream_avx2,
};

#else

bool nvmeio_copy_has_near_cache(void)
{
    return false;
}

static bool never(void)
{
    return false;
}

const struct nvmeio_copy_kernel nvmeio_copy_avx512 = {"avx512", never, NULL, NULL};
const struct nvmeio_copy_kernel nvmeio_copy_avx2 = {"avx2", never, NULL, NULL};

#endif
