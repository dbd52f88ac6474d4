/* loops.h -- what the commands of the child process share: the clock, memory,
 * threads. */
#ifndef LOOPS_H
#define LOOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The figures of one command, between begin() and end(). */
struct turn {
    int64_t bytes; /* or operations, if the command moves no bytes */
    double seconds;
    double cpu_seconds;   /* of all threads */
    int64_t switches;     /* of context, of all threads */
    int64_t device_bytes; /* delivered by the device */
};

/* A command gets the words after its name and returns 0 or -errno. */
typedef int command(char **words, struct turn *turn);

command plain_blocks, plain_files, plain_open_files, plain_fresh, plain_gather,
    plain_both, plain_opens, plain_threads;
command engine_blocks, engine_opens, engine_threads;
command model_load, model_cached, model_save;

/* Start and stop the clock of a turn. */
void begin(struct turn *turn);
void end(struct turn *turn, int64_t bytes);

int64_t number(const char *word);

/* Return memory in "huge" or "small" pages, with every page touched. It is kept and
 * returned again, until a larger one is needed. Returns NULL if memory ran out. */
unsigned char *touched(const char *kind, size_t size);

/* Return a pseudo-random number below `limit`. `state` must not be 0. */
uint64_t draw(uint64_t *state, uint64_t limit);

/* Run `body` in `count` threads at once. Returns 0, or an error of one of them. */
int in_threads(unsigned count, int (*body)(void *context, unsigned index),
               void *context);

#endif
