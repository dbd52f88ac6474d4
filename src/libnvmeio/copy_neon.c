/* copy_neon.c -- copies with the vector instructions that every 64-bit ARM has. */
#include "copy_kernels.h"

#if defined(__aarch64__)

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

/* Two registers a step, because the non-temporal store takes a pair (STNP). */
typedef uint8x16x2_t pair;

static inline pair load_pair(const char *from)
{
    const uint8_t *bytes = (const uint8_t *)from;
    return (pair){{vld1q_u8(bytes), vld1q_u8(bytes + 16)}};
}

static inline void store_pair(char *to, pair vectors)
{
    vst1q_u8((uint8_t *)to, vectors.val[0]);
    vst1q_u8((uint8_t *)to + 16, vectors.val[1]);
}

static inline void stream_pair(char *to, pair vectors)
{
    __asm__ volatile("stnp %q1, %q2, [%0]"
                     :
                     : "r"(to), "w"(vectors.val[0]), "w"(vectors.val[1])
                     : "memory");
}

#define NOTHING() ((void)0)

#define TARGET
#define KERNEL copy_neon
#define VECTOR pair
#define LOAD load_pair
#define STORE store_pair
#define FENCE NOTHING
#define PAGES 1
#include "copy_steps.h"

/* STNP is only a hint to the caches: it is ordered like any other store. */
#define TARGET
#define KERNEL stream_neon
#define VECTOR pair
#define LOAD load_pair
#define STORE stream_pair
#define FENCE NOTHING
#define PAGES 4
#include "copy_steps.h"

static bool always(void)
{
    return true;
}

const struct nvmeio_copy_kernel nvmeio_copy_neon = {
    .name = "neon",
    .works = always,
    .cached = copy_neon,
    .stream = stream_neon,
};

#else

static bool never(void)
{
    return false;
}

const struct nvmeio_copy_kernel nvmeio_copy_neon = {"neon", never, NULL, NULL};

#endif
