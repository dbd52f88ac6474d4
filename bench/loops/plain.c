/* plain.c -- the yardstick: what a program without nvmeio does, in as few lines as
 * possible.
 *
 * A loop on liburing keeps `depth` blocks in flight and waits for an eighth of them. */
#include "loops.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BATCHES = 8, FILES_MAX = 64, PAGE = 4096 };

/* Block i is in file i / blocks_each, and in memory at i blocks from the start. */
struct moves {
    bool reads;
    int *files;
    /* Of files 0, 1, ..., each open only while in flight. NULL: all are open. */
    const char *folder;
    size_t blocks_each;
    size_t count;
    unsigned block;
    unsigned depth;
    /* Of each block in its file. NULL: one block after the other. */
    const int64_t *offsets;
    unsigned char *memory;
};

static struct io_uring *ring_of(unsigned depth, int *error)
{
    static struct io_uring ring;
    static unsigned ring_depth;

    if (ring_depth == depth)
        return &ring;
    if (ring_depth)
        io_uring_queue_exit(&ring);
    ring_depth = 0;
    *error = io_uring_queue_init(
        depth, &ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    if (*error)
        return NULL;
    ring_depth = depth;
    return &ring;
}

static int open_in(const char *folder, size_t i, bool reads)
{
    char name[4200];
    snprintf(name, sizeof(name), "%s/%zu", folder, i);
    return open(name, (reads ? O_RDONLY : O_WRONLY) | O_DIRECT | O_CLOEXEC);
}

static void prepare(struct io_uring *ring, const struct moves *moves, size_t i)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    if (moves->folder)
        moves->files[i] = open_in(moves->folder, i, moves->reads);
    int file = moves->files[i / moves->blocks_each];
    unsigned char *address = moves->memory + i * moves->block;
    uint64_t offset = moves->offsets ? (uint64_t)moves->offsets[i]
                                     : i % moves->blocks_each * moves->block;
    if (moves->reads)
        io_uring_prep_read(sqe, file, address, moves->block, offset);
    else
        io_uring_prep_write(sqe, file, address, moves->block, offset);
    io_uring_sqe_set_data64(sqe, i);
}

static int move(struct io_uring *ring, const struct moves *moves)
{
    size_t begun = 0, done = 0, count = moves->count;
    unsigned batch = moves->depth < BATCHES ? 1 : moves->depth / BATCHES;
    int error = 0;

    while (done < count) {
        for (; begun < count && begun - done < moves->depth; begun++)
            prepare(ring, moves, begun);
        size_t wanted = begun - done < batch ? begun - done : batch;
        int result = io_uring_submit_and_wait(ring, (unsigned)wanted);
        if (result < 0 && result != -EINTR)
            return result;
        struct io_uring_cqe *cqe;
        unsigned head, seen = 0;
        io_uring_for_each_cqe(ring, head, cqe)
        {
            seen++;
            if (cqe->res != (int)moves->block && !error)
                error = cqe->res < 0 ? cqe->res : -ENODATA;
            if (moves->folder)
                close(moves->files[cqe->user_data]);
        }
        io_uring_cq_advance(ring, seen);
        done += seen;
        if (error)
            count = begun; /* wait for what is in flight, and begin no more */
    }
    return error;
}

static int timed_move(const struct moves *moves, struct turn *turn)
{
    int error = 0;
    struct io_uring *ring = ring_of(moves->depth, &error);
    if (!ring)
        return error;
    begin(turn);
    error = move(ring, moves);
    end(turn, (int64_t)(moves->count * moves->block));
    return error;
}

/* OP PATH BLOCK DEPTH BYTES MEMORY: transfer the first BYTES of a file, in order. */
int plain_blocks(char **words, struct turn *turn)
{
    bool reads = strcmp(words[0], "read") == 0;
    int file = open(words[1], (reads ? O_RDONLY : O_WRONLY) | O_DIRECT | O_CLOEXEC);
    size_t size = (size_t)number(words[4]);
    struct moves moves = {.reads = reads,
                          .files = &file,
                          .block = (unsigned)number(words[2]),
                          .depth = (unsigned)number(words[3]),
                          .memory = touched(words[5], size)};
    if (file < 0)
        return -errno;
    moves.count = moves.blocks_each = size / moves.block;
    int error = moves.memory ? timed_move(&moves, turn) : -ENOMEM;
    close(file);
    return error;
}

static int move_files(char **words, struct turn *turn, bool open_before)
{
    size_t count = (size_t)number(words[2]), block = (size_t)number(words[3]);
    int *files = malloc(count * sizeof(*files));
    struct moves moves = {.reads = strcmp(words[0], "read") == 0,
                          .files = files,
                          .folder = open_before ? NULL : words[1],
                          .blocks_each = 1,
                          .count = count,
                          .block = (unsigned)block,
                          .depth = (unsigned)number(words[4]),
                          .memory = touched(words[5], count * block)};
    int error = files && moves.memory ? 0 : -ENOMEM;
    size_t opened = 0;

    for (; !error && open_before && opened < count; opened++) {
        files[opened] = open_in(words[1], opened, moves.reads);
        if (files[opened] < 0)
            error = -errno;
    }
    if (!error)
        error = timed_move(&moves, turn);
    while (opened-- > 0)
        close(files[opened]);
    free(files);
    return error;
}

/* OP FOLDER COUNT BLOCK DEPTH MEMORY: transfer files 0, 1, ..., of one block each. */
int plain_files(char **words, struct turn *turn)
{
    return move_files(words, turn, false);
}

/* The same, with all files open before. */
int plain_open_files(char **words, struct turn *turn)
{
    return move_files(words, turn, true);
}

static int make_files(const char *path, int *files, size_t count, off_t size)
{
    for (size_t i = 0; i < count; i++) {
        char name[4200];
        snprintf(name, sizeof(name), "%s.%zu", path, i);
        files[i] = open(name, O_WRONLY | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0666);
        if (files[i] < 0 || fallocate(files[i], 0, 0, size))
            return -errno;
    }
    return 0;
}

/* PATH COUNT BLOCK DEPTH BYTES MEMORY: write new files PATH.0, PATH.1, ..., each of
 * BYTES / COUNT. The time includes making them and reserving their space. */
int plain_fresh(char **words, struct turn *turn)
{
    int files[FILES_MAX] = {0};
    size_t count = (size_t)number(words[1]), size = (size_t)number(words[4]);
    struct moves moves = {.files = files,
                          .block = (unsigned)number(words[2]),
                          .depth = (unsigned)number(words[3]),
                          .memory = touched(words[5], size)};
    int error = count > FILES_MAX ? -EINVAL : 0;
    struct io_uring *ring = ring_of(moves.depth, &error);

    if (!ring || error || !moves.memory)
        return error ? error : -ENOMEM;
    moves.count = size / moves.block;
    moves.blocks_each = moves.count / count;
    begin(turn);
    error = make_files(words[0], files, count, (off_t)(size / count));
    if (!error)
        error = move(ring, &moves);
    for (size_t i = 0; i < count; i++)
        if (files[i] > 0)
            close(files[i]);
    end(turn, (int64_t)size);
    return error;
}

/* PATH RECORD DEPTH COUNT MEMORY: read COUNT records from random places of a file. */
int plain_gather(char **words, struct turn *turn)
{
    static uint64_t state = 88172645463325252u;
    int file = open(words[0], O_RDONLY | O_DIRECT | O_CLOEXEC);
    struct stat about;
    size_t count = (size_t)number(words[3]), block = (size_t)number(words[1]);
    int64_t *offsets = malloc(count * sizeof(*offsets));
    struct moves moves = {.reads = true,
                          .files = &file,
                          .blocks_each = count,
                          .count = count,
                          .block = (unsigned)block,
                          .depth = (unsigned)number(words[2]),
                          .offsets = offsets,
                          .memory = touched(words[4], count * block)};
    int error = file < 0 || fstat(file, &about) ? -errno : 0;

    if (!offsets || !moves.memory)
        error = -ENOMEM;
    for (size_t i = 0; !error && i < count; i++)
        offsets[i] = (int64_t)(draw(&state, (uint64_t)about.st_size / block) * block);
    if (!error)
        error = timed_move(&moves, turn);
    free(offsets);
    if (file >= 0)
        close(file);
    return error;
}

/* PATH COUNT: open and close a file with O_DIRECT, COUNT times. */
int plain_opens(char **words, struct turn *turn)
{
    int64_t count = number(words[1]);

    begin(turn);
    for (int64_t i = 0; i < count; i++) {
        int file = open(words[0], O_RDONLY | O_DIRECT | O_CLOEXEC);
        if (file < 0)
            return -errno;
        close(file);
    }
    end(turn, count);
    return 0;
}

struct readers {
    int file;
    uint64_t pages;
    unsigned char *memory;
    int64_t count;
};

static int read_pages(void *context, unsigned index)
{
    struct readers *readers = context;
    uint64_t state = 88172645463325252u + index;

    for (int64_t i = 0; i < readers->count; i++) {
        off_t offset = (off_t)(draw(&state, readers->pages) * PAGE);
        ssize_t got =
            pread(readers->file, readers->memory + (size_t)index * PAGE, PAGE, offset);
        if (got != PAGE)
            return got < 0 ? -errno : -ENODATA;
    }
    return 0;
}

/* PATH THREADS COUNT: start THREADS threads, each of which reads COUNT pages, one by
 * one. */
int plain_threads(char **words, struct turn *turn)
{
    unsigned threads = (unsigned)number(words[1]);
    struct stat about;
    struct readers readers = {.file = open(words[0], O_RDONLY | O_DIRECT | O_CLOEXEC),
                              .memory = touched("huge", (size_t)threads * PAGE),
                              .count = number(words[2])};
    if (readers.file < 0 || fstat(readers.file, &about))
        return -errno;
    readers.pages = (uint64_t)about.st_size / PAGE;
    begin(turn);
    int error = readers.memory ? in_threads(threads, read_pages, &readers) : -ENOMEM;
    end(turn, readers.count * threads * PAGE);
    close(readers.file);
    return error;
}
