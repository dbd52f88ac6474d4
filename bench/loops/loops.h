/* loops.h -- what the commands of the child process share: clock, memory, answers. */
#ifndef LOOPS_H
#define LOOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What one command did between begin() and end(). */
struct turn {
    int64_t bytes; /* or operations, where a command moves no bytes */
    double seconds;
    double cpu_seconds;   /* of all threads */
    int64_t switches;     /* of context, of all threads */
    int64_t device_bytes; /* that the device delivered */
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

/* Memory of a kind, "huge" or "small" pages, every page touched.  Kept until a larger
 * one is wanted.  NULL: out of memory. */
unsigned char *touched(const char *kind, size_t size);

/* A pseudo-random number below `limit`; `state` is not 0. */
uint64_t draw(uint64_t *state, uint64_t limit);

/* Run `body` in `count` threads at once: the first error of any. */
int in_threads(unsigned count, int (*body)(void *context, unsigned index),
               void *context);

#endif
