/* copy.c -- chooses the kernel for each copy.
 *
 * Small copies use the caches, because their data is likely to be there and to be used
 * soon. Large ones bypass them. The kernels are in copy_x86.c and copy_neon.c. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "copy_internal.h"
#include "copy_kernels.h"

/* No cache is shared by few cores and much larger. */
#define STREAM_BYTES_MAX ((size_t)64 << 20)

/* The least size for which memcpy(3) may use a string instruction. */
#define STRING_BYTES_MIN ((size_t)2 << 10)

/* A large copy checks once per this many bytes whether its target is in memory. */
#define PIECE_BYTES ((size_t)2 << 20)

static bool always(void)
{
    return true;
}

static void copy_portable(void *target, const void *source, size_t size)
{
    memcpy(target, source, size);
}

/* memcpy(3) chooses its instructions itself. It bypasses the caches only for much
 * larger copies, if at all. */
const struct nvmeio_copy_kernel nvmeio_copy_portable = {
    .name = "portable",
    .works = always,
    .cached = copy_portable,
    .stream = copy_portable,
};

/* In order of preference for large copies. */
static const struct nvmeio_copy_kernel *const kernels[] = {
    &nvmeio_copy_avx512,
    &nvmeio_copy_avx2,
    &nvmeio_copy_neon,
    &nvmeio_copy_portable,
};

#define KERNEL_COUNT (sizeof(kernels) / sizeof(kernels[0]))

/* `selected` is the kernel for all copies, or NULL to choose by size. `best_stream` is
 * the best one for large copies, once it is known. Relaxed: kernels are constants, so a
 * copy reads nothing else that depends on the pointer. */
static _Atomic(const struct nvmeio_copy_kernel *) selected;
static _Atomic(const struct nvmeio_copy_kernel *) best_stream;

static const struct nvmeio_copy_kernel *large_kernel(void)
{
    const struct nvmeio_copy_kernel *kernel =
        atomic_load_explicit(&selected, memory_order_relaxed);

    if (!kernel)
        kernel = atomic_load_explicit(&best_stream, memory_order_relaxed);
    if (kernel)
        return kernel;
    unsigned i = 0;
    while (!kernels[i]->works())
        i++;
    atomic_store_explicit(&best_stream, kernels[i], memory_order_relaxed);
    return kernels[i];
}

/* Within the caches, memcpy(3) is the fastest (docs/decisions.md). */
static const struct nvmeio_copy_kernel *small_kernel(void)
{
    const struct nvmeio_copy_kernel *kernel =
        atomic_load_explicit(&selected, memory_order_relaxed);
    return kernel ? kernel : &nvmeio_copy_portable;
}

/* From some size on, memcpy(3) is a string instruction (rep movsb), which takes twenty
 * times as long if the target is less than a cache line above the source, modulo a
 * page: 64 KiB at 2 GB/s (EPYC with AVX2, 2026-11-27). Large arrays begin 16 bytes
 * after a page, and bounces at one. */
static bool is_slow_string(const void *target, const void *source, size_t size)
{
    return size >= STRING_BYTES_MIN &&
           nvmeio_copy_is_above(target, source, NVMEIO_LINE_BYTES);
}

static void copy_small(void *target, const void *source, size_t size)
{
    bool slow = is_slow_string(target, source, size);
    (slow ? large_kernel() : small_kernel())->cached(target, source, size);
}

/* Whether the page at this address is not in memory. Nearly all such pages were never
 * written. */
static bool is_untouched(const char *address)
{
    uintptr_t page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    unsigned char resident;
    void *page = (void *)((uintptr_t)address / page_bytes * page_bytes);

    return mincore(page, 1, &resident) == 0 && !(resident & 1);
}

/* Copy piece by piece, because the target may be untouched from some point on. On the
 * first write to an untouched page, the kernel zeroes it through the caches, and
 * non-temporal stores would have to wait for that. memcpy(3) is no better there: its
 * string instruction is slow if each page faults. */
static void copy_large(char *target, const char *source, size_t size)
{
    const struct nvmeio_copy_kernel *kernel = large_kernel();

    while (size > 0) {
        size_t piece = size < 2 * PIECE_BYTES ? size : PIECE_BYTES;
        bool untouched = is_untouched(target + piece / 2);
        (untouched ? kernel->cached : kernel->stream)(target, source, piece);
        target += piece;
        source += piece;
        size -= piece;
    }
}

/* The size of the cache that this processor's cores share, or 0. Reading a file is a
 * cancellation point, and changes errno; a copy is and does neither. */
static size_t near_cache_bytes(void)
{
    int cancelling, error = errno;
    size_t kib = 0;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelling);
    FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "re");
    if (file) {
        if (fscanf(file, "%zuK", &kib) != 1)
            kib = 0;
        fclose(file);
    }
    pthread_setcancelstate(cancelling, NULL);
    errno = error;
    return kib << 10;
}

size_t nvmeio_copy_stream_bytes(void)
{
    static atomic_size_t known;
    size_t bytes = atomic_load_explicit(&known, memory_order_relaxed);

    if (bytes > 0)
        return bytes;
    bytes = nvmeio_copy_has_near_cache() ? near_cache_bytes() / 2 : 0;
    if (bytes < NVMEIO_COPY_STREAM_BYTES_MIN)
        bytes = NVMEIO_COPY_STREAM_BYTES_MIN;
    if (bytes > STREAM_BYTES_MAX)
        bytes = STREAM_BYTES_MAX;
    atomic_store_explicit(&known, bytes, memory_order_relaxed);
    return bytes;
}

void nvmeio_copy_part(void *target, const void *source, size_t size, size_t total)
{
    if (total < NVMEIO_COPY_STREAM_BYTES_MIN || total < nvmeio_copy_stream_bytes())
        copy_small(target, source, size);
    else
        copy_large(target, source, size);
}

void nvmeio_copy_cold(void *target, const void *source, size_t size)
{
    bool large = size >= NVMEIO_COPY_COLD_STREAM_BYTES;
    nvmeio_copy_part(target, source, size, large ? SIZE_MAX : size);
}

bool nvmeio_copy_overlaps(const void *target, const void *source, size_t size)
{
    uintptr_t a = (uintptr_t)target, b = (uintptr_t)source;
    return (a > b ? a - b : b - a) < size;
}

void nvmeio_copy(void *target, const void *source, size_t size)
{
    if (size == 0)
        return; /* C forbids null pointers in memcpy(3), even for 0 bytes */
    if (nvmeio_copy_overlaps(target, source, size))
        memmove(target, source, size);
    else
        nvmeio_copy_part(target, source, size, size);
}

const char *nvmeio_copy_kernel_at(unsigned index, int *works)
{
    if (index >= KERNEL_COUNT)
        return NULL;
    *works = kernels[index]->works();
    return kernels[index]->name;
}

static const struct nvmeio_copy_kernel *find_kernel(const char *name)
{
    for (unsigned i = 0; i < KERNEL_COUNT; i++) {
        if (strcmp(kernels[i]->name, name) == 0)
            return kernels[i];
    }
    return NULL;
}

int nvmeio_copy_select(const char *name)
{
    const struct nvmeio_copy_kernel *kernel = NULL;

    if (strcmp(name, "auto") != 0) {
        kernel = find_kernel(name);
        if (!kernel)
            return -EINVAL;
        if (!kernel->works())
            return -ENOTSUP;
    }
    atomic_store_explicit(&selected, kernel, memory_order_relaxed);
    return 0;
}

void nvmeio_copy_selected(const char **small, const char **large)
{
    *small = small_kernel()->name;
    *large = large_kernel()->name;
}
