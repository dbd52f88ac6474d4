/* both.c -- the yardstick for data that is read, changed and written back. Every block
 * of a file is read and then written to the same place. Reads and writes are in flight
 * together. */
#include "loops.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <unistd.h>

enum { BATCHES = 8 };

struct slot {
    size_t block; /* of the file */
    bool writes;
};

struct state {
    struct io_uring ring;
    struct slot *slots;
    unsigned char *memory;
    size_t count, begun, done;
    unsigned block, depth;
    int file;
};

static void prepare(struct state *state, unsigned i)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&state->ring);
    struct slot *slot = &state->slots[i];
    unsigned char *address = state->memory + (size_t)i * state->block;
    uint64_t offset = (uint64_t)slot->block * state->block;

    if (slot->writes)
        io_uring_prep_write(sqe, state->file, address, state->block, offset);
    else
        io_uring_prep_read(sqe, state->file, address, state->block, offset);
    io_uring_sqe_set_data64(sqe, i);
}

static void begin_block(struct state *state, unsigned i)
{
    state->slots[i] = (struct slot){.block = state->begun++};
    prepare(state, i);
}

static int finish(struct state *state, const struct io_uring_cqe *cqe)
{
    unsigned i = (unsigned)cqe->user_data;

    if (cqe->res != (int)state->block)
        return cqe->res < 0 ? cqe->res : -EIO;
    if (!state->slots[i].writes) {
        state->slots[i].writes = true;
        prepare(state, i);
        return 0;
    }
    state->done++;
    if (state->begun < state->count)
        begin_block(state, i);
    return 0;
}

static int move(struct state *state)
{
    int error = 0;

    for (unsigned i = 0; i < state->depth && state->begun < state->count; i++)
        begin_block(state, i);
    while (!error && state->done < state->count) {
        size_t left = state->begun - state->done;
        unsigned batch = state->depth < BATCHES ? 1 : state->depth / BATCHES;
        struct io_uring_cqe *cqe;
        unsigned head, seen = 0;

        error = io_uring_submit_and_wait(&state->ring, left < batch ? left : batch);
        error = error < 0 ? error : 0;
        io_uring_for_each_cqe(&state->ring, head, cqe)
        {
            int found = finish(state, cqe);
            error = error ? error : found;
            seen++;
        }
        io_uring_cq_advance(&state->ring, seen);
    }
    return error;
}

/* PATH BLOCK DEPTH SIZE MEMORY: read all of a file and write it back, with DEPTH blocks
 * in memory. */
int plain_both(char **words, struct turn *turn)
{
    struct state state = {.block = (unsigned)number(words[1]),
                          .depth = (unsigned)number(words[2])};
    size_t size = (size_t)number(words[3]);

    state.count = size / state.block;
    state.memory = touched(words[4], (size_t)state.block * state.depth);
    state.slots = calloc(state.depth, sizeof(*state.slots));
    state.file = open(words[0], O_RDWR | O_DIRECT | O_CLOEXEC);
    int error = state.file < 0 ? -errno : 0;
    if (!error && (!state.memory || !state.slots))
        error = -ENOMEM;
    if (!error)
        error = io_uring_queue_init(state.depth, &state.ring,
                                    IORING_SETUP_SINGLE_ISSUER |
                                        IORING_SETUP_DEFER_TASKRUN);
    if (!error) {
        begin(turn);
        error = move(&state);
        end(turn, (int64_t)state.done * state.block * 2);
        io_uring_queue_exit(&state.ring);
    }
    if (state.file >= 0)
        close(state.file);
    free(state.slots);
    return error;
}
