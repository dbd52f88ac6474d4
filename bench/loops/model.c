/* model.c -- the yardstick for model files: what a program without nvmeio does to load
 * a file into new memory, or to save a new file durably. */
#include "loops.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; libc headers may be older */
#endif

enum { CHUNK = 32 << 20, CACHED_CHUNK = 8 << 20, HUGE = 2 << 20 };

struct fresh {
    unsigned char *mapped, *start;
    size_t size;
};

/* Map new memory, for huge pages, without touching it. */
static struct fresh fresh_memory(size_t size)
{
    struct fresh fresh = {.size = (size + HUGE - 1) & ~(size_t)(HUGE - 1)};

    fresh.mapped = mmap(NULL, fresh.size + HUGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh.mapped == MAP_FAILED)
        abort();
    fresh.start = fresh.mapped + (-(uintptr_t)fresh.mapped & (HUGE - 1));
    madvise(fresh.start, fresh.size, MADV_HUGEPAGE);
    return fresh;
}

static void forget(struct fresh *fresh)
{
    munmap(fresh->mapped, fresh->size + HUGE);
}

static int take(struct io_uring *ring, unsigned least, unsigned *in_flight)
{
    int error = io_uring_submit_and_wait(ring, least);
    struct io_uring_cqe *cqe;
    unsigned head, seen = 0;

    if (error < 0 && error != -EINTR)
        return error;
    error = 0;
    io_uring_for_each_cqe(ring, head, cqe)
    {
        seen++;
        if (cqe->res <= 0)
            error = cqe->res ? cqe->res : -ENODATA;
    }
    io_uring_cq_advance(ring, seen);
    *in_flight -= seen;
    return error;
}

/* Read or write `size` bytes in blocks. For reads, memory is populated a chunk
 * ahead. */
static int stream(int file, bool reads, unsigned char *memory, size_t size,
                  size_t block, unsigned depth)
{
    struct io_uring ring;
    unsigned in_flight = 0;
    int error = io_uring_queue_init(
        depth, &ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);

    if (error)
        return error;
    for (size_t at = 0; at < size && !error; at += block) {
        if (reads && at % CHUNK == 0) {
            size_t left = size - at;
            io_uring_submit(&ring);
            madvise(memory + at, left < CHUNK ? left : CHUNK, MADV_POPULATE_WRITE);
        }
        while (in_flight == depth && !error)
            error = take(&ring, depth / 8 ? depth / 8 : 1, &in_flight);
        struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
        if (reads)
            io_uring_prep_read(sqe, file, memory + at, (unsigned)block, at);
        else
            io_uring_prep_write(sqe, file, memory + at, (unsigned)block, at);
        in_flight++;
    }
    while (in_flight)
        error = take(&ring, in_flight, &in_flight) ?: error;
    io_uring_queue_exit(&ring);
    return error;
}

/* PATH BLOCK DEPTH BYTES: load a file past the page cache into new memory. */
int model_load(char **words, struct turn *turn)
{
    size_t block = (size_t)number(words[1]), size = (size_t)number(words[3]);
    int file = open(words[0], O_RDONLY | O_DIRECT | O_CLOEXEC);

    if (file < 0)
        return -errno;
    begin(turn);
    struct fresh fresh = fresh_memory(size);
    int error =
        stream(file, true, fresh.start, size, block, (unsigned)number(words[2]));
    end(turn, (int64_t)size);
    forget(&fresh);
    close(file);
    return error;
}

struct cached {
    int file;
    unsigned char *memory;
    size_t size;
    _Atomic size_t next;
};

static int copy_chunks(void *context, unsigned index)
{
    struct cached *cached = context;
    size_t at;

    (void)index;
    while ((at = atomic_fetch_add(&cached->next, CACHED_CHUNK)) < cached->size) {
        size_t left = cached->size - at,
               part = left < CACHED_CHUNK ? left : CACHED_CHUNK;
        madvise(cached->memory + at, part, MADV_POPULATE_WRITE);
        for (size_t done = 0; done < part;) {
            ssize_t got = pread(cached->file, cached->memory + at + done, part - done,
                                (off_t)(at + done));
            if (got <= 0)
                return got < 0 ? -errno : -ENODATA;
            done += (size_t)got;
        }
    }
    return 0;
}

/* PATH THREADS BYTES: load a file from the page cache into new memory. */
int model_cached(char **words, struct turn *turn)
{
    struct cached cached = {.file = open(words[0], O_RDONLY | O_CLOEXEC),
                            .size = (size_t)number(words[2])};

    if (cached.file < 0)
        return -errno;
    begin(turn);
    struct fresh fresh = fresh_memory(cached.size);
    cached.memory = fresh.start;
    int error = in_threads((unsigned)number(words[1]), copy_chunks, &cached);
    end(turn, (int64_t)cached.size);
    forget(&fresh);
    close(cached.file);
    return error;
}

/* PATH BLOCK DEPTH BYTES: save a new file, whose space is reserved first, and sync
 * it. */
int model_save(char **words, struct turn *turn)
{
    size_t block = (size_t)number(words[1]), size = (size_t)number(words[3]);
    unsigned char *memory = touched("huge", size);

    if (!memory)
        return -ENOMEM;
    begin(turn);
    int file = open(words[0], O_WRONLY | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0666);
    if (file < 0 || fallocate(file, 0, 0, (off_t)size))
        return -errno;
    int error = stream(file, false, memory, size, block, (unsigned)number(words[2]));
    if (!error && fsync(file))
        error = -errno;
    close(file);
    end(turn, (int64_t)size);
    unlink(words[0]);
    return error;
}
