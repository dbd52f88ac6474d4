/* copy_x86.c -- copies with the vectors of x86-64.
 *
 * A non-temporal store writes whole cache lines without reading them first, and leaves
 * the caches to others. Each kernel is compiled for its instructions by an attribute,
 * so the rest of the library runs on any x86-64. */
#include "copy_kernels.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define NOTHING() ((void)0)

/* Bits of XCR0: the registers that the kernel saves. */
#define XMM 0x2
#define YMM 0x4
#define ZMM 0xe0

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
    unsigned eax, ebx = 0, ecx, edx;

    __get_cpuid(0, &eax, &ebx, &ecx, &edx);
    return ebx == signature_AMD_ebx;
}

/* Whether the processor has an extension, and the kernel saves its registers. zig's
 * __builtin_cpu_supports() always denies (0.17.1). */
static bool has(unsigned extension, unsigned registers)
{
    unsigned eax, ebx, ecx, edx;

    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE))
        return false;
    __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    if ((eax & registers) != registers)
        return false;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && ebx & extension;
}

static bool has_avx512(void)
{
    return has(bit_AVX512F, XMM | YMM | ZMM);
}

static bool has_avx2(void)
{
    return has(bit_AVX2, XMM | YMM);
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
