/* Reads and gathers of partly cached files: which bytes come from the page cache, which
 * from the device, and what is done if the kernel does not report residence.
 *
 * syscall(2), open(2) and preadv2(2) are replaced by functions of this program, which
 * can refuse or take their time.
 */
#include <sys/mman.h>
#include <sys/uio.h>

#include "system_calls.h"
#include "transfer.h"

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

#define RECORDS 40
#define STRIDE ((int64_t)(64 * KIB))
#define FILE_BYTES ((size_t)(RECORDS * STRIDE))

static struct {
    int no_cachestat; /* an errno, or 0 */
    bool no_second;   /* open files cannot be opened again */
    bool interrupted; /* the thread does not run for a while in each try of a byte */
    bool virtual;     /* the drive delivers a missing byte before the try ends */
} answers;

static atomic_uint asked; /* calls of cachestat(2) */

static bool answer(long number, const long *words, long *result)
{
    (void)words;
    if (number != SYS_cachestat)
        return false;
    atomic_fetch_add(&asked, 1);
    *result = -answers.no_cachestat;
    return answers.no_cachestat != 0;
}

int open(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    int mode = flags & O_CREAT ? va_arg(list, int) : 0;
    va_end(list);

    if (answers.no_second && strncmp(path, "/proc/self/fd/", 14) == 0) {
        errno = EACCES;
        return -1;
    }
    return openat(AT_FDCWD, path, flags, mode);
}

ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    long words[6] = {fd, (long)parts, count, offset, 0, flags};
    char byte;

    if (flags & RWF_NOWAIT && answers.interrupted)
        usleep(1000);
    if (flags & RWF_NOWAIT && answers.virtual)
        CHECK(pread(fd, &byte, 1, offset) == 1);
    return call_kernel(SYS_preadv2, words);
}

static const char *path;

/* The file, mapped: the kernel may drop a page at any moment, and some machines drop
 * those that nobody has mapped before there is need (DAMON's pageout). */
static const volatile char *map;

/* Cache nothing, or what was written only. */
static void drop_pages(int fd)
{
    if (map)
        CHECK(munmap((void *)map, FILE_BYTES) == 0);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    map = mmap(NULL, FILE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(map != MAP_FAILED);
    /* A page that is touched brings no others with it. */
    CHECK(madvise((void *)map, FILE_BYTES, MADV_RANDOM) == 0);
}

/* Cache every `step`-th record, and nothing else; 0: nothing. */
static void warm(int step)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    CHECK(fd >= 0);
    drop_pages(fd);
    for (int i = 0; step && i < RECORDS; i += step)
        (void)map[i * STRIDE];
    close(fd);
}

static int64_t pages_cached(void)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int64_t pages = nvmeio_cached_pages(fd, 0, FILE_BYTES);

    close(fd);
    return pages;
}

/* Bytes that came from the page cache, and from the device. */
struct ways {
    uint64_t buffered, past, blocks;
};

/* Gather records of `size` bytes, `stride` apart, and check their bytes. */
static struct ways gather(const char *engine, struct nvmeio_file *file, int count,
                          int64_t size, int64_t stride)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct guarded memory = guarded_new((size_t)(count * size), 0);
    int64_t offsets[RECORDS], places[RECORDS];
    struct nvmeio_request *request;
    struct nvmeio_stats stats;
    size_t offender;

    /* Not in the order of the file, so that neighbours are not adjacent in memory. */
    for (int i = 0; i < count; i++) {
        offsets[i] = (count - 1 - i) * stride;
        places[i] = i * size;
    }
    const struct nvmeio_gather what = {.op = NVMEIO_OP_READ,
                                       .file = file,
                                       .address = memory.address,
                                       .size = memory.size,
                                       .count = (size_t)count,
                                       .offsets = offsets,
                                       .sizes = &size,
                                       .one_size = true,
                                       .places = places};
    CHECK(nvmeio_submit_gather(handle, &what, &request, &offender) == 0);
    CHECK(finish(request).result == count * size);
    char *expected = malloc((size_t)size);
    for (int i = 0; i < count; i++) {
        fill(expected, (size_t)size, (uint64_t)offsets[i], 1);
        CHECK(memcmp(memory.address + places[i], expected, (size_t)size) == 0);
    }
    nvmeio_handle_stats(handle, &stats);
    free(expected);
    guarded_free(&memory);
    nvmeio_handle_close(handle);
    return (struct ways){stats.bytes_buffered, stats.bytes_direct + stats.bytes_bounced,
                         stats.blocks};
}

/* Whether `records` of them came from the page cache, and the others from the device.
 * */
static bool came(struct ways ways, int records)
{
    return ways.buffered == (uint64_t)records * PAGE &&
           ways.past == (uint64_t)(RECORDS - records) * PAGE;
}

static void test_cached_records_come_from_the_page_cache(const char *engine)
{
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);

    for (int step = 0; step < 5; step++) {
        int records = step ? (RECORDS + step - 1) / step : 0;
        warm(step);
        CHECK(pages_cached() == records);
        atomic_store(&asked, 0);
        CHECK(came(gather(engine, file, RECORDS, PAGE, STRIDE), records));
        /* Missing pages are still missing. */
        CHECK(pages_cached() == records);
        /* For a cold file, only samples are checked. */
        CHECK(step || atomic_load(&asked) <= 16 + 1);
    }
    nvmeio_file_release(file);
}

/* Neighbours are read by one I/O, from the page cache if it has all of them. */
static void test_merged_records_are_read_together(const char *engine)
{
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    const int64_t size = 1000, count = 12; /* of the first three pages */

    for (int missing = 0; missing < 4; missing++) {
        warm(0);
        for (size_t i = 0; i < 3; i++)
            if ((int)i != missing)
                (void)map[i * PAGE];
        struct ways ways = gather(engine, file, (int)count, size, size);
        CHECK(ways.blocks == 1);
        CHECK((missing < 3 ? ways.past : ways.buffered) == (uint64_t)(count * size));
    }
    nvmeio_file_release(file);
}

static void test_demanded_direct_io_bypasses_the_page_cache(const char *engine)
{
    struct nvmeio_file *always = open_file(path, O_RDONLY, NVMEIO_DIRECT_ALWAYS);
    struct nvmeio_file *never = open_file(path, O_RDONLY, NVMEIO_DIRECT_NEVER);

    warm(1);
    CHECK(came(gather(engine, always, RECORDS, PAGE, STRIDE), 0));
    warm(0);
    CHECK(came(gather(engine, never, RECORDS, PAGE, STRIDE), RECORDS));
    nvmeio_file_release(always);
    nvmeio_file_release(never);
}

/* Bytes that another process wrote are only in the page cache. */
static void test_dirty_pages_are_read_too(const char *engine)
{
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    char page[PAGE] = {0};

    warm(0);
    for (int i = 0; i < RECORDS; i += 2)
        CHECK(pwrite(fd, page, PAGE, i * STRIDE) == (ssize_t)PAGE);
    for (int i = 0; i < RECORDS; i += 2) {
        fill(page, PAGE, (uint64_t)(i * STRIDE), 1);
        CHECK(pwrite(fd, page, PAGE, i * STRIDE) == (ssize_t)PAGE);
        CHECK(map[i * STRIDE] == page[0]);
    }
    CHECK(came(gather(engine, file, RECORDS, PAGE, STRIDE), RECORDS / 2));
    CHECK(fsync(fd) == 0);
    close(fd);
    nvmeio_file_release(file);
}

/* Before Linux 6.5, under a filter of system calls, and for another user's file: then a
 * byte of each sample is read, if that needs no wait. */
static void test_without_residence_a_few_bytes_are_tried(const char *engine)
{
    static const int errors[] = {ENOSYS, EPERM};

    for (int i = 0; i < 2; i++) {
        struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
        answers.no_cachestat = errors[i];
        CHECK(pages_cached() == -errors[i]);
        warm(1);
        answers.interrupted = true;
        CHECK(came(gather(engine, file, RECORDS, PAGE, STRIDE), RECORDS));
        answers.interrupted = false;
        warm(0);
        answers.virtual = i;
        CHECK(came(gather(engine, file, RECORDS, PAGE, STRIDE), 0));
        answers.no_cachestat = 0;
        answers.virtual = false;
        /* The byte that was tried brings no others with it. */
        CHECK(pages_cached() <= 1);
        nvmeio_file_release(file);
    }
}

/* A failure to read from the page cache does not end O_DIRECT. */
static void test_a_file_that_cannot_be_opened_again_stays_direct(const char *engine)
{
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct nvmeio_file_info info;

    warm(1);
    answers.no_second = true;
    CHECK(came(gather(engine, file, RECORDS, PAGE, STRIDE), 0));
    answers.no_second = false;
    nvmeio_file_get_info(file, &info);
    CHECK(info.direct);
    CHECK(came(gather(engine, file, RECORDS, PAGE, STRIDE), RECORDS));
    nvmeio_file_release(file);
}

/* Cache a range, and nothing else. */
static void warm_range(size_t begin, size_t end)
{
    warm(0);
    for (size_t at = begin; at < end; at += PAGE)
        (void)map[at];
}

/* How many bytes of one read come from the page cache. All bytes must be right. */
static uint64_t buffered_of(const char *engine, enum nvmeio_direct direct, bool perform,
                            size_t residue, size_t size, int64_t offset)
{
    struct nvmeio_config config = config_of(engine);

    config.block_bytes = perform ? MIB : 64 * KIB;
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, direct);
    struct guarded memory = guarded_new(size, residue);
    struct nvmeio_transfer t =
        transfer_of(NVMEIO_OP_READ, file, memory.address, size, offset);
    struct nvmeio_stats stats;

    CHECK(carry_out_by(perform, handle, &t).result == (int64_t)size);
    char *expected = malloc(size);
    fill(expected, size, (uint64_t)offset, 1);
    CHECK(memcmp(memory.address, expected, size) == 0);
    free(expected);
    nvmeio_handle_stats(handle, &stats);
    CHECK(stats.bytes_buffered + stats.bytes_direct + stats.bytes_bounced == size);
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
    return stats.bytes_buffered;
}

static void test_a_small_read_comes_from_where_all_of_it_is(const char *engine)
{
    const size_t size = 80 * KIB;

    for (int perform = 0; perform < 2; perform++)
        for (size_t residue = 0; residue < 2; residue++)
            for (int64_t offset = 0; offset <= (int64_t)PAGE; offset += 2048) {
                warm_range(0, 2 * size);
                CHECK(buffered_of(engine, NVMEIO_DIRECT_AUTO, perform, residue, size,
                                  offset) == size);
                CHECK(buffered_of(engine, NVMEIO_DIRECT_ALWAYS, perform, 0, size, 0) ==
                      0);
                warm_range(0, size);
                CHECK(buffered_of(engine, NVMEIO_DIRECT_AUTO, perform, residue, size,
                                  4 * (int64_t)PAGE + offset) < size);
            }
    warm(0);
    CHECK(buffered_of(engine, NVMEIO_DIRECT_AUTO, true, 0, size, 0) == 0);
    CHECK(pages_cached() == 0);
}

/* A file of which many reads found nothing is looked up less often, but it is; one that
 * is no longer cached is read past the page cache at once. */
static void test_a_file_that_becomes_warm_or_cold_is_noticed(const char *engine)
{
    struct nvmeio_config config = config_of(engine);
    struct nvmeio_handle *handle = open_handle(&config);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    struct guarded memory = guarded_new(PAGE, 0);
    struct nvmeio_stats stats;

    warm(0);
    atomic_store(&asked, 0);
    for (int i = 0; i < 1000; i++)
        read_at(handle, file, memory.address, PAGE, 0);
    CHECK(atomic_load(&asked) < 300);
    warm(1);
    for (int i = 0; i < 100; i++)
        read_at(handle, file, memory.address, PAGE, 0);
    nvmeio_handle_stats(handle, &stats);
    CHECK(stats.bytes_buffered >= 90 * PAGE && stats.bytes_buffered <= 100 * PAGE);
    uint64_t before = stats.bytes_buffered;
    warm(0);
    for (int64_t i = 0; i < 600; i++)
        read_at(handle, file, memory.address, PAGE, i * (int64_t)PAGE);
    nvmeio_handle_stats(handle, &stats);
    CHECK(stats.bytes_buffered == before && pages_cached() == 0);
    guarded_free(&memory);
    nvmeio_file_release(file);
    nvmeio_handle_close(handle);
}

/* Blocks that the page cache has come from there, the others from the device. */
static void test_a_large_read_comes_from_both(const char *engine)
{
    for (size_t residue = 0; residue < 2; residue++) {
        warm(0);
        CHECK(buffered_of(engine, NVMEIO_DIRECT_AUTO, false, residue, FILE_BYTES, 0) ==
              0);
        CHECK(pages_cached() == 0);
        warm_range(0, FILE_BYTES);
        CHECK(buffered_of(engine, NVMEIO_DIRECT_AUTO, false, residue, FILE_BYTES, 0) ==
              FILE_BYTES);
        warm_range(PAGE, MIB + PAGE);
        CHECK(buffered_of(engine, NVMEIO_DIRECT_AUTO, false, residue, FILE_BYTES, 0) ==
              MIB - 64 * KIB);
        warm_range(PAGE, MIB + PAGE);
        uint64_t ragged = buffered_of(engine, NVMEIO_DIRECT_AUTO, false, residue,
                                      FILE_BYTES - 5000, 700);
        CHECK(ragged >= MIB / 2 && ragged < MIB + PAGE);
    }
}

/* Then a read of which a few bytes are there is one through the page cache. */
static void test_without_residence_a_read_tries_a_few_bytes(const char *engine)
{
    answers.no_cachestat = EPERM;
    warm_range(0, FILE_BYTES);
    CHECK(buffered_of(engine, NVMEIO_DIRECT_AUTO, false, 0, FILE_BYTES, 0) ==
          FILE_BYTES);
    warm_range(0, MIB);
    CHECK(buffered_of(engine, NVMEIO_DIRECT_AUTO, false, 0, FILE_BYTES, 0) == 0);
    warm(0);
    CHECK(buffered_of(engine, NVMEIO_DIRECT_AUTO, true, 0, 64 * KIB, 0) == 0);
    answers.no_cachestat = 0;
    CHECK(pages_cached() <= 1);
}

static void test_pages_are_counted(void)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    warm(1);
    CHECK(nvmeio_cached_pages(fd, 0, 0) == 0);
    CHECK(nvmeio_cached_pages(fd, 1, 1) == 1);
    CHECK(nvmeio_cached_pages(fd, PAGE, PAGE) == 0);
    CHECK(nvmeio_cached_pages(fd, PAGE - 1, (size_t)STRIDE) == 2);
    CHECK(nvmeio_try_cached(fd, 1) == 1);
    CHECK(nvmeio_try_cached(fd, (int64_t)FILE_BYTES) == 0);
    close(fd);
    CHECK(nvmeio_cached_pages(fd, 0, PAGE) == -EBADF);
    CHECK(nvmeio_try_cached(fd, 1) == -EBADF);
}

int main(void)
{
    const char *name;
    struct nvmeio_file_info info;

    begin();
    path = path_in(test_folder());
    make_file(path, FILE_BYTES, 1);
    struct nvmeio_file *file = open_file(path, O_RDONLY, NVMEIO_DIRECT_AUTO);
    nvmeio_file_get_info(file, &info);
    nvmeio_file_release(file);
    warm(0);
    if (!info.direct)
        SKIP("the file system has no O_DIRECT");
    if (pages_cached() != 0)
        SKIP("the page cache keeps the file, or the kernel does not report it");
    test_pages_are_counted();
    FOR_EACH_ENGINE(name)
    {
        test_cached_records_come_from_the_page_cache(name);
        test_merged_records_are_read_together(name);
        test_demanded_direct_io_bypasses_the_page_cache(name);
        test_dirty_pages_are_read_too(name);
        test_without_residence_a_few_bytes_are_tried(name);
        test_a_file_that_cannot_be_opened_again_stays_direct(name);
        test_a_small_read_comes_from_where_all_of_it_is(name);
        test_a_file_that_becomes_warm_or_cold_is_noticed(name);
        test_a_large_read_comes_from_both(name);
        test_without_residence_a_read_tries_a_few_bytes(name);
    }
    return 0;
}
